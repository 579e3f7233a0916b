"""What a client asks for: how tokens are sampled, and what the text of the answer must conform to.

Plain records, validated once when they are made, which pass between processes. `StructuredOutputsParams` is a JSON
schema, a regular expression, one of a few texts, or a grammar; structured_outputs/grammar.py compiles it, in the
engine's process.
"""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args

from .errors import InvalidRequestError

STRUCTURED = "structured_outputs"
MAX_GRAMMAR_CHARS = 1 << 20  # of a schema, an expression or a grammar
MAX_CHOICES = 10_000
GRAMMAR_KINDS = ("json", "json_object", "regex", "choice", "grammar")
GRAMMAR_FIELDS = (*GRAMMAR_KINDS, "additional_properties")
OBJECT_MODES = ("closed", "open")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """One kind of text. `json` is a JSON schema, as an object or as text; `grammar` is Lark or GBNF.

    `additional_properties` goes with `json`. "open": objects may have properties that their schema does not name.
    "closed", the default: an object that lists its properties has no others, unless the schema says so.
    """

    json: str | bool | Mapping[str, Any] | None = None  # text once it is validated
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    additional_properties: str | None = None

    def __post_init__(self) -> None:
        kinds = [name for name in GRAMMAR_KINDS if getattr(self, name) not in (None, False)]
        kinds += ["json"] if self.json is False else []
        if len(kinds) != 1:
            options = " and ".join(kinds) or "none"
            raise _unusable(f" must have one of {', '.join(GRAMMAR_KINDS)}: it has {options}")
        (name,) = kinds
        if self.additional_properties is not None and (
            name != "json" or self.additional_properties not in OBJECT_MODES
        ):
            reason = f'must be "closed" or "open", beside json: it is {self.additional_properties!r:.100} beside {name}'
            raise _unusable(f".additional_properties {reason}")
        value = getattr(self, name)
        if name == "json":
            value = _schema_text(value)
        elif name == "choice":
            value = _check_choices(value)
        elif not isinstance(value, bool if name == "json_object" else str):
            kind = "true or false" if name == "json_object" else "text"
            raise _unusable(f".{name} must be {kind}, not {type(value).__name__}")
        if name == "regex" and len(value) - len(value.rstrip("\\")) & 1:
            raise _unusable(".regex ends in a backslash that escapes nothing")
        size = sum(map(len, value)) if name == "choice" else 0 if value is True else len(value)
        if size > MAX_GRAMMAR_CHARS:
            raise _unusable(f".{name} has {size} characters: at most {MAX_GRAMMAR_CHARS} are allowed")
        object.__setattr__(self, name, value)

    @classmethod
    def from_fields(cls, fields: Any) -> StructuredOutputsParams:
        """Return the parameters of a JSON object; raise on fields that do not exist."""
        if not isinstance(fields, Mapping):
            raise _unusable(f" must be an object with one of {', '.join(GRAMMAR_KINDS)}")
        if unknown := sorted(set(map(str, fields)) - set(GRAMMAR_FIELDS)):
            raise _unusable(f" has no field {unknown[0]!r}: it has {', '.join(GRAMMAR_FIELDS)}")
        return cls(**fields)

    @property
    def kind(self) -> str:
        """Which of the fields is set."""
        return next(name for name in GRAMMAR_KINDS if getattr(self, name) not in (None, False))


