"""Lark grammars without recursion, as regular expressions: the input of a custom tool is a string inside JSON, and a
pattern is what a JSON schema can say of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

MAX_CHARS = 50_000  # of the expression
MAX_NESTED = 100
TOO_LONG = f"as a regular expression the grammar has more than {MAX_CHARS} characters"
SCANNER = re.compile(
    r"""(?P<skip>[ \t\f\r]+|//[^\n]*|\#[^\n]*) | (?P<newline>\n) | (?P<string>"(?:\\.|[^"\\\n])*"i?)
      | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imsux]*) | (?P<name>[?!]?_?[A-Za-z][A-Za-z0-9_]*) | (?P<number>[0-9]+)
      | (?P<directive>%[a-z]+) | (?P<operator>->|\.\.|[-:|()\[\]?*+~,{}.])""",
    re.VERBOSE,
)
COMMON = {  # of Lark's library `common`
    "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"', "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]", "WORD": "[a-zA-Z]+", "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*", "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+", "CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+",
}  # fmt: skip
CLOSING = {"(": ")", "[": "]"}


class Token(NamedTuple):
    """A part of the text of a grammar."""

    kind: str
    text: str


class Group(NamedTuple):
    """An open bracket: the expressions of its alternatives, item by item."""

    opening: str
    alternatives: list[list[str]]

    def expression(self) -> str:
        texts = ["".join(items) for items in self.alternatives]
        return texts[0] if len(texts) == 1 else f"(?:{'|'.join(texts)})"


def lark_to_regex(text: str) -> str:
    """Return the expression that accepts what a grammar does; raise a ValueError that says why there is none."""
    expression = _Grammar(text).expand("start")
    if len(expression) > 2 * MAX_CHARS:
        raise ValueError(TOO_LONG)
    return expression


def _statements(text: str) -> list[list[Token]]:
    """Return the tokens of each statement; a line that begins with | belongs to the one before."""
    lines: list[list[Token]] = [[]]
    position = depth = 0
    while position < len(text):
        match = SCANNER.match(text, position)
        if match is None:
            raise ValueError(f"{text[position : position + 20]!r} is not understood")
        position, token = match.end(), Token(str(match.lastgroup), match[0])
        depth += (token.text in CLOSING) - (token.text in CLOSING.values())
        if token.kind == "newline" and depth <= 0 and lines[-1]:
            lines.append([])
        elif token.kind not in ("newline", "skip"):
            if token.text == "|" and not lines[-1] and len(lines) > 1:
                lines.pop()
            lines[-1].append(token)
    return list(filter(None, lines))


class _Grammar:
    """The rules of a grammar, and their expressions as far as they were needed."""

    def __init__(self, text: str) -> None:
        self._rules: dict[str, list[Token]] = {}
        self._ignored: list[list[Token]] = []
        self._expressions: dict[str, str] = {}
        self._open: list[str] = []
        for statement in _statements(text):
            self._read(statement)

    def _read(self, statement: list[Token]) -> None:
        kind, name = statement[0]
        texts = [token.text for token in statement]
        if name == "%ignore":
            self._ignored.append(statement[1:])
        elif kind == "directive":
            names = [token.text for token in statement if token.kind == "name"]
            if name != "%import" or names[:1] != ["common"] or "->" in texts:
                raise ValueError(f"{name} is supported for names of `common` only")
            for imported in names[1:]:
                if imported not in COMMON:
                    raise ValueError(f"common.{imported} is not known")
                self._expressions[imported] = COMMON[imported]
        else:
            colon = texts.index(":") if ":" in texts else 0
            if kind != "name" or colon not in (1, 3):  # NAME: or NAME.PRIORITY:
                raise ValueError(f"{' '.join(texts[:4])!r} is not a rule")
            self._rules[name.lstrip("?!")] = statement[colon + 1 :]

    def expand(self, name: str) -> str:
        """Return the expression of a rule or a terminal."""
        if name in self._expressions:
            return self._expressions[name]
        if name not in self._rules:
            raise ValueError(f"there is no rule {name}")
        if name in self._open:
            raise ValueError(f"the rule {name} is recursive: only grammars without recursion are supported")
        if len(self._open) > MAX_NESTED:
            raise ValueError(f"its rules are nested more than {MAX_NESTED} deep")
        self._open.append(name)
        gap = "" if name.isupper() or not self._ignored else self._gap  # nothing inside a terminal
        expression = _Translator(self._rules[name], self.expand, gap).translate()
        self._open.pop()
        self._expressions[name] = f"(?:{gap if name == 'start' else ''}{expression})"
        return self._expressions[name]

    @cached_property
    def _gap(self) -> str:
        """What may stand between the parts of a rule."""
        ignored = (_Translator(tokens, self.expand, "").translate() for tokens in self._ignored)
        return f"(?:{'|'.join(ignored)})*"


class _Translator:
    """Translates the right side of a rule token by token: most of Lark's operators are operators of expressions."""

    def __init__(self, tokens: list[Token], expand: Callable[[str], str], gap: str) -> None:
        self._rest, self._expand, self._gap = tokens[::-1], expand, gap
        self._groups = [Group("", [[]])]
        self._size = 0  # of the rules that it refers to

    def translate(self) -> str:
        while self._rest:
            kind, text = self._rest.pop()
            group = self._groups[-1]
            items = group.alternatives[-1]
            if kind in ("name", "regex", "string"):
                items.append(self._atom(kind, text))
            elif text == "|":
                group.alternatives.append([])
            elif text in CLOSING:
                self._groups.append(Group(text, [[]]))
                if len(self._groups) > MAX_NESTED + 1:
                    raise ValueError("the grammar is nested too deeply")
            elif text == CLOSING.get(group.opening):
                self._groups.pop()
                self._groups[-1].alternatives[-1].append(f"(?:{group.expression()}){'?' * (text == ']')}")
            elif text in "?*+~{" and items:
                items[-1] = f"(?:{items[-1]}){self._repetition(text)}"
            elif text == "->" and (len(self._rest) < 2 or self._rest[-2].text in "|)]"):
                del self._rest[-1:]  # the name of the alternative
            else:
                text = self._rest[-2].text if text == "->" else text
                raise ValueError(f"{text!r} is not expected")
        if len(self._groups) > 1:
            raise ValueError(f"{self._groups[-1].opening} is not closed")
        return self._groups[0].expression()

    def _next(self, *texts: str) -> bool:
        """Skip the next token if it is one of these."""
        is_next = bool(self._rest) and self._rest[-1].text in texts
        if is_next:
            self._rest.pop()
        return is_next

    def _atom(self, kind: str, text: str) -> str:
        if kind == "name":
            name = text.lstrip("?!")
            expression = self._expand(name) + (self._gap if name.isupper() else "")
            self._size += len(expression)
            if self._size > MAX_CHARS:
                raise ValueError(TOO_LONG)
            return expression
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            return f"(?{flags}:{body}){self._gap}"
        first = _unquote(text)
        if not self._next(".."):
            return f"(?{'i' * text.endswith('i')}:{_escape(first)}){self._gap}"
        last = _unquote(self._rest.pop().text) if self._rest else ""
        if len(first) != 1 or len(last) != 1 or first > last:
            raise ValueError(f"the range from {text} is not one of single characters")
        return f"[{_escape(first)}-{_escape(last)}]{self._gap}"

    def _repetition(self, sign: str) -> str:
        if sign in "?*+":
            return sign
        least = most = self._number()
        if self._next("..", ","):
            has_most = sign == "~" or not self._rest or self._rest[-1].text != "}"
            most = self._number() if has_most else ""
        if sign == "{" and not self._next("}"):
            raise ValueError("{ is not closed")
        return f"{{{least}{'' if most == least else f',{most}'}}}"

    def _number(self) -> str:
        kind, text = self._rest.pop() if self._rest else Token("", "")
        if kind != "number":
            raise ValueError("a number of repetitions is expected")
        return text


def _unquote(text: str) -> str:
    try:
        return str(json.loads(text.removesuffix("i")))
    except ValueError:
        raise ValueError(f"{text[:20]} is not a string") from None


def _escape(text: str) -> str:
    escaped = re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", lambda match: "\\" + match[0], text)
    return escaped.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")
