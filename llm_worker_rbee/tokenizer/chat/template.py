"""Chat templates: messages to the prompt format that a model was trained on.

A template comes with a model file and is not trusted. template_worker.py renders it in a small process (20 MB,
80 ms to start, then kept) whose time and memory the operating system limits; every failure is a `ChatTemplateError`,
except that the process was killed from outside (by the system when memory is short) or did not answer: then it renders
once more. Its processor time alone says that a template is slow: one that did not answer was stopped, or the machine is
busy. Limits inside this process were tried first and could be evaded (docs/decisions/).
"""

import atexit
import json
import logging
import re
import signal
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ChatTemplateError, InvalidRequestError, UnavailableError, WorkerError
from ...pipe_process import PipeProcess, ProgramError
from ..tokenizer import MARK, Tokenizer
from .events import IMAGE, Image, Tool, without_images
from .reader import SURROGATES

Message = Mapping[str, Any]
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
logger = logging.getLogger(__name__)


def validate_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages as templates expect them: a role and text."""
    return read_messages(messages)[0]


def read_messages(messages: Sequence[Message]) -> tuple[list[Message], list[Image]]:
    """Return messages as templates expect them, and their images: content is text (of a list the texts, joined), with a
    mark for each image. A message may have `images`, which go before its text."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of {role, content}", "messages")
    images: list[Image] = []
    return [_read_message(i, message, images) for i, message in enumerate(messages)], images


def _read_message(i: int, message: Message, images: list[Image]) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequestError(f"messages[{i}] must have a role", "messages")
    content, place = message.get("content"), f"messages[{i}]"
    own = [read_image(image, f"{place}.images[{j}]") for j, image in enumerate(message.get("images") or ())]
    images += own
    if isinstance(content, list):
        content = "".join(_read_part(part, f"{place}.content[{j}]", images) for j, part in enumerate(content))
    elif isinstance(content, str):
        content = without_images(content)
    elif own or content is not None or not message.get("tool_calls"):
        raise InvalidRequestError(f"{place}.content must be text, or a list of texts and images", "messages")
    if own:
        content = IMAGE * len(own) + (content or "")
        message = {key: value for key, value in message.items() if key != "images"}
    return message if content is message.get("content") else {**message, "content": content}


def _read_part(part: Any, place: str, images: list[Image]) -> str:
    """Return the text of a part of a message; an image is added to `images`."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind in ("image", "image_url") and part.get(kind) is not None:
        source = part[kind]
        images.append(read_image(source.get("url") if isinstance(source, Mapping) else source, place))
        return IMAGE
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return without_images(part["text"])
    forms = '{"type": "text", "text": ...} or {"type": "image", "image": a path, bytes or a picture of Pillow}'
    raise InvalidRequestError(f"{place} must be {forms}", "messages")


def read_image(source: Any, place: str) -> Image:
    """Return an image of bytes, a path, a data URL, or a picture of Pillow."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return Image(bytes(source), place=place)
    if isinstance(source, str) and source.startswith("data:"):
        return Image.from_url(place, source)
    if isinstance(source, (str, Path)):
        try:
            return Image(Path(source).expanduser().read_bytes(), place=str(source))
        except (OSError, ValueError, RuntimeError) as error:  # a NUL, an unknown ~user
            why = getattr(error, "strerror", None) or error
            raise InvalidRequestError(f"{place}: cannot read {str(source)[:200]!r}: {why}", "messages") from None
    if not callable(getattr(source, "save", None)):
        kind = type(source).__name__
        raise InvalidRequestError(f"{place} must be a path, bytes or a picture of Pillow, not {kind}", "messages")
    file = BytesIO()
    (source if source.mode in PNG_MODES else source.convert("RGB")).save(file, "PNG", compress_level=1)
    return Image(file.getvalue(), place=place)


MAX_KWARGS_CHARS = 64 << 10
MAX_KWARGS_DEPTH = 16
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "xml_tools"})


