"""`bench serving`: the whole command line against a small server on a loopback port."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.openai_server import serving

from .conftest import Run, Terminal


def found(stdout: bytes) -> dict[str, Any]:
    (line,) = stdout.decode().splitlines()
    run = json.loads(line)
    assert (run["kind"], run["complete"]) == ("serving", True)
    return run | {"by_name": {result["name"]: result for result in run["results"]}}


def test_serving_json_has_every_result_and_no_secret(cli: Run) -> None:
    with serving(key="s3cret") as server:
        done = cli(
            "bench", "serving", server.url, "-n", "5", "-c", "2", "--rate", "500", "--json", "--api-key", "s3cret",
            "--header", "X-Tenant: s3cret-too", "--endpoint", "completions", "--temperature", "0.5",
        )  # fmt: skip
        assert len(server.requests) == 6  # one of them to warm up
        assert server.requests[0][1]["x-tenant"] == "s3cret-too"
        assert server.requests[0][2]["temperature"] == 0.5
    assert done.returncode == 0, done.stderr
    assert b"s3cret" not in done.stdout + done.stderr
    run = found(done.stdout)
    latencies = {"ttft", "tpot", "itl", "e2e", "queue_delay", "ttft_from_arrival", "e2e_from_arrival"}
    assert set(run["by_name"]) == {
        "request_throughput", "output_throughput", "total_token_throughput", "event_throughput", "completed", "errors",
        "client_processor",
    } | {f"{name}/{which}" for name in latencies for which in ("mean", "median", "p95", "p99")}  # fmt: skip
    assert run["by_name"]["output_throughput"]["counted_by"] == "usage"
    assert run["by_name"]["request_throughput"]["better"] == "higher"
    assert run["model"] == {"name": "small"}
    assert run["settings"]["header"] == ["X-Tenant"]
    assert run["settings"]["rate"] == 500.0


def test_serving_prints_a_table_and_saves_the_run(cli: Run, tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    with serving("ok", "ok", "busy", "silent") as server:
        done = cli("bench", "serving", server.url, "-n", "4", "-c", "1", "-m", "mine", "--save", saved)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "time to first token" in text
    assert "failed     1 http 503: try later" in text
    assert "deltas were counted" in done.stderr.decode()
    assert "4/4 done" in done.stderr.decode()
    run = json.loads(saved.read_text())
    assert run["settings"]["url"] == server.url
    assert run["settings"]["rate"] == "inf"
    assert len(run["details"]["latencies"]["ttft"]) == 3
    with serving() as server:
        again = cli("bench", "serving", server.url, "-n", "4", "-c", "1", "--baseline", saved, "--json")
    names = {change["name"] for change in json.loads(again.stdout)["comparison"]}
    assert {"request_throughput", "ttft/p99", "errors"} <= names


def test_serving_sends_all_prompts_of_a_file(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}], "max_tokens": 3}\n')
    with serving() as server:
        done = cli("bench", "serving", server.url, "--prompts", path, "--warm-up", "0", "--json", "-c", "1")
        assert found(done.stdout)["by_name"]["completed"]["estimate"] == 2
        assert [body["messages"][0]["content"] for _, _, body in server.requests] == ["one", "two"]
        assert [body["max_tokens"] for _, _, body in server.requests] == [64, 3]
        wrong = cli("bench", "serving", server.url, "--prompts", path, "--endpoint", "completions")
    assert wrong.returncode == 2
    assert b"use --endpoint chat" in wrong.stderr


def test_serving_token_prompts_are_exact(cli: Run) -> None:
    with serving() as server:
        done = cli("bench", "serving", server.url, "-n", "3", "--token-prompts", "300", "--input-len", "27", "--json")
        assert {path for path, _, _ in server.requests} == {"/v1/completions"}
        assert [len(body["prompt"]) for _, _, body in server.requests] == [27] * 4
    assert found(done.stdout)["settings"]["endpoint"] == "completions"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ftp://x"], "http://host:port"),
        (["http://k@x"], "--api-key"),
        (["x", "--rate", "0"], "--rate"),
        (["x", "--rate", "nan"], "--rate"),
        (["x", "--input-len", "many"], "--input-len"),
        (["x", "--output-len", "0"], "--output-len"),
        (["x", "--endpoint", "embeddings"], "chat or completions"),
        (["x", "--header", "nothing"], "Name: value"),
        (["x", "--api-key", "a\nb"], "Authorization"),
        (["x", "-c", "0"], "-c"),
        (["x", "--token-prompts", "300", "--endpoint", "chat"], "--endpoint completions"),
        (["x", "--synthetic", "smollm2-135m:Q8_0"], "--spawn"),
        (["--spawn", "--synthetic", "none:Q8_0"], "unknown synthetic model"),
        ([], "URL"),
    ],
)
def test_serving_invalid_options_fail_before_sending(cli: Run, args: list[str], message: str) -> None:
    done = cli("bench", "serving", *args)
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert done.stdout == b""


def test_serving_unreachable_server_fails_in_one_line(cli: Run) -> None:
    with serving() as server:
        url = server.url
    done = cli("bench", "serving", url, "--json")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().count("\n") == 1
    assert "Connection refused" in done.stderr.decode()


def test_serving_without_answers_exits_1(cli: Run) -> None:
    with serving("busy") as server:
        done = cli("bench", "serving", server.url, "-n", "3", "--warm-up", "0", "--json")
    assert done.returncode == 1
    assert found(done.stdout)["by_name"]["errors"]["by_kind"] == {"http 503": 3}
    assert b"no request was answered: try later" in done.stderr


def test_serving_ctrl_c_keeps_results(terminal: Any, tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    with serving(*["ok"] * 4, "hang") as server:
        pressed: Terminal = terminal("bench", "serving", server.url, "-n", "9", "-c", "1", "--save", saved)
        pressed.wait_for("3/9 done · 1 in flight")
        pressed.press_until("\x03", "kept")
        status, _ = pressed.finish()
    assert status == 130
    run = json.loads(saved.read_text())
    assert run["complete"] is False
    assert {result["name"]: result["estimate"] for result in run["results"]}["completed"] == 3
