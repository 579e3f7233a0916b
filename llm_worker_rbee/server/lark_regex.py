"""Lark grammars without recursion, as regular expressions: the input of a custom tool is a string inside JSON, and a
pattern is what a JSON schema can say of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
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
Resolve = Callable[[str], str]


class Token(NamedTuple):
    """A part of the text of a grammar."""

    kind: str
    text: str


def lark_to_regex(text: str) -> str:
    """Return the expression that accepts what a grammar does; raise a ValueError that says why there is none."""
    expression = _Grammar(text).expand("start")
    if len(expression) > 2 * MAX_CHARS:
        raise ValueError(TOO_LONG)
    return expression


def _scan(text: str) -> Iterator[Token]:
    position = depth = 0
    has_line = False  # an empty line is none
    while position < len(text):
        match = SCANNER.match(text, position)
        if match is None:
            raise ValueError(f"{text[position : position + 20]!r} is not understood")
        position = match.end()
        kind = str(match.lastgroup)
        depth += (match[0] in ("(", "[")) - (match[0] in (")", "]"))
        if kind == "newline" and (depth > 0 or not has_line):
            continue
        if kind != "skip":
            has_line = kind != "newline"
            yield Token(kind, match[0])
    yield Token("newline", "\n")


class _Grammar:
    """The rules of a grammar, and their expressions as far as they were needed."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_scan(text))
        self._at = 0
        self._rules: dict[str, list[Token]] = {}
        self._ignored: list[list[Token]] = []
        self._found: dict[str, str] = {}
        self._open: list[str] = []
        while self._at < len(self._tokens):
            self._read_statement()

    def _read_statement(self) -> None:
        line = self._read_line()
        if not line:
            return
        if line[0].kind == "directive":
            self._read_directive(line)
            return
        colon = next((i for i, token in enumerate(line) if token.text == ":"), 0)
        if line[0].kind != "name" or colon not in (1, 3):  # NAME: or NAME.PRIORITY:
            raise ValueError(f"{' '.join(token.text for token in line[:4])!r} is not a rule")
        self._rules[line[0].text.lstrip("?!")] = line[colon + 1 :]

    def _read_line(self) -> list[Token]:
        """Return the tokens of a statement; lines that begin with | belong to the one before."""
        line: list[Token] = []
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if token.kind != "newline":
                line.append(token)
                continue
            if self._at == len(self._tokens) or self._tokens[self._at].text != "|":
                break
        return line

    def _read_directive(self, line: list[Token]) -> None:
        name = line[0].text
        if name == "%ignore":
            self._ignored.append(line[1:])
            return
        words = [token.text for token in line[1:] if token.kind == "name"]
        if name != "%import" or words[:1] != ["common"] or "->" in [token.text for token in line]:
            raise ValueError(f"{name} is supported for names of `common` only")
        for word in words[1:]:
            if word not in COMMON:
                raise ValueError(f"common.{word} is not known")
            self._found[word] = COMMON[word]

    def expand(self, name: str) -> str:
        """Return the expression of a rule or a terminal."""
        if name in self._found:
            return self._found[name]
        if name not in self._rules:
            raise ValueError(f"there is no rule {name}")
        if name in self._open:
            raise ValueError(f"the rule {name} is recursive: only grammars without recursion are supported")
        if len(self._open) > MAX_NESTED:
            raise ValueError(f"its rules are nested more than {MAX_NESTED} deep")
        self._open.append(name)
        expression = _Expression(self._rules[name], self.expand, self._gap(name)).read()
        self._open.pop()
        if name == "start":
            expression = self._gap(name) + expression
        self._found[name] = f"(?:{expression})"
        return self._found[name]

    def _gap(self, name: str) -> str:
        """Return what may stand between the parts of a rule; nothing inside a terminal."""
        return "" if name.isupper() or not self._ignored else self._ignored_text

    @cached_property
    def _ignored_text(self) -> str:
        return f"(?:{'|'.join(_Expression(tokens, self.expand, '').read() for tokens in self._ignored)})*"