def validate_template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a request's variables for the template; raise if names are reserved, or values too large or not JSON."""
    field = "chat_template_kwargs"
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in kwargs):
        raise InvalidRequestError(f"{field} must be an object whose keys are names of variables", field)
    if reserved := sorted(RESERVED & kwargs.keys()):
        raise InvalidRequestError(f"{field} may not set {', '.join(reserved)}", field)
    try:
        size = len(json.dumps(kwargs))
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError(f"{field} must be plain JSON", field) from None
    if size > MAX_KWARGS_CHARS or _depth(kwargs) > MAX_KWARGS_DEPTH:
        limits = f"at most {MAX_KWARGS_CHARS} characters and {MAX_KWARGS_DEPTH} levels are allowed"
        raise InvalidRequestError(f"{field} is too large: {limits}", field)
    return dict(kwargs)


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, children), default=0)


def tool_definitions(tools: Sequence[Tool | Mapping[str, Any]] | None) -> list[Any] | None:
    """Return tools in the form of templates: objects of type "function"."""
    return [_definition(tool) if isinstance(tool, Tool) else tool for tool in tools] if tools else None


def _definition(tool: Tool) -> dict[str, Any]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


MAX_SOURCE_CHARS = 128 << 10  # the longest published templates have about 20,000
MAX_CPU_S = 1  # CPU time
MAX_WAIT_S = 20.0  # wall time: the machine may be busy
MAX_REPLY_BYTES = 256 << 20
KILL_SIGNALS = (-signal.SIGKILL, -signal.SIGTERM)  # as exit status: of others, not of the limits of a template
WORKER_SCRIPT = Path(__file__).with_name("template_worker.py")


CONTENT_IS_NULL = (
    "messages[{i}].content is null, and the chat template of this model does not support that: send a text, which may "
    'be empty ("content": ""), with tool_calls too'
)


class ChatTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        if not source.strip():
            raise ChatTemplateError("the chat template is empty", "chat_template")
        if len(source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(f"the chat template has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._worker: PipeProcess | None = None
        self.rules: Mapping[str, Any] | None = None  # how messages are adapted: `ChatFormat.adaptation`
        with self._lock:
            self._ensure_worker()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        protected: Tokenizer | None = None,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **fields: object,
    ) -> str:
        """Render the prompt of these messages.

        `template_kwargs` are further variables of the template from a request, and checked; `fields` are not. With
        `protected` the names of its control tokens in messages, tools and variables are broken up: see
        `Tokenizer.protect`.
        """
        try:
            encoded = json.dumps(messages).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _not_json(error) from None
        return self.render_json(
            encoded,
            add_generation_prompt=add_generation_prompt,
            protected=protected,
            tools=tools,
            template_kwargs=template_kwargs,
            **fields,
        )

    def render_json(
        self,
        messages: bytes,
        *,
        add_generation_prompt: bool = True,
        protected: Tokenizer | None = None,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **fields: object,
    ) -> str:
        """Render messages that are encoded as JSON, in one line."""
        values = {"documents": None, **self._tokens, "add_generation_prompt": add_generation_prompt}
        variables = {**fields, **validate_template_kwargs(template_kwargs), "tools": tool_definitions(tools)}
        markers = "|".join(map(re.escape, self.rules["markers"])) if self.rules is not None else ""
        protection = None if protected is None else [protected.special_pattern, markers, MARK]
        head_values = {"values": values, "given": variables, "protect": protection, "rules": self.rules}
        try:
            head = json.dumps(head_values).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _not_json(error) from None
        request = head[:-1] + b', "messages": ' + messages + b"}"
        with self._lock:
            try:
                return self._request(self._ensure_worker(), request)
            except UnavailableError as error:
                logger.warning("%s: rendering again", error)
                return self._request(self._ensure_worker(), request)

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message], **fields: Any) -> list[int]:
        """Return the ids of the prompt. Control tokens of the template are parsed; in a message they are text."""
        prompt = self.render(validate_messages(messages), protected=tokenizer, **fields)
        return tokenizer.encode(prompt, parse_special=True, protected=True)

    def close(self) -> None:
        """End the process; rendering starts it again."""
        with self._lock:
            if self._worker is not None:
                self._worker.stop()

    def _ensure_worker(self) -> PipeProcess:
        """Return the process that holds the compiled template; start a new one if it has ended."""
        if self._worker is None or self._worker.poll() is not None:
            self._worker = _take_worker()
            weakref.finalize(self, self._worker.stop)
            self._request(self._worker, json.dumps({"source": self.source, "seconds": MAX_CPU_S}).encode())
        return self._worker

    def _request(self, child: PipeProcess, request: bytes) -> str:
        try:
            line = child.ask([request, b"\n"], lambda end: child.read_line(end, MAX_REPLY_BYTES), MAX_WAIT_S)
        except ProgramError as error:
            raise _explain(error) from None
        try:
            reply: dict[str, Any] = msgspec.json.decode(line)  # json holds the interpreter's lock for longer
        except msgspec.DecodeError:  # half of a surrogate pair, which the tokenizer would refuse
            reply = json.loads(line)
            if "text" in reply:
                raise _lone_surrogate(request) from None
        if (i := reply.get("null_content")) is not None:
            raise ChatTemplateError(CONTENT_IS_NULL.format(i=i), "messages")
        if "error" in reply:
            raise ChatTemplateError(f"the chat template {_one_line(reply['error'])}", "messages")
        return str(reply["text"])


