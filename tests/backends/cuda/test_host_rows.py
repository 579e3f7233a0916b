"""Blocks of a GPU in rows of the host's memory; without one under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend, device, host_rows  # noqa: E402
from llm_worker_rbee.engine.kv_store import BlockStore, open_folder  # noqa: E402
from llm_worker_rbee.load import make_tier  # noqa: E402
from tests.helpers.engine_runs import QWEN35, SMALL, Question, engine, load_on, run, small_file  # noqa: E402


class SameThread:
    """An executor that computes at once: the interpreter takes no kernels of two threads."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args))
        return future


cuda = CudaBackend()
N_BLOCKS = 40


@pytest.mark.parametrize(("kind", "staging"), [("bfloat16", 100_000), ("float8", 100_000), ("bfloat16", 1)])
def test_copies_are_the_same_bytes(monkeypatch: pytest.MonkeyPatch, kind: str, staging: int) -> None:
    """Layers have other shapes; the staging memory is shorter than the copy, a slab shorter than the rows."""
    monkeypatch.setattr(host_rows, "STAGING_BYTES", staging)
    monkeypatch.setattr(host_rows, "SLAB_BYTES", 200_000)
    layers = [cuda.empty_kv(N_BLOCKS, 16, 2, dim, kind) for dim in (32, 64, 64)]
    layers.append(cuda.empty_state(N_BLOCKS, (3, 10), (2, 8, 8)))
    arrays = [array for layer in layers for array in layer]
    for array in arrays:
        array.copy_(torch.randn(array.shape, device=array.device))
    rows = cuda.host_rows(arrays, 0)
    assert rows.num_rows == host_rows.MIN_ROWS
    assert rows.row_bytes == sum(array[0].nbytes for array in arrays)
    expected = [array.clone().view(torch.uint8) for array in arrays]
    blocks = [*range(1, N_BLOCKS, 2), 0]
    rows.save(blocks, [63 - block for block in blocks])
    (view,) = rows.views(63 - blocks[3])
    data = b"".join(part[blocks[3]].cpu().numpy().tobytes() for part in expected)
    assert view.tobytes() == data
    targets = blocks[1:] + blocks[:1]
    for array in arrays:
        array[targets] = 0
    rows.load([63 - block for block in blocks], targets)
    rows.finish()
    for array, before in zip(arrays, expected, strict=True):
        assert torch.equal(array.view(torch.uint8)[targets], before[blocks])
        assert torch.equal(array.view(torch.uint8)[2::2], before[2::2])


@pytest.mark.parametrize("name", ["plain", "states"])
def test_conversation_comes_back(tmp_path: Any, name: str) -> None:
    """From the host's memory after eviction, and from the disk in another engine."""
    file = small_file(tmp_path / "model.gguf", "Q8_0", variant=SMALL if name == "plain" else QWEN35)
    model = load_on(file, CudaBackend(deterministic=True))
    question = Question(tuple(3 + i % 90 for i in range(70)), 4, {"temperature": 0.0}, frozenset())

    def make() -> Any:
        made = engine(model, "bfloat16", n_blocks=10, max_batch=1, n_slots=8 if name == "states" else 0)
        made.use_tier(make_tier(made, lambda: BlockStore(open_folder(tmp_path / "kv"), bytes(16), 16, 1 << 30), 0))
        made.tier._pays = lambda *_: True
        if device.is_interpreted():
            made.tier._opening.result()
            made.tier._writer = made.tier._reader = SameThread()
        return made

    first = make()
    request = question.request()
    expected = run(first, request).answer(request)
    for i in range(3):
        run(first, Question((i, *question.prompt), 1).request())
    again = question.request()
    assert run(first, again).answer(again) == expected
    is_hybrid = name == "states"
    assert again.num_cached_tokens == 64
    assert first.tier.stats.num_ram_read_blocks in (4, 4 + is_hybrid)  # the state may still be there
    assert first.tier.stats.num_read_blocks == 0
    first.tier.flush(60)
    second, request = make(), question.request()
    assert run(second, request).answer(request) == expected
    assert request.num_cached_tokens == 64
    assert second.tier.stats.num_read_blocks == 4 + is_hybrid
