"""Renderer of chat templates: a program that chat_template.py runs as a child. It imports no module of the package.

A template may do anything that Jinja's immutable sandbox allows, without bound; the operating system bounds this
process. JSON lines on standard input and output: {"source", "seconds"} first, then {"values", "messages", "protect"}
for each rendering; each gets {"text"}, or {"error"} with the index of a message without content where the template
failed. Each rendering has its own CPU time limit.
"""

import json
import os
import re
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY = 512 << 20  # address space of this process
MAX_PROMPT_CHARS = 4 << 20  # characters of the prompt; the input adds to it
GLOBALS = ("range", "dict", "namespace", "joiner", "cycler")


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """As transformers sets it up, except that access to internals raises instead of giving an undefined value."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
        self.globals = {name: self.globals[name] for name in GLOBALS}
        self.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        self.filters["tojson"] = tojson

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")


def raise_exception(message: object) -> NoReturn:
    """Let a template reject messages."""
    raise TemplateError(str(message))


def strftime_now(pattern: str) -> str:
    """Return the current date, formatted."""
    return datetime.now().strftime(pattern)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def allow_more_time(seconds: int) -> None:
    """Grant the next step CPU time of its own; past it the system ends this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def limit_memory() -> None:
    """Limit memory, and forbid core dumps and files; a lower hard limit stays."""
    for kind, limit in ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def protect(messages: list[Any], pattern: str, mark: str) -> list[Any]:
    """Return the messages with the names of control tokens, which match the pattern, broken up by the mark."""
    names = re.compile(pattern)

    def protect_text(text: str) -> str:
        return names.sub(lambda name: name[0][0] + mark + name[0][1:], text.replace(mark, "\ufffd"))

    return [
        {**message, "content": protect_text(message["content"])} if message.get("content") else message
        for message in messages
    ]


def render(template: Any, values: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """Render once; an exception of the template becomes an error reply."""
    try:
        parts, length = [], 0
        for part in template.generate(values):
            length += len(part)
            if length > max_chars:
                return {"error": f"was stopped: it makes a prompt of more than {max_chars} characters"}
            parts.append(part)
        return {"text": "".join(parts)}
    except MemoryError:
        return {"error": f"was stopped: it needs more than {MAX_MEMORY >> 20} MiB of memory"}
    except SecurityError as error:
        return {"error": f"was stopped: {error}"}
    except Exception as error:  # untrusted code may raise anything
        if type(error) is TemplateError:  # of `raise_exception`
            return {"error": f"refused: {error}"}
        return {"error": f"failed: {type(error).__name__}: {error}", "null_content": find_null(values["messages"])}


def find_null(messages: list[Any]) -> int | None:
    """Return the index of the first message without content, which most templates do not expect."""
    nulls = (i for i, message in enumerate(messages) if isinstance(message, dict) and message.get("content") is None)
    return next(nulls, None)


def compile_template(source: str) -> tuple[Any, dict[str, str]]:
    """Return the compiled template and the reply to its source."""
    try:
        return Environment().from_string(source), {"text": ""}
    except TemplateSyntaxError as error:
        return None, {"error": f"is wrong in line {error.lineno}: {error.message}"}
    except Exception as error:  # untrusted source: Jinja or Python's compiler may raise anything
        return None, {"error": f"cannot be compiled: {error or type(error).__name__}"}


def main() -> None:
    """Reply to lines until end of file."""
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    limit_memory()
    template, seconds = None, 1
    for line in sys.stdin.buffer:
        allow_more_time(seconds)
        request = json.loads(line)
        if "source" in request:
            seconds = request["seconds"]
            template, reply = compile_template(request["source"])
        else:
            messages = request["messages"]
            if request["protect"] is not None:
                messages = protect(messages, *request["protect"])
            reply = render(template, {**request["values"], "messages": messages}, MAX_PROMPT_CHARS + 4 * len(line))
        try:
            text = json.dumps(reply)
        except MemoryError:
            text = json.dumps({"error": "was stopped: it needs too much memory"})
        replies.write(text + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
