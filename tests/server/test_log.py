"""Log lines: formats, correlation ids, and no text of requests."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from llm_worker_rbee.server import log
from llm_worker_rbee.tokenizer import Detokenizer
from tests.helpers.server import Server


def line(formatter: logging.Formatter, message: str, **more: Any) -> str:
    return formatter.format(logging.LogRecord("x", logging.ERROR, "f", 1, message, (), more.pop("exc_info", None)))


def test_formatters_have_correlation_id_and_no_error_text() -> None:
    try:
        raise ValueError("text of a prompt")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    mark = log.correlation_id.set("c-1")
    try:
        entry = json.loads(line(log.JsonFormatter(), "it\nfailed\x1b", exc_info=info))
        pretty = line(log.PrettyFormatter(), "it\nfailed\x1b", exc_info=info)
    finally:
        log.correlation_id.reset(mark)
    assert (entry["message"], entry["level"], entry["error"]) == ("it failed\ufffd", "error", "ValueError")
    assert entry["correlation_id"] == "c-1"
    assert "test_log.py" in entry["where"][-1]
    assert pretty.endswith("[c-1]")
    assert "\n" not in pretty
    assert "text of a" not in json.dumps(entry) + pretty
    assert "correlation_id" not in json.loads(line(log.JsonFormatter(), "alone"))


def test_request_is_one_line_with_its_correlation_id(
    server: Server,
) -> None:
    seen: list[tuple[str | None, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((log.correlation_id.get(), record.figures))  # type: ignore[attr-defined]

    handler, level = Handler(), log.logger.level
    log.logger.addHandler(handler)
    log.logger.setLevel(logging.INFO)
    try:
        ids = [f"0000000{i}-0000-0000-0000-000000000000" for i in range(3)]
        for i, path in zip(ids, ("/v1/models", "/health", "/no%0Athing"), strict=True):
            assert server.http.get(path, headers={"x-correlation-id": i}).headers["x-correlation-id"] == i
        with server.http.stream("GET", "/v1/loading/progress", params={"key": "secret"}) as stream:
            stream.read()
    finally:
        log.logger.removeHandler(handler)
        log.logger.setLevel(level)
    assert [(i, figures["path"], figures["status"]) for i, figures in seen[:2]] == [
        (ids[0], "/v1/models", 200), (ids[2], "/no\\nthing", 404),
    ]  # fmt: skip
    assert "secret" not in str(seen)


def test_job_failure_line_has_correlation_id_of_its_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job runs in its own task, after that request was answered."""

    def breaking(*_: Any) -> str:
        raise ValueError("text of a prompt")

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(log.JsonFormatter().format(record))  # type: ignore[method-assign]
    monkeypatch.setattr(Detokenizer, "push", breaking)
    log.logger.addHandler(handler)
    try:
        mark = "00000009-0000-0000-0000-000000000000"
        body = {"prompt": "#", "max_tokens": 3}
        job = server.post("/v1/jobs", body, headers={"x-correlation-id": mark}).json()["job_id"]
        assert server.events(job)[-1]["code"] == "INFERENCE_FAILED"
    finally:
        log.logger.removeHandler(handler)
    failed = [json.loads(line) for line in lines if "failed" in line]
    assert [(one["correlation_id"], one["error"]) for one in failed] == [(mark, "ValueError")]
    assert "text of a" not in str(lines)
