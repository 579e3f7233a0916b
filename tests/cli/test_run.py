"""`run` as a person or a program calls it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_worker_rbee import LLM, SamplingParams

from .conftest import Run, Terminal, write_model

FIGURES = re.compile(
    r"^\d+ prompt tokens? · \d+ tokens? · first token \d+\.\d\d s( · \d+\.\d tokens/s)? · (stop|length)$"
)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny)


def run_json(cli: Run, *args: str | Path, stdin: bytes = b"") -> dict[str, object]:
    done = cli("run", "--json", *args, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 1
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_run_default_model_answers(spawn: Run, default_model: Path) -> None:
    done = spawn("run", "--raw", "The capital of France is", "-t", "0", "-n", "2", "-m", default_model)
    assert done.returncode == 0
    assert done.stdout == b" Paris.\n"
    (line,) = done.stderr.decode().splitlines()
    assert FIGURES.match(line)
    assert line.endswith("length")


def test_run_gives_answer_of_python_api(cli: Run, tiny: Path, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo"}]
    expected = llm.chat(messages, SamplingParams(max_tokens=12, seed=3))
    done = cli("run", "héllo", "--system", "Be brief.", "-m", tiny, "-n", "12", "--seed", "3")
    assert done.returncode == 0
    assert done.stdout.decode().removesuffix("\n") == expected.text.removesuffix("\n")
    answer = run_json(cli, "héllo", "--system", "Be brief.", "-m", tiny, "-n", "12", "--seed", "3")
    assert answer["prompt_tokens"] == expected.prompt_tokens
    assert answer["tokens"] == expected.tokens
    assert answer["text"] == expected.text
    assert answer["finish_reason"] == expected.finish_reason
    assert answer["seed"] == 3


def test_run_takes_sampling_defaults_of_the_model(cli: Run, tmp_path: Path, tiny: Path) -> None:
    """The answer is greedy without an option, because the file says so; an option wins; a bad value is a note."""
    stated = {"general.sampling.temp": 0.0, "general.sampling.top_p": "most"}
    greedy = write_model(tmp_path / "greedy.gguf", stated)
    common = ("--raw", "hello", "-n", "8", "--ignore-eos", "--seed", "3")
    done = cli("run", *common, "-m", greedy)
    assert done.stdout == cli("run", *common, "-m", tiny, "-t", "0").stdout
    assert b"general.sampling.top_p is ignored: top_p must be a finite number, not 'most'" in done.stderr
    drawn = cli("run", *common, "-m", tiny, "-t", "1.5", "--top-p", "1", "--min-p", "0").stdout
    assert cli("run", *common, "-m", greedy, "-t", "1.5", "--top-p", "1", "--min-p", "0").stdout == drawn
    assert drawn != done.stdout


def test_json_line_null_is_the_value_of_the_option(cli: Run, tmp_path: Path, tiny: Path) -> None:
    lines = [{"prompt": "hello", "temperature": None, "top_k": -1}, {"prompt": "hello"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = cli("run", "--prompts", path, "-m", tiny, "-t", "0", "-n", "6", "--json", "--ignore-eos")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["tokens"] == second["tokens"]


def test_run_json_has_documented_fields(cli: Run, tiny: Path, llm: LLM) -> None:
    answer = run_json(
        cli, "--raw", "hello", "-m", tiny, "-n", "5", "--logprobs", "3", "--echo", "-t", "0", "--ignore-eos"
    )
    expected = llm.generate("hello", max_tokens=5, temperature=0.0, logprobs=3, prompt_logprobs=True, ignore_eos=True)
    assert set(answer) == {
        "model", "prompt_tokens", "tokens", "text", "finish_reason", "stop_sequence", "logprobs", "prompt_logprobs",
        "seed", "timings", "cached_tokens", "speculative",
    }  # fmt: skip
    assert (answer["finish_reason"], answer["cached_tokens"], answer["speculative"]) == ("length", 0, None)
    assert isinstance(answer["logprobs"], list)
    assert isinstance(answer["prompt_logprobs"], list)
    assert expected.logprobs is not None
    for entry, token, scored in zip(answer["logprobs"], expected.tokens, expected.logprobs, strict=True):
        assert set(entry) == {"id", "logprob", "text", "top"}
        assert entry["id"] == token
        assert entry["logprob"] == pytest.approx(scored.logprob, abs=1e-6)
        assert [one["id"] for one in entry["top"]] == [i for i, _ in scored.top]
        assert entry["text"] == llm.tokenizer.piece(token)
        assert entry["top"][0]["id"] == token  # greedy
    assert len(answer["prompt_logprobs"]) == len(expected.prompt_tokens)
    assert answer["prompt_logprobs"][0] is None
    assert [entry["id"] for entry in answer["prompt_logprobs"][1:]] == expected.prompt_tokens[1:]
    assert isinstance(answer["timings"], dict)
    assert set(answer["timings"]) == {"load_s", "time_to_first_token_s", "total_s", "tokens_per_second"}
    assert all(value >= 0 for value in answer["timings"].values())


def test_run_json_omits_what_was_not_requested(cli: Run, tiny: Path) -> None:
    answer = run_json(cli, "hello", "-m", tiny, "-n", "2")
    assert answer["logprobs"] is None
    assert "prompt_logprobs" not in answer
    assert isinstance(answer["seed"], int)
    again = run_json(cli, "hello", "-m", tiny, "-n", "2", "--seed", str(answer["seed"]))
    assert again["tokens"] == answer["tokens"]


def test_prompt_from_argument_file_and_stdin(cli: Run, tiny: Path, tmp_path: Path, llm: LLM) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b" he\r\n\n")
    options = ("-m", tiny, "-n", "1")
    raw = {
        "argument": run_json(cli, "--raw", " he\r\n\n", *options),
        "file": run_json(cli, "--raw", "--file", file, *options),
        "stdin": run_json(cli, "--raw", *options, stdin=b" he\r\n\n\n"),  # one newline is dropped
        "dash": run_json(cli, "--raw", "-", *options, stdin=b" he\r\n\n\n"),
        "argument beats stdin": run_json(cli, "--raw", " he\r\n\n", *options, stdin=b"other"),
    }
    for source, answer in raw.items():
        assert answer["prompt_tokens"] == llm.tokenize(" he\r\n\n"), source
    message = llm.tokenize(llm.apply_chat_template([{"role": "user", "content": " he\r\n"}]), parse_special=True)
    assert run_json(cli, "--file", file, *options)["prompt_tokens"] == message
    assert run_json(cli, *options, stdin=b" he\r\n\n")["prompt_tokens"] == message


def test_prompt_that_is_not_utf8_is_rejected(cli: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    for args, stdin, origin in (
        (["--file", str(tmp_path / "latin1.txt")], b"", "latin1.txt"),
        ([], b"caf\xe9", "standard input"),
    ):
        done = cli("run", *args, "-m", tiny, stdin=stdin)
        assert (done.returncode, done.stdout) == (1, b"")
        assert f"{origin} is not UTF-8 text: byte 3 is 0xE9" in done.stderr.decode()


def test_raw_prompt_special_tokens(cli: Run, tiny: Path) -> None:
    options = ("--raw", "<|im_end|>", "-m", tiny, "-n", "1")
    plain = run_json(cli, *options)["prompt_tokens"]
    assert isinstance(plain, list)
    assert len(plain) == len("<|im_end|>")
    assert run_json(cli, *options, "--special")["prompt_tokens"] == [2]


def test_stop_strings_and_logit_bias(cli: Run, tiny: Path, llm: LLM) -> None:
    letter = llm.tokenizer.token_id("Q")
    assert letter is not None
    forced = ("--raw", "x", "-m", tiny, "-n", "4", "--logit-bias", f"{letter}=100", "-t", "0")
    assert run_json(cli, *forced)["text"] == "QQQQ"
    answer = run_json(cli, *forced, "--stop", "no", "--stop", "QQ")
    assert (answer["text"], answer["finish_reason"], answer["stop_sequence"]) == ("", "stop", "QQ")
    past = cli("run", "--raw", "x", "-m", tiny, "--logit-bias", "99999=1")
    assert (past.returncode, past.stdout) == (1, b"")


def test_eos_is_no_token_of_the_answer(cli: Run, tiny: Path) -> None:
    answer = run_json(cli, "--raw", "x", "-m", tiny, "--logit-bias", "2=100", "-t", "0")
    assert (answer["tokens"], answer["text"], answer["finish_reason"]) == ([], "", "stop")


def test_default_max_tokens_fits_context(cli: Run, tiny: Path) -> None:
    options = ("--raw", "x", "-m", tiny, "--max-context", "8", "--ignore-eos")
    answer = run_json(cli, *options)
    assert isinstance(answer["tokens"], list)
    assert len(answer["tokens"]) == 7
    named = cli("run", *options, "-n", "8")
    assert (named.returncode, named.stdout) == (1, b"")
    assert b"--max-tokens is 8" in named.stderr
    long = cli("run", "--raw", "x" * 8, *options[2:])
    assert long.returncode == 1
    assert b"the prompt has 8 tokens, the context 8" in long.stderr


def test_echo_and_logprobs_as_text(cli: Run, tiny: Path) -> None:
    done = cli(
        "run", "--raw", "hello", "--echo", "-m", tiny, "-n", "3", "--logprobs", "2", "-t", "0", "--ignore-eos", "-q"
    )
    assert done.stdout.startswith(b"hello")
    header, *rows = done.stderr.decode().splitlines()
    assert header.split() == ["LOGPROB", "TOKEN", "LIKELIEST"]
    assert len(rows) == 3
    chat = cli("run", "hello", "--echo", "-m", tiny, "-n", "1", "-q")
    assert chat.stdout.startswith(b"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_chat_template_from_file_and_missing(cli: Run, tiny: Path, tmp_path: Path, llm: LLM) -> None:
    bare = write_model(tmp_path / "bare.gguf", {"tokenizer.chat_template": None})
    done = cli("run", "hi", "-m", bare)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"no chat template" in done.stderr
    assert b"--chat-template" in done.stderr
    template = tmp_path / "template.jinja"
    template.write_text("<<{{ messages[0].content }}>>")
    answer = run_json(cli, "hi", "-m", bare, "--chat-template", template, "-n", "1")
    assert answer["prompt_tokens"] == llm.tokenize("<<hi>>")


def test_run_prints_draft_stats(cli: Run, tiny: Path) -> None:
    ask = ("run", "--raw", "abc", "-m", tiny, "-n", "11", "-t", "0", "--ignore-eos", "--draft-model", tiny)
    report = json.loads(cli(*ask, "--draft-tokens", "2", "--json").stdout)["speculative"]
    assert report == {"drafted": 6, "accepted": 6}  # the model itself drafts: 1 token, three times 3, 1
    shown = cli(*ask, "--draft-tokens", "2").stderr.decode()
    assert " · drafts 100% accepted (6 of 6), 2.20 tokens a step · length\n" in shown
    assert " · no drafts · length\n" in cli(*ask[:5], "-n", "1", "--speculative", "ngram").stderr.decode()


def test_run_timeout_fails(cli: Run, endless: Path, llm: LLM) -> None:
    letter = llm.tokenizer.token_id("Q")
    ask = ("run", "--raw", "x", "-m", endless, "-n", "60000", "-t", "0", "--logit-bias", f"{letter}=100")
    done = cli(*ask, "--timeout", "0.2")
    assert done.returncode == 1
    assert set(done.stdout.removesuffix(b"\n")) <= set(b"Q")
    assert done.stdout == b"" or done.stdout.endswith(b"\n")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ")
    for wrong in ("0", "nan", "inf", "-1"):
        refused = cli(*ask, "--timeout", wrong)
        assert (refused.returncode, refused.stdout) == (2, b"")
        assert f"--timeout is {wrong}: it must be a number of seconds above 0" in refused.stderr.decode()


def test_run_without_prompt_on_terminal_is_usage_error(terminal: Callable[..., Terminal]) -> None:
    status, shown = terminal("run").finish()
    assert status == 2
    assert b"give one as an argument, with --file FILE, or on standard input" in shown


def test_answer_on_terminal_has_no_control_characters(terminal: Callable[..., Terminal], tiny: Path, llm: LLM) -> None:
    escape = llm.tokenize("\x1b")[0]
    screen = terminal("run", "--raw", "x", "-m", tiny, "-n", "2", "-t", "0", "--logit-bias", f"{escape}=100")
    status, shown = screen.finish()
    assert status == 0
    assert "␛␛\r\n".encode() in shown
    assert b"loading" in shown
    assert " · ".encode() in shown


def test_ctrl_c_exits_with_130(terminal: Callable[..., Terminal], endless: Path, llm: LLM) -> None:
    letter = llm.tokenizer.token_id("Q")
    screen = terminal("run", "--raw", "x", "-m", endless, "-n", "60000", "-t", "0", "--logit-bias", f"{letter}=100")
    screen.wait_for("QQQ")
    screen.send("\x03")
    status, shown = screen.finish()
    assert status == 130
    assert b"Traceback" not in shown
    assert shown.endswith(b"\r\n")


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_chat_template_is_rejected(cli: Run, tiny: Path, tmp_path: Path, text: str) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(text)
    for command in (["run", "hi"], ["chat"]):
        done = cli(*command, "-m", tiny, "--chat-template", template, stdin=b"hi\n")
        assert (done.returncode, done.stdout) == (1, b"")
        assert f"error: the chat template {template} is empty" in done.stderr.decode()


def test_run_with_a_grammar_prints_text_of_it(cli: Run, tiny: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}')
    done = cli("run", "x", "-m", tiny, "-n", "120", "--json-schema", schema, "--close-on-length", "-q")
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) in ({"a": 1}, {"a": 22})
    opened = cli("run", "x", "-m", tiny, "-n", "120", "--json-schema", schema, "--close-on-length", "--open-objects")
    assert json.loads(opened.stdout)["a"] in (1, 22)
    grammar = tmp_path / "g.lark"
    grammar.write_text('start: "ab" /[0-9]{2}/')
    for options, pattern in (
        (("--grammar", grammar), rb"ab[0-9]{2}\n"),
        (("--regex", "[xy]{3}"), rb"[xy]{3}\n"),
        (("--choice", "one two", "--choice", 'say "x"'), rb'(one two|say "x")\n'),
        (("--json-schema", '{"const": 5}'), rb"5\n"),
    ):
        assert re.fullmatch(pattern, cli("run", "x", "-m", tiny, "-n", "20", "-q", *options).stdout)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--regex", "(a"), "--regex cannot be used: unclosed group"),
        (("--regex", "a", "--choice", "b"), "--regex and --choice exclude each other"),
        (("--json-schema", "none.json"), "--json-schema: cannot read none.json"),
        (("--json-schema", "{"), "--json-schema is not valid JSON"),
        (("--json-schema", '{"not": {}}'), '"not"'),
        (("--close-on-length",), "--close-on-length needs --json-schema"),
        (("--open-objects", "--regex", "a"), "--open-objects needs --json-schema"),
    ],
)
def test_run_with_a_bad_grammar_is_one_line(cli: Run, tiny: Path, options: tuple[str, ...], reason: str) -> None:
    done = cli("run", "x", "-m", tiny, *options)
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert reason in line


def test_run_takes_structured_outputs_of_json_lines(cli: Run, tiny: Path) -> None:
    lines = b'{"prompt": "a", "structured_outputs": {"regex": "[ab]{2}"}}\n{"prompt": "b", "max_tokens": 3}\n'
    done = cli("run", "--prompts", "-", "-m", tiny, "--json", "-q", stdin=lines)
    first, _ = map(json.loads, done.stdout.splitlines())
    assert re.fullmatch("[ab]{2}", first["text"])
    done = cli("run", "--prompts", "-", "-m", tiny, stdin=b'{"prompt": "a", "structured_outputs": {"xml": 1}}\n')
    assert done.returncode == 1
    assert b"line 1: structured_outputs has no field 'xml'" in done.stderr
