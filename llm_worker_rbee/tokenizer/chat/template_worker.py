"""Renderer of chat templates: a program that template.py runs as a child. It imports no module of the package.

A template may do anything that Jinja's immutable sandbox allows, without bound; the operating system bounds this
process. JSON lines on standard input and output: {"source", "seconds"} first, then {"values", "messages", "rules",
"protect"} for each rendering; each gets {"text"}, or {"error"} with the index of a message without content where the
template failed. Each rendering has its own CPU time limit. `adapt` changes messages to what the template accepts, by
the rules that detection.py found; it is done here because a long conversation takes long.
"""

import hashlib
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
IMAGE = "\ufdd1"  # stands for an image in a text, as in events.py


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
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace("\\ufdd0", "\ufdd0") if ensure_ascii else text  # the mark of `protect`


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


KNOWN_ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython")
TOOLS_PROMPT = (
    "# Tools\n\nYou may call functions to help with the request. These are their signatures:\n"
    "<tools>\n{tools}\n</tools>\n\nTo call a function, "
    "write a JSON object with its name and arguments inside tags, as in:\n"
    '<tool_call>\n{{"name": "function-name", "arguments": {{"argument": "value"}}}}\n</tool_call>'
)


def adapt(messages: list[Any], values: dict[str, Any], rules: dict[str, Any]) -> list[Any]:
    """Adapt messages to the template; `values` gets its variables of tools."""
    adapted = [adapt_message(message, rules) for message in messages]
    if not rules["has_parallel_calls"]:
        images = [message for message in adapted if IMAGE in str(message["content"])]
        adapted = split_calls(adapted)
        if images != [message for message in adapted if IMAGE in str(message["content"])]:
            raise TypeError("results with images must come in the order of their calls")
    if rules["format"]["name_is_id"]:
        name_ids(adapted)
    tools = values.get("tools")
    if tools and rules["tools"] == "system":
        values["tools"] = None
        prompt = TOOLS_PROMPT.format(tools="\n".join(tojson(tool) for tool in tools))
        if adapted and adapted[0]["role"] == "system":
            adapted[0] = {**adapted[0], "content": f"{adapted[0].get('content') or ''}\n\n{prompt}".strip()}
        else:
            adapted.insert(0, {"role": "system", "content": prompt})
    elif tools and rules["tools"] == "xml_tools":
        values["xml_tools"] = tools
    adapted = move_system(adapted, rules)
    adapted = merge_users(adapted) if rules["must_alternate"] else adapted
    return [split_parts(message, rules["parts"]) for message in adapted] if rules["parts"] else adapted


