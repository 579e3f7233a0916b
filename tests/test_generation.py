"""One generation as text: limits, seed, stop strings, finish reasons, clocks; driven by made-up step outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from llm_worker_rbee import LLM, SamplingParams, generation
from llm_worker_rbee.config import EngineConfig
from llm_worker_rbee.errors import ContextLengthError, DeadlineError, InvalidRequestError
from llm_worker_rbee.generation import Generation, GenerationListener, TextDelta, Timings, make_generations
from llm_worker_rbee.images.sizes import ImagePart
from llm_worker_rbee.sampling_params import FinishReason, TokenLogprob
from llm_worker_rbee.text_model import EncodedPrompt
from llm_worker_rbee.token_engine.protocol import RequestState, TokenOutput

CONFIG = EngineConfig(max_context=64, n_blocks=4)
Make = Callable[..., list[Generation]]


@pytest.fixture
def make(tiny_llm: LLM) -> Make:
    """Make generations of the tiny model, whose tokens are bytes; keywords are those of both records."""

    def generations(prompt: str = "Hello", **options: Any) -> list[Generation]:
        names = ("n", "priority", "timeout_s", "is_scored_only", "listener")
        own = {name: options.pop(name) for name in names if name in options}
        encoded = EncodedPrompt(list(prompt.encode()))
        return make_generations(
            tiny_llm.tokenizer,
            CONFIG,
            tiny_llm.config.vocab_size,
            encoded,
            SamplingParams(**options).resolve(),
            **own,
        )

    return generations


def step_outputs(request: RequestState, text: str, finish: FinishReason | None = None) -> list[TokenOutput]:
    """Return an output for each byte of the text; the last one has the finish reason."""
    tokens = text.encode()
    return [TokenOutput(request.id, [t], finish if i == len(tokens) else None) for i, t in enumerate(tokens, 1)]


class Recorder(GenerationListener):
    """Keeps the calls of a generation."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_first_outputs(self, generation: Generation, seconds: float, count: int) -> None:
        self.calls.append(("first", seconds, count))

    def on_outputs(self, generation: Generation, seconds: float, count: int) -> None:
        self.calls.append(("more", seconds, count))

    def on_close(self, generation: Generation) -> None:
        self.calls.append(("close",))


class FakeStream:
    """The outputs of a request, as an engine's thread would give them, and whether it was aborted."""

    def __init__(self, steps: Iterable[list[TokenOutput]]) -> None:
        self.steps = list(steps)
        self.num_aborts = 0

    async def next_outputs(self) -> list[TokenOutput]:
        return self.steps.pop(0) if self.steps else []

    def take_outputs(self) -> list[TokenOutput]:
        return self.steps.pop(0) if self.steps else []

    def notify(self, on_outputs: Callable[[], None]) -> None:
        for _ in list(self.steps):
            on_outputs()

    def abort(self) -> None:
        self.num_aborts += 1


class FakeEngine:
    """Takes one request and gives prepared outputs."""

    def __init__(self, steps: Iterable[list[TokenOutput]]) -> None:
        self.stream = FakeStream(steps)

    def submit(self, request: RequestState) -> FakeStream:
        return self.stream


async def read_all(generation: Generation, engine: FakeEngine) -> list[TextDelta]:
    generation.submit(engine)  # type: ignore[arg-type]
    return [delta async for delta in generation.deltas()]


