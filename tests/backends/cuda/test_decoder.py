"""Whole steps through the decoder, under Triton's interpreter, against the reference op by op.

What is tolerated, as a part of the logits' deviation: 4e-2 where activations are bytes (few tokens that answer; an
emulation of that rounding alone gives 2e-2 on such small models), 2e-2 where they are float16 or float32.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend, decoder, packed_weight  # noqa: E402
from llm_worker_rbee.backends.cuda.decode_small_batch import embed_rows  # noqa: E402
from llm_worker_rbee.backends.cuda.repack import Matrix  # noqa: E402
from tests.backends.cuda import tiny  # noqa: E402

ops = CudaBackend()

AS_BYTES, AS_NUMBERS = 4e-2, 2e-2
CASES = {
    "packed, grouped heads": (tiny.GROUPED._replace(layers=1), "Q4_0"),
    "parts of unlike kinds": (tiny.PLAIN._replace(layers=1), "Q4_K_M"),
    "numbers, bias, tied": (tiny.QWEN._replace(layers=1), "F16"),
    "window, cap, norms of heads": (tiny.GROUPED._replace(layers=1), "F16", {"window": 3, "cap": 2.0, "norms": True}),
}
# (who, tokens of each, logits of all): read (padded to 16), answer one and two, mixed
STEPS = (((0, 1), (3, 2), False), ((0,), (1,), False), ((0, 1), (1, 1), False), ((0, 1, 2), (1, 1, 2), True))


@pytest.mark.parametrize("case", CASES)
def test_steps_agree_with_the_reference(case: str) -> None:
    shape, mix, *more = CASES[case]
    models = [tiny.featured(model, **more[0]) if more else model for model in tiny.both(tiny.tiny(shape, mix), ops)]
    assert models[0].fused is not None
    random = np.random.default_rng(1)
    pair = [tiny.Requests(model, 3, "float32") for model in models]
    for who, counts, every in STEPS:
        ids = random.integers(0, 96, sum(counts))
        got, want = (
            model.forward(requests.step(who, counts, ids, every), requests.cache)
            for model, requests in zip(models, pair, strict=True)
        )
        assert tuple(got.shape) == want.shape
        few = max(counts) == 1 and mix != "F16"
        assert tiny.relative(got.cpu(), want) < (AS_BYTES if few else AS_NUMBERS), counts


def test_more_answers_than_graphs_are_made_for_with_ids_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step that was begun ahead gives them; the same numbers as from the host."""
    monkeypatch.setattr(decoder, "SIZES", (1,))
    model, _ = tiny.both(tiny.tiny(tiny.GROUPED._replace(layers=1), "Q4_0"), ops)
    found = []
    for is_there in (False, True):
        requests = tiny.Requests(model, 2, "float32")
        model.forward(requests.step((0, 1), (2, 1), np.array([5, 6, 7])), requests.cache)
        batch = requests.step((0, 1), (1, 1), np.array([8, 9]))
        ids = torch.tensor([8, 9], dtype=torch.int32, device=ops.device.current())
        found.append(model.forward(replace(batch, ids=ids) if is_there else batch, requests.cache).clone())
    assert torch.equal(*found)


def test_a_token_that_was_not_chosen_reads_the_first_row() -> None:
    """The step after it is made again; until then it may not look outside of the table."""
    where = ops.device.current()
    part = packed_weight.random_planes("q6", 5, 64, where)
    stream = torch.zeros(2, 64, device=where)
    ids = torch.tensor([-1, -2], dtype=torch.int32, device=where)
    embed_rows(Matrix((part,)), 1.0, ids, 2, stream, stream, None, None, False)
    assert torch.allclose(stream, packed_weight.values(part)[:1].expand(2, 64))