def adapt_message(message: dict[str, Any], rules: dict[str, Any]) -> dict[str, Any]:
    """Adapt one message: its content to text, its role, calls and reasoning to the template's."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    if role == "developer" and not rules["has_developer_role"]:
        role = "system"
    if role == "function":
        role = "tool"
    adapted = {**message, "role": role, "content": content}
    reasoning = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)), None)
    for key in ("reasoning_content", "reasoning", "thinking"):
        adapted.pop(key, None)
    if role == "assistant" and reasoning and rules["reasoning_field"]:
        adapted[rules["reasoning_field"]] = reasoning
    calls = message.get("tool_calls")
    adapted.pop("tool_calls", None)
    if calls and role == "assistant":
        calls = [adapt_call(call, rules) for call in calls if isinstance(call, dict)]
        if reasoning and content and not rules["has_content_beside_reasoning"]:
            adapted[rules["reasoning_field"]], adapted["content"] = f"{reasoning}\n\n{content}", ""
        if rules["calls"] == "content":
            adapted["content"] = "\n".join(filter(None, (content, print_calls(calls, rules["format"]))))
        else:
            adapted["tool_calls"] = calls
    if "tool_call_id" in message and rules["has_short_ids"]:
        adapted["tool_call_id"] = short_id(message["tool_call_id"])
    if role == "tool" and not rules["has_tool_role"]:
        return {"role": "user", "content": f"<tool_response>\n{content or ''}\n</tool_response>"}
    if adapted["content"] is None and not (rules["has_null_content"] and calls):
        adapted["content"] = ""
    return adapted


def split_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each call a message of its own, followed by its result: for a template that shows one call a message."""
    groups: list[list[dict[str, Any]]] = []
    unanswered: list[tuple[str, list[dict[str, Any]]]] = []  # ids of calls, and the groups that their results join
    for message in messages:
        if message["role"] == "tool" and unanswered:
            call_id = str(message.get("tool_call_id"))
            entry = next((item for item in unanswered if item[0] == call_id), unanswered[0])
            unanswered.remove(entry)
            entry[1].append(message)
            continue
        calls = message.get("tool_calls") or []
        added = [[{**message, "tool_calls": calls[:1]} if calls else message]]
        added += [[{"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls[1:]]
        unanswered = [(str(call["id"]), group) for call, group in zip(calls, added, strict=False)]
        groups += added
    return [message for group in groups for message in group]


def adapt_call(call: dict[str, Any], rules: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object or text; where calls are objects, malformed ones are closed."""
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and rules["calls"] != "string":
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = without_images(parsed)
        elif rules["calls"] != "content":
            arguments = without_images(close_object(arguments))
    elif not isinstance(arguments, str):
        arguments = {} if arguments is None else arguments
        arguments = tojson(arguments) if rules["calls"] == "string" else arguments
    call_id = call.get("id")
    call_id = short_id(call_id) if rules["has_short_ids"] else call_id
    adapted = {"name": function.get("name"), "arguments": arguments}
    return {"id": call_id, "type": "function", "function": adapted}


def close_object(text: str) -> dict[str, Any]:
    """Return the object that a cut text of JSON becomes by closing its quotes and brackets; an empty one otherwise."""
    closers, in_string = "", False
    for mark in re.findall(r'\\.|["{}\[\]]', text, re.DOTALL):
        if mark == '"':
            in_string = not in_string
        elif mark in "{[" and not in_string:
            closers = ("}" if mark == "{" else "]") + closers
        elif mark in "}]" and not in_string:
            closers = closers[1:]
    try:
        value = json.loads(text + '"' * in_string + closers)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def name_ids(messages: list[dict[str, Any]]) -> None:
    """Give calls and their results ids with the function's name, since the template prints only the id."""
    ids: dict[Any, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            if not str(call["id"]).startswith("functions."):
                old_id, call["id"] = call["id"], f"functions.{call['function']['name']}:{len(ids)}"
                ids[old_id] = call["id"]
        if message.get("tool_call_id") in ids:
            message["tool_call_id"] = ids[message["tool_call_id"]]


def short_id(call_id: Any) -> str:
    """Return an id of 9 letters and digits: the same for the same id."""
    text = str(call_id)
    return (
        text if re.fullmatch(r"[a-zA-Z0-9]{9}", text) else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]
    )


def print_calls(calls: list[dict[str, Any]], form: dict[str, Any]) -> str:
    """Return calls in the model's own format, for a template that omits them."""
    texts = []
    for call in calls:
        name, arguments = str(call["function"]["name"]), call["function"]["arguments"]
        if form["kind"] == "pythonic":
            shown = arguments
            if isinstance(arguments, dict):
                shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            texts.append(f"{name}({shown})")
        else:
            shown = tojson(name)[1:-1] if form["kind"] == "json" else name
            shown = f"functions.{name}:{len(texts)}" if form["name_is_id"] else shown
            printed = arguments if isinstance(arguments, str) else tojson(arguments)
            text = f"{form['call_start']}{shown}{form['name_suffix']}{printed}{form['call_end']}"
            texts.append(text.replace("\0", short_id(call["id"])))
    return f"{form['section_start']}{form['separator'].join(texts)}{form['section_end']}"


def move_system(messages: list[Any], rules: dict[str, Any]) -> list[Any]:
    """Turn system messages that the template would refuse or drop into text of the user, in place.

    They go before the text of a user's message that follows at once, or are a message of their own: later ones change
    nothing of the prompt before them.
    """
    moved: list[Any] = []
    waiting: list[str] = []
    for i, message in enumerate(messages):
        if message["role"] == "system" and not (rules["has_system_role"] if i == 0 else rules["has_late_system"]):
            waiting.append(message.get("content") or "")
            continue
        if waiting and message["role"] == "user":
            message = {**message, "content": "\n\n".join([*waiting, message.get("content") or ""])}
            waiting = []
        elif waiting and message["role"] != "tool":  # nothing may stand between calls and their results
            moved.append({"role": "user", "content": "\n\n".join(waiting)})
            waiting = []
        moved.append(message)
    return [*moved, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else moved


def merge_users(messages: list[Any]) -> list[Any]:
    """Join neighbouring messages of a user."""
    merged: list[Any] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] == "user":
            merged[-1] = {**merged[-1], "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def split_parts(message: dict[str, Any], parts: str) -> dict[str, Any]:
    """Return a message with its content as a list of texts and images, if the template takes it so."""
    text = message["content"]
    if not isinstance(text, str) or not (parts == "all" or (message["role"] == "user" and IMAGE in text)):
        return message
    pieces = [piece for piece in re.split(f"({IMAGE})", text) if piece]
    content = [{"type": "image"} if piece == IMAGE else {"type": "text", "text": piece} for piece in pieces]
    return {**message, "content": content}


def protect(value: Any, names: re.Pattern[str], mark: str) -> Any:
    """Return a value in whose texts the names of control tokens, which match the pattern, are broken up by the mark."""
    if isinstance(value, str):
        return names.sub(lambda name: name[0][0] + mark + name[0][1:], value.replace(mark, "\ufffd"))
    if isinstance(value, list):
        return [protect(item, names, mark) for item in value]
    if isinstance(value, dict):
        return {
            protect(key, names, mark): item if key == "role" and item in KNOWN_ROLES else protect(item, names, mark)
            for key, item in value.items()
        }
    return value


def without_images(value: Any) -> Any:
    """Return a value without marks of images, which only the content of a message has."""
    if isinstance(value, str):
        return value.replace(IMAGE, "\ufffd")
    if isinstance(value, list):
        return [without_images(item) for item in value]
    return (
        {without_images(key): without_images(item) for key, item in value.items()} if isinstance(value, dict) else value
    )


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


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a rendering: messages and tools adapted, and texts of a request protected."""
    variables, messages = without_images(request["given"]), request["messages"]
    messages = [
        {key: value if key == "content" else without_images(value) for key, value in message.items()}
        for message in messages
    ]
    if request["rules"] is not None:
        messages = adapt(messages, variables, request["rules"])
    if request["protect"] is not None:
        control, markers, mark = request["protect"]
        names, all_names = re.compile(control), re.compile(f"{markers}|{control}" if markers else control)
        messages = [protect(message, names if is_assistant(message) else all_names, mark) for message in messages]
        variables = protect(variables, all_names, mark)
    return {**variables, **request["values"], "messages": messages}


def is_assistant(message: Any) -> bool:
    """Templates look for markers in the text of these messages."""
    return isinstance(message, dict) and message.get("role") == "assistant"


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
            try:
                reply = render(template, prepare(request), MAX_PROMPT_CHARS + 4 * len(line))
            except (AttributeError, KeyError, TypeError, MemoryError, RecursionError) as error:  # of odd messages
                reply = {"error": f"failed: {type(error).__name__}: {error}"}
        try:
            text = json.dumps(reply)
        except MemoryError:
            text = json.dumps({"error": "was stopped: it needs too much memory"})
        replies.write(text + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
