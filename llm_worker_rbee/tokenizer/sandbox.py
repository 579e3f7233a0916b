"""The Jinja environment in which chat templates run: immutable, without Python's internals, and metered.

Jinja turns a template into Python source. Before that is compiled, a tick is put into every loop and function, and
every list, tuple, mapping and `~` goes through the meter; operators, filters and calls go through it by Jinja's own
hooks. So nested loops and recursion end at the deadline, in whatever thread, and nothing large is made first and
refused later.
"""

import ast
import functools
import json
import threading
from collections.abc import Callable, Iterable
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .template_limits import FILTERS, METHODS, Estimate, Meter, estimate_operator

# Filters of Jinja that chat templates have a use for. Others make HTML, or take time that no meter sees.
_KEPT_FILTERS = (
    "abs", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "first", "float", "format", "groupby",
    "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "select", "selectattr", "slice", "sort", "string", "sum", "title", "trim",
    "truncate", "unique", "upper", "urlencode", "wordcount",
)  # fmt: skip
_KEPT_GLOBALS = ("range", "dict", "namespace", "joiner", "cycler")
_MAX_FORMAT = 256  # characters of a date format


class Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment. `meter` belongs to the rendering that the current thread is at."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing of the template is evaluated while it is compiled
            finalize=_finalize,
            extensions=[loopcontrols, Generation],
        )
        self._local = threading.local()
        self.globals = {name: self.globals[name] for name in _KEPT_GLOBALS}
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        kept = {name: self.filters[name] for name in _KEPT_FILTERS}
        kept.update(tojson=_tojson, attr=_attr, safe=_plain, escape=_escape, e=_escape)
        self.filters = {name: _metered_filter(self, filter_, FILTERS.get(name)) for name, filter_ in kept.items()}

    @property
    def meter(self) -> Meter:
        """The meter of the rendering in this thread."""
        meter: Meter | None = getattr(self._local, "meter", None)
        if meter is None:
            meter = self._local.meter = Meter()
        return meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        self._local.meter = meter

    def tick(self, size: int) -> None:
        """Called by the compiled template in every loop and function."""
        self.meter.tick(size)

    def made(self, value: Any) -> Any:
        """Called by the compiled template for every list, tuple and mapping."""
        return self.meter.made(value)

    def concat(self, parts: Iterable[str]) -> str:
        """Output of a macro or block, joined."""
        return self.join_text(parts)

    def join_text(self, parts: Iterable[object]) -> str:
        """The `~` operator."""
        parts = list(parts)
        self.meter.check(sum(self.meter.size(part) for part in parts))
        text: str = self.meter.made("".join([_text(part) for part in parts]))
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A binary operator, refused where its result would be too large."""
        self.meter.check(estimate_operator(self.meter, operator, left, right))
        return self.meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call, refused where its result would be too large."""
        meter = __self.meter
        this, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(this, str | bytes | int | float) and name in METHODS:
            named = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # without Jinja's own
            meter.check(METHODS[name](meter, this, args, named))
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format, sandboxed by Jinja and metered here."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def metered(*args: Any, **kwargs: Any) -> str:
            self.meter.check(METHODS["format"](self.meter, value.__self__, args, kwargs))
            text: str = self.meter.made(wrapped(*args, **kwargs))
            return text

        return metered

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Reaching for internals is an error at once, not an undefined value."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        refused = (nodes.EvalContextModifier, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
        for node in template.find_all(refused):
            raise TemplateSyntaxError(f"{type(node).__name__} is not for chat templates", node.lineno)
        return template

    def _compile(self, source: str, filename: str) -> CodeType:
        tree = _Instrument().visit(ast.parse(source))
        code: CodeType = compile(ast.fix_missing_locations(tree), filename, "exec")
        return code


class _Instrument(ast.NodeTransformer):
    """Puts the meter into the Python source that Jinja makes of a template."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._with_tick(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._with_tick(node)

    def _with_tick(self, node: Any) -> ast.AST:
        text = sum(len(c.value) for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str))
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_environment("tick", ast.Constant(text))))
        return node  # type: ignore[no-any-return]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("str_join", "markup_join"):
            return _environment("join_text", *node.args)
        return node

    def _display(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        return _environment("made", node) if isinstance(getattr(node, "ctx", ast.Load()), ast.Load) else node

    visit_List = visit_Tuple = visit_Dict = _display  # noqa: N815

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        return node


def _environment(method: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name("environment", ast.Load()), method, ast.Load()), list(args), [])


def _metered_filter(environment: MeteredEnvironment, filter_: Callable[..., Any], estimate: Estimate | None) -> Any:
    passes = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @functools.wraps(filter_)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = environment.meter
        if estimate is not None and len(args) > passes:
            meter.check(estimate(meter, args[passes], args[passes + 1 :], kwargs))
        return meter.made(filter_(*args, **kwargs))

    return metered


def _text(value: object) -> str:
    if isinstance(value, Namespace):
        raise SecurityError("a namespace is no text")
    return value if type(value) is str else str(value)


@pass_context  # so that Jinja does not evaluate constants while it compiles
def _finalize(context: Context, value: object) -> str:
    meter: Meter = context.environment.meter  # type: ignore[attr-defined]
    meter.check(meter.size(value))
    text: str = meter.made(_text(value))
    return text


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_FORMAT:
        raise SecurityError(f"strftime_now: a format of more than {_MAX_FORMAT} characters")
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context
def _attr(context: Context, value: Any, name: str) -> Any:
    return context.environment.getattr(value, name)


def _plain(value: Any) -> str:
    return str(value)


def _escape(value: Any) -> str:
    text = str(value)
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ('"', "&#34;")):
        text = text.replace(char, entity)
    return text
