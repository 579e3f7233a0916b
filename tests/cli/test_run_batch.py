"""`run --prompts` and `run --choices`: many answers at once are those that each prompt gets alone, in order."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import LLM, SamplingParams
from tests.conftest import with_kernels
from tests.helpers.tiny_models import write_scripted

from .conftest import Run, Terminal

SEEDED = ("-n", "9", "--seed", "3", "--ignore-eos")
SUM = re.compile(r"^(\d+) answers? · \d+ prompt tokens · \d+ tokens · \d+\.\d\d s · [\d,]+\.\d tokens/s$")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_bytes("héllo\r\n\n  \nwhy?\n{not JSON}".encode())
    return path


def objects(cli: Run, *args: str | Path, stdin: bytes = b"") -> list[dict[str, Any]]:
    done = cli("run", "--json", "-q", *args, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b"")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_batch_gives_answers_of_single_requests(cli: Run, tiny: Path, prompts: Path, llm: LLM) -> None:
    found = objects(cli, "--prompts", prompts, "-m", tiny, "--system", "Be brief.", *SEEDED)
    assert [(one["index"], one["choice"]) for one in found] == [(0, 0), (1, 0), (2, 0)]
    for one, text in zip(found, ("héllo", "why?", "{not JSON}"), strict=True):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        alone = llm.chat(messages, SamplingParams(max_tokens=9, seed=3, ignore_eos=True))
        assert (one["prompt_tokens"], one["tokens"], one["text"]) == (alone.prompt_tokens, alone.tokens, alone.text)
    raw = objects(cli, "--prompts", "-", "--raw", "-m", tiny, *SEEDED, stdin=b" he\n\nthe\n")
    assert [one["prompt_tokens"] for one in raw] == [llm.tokenize(" he"), llm.tokenize("the")]


def test_json_lines_set_their_own_parameters(cli: Run, tiny: Path, tmp_path: Path, llm: LLM) -> None:
    letter = llm.tokenizer.token_id("Q")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, *_said("hu")]
    lines = [
        {"prompt": "x", "max_tokens": 2, "logit_bias": {str(letter): 100}, "temperature": 0},
        {"messages": messages, "seed": 8},
        {"prompt": "two\nlines"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    first, second, third = objects(cli, "--prompts", path, "-m", tiny, *SEEDED)
    assert (first["text"], first["finish_reason"]) == ("QQ", "length")
    assert (second["seed"], second["prompt_tokens"]) == (8, llm.tokenize_chat(messages))
    assert len(second["tokens"]) == 9
    assert (third["seed"], third["prompt_tokens"]) == (3, llm.tokenize_chat(_said("two\nlines")))


def test_choices_gives_several_answers(cli: Run, tiny: Path, llm: LLM) -> None:
    found = objects(cli, "hello", "--choices", "3", "-m", tiny, *SEEDED)
    assert [(one["index"], one["choice"], one["seed"]) for one in found] == [(0, k, 3) for k in range(3)]
    assert len({tuple(one["tokens"]) for one in found}) == 3
    assert found[0]["tokens"] == llm.chat(_said("hello"), max_tokens=9, seed=3, ignore_eos=True).tokens
    assert [one["tokens"] for one in objects(cli, "hello", "--choices", "2", "-m", tiny, *SEEDED)] == [
        one["tokens"] for one in found[:2]
    ]


def test_batch_as_text(cli: Run, tiny: Path, prompts: Path) -> None:
    done = cli("run", "--prompts", prompts, "--choices", "2", "-m", tiny, *SEEDED)
    assert done.returncode == 0
    heads = re.findall(r"^==> (.*) <==$", done.stdout.decode(), re.MULTILINE)
    assert heads == [f"{i}.{k}: {text}" for i, text in enumerate(("héllo", "why?", "{not JSON}"), 1) for k in (1, 2)]
    fits, *steps, last = done.stderr.decode().splitlines()
    assert fits.startswith("KV cache ")
    assert all(re.match(r"[1-5] of 6 answers · ", line) for line in steps), "two sums"
    assert SUM.match(last)
    assert last.startswith("6 answers")
    echoed = cli("run", "--prompts", prompts, "--raw", "--echo", "-q", "-m", tiny, *SEEDED)
    assert "==> 2: why? <==\nwhy?" in echoed.stdout.decode()
    assert echoed.stderr == b""
    ask = ("run", "--choices", "2", "--logprobs", "1", "-n", "3", "--ignore-eos", "-q", "-m", tiny)
    scored = cli(*ask, "hello").stderr.decode().splitlines()
    assert [scored[i] for i in (0, 5)] == ["==> 1.1 <==", "==> 1.2 <=="]
    assert len(scored) == 2 * (1 + 1 + 3)


def test_batch_on_terminal_draws_bar(terminal: Callable[..., Terminal], tiny: Path, prompts: Path) -> None:
    status, shown = terminal("run", "--prompts", prompts, "-m", tiny, *SEEDED).finish()
    assert status == 0
    text = shown.decode()
    assert "answering" in text
    assert "━" in text
    assert re.search(r"3/3.* 27 tokens · [\d,.]+ tokens/s", text)
    assert text.index("3/3") < text.index("==> 1: ")
    silent, shown = terminal("run", "--prompts", prompts, "-m", tiny, "-q", *SEEDED).finish()
    assert silent == 0
    assert "━" not in shown.decode()


@pytest.mark.parametrize(
    ("line", "report"),
    [
        ('{"prompt": "a", "foo": 1}', "line 2: unknown field 'foo'"),
        ('{"prompt": "a", "seed": -2}', "line 2: seed is -2"),
        ('{"prompt": "a", "messages": []}', 'line 2 must have either a "prompt" (text) or "messages" (a list)'),
        ('{"prompt": ["a"]', "line 2 is not JSON"),
        ('{"prompt": 5}', 'line 2 must have either a "prompt"'),
        ('{"prompt": ""}', 'line 2 must have either a "prompt"'),
        ("{}", 'line 2 must have either a "prompt"'),
        ("[1]", "line 2 is not a JSON object"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"messages": [{}]}', "line 2: messages[0] must have a role"),
        ('{"messages": ["x"]}', "line 2: messages[0]"),
        ('{"prompt": "\\ud800"}', "line 2: messages[0] is not valid Unicode"),
        ('{"prompt": "a", "max_tokens": 256}', "line 2: the prompt has"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2: logit_bias"),
        ('{"prompt": "a", "logit_bias": {"99999": 1}}', "line 2: logit_bias names token 99999"),
        ('{"prompt": "a", "priority": 1.5}', "line 2: priority must be a whole number, not 1.5"),
        ('{"prompt": "a", "timeout": 0}', "line 2: timeout is 0: it must be a number of seconds above 0"),
    ],
)
def test_invalid_line_is_named(cli: Run, tiny: Path, line: str, report: str) -> None:
    done = cli("run", "--prompts", "-", "-m", tiny, stdin=f'{{"prompt": "fine"}}\n{line}\n'.encode())
    assert (done.returncode, done.stdout) == (1, b"")
    (error,) = done.stderr.decode().splitlines()
    assert error.startswith(f"error: {report}")


def test_conflicting_options_are_rejected(cli: Run, tiny: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    messages = b'{"messages": [{"role": "user", "content": "a"}]}'
    for args, stdin, status, report in (
        ((prompts, "hello"), b"", 2, "--prompts brings all prompts"),
        ((prompts, "--file", prompts), b"", 2, "--prompts brings all prompts"),
        ((tmp_path / "empty.txt",), b"", 2, "there is no prompt in"),
        ((tmp_path / "none.txt",), b"", 1, "cannot read"),
        (("-", "--raw"), messages, 1, "line 1: messages need the chat template"),
        (("-", "--system", "x"), messages, 1, "line 1: messages bring their own system message"),
        (("-",), b"caf\xe9", 1, "standard input is not UTF-8 text"),
        ((prompts, "--choices", "129"), b"", 2, "--choices"),
        ((prompts, "--choices", "0"), b"", 2, "--choices"),
    ):
        done = cli("run", "-m", tiny, "--prompts", *args, stdin=stdin)
        assert (done.returncode, done.stdout) == (status, b""), done.stderr
        assert report in done.stderr.decode()


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_failed_request_leaves_others(cli: Run, tmp_path: Path) -> None:
    a, b, q = map(ord, "abq")
    model = with_kernels(write_scripted(tmp_path / "model.gguf", {a: b, b: a, q: {a: 3e38}}))  # after q all overflows
    ask = ("run", "--prompts", "-", "--raw", "-m", model, "-n", "4", "-t", "0")
    done = cli(*ask, "--json", stdin=b"a\nq\nb\n")
    assert done.returncode == 1
    first, second, third = map(json.loads, done.stdout.splitlines())
    assert (first["text"], third["text"]) == ("baba", "abab")
    assert "error" not in first
    assert (second["tokens"], second["finish_reason"], second["error"]["code"]) == ([], "error", "INFERENCE_FAILED")
    assert done.stderr.decode().splitlines()[-1] == "error: 1 of 3 answers failed"
    shown = cli(*ask, "-q", stdin=b"a\nq\nb\n")
    assert (shown.returncode, shown.stdout) == (1, b"==> 1: a <==\nbaba\n\n==> 2: q <==\n\n\n==> 3: b <==\nabab\n")
    assert b"error: 2: " in shown.stderr


def test_ctrl_c_prints_finished_answers(
    terminal: Callable[..., Terminal], endless: Path, tmp_path: Path, llm: LLM
) -> None:
    letter = str(llm.tokenizer.token_id("Q"))
    lines = [{"prompt": text, "max_tokens": n} for text, n in (("a", 3), ("b", 60000), ("c", 4))]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    screen = terminal("run", "--prompts", path, "-m", endless, "-t", "0", "--logit-bias", f"{letter}=100")
    screen.wait_for("2/3")
    screen.send("\x03")
    status, shown = screen.finish()
    assert status == 130
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "==> 1: a <==\r\nQQQ\r\n\r\n==> 3: c <==\r\nQQQQ\r\n" in text
    assert "==> 2: b" not in text
    assert b"Traceback" not in shown
    assert b"\x1b[?25h" in shown, "the cursor is gone"


def test_line_sets_priority_and_timeout(cli: Run, endless: Path, llm: LLM) -> None:
    letter = str(llm.tokenizer.token_id("Q"))
    lines = [
        {"prompt": "late", "max_tokens": 60000, "timeout": 0.3, "logit_bias": {letter: 100}},
        {"prompt": "second", "max_tokens": 2, "priority": 5, "timeout": None},
        {"prompt": "first", "max_tokens": 2, "priority": -5},
    ]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    ask = ("run", "--prompts", "-", "-q", "-m", endless, "--max-batch", "1", "--ignore-eos", "--timeout", "30")
    done = cli(*ask, "--json", stdin=stdin)
    assert done.returncode == 1
    late, second, first = map(json.loads, done.stdout.splitlines())
    assert (late["finish_reason"], late["error"]["code"]) == ("error", "TIMEOUT")
    assert [len(one["tokens"]) for one in (second, first)] == [2, 2]
    assert first["timings"]["total_s"] < second["timings"]["time_to_first_token_s"]


def test_notes_before_batch(cli: Run, tiny: Path) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    stdin = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    done = cli("run", "--prompts", "-", "-m", tiny, "-n", "2", "-t", "0", "--choices", "2", stdin=stdin)
    assert done.returncode == 0
    heads = re.findall(r"^==> (.*) <==$", done.stdout.decode(), re.MULTILINE)
    assert heads == ["1.1: one two", "1.2: one two"]
    fits, same, *_ = done.stderr.decode().splitlines()
    assert fits.startswith("KV cache ")
    assert same.startswith("at temperature 0 all answers to a prompt are the same")
    drawn = cli("run", "hello", "-m", tiny, "-n", "2", "--choices", "2").stderr.decode()
    assert "KV cache" not in drawn
    assert "temperature" not in drawn


def test_batch_sums_draft_stats(cli: Run, tiny: Path) -> None:
    done = cli("run", "--prompts", "-", "-m", tiny, "-n", "6", "--ignore-eos", "--draft-model", tiny, stdin=b"a\nb\n")
    report = r" tokens/s · drafts \d+% accepted \(\d+ of \d+\), \d\.\d\d tokens a step\n$"
    assert re.search(report, done.stderr.decode())
