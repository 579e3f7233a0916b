"""Load over HTTP: the client against a real server on a real port, the workload, the tally and its figures."""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_worker_rbee.bench import baseline
from llm_worker_rbee.bench.http_client import (
    MAX_EVENT_BYTES,
    Address,
    ChunkedDecoder,
    Client,
    EventParser,
    RequestFailedError,
    Response,
    parse_header,
)
from llm_worker_rbee.bench.results import Recorder, Result
from llm_worker_rbee.bench.serving import Limits, Load, connect, latencies, raise_file_limit, run
from llm_worker_rbee.bench.serving.latencies import InterTokenLatencies, LoadStatistics
from llm_worker_rbee.bench.serving.openai_client import Answer, Target, add_event, api_address
from llm_worker_rbee.bench.serving.server_process import ServingError
from llm_worker_rbee.bench.workload import Job, Lengths, Prompt, Workload, read_prompts, vocabulary
from llm_worker_rbee.errors import InvalidRequestError
from tests.helpers.openai_server import WORDS, Server, serving

CERTIFICATE = Path(__file__).parent / "data" / "loopback.pem"  # with its key, for these tests only
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def quiet(what: str, done: float, total: float) -> None:
    assert 0 <= done <= total, what


def workload(requests: int = 4, **changes: Any) -> Workload:
    return Workload(requests, Lengths.parse("5", "i"), Lengths.parse("4", "o"), **changes)


def target(server: Server, **changes: Any) -> Target:
    return Target(Client(api_address(server.url)), "small", **changes)


def measured(server: Server, work: Workload, limits: Limits | None = None, **changes: Any) -> dict[str, Result]:
    recorder = Recorder("serving")
    run(recorder, quiet, target(server, **changes), work, limits or Limits(concurrency=2, warm_up=0))
    found = {result.name: result for result in recorder.results()}
    for result in found.values():
        assert result.low <= result.estimate <= result.high, result
    found["details"] = recorder.details  # type: ignore[assignment]
    return found


# ---- events and HTTP


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(end: str, size: int) -> None:
    lines = [": comment", "event: x", "data: ä🧀", "data:two", "", "data", "", "", "id: 4", "", "data: [DONE]"]
    raw = end.join(lines).encode()
    parser, found = EventParser(), []
    for i in range(0, len(raw), size):
        found += parser.feed(raw[i : i + size])
    assert found == ["ä🧀\ntwo", ""]
    assert list(parser.finish()) == ["[DONE]"]


def test_an_event_without_end_is_refused() -> None:
    parser = EventParser()
    with pytest.raises(RequestFailedError, match="longer than"):
        list(parser.feed(b"data: " + b"x" * MAX_EVENT_BYTES))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("localhost:8080/", "http://localhost:8080/v1"),
        ("https://host/api/v1/", "https://host:443/api/v1"),
        ("http://[::1]:80/v1", "http://[::1]:80/v1"),
    ],
)
def test_urls(url: str, shown: str) -> None:
    assert str(api_address(url)) == shown


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://x:99999", "http://u:p@x", "http://x?a", "http://x/a b", "http://ä"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        Address.parse(url)


@pytest.mark.parametrize("text", ["X", "X Y: z", "X: a\r\nY: b", "Host: x", "content-length: 3", ": x"])
def test_headers_that_would_break_a_request_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_header(text)


