"""Chat templates: messages to the prompt that the model was taught to expect, in Jinja's immutable sandbox.

A template comes with a model file and is not to be trusted: time and sizes are limited (see `template_limits`), and
whatever goes wrong in it is a `ChatTemplateError`. Fields and filters are those of transformers' renderer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError, TemplateSyntaxError

from ..errors import ChatTemplateError
from .sandbox import MeteredEnvironment
from .template_limits import MAX_DEPTH, Meter

_MAX_SOURCE = 256 << 10  # characters; the longest published templates have some twenty thousand


class ChatTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > _MAX_SOURCE:
            raise ChatTemplateError(f"the chat template has {len(source)} characters, more than {_MAX_SOURCE}")
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._environment = MeteredEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is wrong in line {error.lineno}: {error.message}") from None
        except Exception as error:  # whatever Jinja or Python's compiler makes of a malicious source
            raise ChatTemplateError(f"the chat template cannot be compiled: {_one_line(error)}") from None

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **fields: object
    ) -> str:
        """The prompt for these messages; `fields` are further values that the template may read."""
        values = {
            "tools": None,
            "documents": None,
            **self._tokens,
            **fields,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        environment = self._environment
        try:
            plain = {name: _plain_data(value) for name, value in values.items()}
            environment.meter = Meter(plain)
            return environment.join_text(self._template.generate(plain))
        except SecurityError as error:
            raise ChatTemplateError(f"the chat template was stopped: {_one_line(error)}", field="messages") from None
        except Exception as error:  # a template may raise anything: it is program text from elsewhere
            raise ChatTemplateError(f"the chat template refused: {_one_line(error)}", field="messages") from None
        finally:
            environment.meter = None


def _plain_data(value: object, depth: int = 0) -> Any:
    """A copy out of plain JSON types: a template never sees an object with methods of its own."""
    if depth > MAX_DEPTH:
        raise SecurityError(f"the messages are nested more than {MAX_DEPTH} deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain_data(key, depth + 1): _plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(item, depth + 1) for item in value]
    raise SecurityError(f"a value of type {type(value).__name__} is no JSON")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