def _lone_surrogate(request: bytes) -> ChatTemplateError:
    """Return the error that names the message with half of a surrogate pair."""
    i = next((i for i, message in enumerate(json.loads(request)["messages"]) if _has_surrogate(message)), 0)
    problem = f"messages[{i}] is not valid Unicode: it holds a lone surrogate, perhaps in the arguments of a call"
    return ChatTemplateError(problem, "messages")


def _has_surrogate(value: Any) -> bool:
    """Return whether a text holds half of a surrogate pair; it may be JSON itself, which has it escaped."""
    if isinstance(value, str) and not SURROGATES.search(value):
        try:
            return "\\u" in value and not isinstance(inner := json.loads(value), str) and _has_surrogate(inner)
        except (ValueError, RecursionError):
            return False
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return isinstance(value, str) or any(map(_has_surrogate, children))


def _not_json(error: Exception) -> ChatTemplateError:
    return ChatTemplateError(f"the messages are not plain JSON: {_one_line(error)}", "messages")


_ahead: list[PipeProcess] = []  # at most one, without a template


def start_ahead() -> None:
    """Start the renderer of the next template, to import what it needs while a model is loaded."""
    if not _ahead:
        with suppress(ChatTemplateError):  # what is wrong is reported when it is needed
            _ahead.append(_start_worker())
            atexit.register(_ahead[0].stop)


def _take_worker() -> PipeProcess:
    """Return the renderer that was started ahead, if there is one and it still runs, or a new one."""
    ahead = _ahead.pop() if _ahead else None
    return _start_worker() if ahead is None or ahead.poll() is not None else ahead


def _start_worker() -> PipeProcess:
    """Start the renderer; -P keeps this folder off its import path."""
    try:
        return PipeProcess([sys.executable, "-P", str(WORKER_SCRIPT)])
    except ProgramError as error:
        raise ChatTemplateError(f"the process that renders chat templates {error}") from error


def _explain(error: ProgramError) -> WorkerError:
    """Return the error of a request whose process has ended."""
    status, renderer = error.status, "the process that renders chat templates"
    if status is not None and status in KILL_SIGNALS:
        return UnavailableError(f"{renderer} was killed by signal {-status}")
    if status != -signal.SIGXCPU and isinstance(error.__cause__, TimeoutError):
        return UnavailableError(f"{renderer} did not answer within {MAX_WAIT_S:g} s")
    why: object = error.__cause__ if status is None else f"its process ended with status {status}"
    if status == -signal.SIGXCPU:
        why = f"it takes more than {MAX_CPU_S} s of processor time"
    return ChatTemplateError(f"the chat template was stopped: {why}", "messages")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
