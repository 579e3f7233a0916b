"""The mode of `--deterministic`: a token's logits are the same bits alone, in company, read at once or in pieces, fused
and op by op; and they are as close to the reference as those of the usual mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend  # noqa: E402
from llm_worker_rbee.models import Transformer  # noqa: E402
from tests.backends.cuda import tiny  # noqa: E402

fixed = CudaBackend(deterministic=True)

usual = CudaBackend()

CASES = {
    "packed": (tiny.GROUPED._replace(layers=1), "Q4_0"),
    "parts of unlike kinds": (tiny.PLAIN._replace(layers=1), "Q4_K_M"),
    "numbers": (tiny.QWEN._replace(layers=1), "F16"),
}
Step = tuple[Sequence[int], Sequence[int]]  # who, tokens of each
WAYS: dict[str, Sequence[Step]] = {
    "at once": (((0,), (4,)),),
    "in pieces": (((0,), (1,)), ((0,), (3,))),
    "in company": (((1, 0), (3, 2)), ((0, 1), (1, 1)), ((1, 0), (3, 1))),
}


def logits_of_first(model: Transformer, steps: Sequence[Step]) -> Any:
    """Those of request 0, all its tokens."""
    ids = np.random.default_rng(5).integers(0, 96, (2, 40))
    requests, found = tiny.Requests(model, 2, "float32", blocks_each=10), []
    for who, counts in steps:
        chosen = [ids[w, requests.done[w] : requests.done[w] + n] for w, n in zip(who, counts, strict=True)]
        batch = requests.step(who, counts, np.concatenate(chosen), logits_of_all=True)
        first = sum(counts[: list(who).index(0)])
        logits = torch.as_tensor(model.forward(batch, requests.cache)).cpu()
        found.append(logits[first : first + counts[list(who).index(0)]].clone())
    return torch.cat(found)


@pytest.mark.parametrize(("case", "is_fused"), [*((case, True) for case in CASES), ("packed", False)])
def test_the_same_bits_in_any_company(case: str, is_fused: bool) -> None:
    model, reference = tiny.both(tiny.tiny(*CASES[case]), fixed)
    assert model.fused is not None
    model = model if is_fused else replace(model, fused=None)
    found = {way: logits_of_first(model, steps) for way, steps in WAYS.items()}
    for way, logits in found.items():
        assert torch.equal(logits, found["at once"]), way
    want = logits_of_first(reference, WAYS["at once"])
    assert tiny.relative(found["at once"], want.numpy()) < 2e-2


def test_deterministic_backend_differs_by_a_field_only() -> None:
    assert (fixed.name, fixed.device, fixed.deterministic) == (usual.name, usual.device, True)
    assert not usual.deterministic