class _Expression:
    """Reads the right side of a rule."""

    def __init__(self, tokens: list[Token], resolve: Resolve, gap: str) -> None:
        self._tokens, self._resolve, self._gap = tokens, resolve, gap
        self._at = self._depth = 0
        self._size = 0  # of the rules that it refers to

    def read(self) -> str:
        pattern = self._alternatives()
        if self._at < len(self._tokens):
            raise ValueError(f"{self._tokens[self._at].text!r} is not expected")
        return pattern

    def _next(self, *texts: str) -> str | None:
        """Return the next token if it is one of these, and go on."""
        if not self._next_is(*texts):
            return None
        self._at += 1
        return self._tokens[self._at - 1].text

    def _next_is(self, *texts: str) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at].text in texts

    def _alternatives(self) -> str:
        options = [self._sequence()]
        while self._next("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _sequence(self) -> str:
        items = []
        while self._at < len(self._tokens) and not self._next_is("|", ")", "]", "->"):
            items.append(self._repeated(self._atom()))
        if self._next("->"):
            self._at += 1  # the name of the alternative
        return "".join(items)

    def _atom(self) -> str:
        token = self._tokens[self._at]
        self._at += 1
        if token.text in ("(", "["):
            self._depth += 1
            if self._depth > MAX_NESTED:
                raise ValueError("the grammar is nested too deeply")
            inner = f"(?:{self._alternatives()})"
            if not self._next(")" if token.text == "(" else "]"):
                raise ValueError(f"{token.text} is not closed")
            self._depth -= 1
            return inner if token.text == "(" else f"{inner}?"
        if token.kind == "name":
            name = token.text.lstrip("?!")
            atom = self._resolve(name) + (self._gap if name.isupper() else "")
            self._size += len(atom)
            if self._size > MAX_CHARS:
                raise ValueError(TOO_LONG)
            return atom
        if token.kind == "regex":
            body, _, flags = token.text[1:].rpartition("/")
            return (f"(?{flags}:{body})" if flags else f"(?:{body})") + self._gap
        if token.kind != "string":
            raise ValueError(f"{token.text!r} is not expected")
        if self._next(".."):
            self._at += 1
            last = _unquote(self._tokens[self._at - 1].text) if self._at <= len(self._tokens) else ""
            first = _unquote(token.text)
            if len(first) != 1 or len(last) != 1 or first > last:
                raise ValueError(f"the range from {token.text} is not one of single characters")
            return f"[{_escape(first)}-{_escape(last)}]" + self._gap
        text = _escape(_unquote(token.text))
        return (f"(?i:{text})" if token.text.endswith("i") else f"(?:{text})") + self._gap

    def _repeated(self, atom: str) -> str:
        while (sign := self._next("?", "*", "+", "~", "{")) is not None:
            if sign in "?*+":
                atom = f"(?:{atom}){sign}"
                continue
            least = self._number()
            most = least
            if self._next("..", ","):
                most = "" if sign == "{" and self._next_is("}") else self._number()
            if sign == "{" and not self._next("}"):
                raise ValueError("{ is not closed")
            atom = f"(?:{atom}){{{least}{'' if most == least else f',{most}'}}}"
        return atom

    def _number(self) -> str:
        if self._at >= len(self._tokens) or self._tokens[self._at].kind != "number":
            raise ValueError("a number of repetitions is expected")
        self._at += 1
        return self._tokens[self._at - 1].text


def _unquote(text: str) -> str:
    try:
        return str(json.loads(text.removesuffix("i")))
    except ValueError:
        raise ValueError(f"{text[:20]} is not a string") from None


def _escape(text: str) -> str:
    escaped = re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", lambda match: "\\" + match[0], text)
    return escaped.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")
