"""`--deterministic`: the logits of a token are bitwise equal alone, in a batch, prefilled at once or in chunks, fused
and unfused; and as close to the reference as in the default mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend  # noqa: E402
from llm_worker_rbee.models import Transformer, load_model, read_model_config  # noqa: E402
from tests.helpers import cuda_models  # noqa: E402

INVARIANT, DEFAULT = CudaBackend(deterministic=True), CudaBackend()

CASES = {
    "packed": (cuda_models.GROUPED._replace(layers=1), "Q4_0"),
    "mixed kinds": (cuda_models.PLAIN._replace(layers=1), "Q4_K_M"),
    "dense": (cuda_models.QWEN._replace(layers=1), "F16"),
    "heads of 48": (cuda_models.GROUPED._replace(layers=1, width=192, head_dim=48), "Q4_0"),
}
Step = tuple[Sequence[int], Sequence[int]]  # requests, tokens of each
WAYS: dict[str, Sequence[Step]] = {
    "at once": (((0,), (4,)),),
    "in chunks": (((0,), (1,)), ((0,), (3,))),
    "in a batch": (((1, 0), (3, 2)), ((0, 1), (1, 1)), ((1, 0), (3, 1))),
}


def logits_of_first(model: Transformer, steps: Sequence[Step]) -> Any:
    """Return the logits of all tokens of request 0."""
    ids = np.random.default_rng(5).integers(0, 96, (2, 40))
    requests, found = cuda_models.Requests(model, 2, "float32", blocks_each=10), []
    for indices, counts in steps:
        chosen = [ids[w, requests.done[w] : requests.done[w] + n] for w, n in zip(indices, counts, strict=True)]
        batch = requests.step(indices, counts, np.concatenate(chosen), logits_of_all=True)
        first = sum(counts[: list(indices).index(0)])
        logits = torch.as_tensor(model.forward(batch, requests.cache)).cpu()
        found.append(logits[first : first + counts[list(indices).index(0)]].clone())
    return torch.cat(found)


@pytest.mark.parametrize(("case", "is_fused"), [*((case, True) for case in CASES), ("packed", False)])
def test_logits_do_not_depend_on_batch(case: str, is_fused: bool) -> None:
    model, reference = cuda_models.load_both(cuda_models.random_checkpoint(*CASES[case]), INVARIANT)
    assert model.fused is not None
    model = model if is_fused else replace(model, fused=None)
    found = {way: logits_of_first(model, steps) for way, steps in WAYS.items()}
    for way, logits in found.items():
        assert torch.equal(logits, found["at once"]), way
    want = logits_of_first(reference, WAYS["at once"])
    assert cuda_models.relative_error(found["at once"], want.numpy()) < 2e-2


def test_deterministic_backend_differs_by_a_field_only() -> None:
    assert (INVARIANT.name, INVARIANT.device, INVARIANT.deterministic) == (DEFAULT.name, DEFAULT.device, True)
    assert not DEFAULT.deterministic


def test_two_backends_in_one_process_do_not_affect_each_other() -> None:
    """A deterministic backend and a default one, in turn: each gives what it gives alone, fused and unfused."""
    checkpoint = cuda_models.random_checkpoint(*CASES["packed"])
    steps = WAYS["in a batch"]
    for is_fused in (True, False):
        models = []
        for backend in (CudaBackend(deterministic=True), CudaBackend()):
            model = load_model(checkpoint, backend, read_model_config(checkpoint))
            models.append(model if is_fused else replace(model, fused=None))
        alone = [logits_of_first(model, steps) for model in models]
        in_turn = [logits_of_first(model, steps) for model in reversed(models)]
        assert torch.equal(alone[0], in_turn[1])
        assert torch.equal(alone[1], in_turn[0])
        assert models[0].ops.deterministic
        assert not models[1].ops.deterministic
