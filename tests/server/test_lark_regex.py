"""Lark grammars as regular expressions: they accept the same texts; what has none is refused with its reason."""

from __future__ import annotations

import re

import pytest

from llm_worker_rbee.server.lark_regex import MAX_CHARS, lark_to_regex

SUM = """
// a comment
start: _term (("+" | "-") _term)~1..2 -> sum
     | "none"i
?_term: NUMBER | NAME
NAME.1: "a".."c"+
%import common (NUMBER, WS)
%ignore WS
"""
ACCEPTED = [
    ('start: "a" "b"? [C]\nC: /x+/i', ["a", "ab", "aX", "abxx"], ["", "b", "abc"]),
    (SUM, ["1+2", " ab - 3.5 ", "1 +2+c", "NONE"], ["1", "1+2+3+4", "d+1"]),
    ('start: line{2,3} "."\nline: "\\t(" /[^\\n]*/ ")" LF\n%import common.LF', ["\t(a)\n\t()\n."], ["\t(a)\n.", "."]),
    ('start: ("a"\n  | "/")*', ["", "a/a"], ["b"]),
    ('start: "x"{2} "y"~2', ["xxyy"], ["xyy", "xxyyy"]),
]


@pytest.mark.parametrize(("grammar", "accepted", "refused"), ACCEPTED)
def test_expression_accepts_texts_of_grammar(grammar: str, accepted: list[str], refused: list[str]) -> None:
    expression = lark_to_regex(grammar)
    assert [text for text in accepted if not re.fullmatch(expression, text)] == []
    assert [text for text in refused if re.fullmatch(expression, text)] == []


DOUBLING = "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"'
NESTED = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(200)) + '\nr200: "a"'
BAD = [
    ('start: "(" start ")" |', "recursive"), ("start: zap", "no rule zap"), ('other: "a"', "no rule start"),
    ('start: "a', "not understood"), ("start: (", "not closed"), ('start: "z".."a"', "range"),
    ('start: "a"..', "range"), ('start: "a" ~', "number"), ('start: "a"{2', "not closed"), ('start: "a"{2,', "number"),
    ("start a", "not a rule"), ("%import python.NAME\nstart: NAME", "%import"), ("%declare A", "declare"),
    ("%import common.ZAP\nstart: ZAP", "ZAP"), ('start: "a" )', "not expected"), ("start: a{b}", "no rule a"),
    ("start: " + "(" * 200 + ")" * 200, "deeply"), (DOUBLING, str(MAX_CHARS)), ("", "no rule start"),
    ('start: "a"' + "+" * 30_000, str(MAX_CHARS)), (NESTED, "deep"), ("start: *", "not expected"),
    ('start: "\\q"', "not a string"),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_grammar_without_expression_is_refused(grammar: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        lark_to_regex(grammar)