def _unusable(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{STRUCTURED}{reason}", STRUCTURED)


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as text."""
    if isinstance(schema, str):
        try:
            schema = json_module.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _unusable(f".json is not valid JSON: {_describe(error)}") from None
    if not isinstance(schema, (Mapping, bool)):
        raise _unusable(f".json must be a JSON schema: an object, not {type(schema).__name__}")
    try:
        return json_module.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _unusable(f".json is not plain JSON: {_describe(error)}") from None


def _describe(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _check_choices(choices: Any) -> tuple[str, ...]:
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not all(isinstance(text, str) for text in choices):
        raise _unusable(".choice must be a list of texts")
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise _unusable(f".choice must have 1 to {MAX_CHOICES} texts, none of them empty")
    return tuple(choices)


FinishReason = Literal["stop", "length", "error"]
LogprobsMode = Literal["raw", "masked"]
MAX_SEED = 1 << 64
MAX_COMPLETIONS = 128  # of one prompt
MAX_COUNT = (1 << 63) - 1  # the largest integer that a kernel takes
MAX_STOPS = 16
MAX_STOP_CHARS = 100
MAX_LOGPROBS = 20


class Bounds(NamedTuple):
    """The values that a numeric parameter accepts; an error message and a JSON schema follow from it."""

    minimum: float
    maximum: float | None = None
    excludes_minimum: bool = False
    is_integer: bool = False
    is_optional: bool = False  # None is accepted too

    def describe(self) -> str:
        """Return the range in words, for error messages."""
        least = f"above {self.minimum:g}" if self.excludes_minimum else f"{_shown(self.minimum)} or more"
        return least if self.maximum is None else f"{least}, at most {_shown(self.maximum)}"

    def __contains__(self, value: object) -> bool:
        if type(value) not in (int, float) and not isinstance(value, Real):
            return False
        if value < self.minimum or (self.excludes_minimum and value == self.minimum):  # type: ignore[operator]
            return False
        return self.maximum is None or value <= self.maximum  # type: ignore[operator]


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


# Every numeric field of SamplingParams; the HTTP schema takes its bounds from here.
SAMPLING_BOUNDS: dict[str, Bounds] = {
    "max_tokens": Bounds(1, is_integer=True, is_optional=True),
    "temperature": Bounds(0.0, 2.0),
    "top_k": Bounds(-1, MAX_COUNT, is_integer=True),  # -1 is 0: all tokens
    "top_p": Bounds(0.0, 1.0),
    "min_p": Bounds(0.0, 1.0),
    "typical_p": Bounds(0.0, 1.0),
    "repetition_penalty": Bounds(0.0, 2.0, excludes_minimum=True),
    "repeat_last_n": Bounds(0, MAX_COUNT, is_integer=True),
    "presence_penalty": Bounds(-2.0, 2.0),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "seed": Bounds(-1, MAX_SEED - 1, is_integer=True, is_optional=True),  # -1 is None: drawn
    "logprobs": Bounds(0, MAX_LOGPROBS, is_integer=True, is_optional=True),
}
LOGIT_BIAS_BOUNDS = Bounds(-100.0, 100.0)
# The fields that a model has defaults for, and the values that leave its distribution as it is.
NEUTRAL_SAMPLING: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "repeat_last_n": 128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled. `temperature=0` is greedy; `max_tokens=None` is what is left of the context.

    A field of `NEUTRAL_SAMPLING` that is None is not set: `LLM` and the server take the model's default for it, by
    `resolve`. The engine gets resolved parameters only.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many of the most probable tokens to report with the sampled one
    prompt_logprobs: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    close_on_length: bool = False  # end a document within max_tokens, by the shortest way that the grammar allows
    logprobs_mode: LogprobsMode = "raw"  # "masked": of the tokens that the grammar allows only

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        checked: dict[str, Any] = {"stop": _check_stops(stops), "logit_bias": _check_logit_bias(self.logit_bias)}
        for name, bounds in SAMPLING_BOUNDS.items():
            value = getattr(self, name)
            is_unset = value is None and name in NEUTRAL_SAMPLING
            checked[name] = None if is_unset else _check_number(name, value, bounds)
        checked["top_k"] = 0 if checked["top_k"] == -1 else checked["top_k"]
        checked["seed"] = None if checked["seed"] == -1 else checked["seed"]
        for name in ("ignore_eos", "prompt_logprobs", "close_on_length"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise InvalidRequestError(
                f"logprobs_mode must be raw or masked, not {self.logprobs_mode!r}", "logprobs_mode"
            )
        if not isinstance(self.structured_outputs, (StructuredOutputsParams, NoneType)):
            raise InvalidRequestError("structured_outputs must be a StructuredOutputsParams", "structured_outputs")
        for name, value in checked.items():  # NumPy numbers become Python's, mutable values are copied
            object.__setattr__(self, name, value)

    @property
    def is_resolved(self) -> bool:
        return all(getattr(self, name) is not None for name in NEUTRAL_SAMPLING)

    def resolve(self, defaults: Mapping[str, Any] = NEUTRAL_SAMPLING) -> SamplingParams:
        """Return the parameters with the fields that are not set taken from `defaults`."""
        unset = {name: value for name, value in defaults.items() if getattr(self, name) in (None, ())}
        return self._copy(unset) if unset else self

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """Return the parameters with another limit."""
        return self._copy({"max_tokens": max_tokens})

    def with_structured_outputs(self, structured_outputs: StructuredOutputsParams | None) -> SamplingParams:
        """Return the parameters with another grammar."""
        return self._copy({"structured_outputs": structured_outputs})

    def _copy(self, changes: Mapping[str, Any]) -> SamplingParams:
        """Return a copy with values that are valid; `dataclasses.replace` would check all of them again."""
        copied = object.__new__(SamplingParams)
        for name in self.__slots__:
            object.__setattr__(copied, name, changes[name] if name in changes else getattr(self, name))
        return copied


def _check_stops(stops: Any) -> tuple[str, ...]:
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
        raise InvalidRequestError("stop must be a string or a list of strings", "stop")
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop holds {len(stops)} strings: at most {MAX_STOPS} are allowed", "stop")
    if any(not 1 <= len(s) <= MAX_STOP_CHARS for s in stops):
        raise InvalidRequestError(f"each stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")
    return tuple(stops)


def _check_logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError("logit_bias must map token ids to numbers", "logit_bias")
    if all(type(t) is int and t >= 0 and type(v) is float and v in LOGIT_BIAS_BOUNDS for t, v in bias.items()):
        return dict(bias)
    token_bounds = Bounds(0, is_integer=True)
    return {
        _check_number("logit_bias", token, token_bounds): _check_number(
            "logit_bias", value, LOGIT_BIAS_BOUNDS, shown=f"logit_bias of token {token}"
        )
        for token, value in bias.items()
    }


def _check_number(name: str, value: Any, bounds: Bounds, shown: str | None = None) -> Any:
    """Return the value as a Python number, or raise an error that names the parameter and its range."""
    if value is None and bounds.is_optional:
        return None
    if type(value) is (int if bounds.is_integer else float) and value == value and value in bounds:
        return value
    shown = shown or name
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    if bounds.is_integer and not (is_number and isinstance(value, Integral)):
        raise InvalidRequestError(f"{shown} must be a whole number, not {value!r}", name)
    if not (is_number and abs(value) < math.inf):  # NaN compares false, so it is rejected too
        raise InvalidRequestError(f"{shown} must be a finite number, not {value!r}", name)
    if value not in bounds:
        raise InvalidRequestError(f"{shown} is {value}: it must be {bounds.describe()}", name)
    return int(value) if bounds.is_integer else float(value)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability and the most probable tokens at its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


BUILT_IN_SAMPLING: dict[str, float] = {**NEUTRAL_SAMPLING, "temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
BUILT_IN = "built-in"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A value for each field of `NEUTRAL_SAMPLING`, and its source; a served model may have more, such as `stop`."""

    values: dict[str, Any]
    sources: dict[str, str]
    warnings: list[str]  # on values that were left out

    def report(self) -> dict[str, dict[str, Any]]:
        """Return `{"temperature": {"value": 0.7, "source": "built-in"}, ...}`."""
        return {name: {"value": value, "source": self.sources[name]} for name, value in self.values.items()}
