"""Requests with images in an engine: the answer of a request alone, whatever its company, chunks and cached blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.backends import select_backend
from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.engine.engine import Engine
from llm_worker_rbee.engine.model_runner import SingleSequence, forward
from llm_worker_rbee.engine.mtp import MtpDrafter
from llm_worker_rbee.engine.request import Request, ScheduledTokens
from llm_worker_rbee.engine.speculative import DraftModel
from llm_worker_rbee.errors import InvalidRequestError, ModelFileError
from llm_worker_rbee.images.prompt import ImageSpan, PromptImages, step_arrays
from llm_worker_rbee.models import load_model, load_model_with_head, read_model_config, vision_config
from llm_worker_rbee.models.vision import load_vision_tower
from llm_worker_rbee.sampling_params import SamplingParams
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.vision_names import open_projector
from tests.engine.test_async_scheduling import AsyncBackend, PendingForward, make_async
from tests.helpers import mtp_models, tiny_vision

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "idefics3", "mistral3", "gemma4", "gemma4_e")
TOKENS = 6
Loaded = tuple[Any, Any]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Return a random model and its tower on the CPU, built once."""
    kept: dict[str, Loaded] = {}

    def load(name: str) -> Loaded:
        if name not in kept:
            folder: Path = tiny_vision.save_model(name, tmp_path_factory.mktemp(name))
            ops, checkpoint = select_backend("cpu", "cpu", threads=2), open_checkpoint(folder)
            tower = load_vision_tower(open_projector(folder), ops)
            config = read_model_config(checkpoint)
            kept[name] = load_model(checkpoint, ops, config, image_parts=tower.row_width // config.d_model), tower
        return kept[name]

    return load


def make_engine(loaded: Loaded, **changes: Any) -> Engine:
    model, tower = loaded
    settings = {"max_context": 512, "n_blocks": 64, "max_batch": 4, "max_step_tokens": 64, "debug": True, **changes}
    engine = Engine(model, EngineConfig(**settings))
    engine.use_tower(tower)
    return engine


def question(loaded: Loaded, seed: int, sizes: tuple[tuple[int, int], ...], tail: int = 0) -> Request:
    """Return a request about random pictures; `tail`: words after the last one are others."""
    settings, family = loaded[1].config.images, loaded[1].config.family
    name = "mistral3" if family.prompt.row_end else family.hf[0]
    rng = np.random.default_rng(seed)
    parts, _ = tiny_vision.plain_parts(name, settings, [tiny_vision.picture(rng, *size) for size in sizes])
    ids, spans = tiny_vision.image_prompt(rng, settings, parts, int(bool(family.prompt.row_end)))
    ids += np.random.default_rng(tail).integers(1, 90, 8).tolist()
    images = PromptImages(spans, parts, [part.tobytes() for part in parts])
    params = SamplingParams(temperature=0.0).resolve()
    return Request(ids, params, TOKENS, 0, frozenset(), extra_keys=images.extra_keys, images=images)


def words(seed: int, count: int) -> Request:
    ids = np.random.default_rng(seed).integers(1, 90, count).tolist()
    return Request(ids, SamplingParams(temperature=0.0).resolve(), TOKENS, 0, frozenset())


def run(engine: Engine, *requests: Request) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
    return [request.tokens for request in requests]


def alone(loaded: Loaded, request: Request) -> list[int]:
    """Return the answer of a request without engine, scheduler or batch."""
    model, tower = loaded
    images = request.images or PromptImages((), (), ())
    images = PromptImages(images.spans, images.parts, images.digests)
    images.rows = list(tower.encode(images.parts)) if images.parts else []
    sequence, ids, start = SingleSequence(model, len(request.prompt) + TOKENS), list(request.prompt), 0
    for _ in range(TOKENS):
        batch = sequence.batch(ids[start:], start, all_logits=False)
        padded = batch.ids if model.pads_images else None
        flags = {"has_axes": model.has_axes, "sees_both_ways": model.sees_both_ways}
        fields = step_arrays([(images, start, len(ids))], **flags, ids=padded)
        logits = forward(model, replace(batch, **fields), sequence.cache)
        start = len(ids)
        ids.append(int(logits[0].argmax()))
    return ids[len(request.prompt) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_requests_alone(name: str, loaded: Callable[[str], Loaded]) -> None:
    pair = loaded(name)
    requests = [
        question(pair, 1, ((100, 150), (60, 90))), words(3, 40), question(pair, 2, ((120, 120),)), words(4, 7),
    ]  # fmt: skip
    expected = [alone(pair, request) for request in requests]
    engine = make_engine(pair)
    assert run(engine, *requests) == expected
    assert engine.encoder is not None
    assert engine.encoder.num_encoded == sum(len(r.images.parts) for r in requests if r.images is not None)
    assert not engine.encoder.waiting


@pytest.mark.parametrize("name", FAMILIES)
def test_second_question_computes_no_token_of_the_picture(name: str, loaded: Callable[[str], Loaded]) -> None:
    pair = loaded(name)
    engine = make_engine(pair)
    first, second = (question(pair, 5, ((150, 150),), tail=tail) for tail in (1, 2))
    run(engine, first)
    encoded = engine.encoder.num_encoded if engine.encoder else 0
    expected = alone(pair, second)
    assert run(engine, second) == [expected]
    assert engine.encoder is not None
    assert engine.encoder.num_encoded == encoded
    if name != "qwen3_5":  # which goes on from a snapshot of its states
        end = max(span.stop for span in second.images.spans)  # type: ignore[union-attr]
        assert second.num_cached_tokens >= end // engine.config.block_size * engine.config.block_size


def ahead_engine(loaded: Loaded, **changes: Any) -> tuple[Engine, AsyncBackend]:
    """Return an engine that launches steps ahead, as on a GPU."""
    model, tower = loaded
    device = AsyncBackend(model.ops)
    fused_images: Any = PendingForward(model.fused_images, device)
    return make_engine((replace(make_async(model, device), fused_images=fused_images), tower), **changes), device


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_steps_launched_ahead_encode_pictures_whose_blocks_went_away(
    name: str, loaded: Callable[[str], Loaded]
) -> None:
    """The second question waits behind a long text, which takes the blocks that it had at its arrival."""
    pair = loaded(name)
    engine, device = ahead_engine(pair, n_blocks=20, max_batch=1)
    first, second = (question(pair, 5, ((150, 150),), tail=tail) for tail in (1, 2))
    text = words(6, 300)
    expected = [alone(pair, request) for request in (first, text, second)]
    assert run(engine, first) == expected[:1]
    assert engine.encoder is not None
    engine.encoder._rows.clear()
    assert run(engine, text, second) == expected[1:]
    assert second.num_cached_tokens == 0
    assert engine.encoder.num_encoded == 2 * len(second.images.parts)  # type: ignore[union-attr]
    assert device.num_ahead > 0
    for request in (first, second):
        assert request.images is not None
        assert request.images.rows == [None] * len(request.images.rows), "behind their tokens none is kept"


def test_steps_with_images_and_adapters_are_not_launched_ahead(loaded: Callable[[str], Loaded]) -> None:
    """They run op by op, where the id of a token that the device has yet to sample would be read."""
    pair = loaded("gemma3")
    pipeline = ahead_engine(pair)[0].pipeline
    picture, text, adapted = question(pair, 1, ((50, 50),)), words(2, 9), words(3, 9)
    adapted.adapter_slot = 0
    assert picture.images is not None
    stop = len(picture.ids)
    whole, rest = (ScheduledTokens(picture, start, stop, stop - 1) for start in (0, picture.images.spans[-1].stop))
    text_step, adapted_step = (ScheduledTokens(request, 0, 9, 8) for request in (text, adapted))
    assert pipeline.can_launch([whole, text_step])
    assert pipeline.can_launch([rest, adapted_step])
    assert not pipeline.can_launch([adapted_step, whole])


def test_other_picture_of_the_same_size_is_not_found_in_the_prefix_cache(loaded: Callable[[str], Loaded]) -> None:
    pair = loaded("qwen3_vl")
    engine = make_engine(pair)
    first, second = question(pair, 5, ((150, 150),)), question(pair, 5, ((150, 150),))
    assert second.images is not None
    changed = [255 - part for part in second.images.parts]
    images = PromptImages(second.images.spans, changed, [part.tobytes() for part in changed])
    second.images, second.extra_keys = images, images.extra_keys
    run(engine, first)
    assert run(engine, second) == [alone(pair, second)]
    assert second.num_cached_tokens <= images.spans[0].start
    assert engine.encoder is not None
    assert engine.encoder.num_encoded == 2


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_preempted_requests_give_the_same(name: str, loaded: Callable[[str], Loaded]) -> None:
    pair = loaded(name)
    requests = [question(pair, seed, ((150, 150),)) for seed in range(6, 10)]
    expected = [alone(pair, request) for request in requests]
    length = len(requests[0].prompt)
    blocks = -(-(length + TOKENS) // 16) + -(-length // 16) + 1
    engine = make_engine(pair, n_blocks=blocks, prefix_cache=False)
    assert run(engine, *requests) == expected


@pytest.mark.parametrize(("patches", "expected"), [(64 * 8, [4, 2]), (64 * 3, [3, 1, 2]), (9, [1] * 6)])
def test_steps_encode_images_of_several_requests_together(
    patches: int, expected: list[int], loaded: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more at a time than memory was planned for."""
    monkeypatch.setattr(vision_config, "STEP_PATCHES", patches)
    pair = loaded("gemma3")
    engine, sizes = make_engine(pair), list[int]()
    encode = pair[1].encode
    requests = [question(pair, seed, ((50, 50),)) for seed in range(20, 26)]
    for request in requests:
        engine.add(request)
    assert engine.encoder is not None

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(pair[1], name)

        def encode(self, parts: list[Any]) -> Any:
            sizes.append(len(parts))
            return encode(parts)

    engine.encoder.tower = Counting()  # type: ignore[assignment]
    while engine.has_work:
        engine.step()
    assert sizes == expected, "16 tokens of 64 patches each, a budget of 64 tokens"


def test_rows_of_waiting_requests_are_bounded(loaded: Callable[[str], Loaded]) -> None:
    """The engine encodes no further ahead than that, the most urgent requests first."""
    pair = loaded("gemma3")
    engine, each = make_engine(pair, max_batch=1, prefix_cache=False), 16 * pair[1].row_width * 4
    assert engine.encoder is not None
    engine.encoder.max_bytes = 2 * each
    requests = [question(pair, seed, ((50, 50),)) for seed in range(80, 88)]
    requests[-1].priority = -1
    expected = [alone(pair, request) for request in requests]
    for request in requests:
        engine.add(request)
    most, encoded = 0, set[Request]()
    while engine.has_work:
        assert all(output.error is None for output in engine.step())
        images = [request.images for request in requests if request.images is not None]
        rows = {id(rows): rows.nbytes for item in images for rows in item.rows if rows is not None}
        most = max(most, sum(rows.values()))
        encoded |= {request for request in requests if not request.is_held}
        assert requests[-1] in encoded, "which was added last"
    assert [request.tokens for request in requests] == expected
    assert each < most <= 4 * each, "what is allowed, the one that exceeds it, and the first of the queue"


def test_aborted_request_is_not_encoded(loaded: Callable[[str], Loaded]) -> None:
    pair = loaded("gemma3")
    engine = make_engine(pair)
    first, second = question(pair, 30, ((50, 50),)), question(pair, 31, ((50, 50),))
    engine.add(first)
    engine.add(second)
    assert engine.abort(first)
    while engine.has_work:
        engine.step()
    assert engine.encoder is not None
    assert engine.encoder.num_encoded == 1


def test_failing_tower_fails_its_requests_alone(loaded: Callable[[str], Loaded]) -> None:
    pair = loaded("gemma3")
    engine = make_engine(pair)
    assert engine.encoder is not None
    engine.encoder.tower = replace(pair[1], config=None)
    bad, good = question(pair, 40, ((50, 50),)), words(41, 9)
    for request in (bad, good):
        engine.add(request)
    errors = {}
    while engine.has_work:
        errors |= {output.request: output.error for output in engine.step() if output.error is not None}
    assert list(errors) == [bad]
    assert len(good.tokens) == TOKENS
    assert not engine.encoder.waiting


def test_failing_image_fails_its_request_alone(loaded: Callable[[str], Loaded]) -> None:
    """Of several that are encoded in a step."""
    pair = loaded("gemma3")
    engine = make_engine(pair)
    requests = [question(pair, seed, ((50, 50),)) for seed in (90, 91, 92)]
    expected = [alone(pair, request) for request in requests]
    assert requests[1].images is not None
    requests[1].images.parts = [np.zeros((55, 55, 3), np.uint8)]  # cut into no whole patches
    for request in requests:
        engine.add(request)
    errors = {}
    while engine.has_work:
        errors |= {output.request: output.error for output in engine.step() if output.error is not None}
    assert list(errors) == [requests[1]]
    assert [requests[0].tokens, requests[2].tokens] == [expected[0], expected[2]]


def test_rows_are_dropped_by_age(loaded: Callable[[str], Loaded]) -> None:
    pair = loaded("gemma3")
    engine = make_engine(pair, prefix_cache=False)
    assert engine.encoder is not None
    engine.encoder.max_bytes = 2 * 16 * pair[1].row_width * 4
    for seed in (50, 51, 52, 52, 50):
        run(engine, question(pair, seed, ((50, 50),)))
    assert engine.encoder.num_encoded == 4, "the fourth is kept, the fifth went away"


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_drafts_from_earlier_tokens_change_nothing(name: str, loaded: Callable[[str], Loaded]) -> None:
    pair = loaded(name)
    first = question(pair, 60, ((90, 60),))
    prompt = list(first.prompt) + list(first.prompt[-6:]) * 2  # what follows it is drafted
    again = Request(prompt, first.params, TOKENS, 0, frozenset(), extra_keys=first.extra_keys, images=first.images)
    expected = [alone(pair, request) for request in (again, words(61, 20))]
    engine = make_engine(pair, speculative="ngram")
    assert run(engine, again, words(61, 20)) == expected
    assert engine.drafter is not None, "it did not fail"


def test_head_for_further_tokens_takes_images(loaded: Callable[[str], Loaded], tmp_path: Path) -> None:
    """Multi-token prediction: the same answers as without drafts."""
    tower = loaded("qwen3_5")[1]
    path = mtp_models.make("qwen3_5").save_gguf(tmp_path / "model.gguf")
    checkpoint, ops = open_checkpoint(path), tower.ops
    model, head = load_model_with_head(checkpoint, ops, read_model_config(checkpoint), None, image_parts=1)
    plain, answers = make_engine((model, tower), max_context=256), []
    for speculative in ("off", "mtp"):
        config = replace(plain.config, speculative=speculative, draft_tokens=3)
        engine = Engine(model, config, drafter=MtpDrafter(head, config) if speculative == "mtp" else None)
        engine.use_tower(tower)
        answers.append(run(engine, *(question((model, tower), seed, ((90, 60),)) for seed in (70, 71))))
        assert (engine.drafter is None) == (speculative == "off"), "it did not fail"
    assert answers[0] == answers[1]


def test_draft_model_with_images_is_refused(loaded: Callable[[str], Loaded]) -> None:
    model, tower = loaded("gemma3")
    config = EngineConfig(max_context=512, n_blocks=64)
    drafter = DraftModel(model, config, model.config.vocab_size)
    with pytest.raises(InvalidRequestError, match="a draft model takes no images"):
        Engine(model, config, drafter=drafter).use_tower(tower)


def test_image_is_cut_by_no_chunk() -> None:
    images = PromptImages([ImageSpan(5, 2, 4), ImageSpan(20, 1, 6)], [], [])
    assert [images.whole_stop(0, stop) for stop in (3, 5, 8, 13, 21, 26, 30)] == [3, 5, 5, 13, 20, 26, 30]
    assert images.whole_stop(5, 8) == 13, "it begins with an image: that is longer than the budget"


def test_model_without_a_tower_refuses_images(loaded: Callable[[str], Loaded]) -> None:
    pair = loaded("gemma3")
    engine = Engine(pair[0], EngineConfig(max_context=512, n_blocks=64))
    with pytest.raises(InvalidRequestError, match="no vision tower"):
        engine.add(question(pair, 1, ((50, 50),)))
    with pytest.raises(ModelFileError, match="do not belong together"):
        engine.use_tower(loaded("qwen3_vl")[1])
