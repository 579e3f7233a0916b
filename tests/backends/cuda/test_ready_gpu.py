"""Ready means ready: after the warm-up of `serve` no kernel is compiled or loaded and no graph is captured, whatever
requests come. The stream of requests itself is checked on a CPU, where it must contain what it is meant to contain."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from llm_worker_rbee.backends.cpu import CpuBackend  # noqa: E402
from llm_worker_rbee.backends.cuda import CudaBackend, precompile  # noqa: E402
from llm_worker_rbee.config import EngineConfig  # noqa: E402
from llm_worker_rbee.engine.engine import Engine  # noqa: E402
from llm_worker_rbee.engine.request import ScheduledTokens  # noqa: E402
from llm_worker_rbee.engine.speculative import DraftModel  # noqa: E402
from llm_worker_rbee.load import LoadPhases  # noqa: E402
from llm_worker_rbee.models import Transformer, load_model, read_model_config  # noqa: E402
from llm_worker_rbee.sampling_params import SamplingParams  # noqa: E402
from llm_worker_rbee.token_engine.launch import warm_up  # noqa: E402
from tests.helpers import cuda_models, request_stream  # noqa: E402
from tests.helpers.synthetic import Shape  # noqa: E402

MIDDLE = Shape(2, 1024, 8, 2, 1536, 2000, 4096, head_dim=128)
SMALL = Shape(1, 64, 2, 1, 96, 300, 512, head_dim=32)


class Variant(NamedTuple):
    """An engine to warm up."""

    kv_type: str = "bfloat16"
    deterministic: bool = False
    speculative: str = "off"  # or "ngram", or "draft" for a draft model


VARIANTS = {
    "bfloat16": Variant(), "float16": Variant("float16"), "float8": Variant("float8"), "float32": Variant("float32"),
    "deterministic": Variant(deterministic=True), "ngram": Variant(speculative="ngram"),
    "draft model": Variant(speculative="draft"),
}  # fmt: skip


def make_engine(shape: Shape, mix: str, ops: Any, variant: Variant, n_blocks: int) -> Engine:
    """Return an engine; a full batch of the longest requests would need 1,056 blocks."""
    made = cuda_models.random_checkpoint(shape, mix)

    def load() -> Transformer:
        return load_model(made, cast(Any, ops), read_model_config(made))

    config = EngineConfig(
        max_context=request_stream.MAX_TOTAL + 1, n_blocks=n_blocks, max_batch=48, max_step_tokens=512,
        target_itl_ms=1e9,  # budgets do not depend on the clock
        speculative="ngram" if variant.speculative == "ngram" else "off",
    )  # fmt: skip
    drafter = None
    if variant.speculative == "draft":
        drafter = DraftModel(load(), config, shape.vocabulary, variant.kv_type)
    return Engine(load(), config, variant.kv_type, drafter)


def num_captures(engine: Engine) -> list[int]:
    """Return how many graphs each model of an engine has captured, and how many it holds."""
    models = [engine.model]
    if isinstance(engine.drafter, DraftModel):
        models.append(engine.drafter.model)
    graphs = [cast(Any, model.fused).graphs for model in models]
    return [number for one in graphs for number in (one.num_captures, len(one))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_is_compiled_loaded_or_captured_after_warm_up(name: str) -> None:
    variant = VARIANTS[name]
    engine = make_engine(MIDDLE, "Q4_K_M", CudaBackend(deterministic=variant.deterministic), variant, n_blocks=320)
    warm_up(engine, LoadPhases())
    captured = num_captures(engine)
    assert min(captured) > 0
    arrivals = request_stream.make_arrivals(500, MIDDLE.vocabulary, mean_gap=0.1)
    with precompile.count_compilations() as found:
        ended = request_stream.serve(engine, arrivals)
    assert (found.compiled, found.loaded) == ([], [])
    assert num_captures(engine) == captured
    assert ended["error"] == 0
    assert (engine.scheduler.stats.num_accepted_tokens > 0) == (variant.speculative != "off")
    assert not engine.device_failed


@pytest.mark.parametrize("speculative", ["off", "ngram", "draft"])
def test_stream_of_requests_has_every_setting_and_kind_of_step(
    speculative: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(SMALL, "Q8_0", CpuBackend(), Variant("float32", speculative=speculative), n_blocks=120)
    kinds: set[tuple[bool, int]] = set()  # (whether requests decode, prefills up to 2) of all steps
    schedule = engine.scheduler.schedule

    def record(token_budget: int) -> list[ScheduledTokens]:
        step = schedule(token_budget)
        prefills = sum(one.stop - one.start > 1 + len(one.request.drafts) for one in step)
        kinds.add((len(step) > prefills, min(prefills, 2)))
        return step

    monkeypatch.setattr(engine.scheduler, "schedule", record)
    warm_up(engine, LoadPhases())
    arrivals = request_stream.make_arrivals(160, SMALL.vocabulary)
    ended = request_stream.serve(engine, arrivals)
    aborted = len(arrivals) - sum(ended.values())
    assert (ended["error"], aborted > 0) == (0, True)
    assert min(ended["stop"], ended["length"]) > 0
    assert kinds >= {(True, 0), (True, 1), (True, 2)}
    assert kinds & {(False, 1), (False, 2)}
    assert (engine.scheduler.stats.num_accepted_tokens > 0) == (speculative != "off")
    assert min(engine.scheduler.stats.num_preemptions, engine.scheduler.stats.num_hit_tokens) > 0


def test_settings_of_the_stream_set_every_sampling_parameter() -> None:
    changed = {name for settings in request_stream.SETTINGS for name in settings}
    drawn_or_text = {"max_tokens", "seed", "ignore_eos", "stop"}
    guided = {"structured_outputs", "close_on_length", "logprobs_mode"}  # they compile no other variants
    assert changed | drawn_or_text | guided == {*SamplingParams.__slots__}