def test_pixels_that_no_message_holds_are_refused(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they reach the engine's process, which would end."""
    monkeypatch.setattr(generation, "MAX_DATA_BYTES", 300)
    image = ImagePart(0, 1, 1, 0, 8, 5, b"", bytes(120))

    def make_some(num_images: int, n: int) -> list[Generation]:
        prompt, params = EncodedPrompt([1, 2, 3], images=[image] * num_images), SamplingParams(max_tokens=1).resolve()
        return make_generations(tiny_llm.tokenizer, CONFIG, tiny_llm.config.vocab_size, prompt, params, n=n)

    assert len(make_some(2, 1)) == 1
    assert len(make_some(1, 2)) == 2
    with pytest.raises(InvalidRequestError, match=r"1 answer \(n\) have 360 bytes .*at most 300 .*or smaller ones$"):
        make_some(3, 1)
    with pytest.raises(InvalidRequestError, match=r"2 answers \(n\) have 480 bytes of pixels: .*, or lower n$"):
        make_some(2, 2)


def test_length_finish_keeps_last_token(make: Make) -> None:
    (generation,) = make(max_tokens=3)
    delta = generation.push(step_outputs(generation.request, "abc", "length"), 1.0)
    assert delta == TextDelta("abc", list(b"abc"), [], "length", None)
    assert (generation.num_tokens, generation.finish_reason) == (3, "length")


def test_end_of_text_token_is_counted_and_not_in_output(make: Make) -> None:
    (generation,) = make()
    delta = generation.push(step_outputs(generation.request, "ab!", "stop"), 1.0)
    assert delta == TextDelta("ab", list(b"ab"), [], "stop", None)
    assert (generation.num_tokens, generation.stop_sequence) == (3, None)


def test_stop_string_over_several_deltas_never_leaks(make: Make) -> None:
    (generation,) = make(stop=["END", "never"])
    outputs = step_outputs(generation.request, "abENxENDcd")
    deltas = [generation.push([output], 1.0) for output in outputs[:8]]
    assert [delta.text for delta in deltas] == ["a", "b", "", "", "ENx", "", "", ""]
    assert [delta.finish_reason for delta in deltas] == [None] * 7 + ["stop"]
    assert deltas[-1].stop_sequence == generation.stop_sequence == "END"
    assert generation.num_tokens == 8


def test_outputs_behind_stop_string_are_dropped(make: Make) -> None:
    (generation,) = make(stop="END")
    delta = generation.push(step_outputs(generation.request, "abENDcd"), 1.0)
    assert delta == TextDelta("ab", list(b"abEND"), [], "stop", "END")


def test_beginning_of_stop_string_at_the_end_is_text(make: Make) -> None:
    (generation,) = make(stop="END")
    assert generation.push(step_outputs(generation.request, "abEN", "length"), 1.0).text == "abEN"


def test_character_of_several_tokens_comes_whole(make: Make) -> None:
    (generation,) = make()
    first, second = step_outputs(generation.request, "é")
    assert (generation.push([first], 1.0).text, generation.push([second], 2.0).text) == ("", "é")
    cut = generation.push([TokenOutput(generation.request.id, [0xC3], "length")], 3.0)
    assert (cut.text, cut.tokens) == ("�", [0xC3])


def test_logprobs_are_those_of_output_tokens(make: Make) -> None:
    (generation,) = make(logprobs=0)
    scores = [TokenLogprob(97, -0.5), TokenLogprob(98, -1.5)]
    outputs = [TokenOutput(generation.request.id, [score.token], None, [score]) for score in scores]
    end = TokenOutput(generation.request.id, [0], "stop")
    assert generation.push([*outputs, end], 1.0).logprobs == scores


def test_error_is_raised_and_finishes(make: Make) -> None:
    (generation,) = make()
    with pytest.raises(DeadlineError, match="too late"):
        generation.push([TokenOutput(generation.request.id, [], "error", error=DeadlineError("too late"))], 2.0)
    assert (generation.finish_reason, generation.num_tokens, generation.last_token_at) == ("error", 0, 2.0)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "options", "expected"),
    [(5, {}, 59), (5, {"max_tokens": 7}, 7), (5, {"max_tokens": 59}, 59), (64, {"is_scored_only": True}, 0)],
)
def test_max_tokens_is_resolved(make: Make, num_prompt_tokens: int, options: dict[str, Any], expected: int) -> None:
    (generation,) = make("x" * num_prompt_tokens, **options)
    assert generation.request.submitted.max_tokens == expected


