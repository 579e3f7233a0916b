"""On a real GPU: the decoder at real shapes against float32 torch, and features of families against the reference; with
graphs and without, bit for bit.

Errors are relative to the logits' deviation: 3e-2 for a model of two layers, 5e-2 for a small one with many features
and int8 activations; 1e-1 where keys and values are float8 besides, which turns the last bit of an activation into a
sixteenth of a key.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from llm_worker_bench import profile  # noqa: E402
from llm_worker_bench.profile.workload import Settings, Subject  # noqa: E402
from llm_worker_bench.results import Recorder  # noqa: E402
from llm_worker_rbee.backends.cuda import CudaBackend  # noqa: E402
from llm_worker_rbee.config import EngineConfig  # noqa: E402
from llm_worker_rbee.engine.engine import Engine  # noqa: E402
from llm_worker_rbee.engine.request import Request  # noqa: E402
from llm_worker_rbee.models import load_model, read_model_config  # noqa: E402
from llm_worker_rbee.sampling_params import SamplingParams  # noqa: E402
from llm_worker_rbee.structured_outputs.grammar import GrammarCompiler  # noqa: E402
from llm_worker_rbee.text_model import open_tokenizer  # noqa: E402
from llm_worker_rbee.weights import open_checkpoint  # noqa: E402
from tests.engine.test_async_guided import make_mixed  # noqa: E402
from tests.engine.test_async_scheduling import SyncBackend, run  # noqa: E402
from tests.helpers import cuda_models  # noqa: E402
from tests.helpers.synthetic import Shape  # noqa: E402

ops, deterministic_ops = CudaBackend(), CudaBackend(deterministic=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# shape, mix, kv_type, batch sizes: each compiles its own kernels, which takes seconds
REAL = [
    ("llama2-7b", "Q4_0", "bfloat16", (1, 4, 24, 64)),
    ("llama2-7b", "Q4_K_M", "bfloat16", (1, 24)),
    ("llama2-7b", "Q8_0", "float16", (2, 64)),
    ("llama2-7b", "BF16", "bfloat16", (1, 24)),
    ("llama3-8b", "Q4_K_M", "bfloat16", (1, 8)),
    ("llama2-7b", "Q2_K", "bfloat16", (1, 4, 24)),
    ("llama2-7b", "IQ4_XS", "bfloat16", (1, 24)),
    ("smollm2-135m", "Q4_0", "bfloat16", (1,)),
]
MIDDLE = Shape(2, 1024, 8, 2, 1536, 2000, 4096, head_dim=128)
FEATURES: dict[str, tuple[Shape, str, str, dict[str, Any]]] = {
    "head norms": (MIDDLE, "Q4_0", "bfloat16", {"norms": True}),
    "window and cap": (
        MIDDLE._replace(heads=16, kv_heads=16, head_dim=64),
        "Q8_0",
        "float16",
        {"window": 50, "cap": 3.0},
    ),
    "bias, float8": (MIDDLE, "Q4_K_M", "float8", {"bias": True}),
    "dense, all features, float8": (MIDDLE, "BF16", "float8", {"norms": True, "window": 50, "cap": 3.0, "bias": True}),
    "norms after, GELU": (MIDDLE, "Q4_0", "bfloat16", {"post": True, "norms": True, "activation": "gelu_tanh"}),
    "norms after, GELU, dense": (MIDDLE, "BF16", "bfloat16", {"post": True, "activation": "gelu_tanh"}),
    "heads of 96": (MIDDLE._replace(width=768, heads=8, kv_heads=8, head_dim=96), "Q4_0", "bfloat16", {"bias": True}),
    "heads of 80, part": (
        MIDDLE._replace(width=640, heads=8, kv_heads=8, head_dim=80),
        "Q4_0",
        "bfloat16",
        {"rope_dim": 20},
    ),
    "part of grouped heads": (MIDDLE, "Q4_K_M", "bfloat16", {"rope_dim": 96}),
    "grouped heads of 96, float8": (MIDDLE._replace(width=768, head_dim=96), "BF16", "float8", {"norms": True}),
}
# (requests, tokens of each, logits of all): prefill, decode of one, of two, mixed, many prefills, many decodes
STEPS = (
    ((0, 1), (300, 70), False), ((0,), (1,), False), ((0, 1), (1, 1), False), ((0, 1, 2), (1, 1, 100), True),
    (range(3, 23), (5,) * 20, False), (range(23), (1,) * 23, False),
)  # fmt: skip


@pytest.fixture(scope="module")
def gpu() -> Any:
    return importlib.import_module("tests.helpers.cuda_real_shapes")  # it takes the GPU


@pytest.mark.parametrize(("shape", "mix", "kv_type", "sizes"), REAL, ids=lambda x: str(x))
def test_two_layer_logits_match_torch(gpu: Any, shape: str, mix: str, kv_type: str, sizes: tuple[int, ...]) -> None:
    errors = gpu.model_errors(mix, shape, sizes, kv_type)
    assert max(errors.values()) < 3e-2, errors


@pytest.mark.parametrize("case", FEATURES)
def test_features_match_reference_with_and_without_graphs(case: str) -> None:
    """Steps against the reference; with float8 against unfused ops, which round the same. Each step runs uncaptured, is
    captured, and is replayed."""
    shape, mix, kv_type, more = FEATURES[case]
    ours, reference = (
        cuda_models.with_features(model, **more)
        for model in cuda_models.load_both(cuda_models.random_checkpoint(shape, mix), ops)
    )
    assert ours.fused is not None
    twin, its_type = (replace(ours, fused=None), kv_type) if kv_type == "float8" else (reference, "float32")
    pair = [cuda_models.Requests(m, 23, kind, 32, 16) for m, kind in ((ours, kv_type), (twin, its_type))]
    random = np.random.default_rng(1)
    for indices, counts, every in STEPS:
        ids = random.integers(0, shape.vocabulary, sum(counts))
        batch = pair[0].step(indices, counts, ids, every)
        found = [ours.forward(batch, pair[0].cache).clone() for _ in range(3)]
        assert torch.equal(found[0], found[1]), counts
        assert torch.equal(found[0], found[2]), counts
        wanted = twin.forward(pair[1].step(indices, counts, ids, every), pair[1].cache)
        wanted = wanted.cpu().numpy() if isinstance(wanted, torch.Tensor) else wanted
        assert cuda_models.relative_error(found[0].cpu(), wanted) < (1e-1 if kv_type == "float8" else 5e-2), counts
    assert len(ours.fused.graphs) >= 3  # type: ignore[attr-defined]


def test_small_batch_row_does_not_depend_on_batch(gpu: Any) -> None:
    model = gpu.random_model(gpu.parse("llama2-7b:Q4_0:2"))
    cache = gpu.KVCache(gpu.OPS, model.config, 64, 16, "bfloat16")
    tables, ids = np.arange(64).reshape(4, 16), np.array([11, 12, 13, 14])
    rows: dict[int, list[Any]] = {}
    for size in (1, 2, 3, 4, 4, 4):  # the last two run from a graph
        batch = gpu.one_request(ids[:1], 0, tables[:size, :1].copy(), False, size)
        object.__setattr__(batch, "ids", ids[:size])
        rows.setdefault(size, []).append(model.forward(batch, cache).clone())
    for found in rows.values():
        for one in found:
            assert torch.equal(one[0], rows[1][0][0])


def test_graphs_share_large_result_buffer_and_count_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of several sizes in turn give their own results, and `clear` frees all of them. Memory is counted for this
    process alone: other processes change what the driver calls free."""
    from llm_worker_rbee.backends.cuda.cuda_graphs import MIN_SHARED_RESULT, CudaGraphs

    where = ops.torch_device
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (-torch.cuda.memory_reserved(device), 0))
    graphs = CudaGraphs(where)
    inputs = {rows: torch.rand(rows, MIN_SHARED_RESULT // 16, device=where) for rows in (1, 5, 6, 7)}
    for _ in range(3):
        for rows, x in inputs.items():
            assert torch.equal(graphs.run(rows, lambda x=x: x * 2), x * 2)  # type: ignore[misc]
    held = {graphs.run(rows, lambda: inputs[1]).data_ptr() for rows in (5, 6, 7)}
    assert (len(graphs), len(held)) == (4, 1)
    assert graphs.nbytes > 0
    graphs.clear()
    assert (len(graphs), graphs.nbytes) == (0, 0)


def logits_of_first_request(model: Any, steps: Any) -> Any:
    """Return the logits of request 0, whose tokens are always the same, from steps of (requests, tokens of each)."""
    requests, found = cuda_models.Requests(model, 300, "bfloat16", 8, 16), []
    ids = np.random.default_rng(5).integers(0, MIDDLE.vocabulary, (300, 128))
    for indices, counts in steps:
        given = np.concatenate([ids[w, requests.done[w] :][:n] for w, n in zip(indices, counts, strict=True)])
        batch = requests.step(indices, counts, given, logits_of_all=True)
        at = sum(counts[: list(indices).index(0)])
        found.append(model.forward(batch, requests.cache)[at : at + counts[list(indices).index(0)]].clone())
    return torch.cat(found)


@pytest.mark.parametrize("mix", ["Q4_0", "Q4_K_M", "Q2_K", "BF16"])
def test_deterministic_logits_do_not_depend_on_tiles(mix: str) -> None:
    """A request alone, in chunks, and with so many others that every tile size is used; batch sizes repeat, from
    graphs, with other numbers of requests in them."""
    model = load_model(
        made := cuda_models.random_checkpoint(MIDDLE._replace(layers=1), mix),
        deterministic_ops,
        read_model_config(made),
    )
    expected = logits_of_first_request(model, [((0,), (40,)), *(((0,), (1,)) for _ in range(12))])
    for others in (9, 13, 30, 61, 120, 250):
        batch_requests = list(range(others + 1))
        steps = [([*batch_requests[1:], 0], [1] * others + [25]), ((0,), (15,))]
        steps += [
            (batch_requests[: len(batch_requests) - i % 4], [1] * (len(batch_requests) - i % 4)) for i in range(12)
        ]
        assert torch.equal(logits_of_first_request(model, steps), expected), others


def test_async_and_sync_steps_give_same_tokens() -> None:
    """Requests that begin and end together take the same steps, so the same tokens; also beyond graph sizes."""
    model = load_model(made := cuda_models.random_checkpoint(MIDDLE, "Q4_K_M"), cast(Any, ops), read_model_config(made))
    config = EngineConfig(
        max_context=256, n_blocks=400, max_batch=300, max_step_tokens=4096, target_itl_ms=1e9, prefix_cache=False
    )
    for count in (1, 3, 10, 280):
        replies = []
        for one_by_one in (False, True):
            engine = Engine(replace(model, ops=SyncBackend(ops)) if one_by_one else model, config, "bfloat16")
            greedy = SamplingParams(temperature=0).resolve()
            requests = [Request([i % 90 + 1, 2, 3], greedy, 12, 0, frozenset()) for i in range(count)]
            for request in requests:
                engine.add(request)
            while engine.has_work:
                engine.step()
            replies.append([request.tokens for request in requests])
        assert replies[0] == replies[1], count


def test_async_schedules_give_results_of_sync_steps() -> None:
    """Random arrivals, aborts, penalties and log-probabilities: the same bits, since logits are batch-invariant."""
    made = cuda_models.random_checkpoint(MIDDLE, "Q4_K_M")
    model = load_model(made, cast(Any, deterministic_ops), read_model_config(made))
    config = EngineConfig(max_context=112, n_blocks=64, max_step_tokens=32, debug=True)
    ahead = Engine(model, config, "bfloat16")
    plain = Engine(replace(model, ops=SyncBackend(deterministic_ops)), config, "bfloat16")
    for seed in range(15):
        assert run(ahead, seed) == run(plain, seed), seed


def test_guided_schedules_give_results_of_sync_steps(tiny_file: Path) -> None:
    """The same of guided requests among others; steps with forced tokens interrupt the steps ahead."""
    made = cuda_models.random_checkpoint(MIDDLE, "Q4_K_M")
    model = load_model(made, cast(Any, deterministic_ops), read_model_config(made))
    compiler = GrammarCompiler(lambda: open_tokenizer(open_checkpoint(tiny_file)), MIDDLE.vocabulary)
    config = EngineConfig(max_context=112, n_blocks=64, max_step_tokens=32, debug=True)
    ahead = Engine(model, config, "bfloat16")
    plain = Engine(replace(model, ops=SyncBackend(deterministic_ops)), config, "bfloat16")
    for engine in (ahead, plain):
        engine.grammar_compiler = compiler
    for seed in range(15):
        found, expected = (run(engine, seed, partial(make_mixed, compiler)) for engine in (ahead, plain))
        assert found == expected, seed


def test_profile_finds_every_component_of_a_decode_step() -> None:
    """In the time line of a graph, and none is past its limit. What part of the step they take is a measured number of
    `profile`, not asserted here."""
    made = cuda_models.random_checkpoint(MIDDLE, "Q4_0")
    model = load_model(made, ops, read_model_config(made))
    recorder = Recorder("profile")
    subject = Subject(model, made, ops.default_kv_type)
    settings = Settings(pp=64, tg=16, repetitions=3, flame_seconds=0, batch=2)
    profile.run(recorder, lambda *_: None, subject, settings, {})
    found = {result.name: result for result in recorder.results()}
    decode = {name.removeprefix("decode/") for name in found if name.startswith("decode/")}
    assert {"qkv", "rope_kv_attention", "output_norm", "gate_up_activation", "down_norm", "head", "sampling"} <= decode
    assert found["decode/qkv"].fields["calls"] == MIDDLE.layers
    assert found["decode/components_of_step"].estimate > 0
    assert all(result.fields.get("percent_of_limit", 0) <= 100 for result in found.values())