async def answers_to(raw: bytes) -> bytes:
    """What the client makes of these bytes from a server."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        client = Client(Address("http", "127.0.0.1", server.sockets[0].getsockname()[1], ""))
        async with client.request("GET", "/") as response:
            return b"".join([part async for part in response.parts()])


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (CHUNKED + b"2;x=y\r\nab\r\n1\r\nc\r\n0\r\nTrailer: 1\r\n\r\n", b"abc"),
    ],
)
def test_bodies(raw: bytes, body: bytes) -> None:
    assert asyncio.run(answers_to(raw)) == body


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_chunks_are_the_same_however_the_bytes_are_cut(size: int) -> None:
    raw = b"5\r\na\r\nbc\r\n 1a;x=y\r\n" + b"d" * 26 + b"\r\n1\ne\n0\r\nTrailer: 5\r\n\r\n"
    chunks, found = ChunkedDecoder(), b""
    for i in range(0, len(raw), size):
        assert not chunks.is_done
        found += chunks.feed(raw[i : i + size])
    assert chunks.is_done
    assert found == b"a\r\nbc" + b"d" * 26 + b"e"


@pytest.mark.parametrize(
    "raw", [b"0\r\n\r\nmore", b"-1\r\n", b"\r\n", b"1\r\nab\r\n", b"x" * 70_000, b"1" * 16 + b"\r\n"]
)
def test_chunks_that_are_none_are_refused(raw: bytes) -> None:
    with pytest.raises(RequestFailedError):
        ChunkedDecoder().feed(raw)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", "connect"),
        (b"SSH-2.0-x\r\n", "protocol"),
        (b"HTTP/1.1 abc\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "truncated"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "truncated"),
        (CHUNKED + b"zz\r\n", "protocol"),
        (CHUNKED + b"1\r\nabc\r\n", "protocol"),
        (CHUNKED + b"5\r\nabc", "truncated"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "protocol"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300, "protocol"),
    ],
)
def test_broken_answers_are_told_by_kind(raw: bytes, kind: str) -> None:
    with pytest.raises(RequestFailedError) as caught:
        asyncio.run(answers_to(raw))
    assert caught.value.kind == kind


def test_https_with_a_certificate_that_is_trusted_and_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk() -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        async with server:
            client = Client(Address("https", "127.0.0.1", server.sockets[0].getsockname()[1], ""))
            async with client.request("GET", "/") as response:
                text = await response.text(10)
            client.close()
            return text

    with pytest.raises(RequestFailedError, match="certificate"):
        asyncio.run(talk())
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    assert asyncio.run(talk()) == "hi"


# ---- the workload


def test_requests_depend_on_seed_and_number_alone() -> None:
    work = workload(5, seed=3)
    jobs = list(work.jobs())
    assert jobs[3] == work.job(3) == list(workload(9, seed=3).jobs())[3]
    assert len({job.prompt.text for job in jobs}) == 5
    assert jobs[0] != workload(5, seed=4).job(0)
    assert all(job.prompt.words == 5 and job.max_tokens == 4 and job.arrival is None for job in jobs)
    assert set(" ".join(str(job.prompt.text) for job in jobs).split()) <= set(vocabulary())


@pytest.mark.parametrize(
    ("text", "low", "high"), [("7", 7, 7), ("3-5", 3, 5), ("normal:50,10", 1, 120), ("normal:1,9", 1, 80)]
)
def test_lengths(text: str, low: int, high: int) -> None:
    rng = np.random.default_rng(1)
    drawn = [Lengths.parse(text, "--input-len").draw(rng) for _ in range(500)]
    assert low <= min(drawn)
    assert max(drawn) <= high
    if text == "3-5":
        assert set(drawn) == {3, 4, 5}
    if text == "normal:50,10":
        assert abs(np.mean(drawn) - 50) < 2
        assert abs(np.std(drawn) - 10) < 2


@pytest.mark.parametrize("text", ["", "0", "-3", "5-3", "1e3", "normal:0,1", "normal:5", "9999999", "٣", "3-9999999"])
def test_wrong_lengths_are_named(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="--output-len"):
        Lengths.parse(text, "--output-len")


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    arrivals = [job.arrival for job in workload(3000, rate=50.0, burstiness=burstiness).jobs()]
    gaps = np.diff(np.array(arrivals, float))
    assert arrivals[0] == 0
    assert abs(gaps.mean() * 50 - 1) < 0.12
    assert abs((gaps.std() / gaps.mean()) ** 2 * burstiness - 1) < 0.3  # a gamma's variance is mean^2 / shape
    assert workload(3000, rate=50.0, burstiness=burstiness).count_arrivals(float(arrivals[100] or 0)) == 100


def test_prefixes_are_shared_within_a_group() -> None:
    work = workload(6, shared_prefix=20, prefix_groups=2)
    starts = [str(job.prompt.text).split()[:20] for job in work.jobs()]
    assert starts[0] == starts[2] == starts[4] != starts[1] == starts[3]
    assert all(job.prompt.words == 25 for job in work.jobs())
    assert str(work.warm_up(1)[0].prompt.text).split()[:20] not in starts


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a b c"}\n\n{"messages": [{"role": "user", "content": "x y"}], "max_tokens": 9}\n')
    prompts = read_prompts(path)
    jobs = list(workload(3, prompts=prompts).jobs())
    assert [job.max_tokens for job in jobs] == [4, 9, 4]
    assert [job.prompt.words for job in jobs] == [3, 2, 3]
    (tmp_path / "p.txt").write_text("one\r\n{two\n")
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.txt")] == ["one", "{two"]


@pytest.mark.parametrize(
    "line",
    ["{", "3", "{}", '{"prompt": ""}', '{"prompt": 1}', '{"messages": []}', '{"messages": [{"content": "x"}]}',
     '{"prompt": "x", "messages": []}', '{"prompt": "x", "max_tokens": 0}', '{"prompt": "x", "max_tokens": true}',
     '{"prompt": "x", "top_k": 1}'],
)  # fmt: skip
def test_wrong_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(InvalidRequestError, match="line 2"):
        read_prompts(path)


# ---- a server under load


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("mode", ["ok", "cut", "sized"])
def test_a_run_counts_what_the_server_counts(endpoint: Any, mode: str) -> None:
    with serving(mode) as server:
        found = measured(server, workload(6), endpoint=endpoint, ignore_eos=True)
    details: Any = found["details"]
    assert found["completed"].estimate == 6
    assert found["errors"].estimate == 0
    assert (details["prompt_tokens"], details["output_tokens"], details["counted_by"]) == (42, 48, "usage")
    seconds = details["duration_s"]
    assert found["request_throughput"].estimate == pytest.approx(6 / seconds, rel=1e-3)
    assert found["output_throughput"].estimate == pytest.approx(48 / seconds, rel=1e-3)
    assert found["total_token_throughput"].estimate == pytest.approx(90 / seconds, rel=1e-3)
    for name in ("ttft", "tpot", "itl", "e2e"):
        values = [found[f"{name}/{which}"].estimate for which in ("median", "p95", "p99")]
        assert values == sorted(values)
        assert found[f"{name}/mean"].fields["count"] == (18 if name == "itl" else 6)
        assert found[f"{name}/mean"].unit == "s"
    assert "queue_delay/mean" not in found
    path, headers, body = server.asked[0]
    assert path == ("/v1/chat/completions" if endpoint == "chat" else "/v1/completions")
    assert headers["host"] == server.url.removeprefix("http://")
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("small", 4, True, True)
    assert ("messages" in body) == (endpoint == "chat")


def test_without_usage_pieces_are_counted_and_that_is_said() -> None:
    with serving("silent") as server:
        details: Any = measured(server, workload(3))["details"]
    assert (details["output_tokens"], details["prompt_tokens"], details["counted_by"]) == (12, 15, "chunks")
    with serving() as server:
        measured(server, workload(1), usage=False)
        assert "stream_options" not in server.asked[0][2]
        assert "ignore_eos" not in server.asked[0][2]


def test_failures_are_counted_by_kind_and_in_no_latency() -> None:
    modes = ("ok", "busy", "json", "drop", "error", "garbage", "unfinished", "broken", "ok")
    with serving(*modes) as server:
        found = measured(server, workload(9), Limits(concurrency=1, warm_up=0))
    kinds = {"http 503": 1, "protocol": 2, "connect": 1, "server": 1, "truncated": 2}
    assert found["errors"].fields["by_kind"] == kinds
    assert found["errors"].estimate == sum(kinds.values())
    assert found["completed"].estimate == found["ttft/mean"].fields["count"] == found["e2e/p99"].fields["count"] == 2
    details: Any = found["details"]
    assert details["errors"]["http 503"] == ["try later"]
    assert details["errors"]["server"] == ["out of memory"]
    assert details["output_tokens"] == 2 * 2 * len(WORDS)


def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    with serving("hang", "endless", "ok") as server:
        found = measured(server, workload(3), Limits(concurrency=1, timeout=0.3, warm_up=0))
    assert found["errors"].fields["by_kind"] == {"timeout": 2}
    assert found["completed"].estimate == 1


def test_a_connection_is_kept_where_the_server_says_so() -> None:
    def kept(headers: dict[str, str], *, whole: bool = True) -> bool:
        return Response(200, headers, None, whole).is_reusable  # type: ignore[arg-type]

    assert kept({"content-length": "0"})
    assert kept({"transfer-encoding": "chunked"})
    assert not kept({"content-length": "0", "connection": "Close"})
    assert not kept({"content-length": "9"}, whole=False)
    assert not kept({})


def test_connections_are_used_again_and_never_more_than_allowed() -> None:
    with serving(hold=3) as server:
        details: Any = measured(server, workload(12), Limits(concurrency=3, warm_up=0))["details"]
        assert server.most == 3
        assert server.connections == details["connections"] == 3
    with serving(hold=8) as server:
        measured(server, workload(8), Limits(warm_up=0))
        assert server.most == 8


def test_a_rate_fixes_arrivals_and_reports_the_wait() -> None:
    with serving() as server:
        found = measured(server, workload(10, rate=1000.0), Limits(concurrency=1, warm_up=2))
        assert len(server.asked) == 12
    for which in ("mean", "p99"):
        assert found[f"queue_delay/{which}"].estimate >= 0
        assert found[f"e2e_from_arrival/{which}"].estimate >= found[f"e2e/{which}"].estimate
    late = found["queue_delay/mean"].estimate + found["ttft/mean"].estimate
    assert found["ttft_from_arrival/mean"].estimate == pytest.approx(late)


def test_a_duration_ends_the_sending_and_tells_what_found_no_room() -> None:
    work = workload(1000, rate=200.0)
    with serving("hang") as server:
        found = measured(server, work, Limits(concurrency=1, timeout=0.5, duration=0.3, warm_up=0))
        assert len(server.asked) == 1
    assert found["unsent"].estimate == work.count_arrivals(0.3) - 1 > 20
    with serving() as server:
        found = measured(server, workload(1_000_000), Limits(concurrency=1, duration=0.2, warm_up=0))
    assert 0 < found["completed"].estimate == len(server.asked) < 1_000_000


def test_what_was_measured_stays_when_it_is_broken_off() -> None:
    with serving("ok", "ok", "ok", "hang") as server:
        recorder = Recorder("serving")

        def stop(what: str, done: float, total: float) -> None:
            if len(server.asked) > 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(recorder, stop, target(server), workload(9), Limits(concurrency=1, warm_up=0))
    found = {result.name: result for result in recorder.results()}
    assert found["completed"].estimate == 3
    assert found["e2e/mean"].estimate > 0


def test_the_progress_says_how_it_goes() -> None:
    said: list[str] = []
    with serving("ok", "busy", "ok") as server:
        load = Load(target(server), workload(4), Limits(concurrency=1), lambda what, *_: said.append(what))
        asyncio.run(load.execute())
    assert said[0] == "warming up"
    assert said[-1].startswith("4/4 done · 0 in flight · ")
    assert said[-1].endswith("tok/s · 1 errors")


def test_reaching_a_server() -> None:
    def of(url: str, key: str = "k") -> Any:
        return lambda name: Target(Client(api_address(url), {"Authorization": f"Bearer {key}"}), name)

    with serving(key="k") as server:
        assert connect(of(server.url), None, 5).model == "small"
        assert connect(of(server.url), "other", 5).model == "other"
        with pytest.raises(ServingError, match=r"401: wrong key.*--api-key"):
            connect(of(server.url, "wrong"), "other", 5)
        url = server.url
    with pytest.raises(ServingError, match=r"cannot connect to 127\.0\.0\.1:\d+: Connection refused"):
        connect(of(url), "other", 5)


def test_a_failing_first_request_is_said_before_the_load() -> None:
    with serving("busy") as server:
        with pytest.raises(ServingError, match=r"warm-up request failed \(http 503\): try later"):
            measured(server, workload(50), Limits(warm_up=1))
        assert len(server.asked) == 1


def test_more_connections_than_files_are_refused() -> None:
    with pytest.raises(ServingError, match="--concurrency"):
        raise_file_limit(1 << 40)


# ---- figures


def test_latencies_are_counted_from_sending_and_from_arrival() -> None:
    answer = Answer(arrivals=[12.0, 12.5, 14.0], ended=14.5, finished=True, output_tokens=6)
    tally = LoadStatistics()
    tally.add_answer(Job(0, 1.0, Prompt("a b"), 9), answer, start=10.0, sent=11.5)
    assert {name: list(values) for name, values in tally.latencies.items()} == {
        "ttft": [0.5], "e2e": [3.0], "tpot": [0.5], "queue_delay": [0.5],
        "ttft_from_arrival": [1.0], "e2e_from_arrival": [3.5],
    }  # fmt: skip
    assert list(tally.itls.values) == [0.5, 1.5]
    assert (tally.prompt_tokens, tally.output_tokens, tally.completed) == (2, 6, 1)


def test_an_empty_answer_has_a_first_token_time_but_no_time_per_token() -> None:
    answer = Answer()
    add_event(answer, json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]}), 3.0)
    tally = LoadStatistics()
    tally.add_answer(Job(0, None, Prompt("a"), 9), answer, start=1.0, sent=2.0)
    assert list(tally.latencies["ttft"]) == [1.0]
    assert "tpot" not in tally.latencies


def test_summaries_know_their_percentiles_and_their_doubt() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(40):
        values = rng.exponential(1.0, 60)
        found = latencies.summarize(values, np.arange(60))
        assert found["mean"].value == pytest.approx(values.mean())
        assert found["p95"].value == pytest.approx(np.quantile(values, 0.95))
        covered += found["p95"].low <= -math.log(0.05) <= found["p95"].high
    assert covered >= 34  # 95% of 40, less what chance allows


def test_gaps_of_one_answer_count_together() -> None:
    """Ten answers, each with a pace of its own: a thousand gaps say no more about the mean than ten answers do."""
    rng = np.random.default_rng(6)
    paces = rng.uniform(1, 3, 10)
    values, owners = np.repeat(paces, 100), np.repeat(np.arange(10), 100)
    decode_prompts = latencies.summarize(values, owners)["mean"]
    apart = latencies.summarize(values, np.arange(1000))["mean"]
    assert decode_prompts.high - decode_prompts.low > 5 * (apart.high - apart.low)


def test_very_many_gaps_are_thinned_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latencies, "MAX_ITLS", 500)
    gaps = InterTokenLatencies()
    for i in range(5000):
        gaps.add(float(i), i)
    assert len(gaps.values) == 500
    assert list(gaps.values) == [float(owner) for owner in gaps.owners]
    assert abs(np.mean(gaps.values) - 2500) < 250


def test_a_saved_run_keeps_a_bounded_number_of_latencies() -> None:
    assert latencies._evenly_chosen(array("d")) == []
    chosen = latencies._evenly_chosen(array("d", range(100_000)))
    assert (len(chosen), chosen[0], chosen[-1]) == (latencies.MAX_SAVED_VALUES, 0.0, 99_999.0)


def test_figures_without_samples_are_compared_by_their_intervals() -> None:
    def change(low: float, high: float) -> str:
        before = Result("ttft/p95", "s", 1.0, 0.9, 1.1)
        return baseline.compare_results(before, Result("ttft/p95", "s", (low + high) / 2, low, high)).verdict

    assert change(1.0, 1.3) == "within noise"
    assert change(1.2, 1.4) == "regressed"
    assert change(0.5, 0.7) == "improved"