@pytest.mark.parametrize(
    ("num_prompt_tokens", "options", "error", "field"),
    [
        (0, {}, InvalidRequestError, "prompt"),
        (64, {}, ContextLengthError, "prompt"),
        (65, {"is_scored_only": True}, ContextLengthError, "prompt"),
        (5, {"max_tokens": 60}, ContextLengthError, "max_tokens"),
        (5, {"logit_bias": {10**6: 1.0}}, InvalidRequestError, "logit_bias"),
    ],
)
def test_impossible_request_raises_with_field(
    make: Make, num_prompt_tokens: int, options: dict[str, Any], error: type[InvalidRequestError], field: str
) -> None:
    with pytest.raises(error) as caught:
        make("x" * num_prompt_tokens, **options)
    assert caught.value.field == field


def test_n_generations_share_seed_and_differ_in_sample_index(make: Make) -> None:
    requests = [generation.request.submitted for generation in make(n=3, priority=2)]
    assert len({request.id for request in requests}) == 3
    assert len({request.seed for request in requests}) == 1
    assert [request.sample_index for request in requests] == [0, 1, 2]
    assert [request.priority for request in requests] == [2, 2, 2]
    drawn = {make()[0].request.submitted.seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 1 << 53 for seed in drawn)
    assert make(seed=7)[0].request.submitted.seed == 7


def test_start_sets_clock_and_returns_request_with_timeout(make: Make) -> None:
    (generation,) = make(timeout_s=5.0)
    assert generation.start().submitted.timeout_s == 5.0
    assert 0.0 < generation.started_at <= time.perf_counter()
    assert make()[0].start().submitted.timeout_s is None


def test_stop_string_inside_an_output_of_several_tokens(make: Make) -> None:
    """Tokens behind it, an end-of-text id included, are neither counted nor returned."""
    (generation,) = make(stop="b", logprobs=0)
    scores = [TokenLogprob(token, -0.5) for token in b"abc"]
    delta = generation.push([TokenOutput(1, [*b"abc", 0], "stop", scores)], 1.0)
    assert delta == TextDelta("a", list(b"ab"), scores[:2], "stop", "b")
    assert generation.num_tokens == 2


def test_listener_gets_latencies(make: Make) -> None:
    recorder = Recorder()
    (generation,) = make(listener=recorder)
    generation.started_at = 10.0
    generation.push(step_outputs(generation.request, "ab"), 10.5)
    generation.push(step_outputs(generation.request, "c"), 10.75)
    generation.close()
    generation.close()
    assert recorder.calls == [("first", 0.5, 2), ("more", 0.25, 1), ("close",)]
    assert generation.decode_ms == 250.0


def test_deltas_end_with_finish_reason_and_close(make: Make) -> None:
    recorder = Recorder()
    (generation,) = make(listener=recorder)
    request = generation.request
    engine = FakeEngine([step_outputs(request, "ab"), step_outputs(request, "c", "length"), step_outputs(request, "x")])
    deltas = asyncio.run(read_all(generation, engine))
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("ab", None), ("c", "length")]
    assert recorder.calls[-1] == ("close",)


def test_stop_string_ends_deltas_and_aborts_request(make: Make) -> None:
    (generation,) = make(stop="b")
    engine = FakeEngine([step_outputs(generation.request, "ab"), step_outputs(generation.request, "never")])
    (delta,) = asyncio.run(read_all(generation, engine))
    assert (delta.text, delta.finish_reason, delta.stop_sequence) == ("a", "stop", "b")
    assert engine.stream.num_aborts == 1


def test_reader_that_leaves_aborts_request(make: Make) -> None:
    (generation,) = make()
    engine = FakeEngine([step_outputs(generation.request, "a"), step_outputs(generation.request, "b")])

    async def read_one() -> str:
        generation.submit(engine)  # type: ignore[arg-type]
        deltas = generation.deltas()
        text = (await anext(deltas)).text
        await deltas.aclose()  # type: ignore[attr-defined]
        return text

    assert asyncio.run(read_one()) == "a"
    assert engine.stream.num_aborts == 1


@pytest.mark.parametrize(
    ("timings", "rate"), [(Timings(0.5, 2.5, 5), 2.0), (Timings(0.5, 0.5, 1), 0.0), (Timings(0.0, 0.0, 0), 0.0)]
)
def test_tokens_per_second_leaves_first_token_out(timings: Timings, rate: float) -> None:
    assert timings.tokens_per_second == rate
