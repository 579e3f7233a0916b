"""The page in a real browser."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.engine.step_time import StepTimeCoefficients
from llm_worker_rbee.progress import OnStage, Stage
from tests.conftest import ON_CPU
from tests.helpers.chat_page import LIMIT_MS, PHONE, ask, finished, opened, press, setup
from tests.helpers.hub_server import running_hub
from tests.helpers.serve_process import ServeProcess
from tests.helpers.server import Server, until, write_model
from tests.server.conftest import KEY, Start
from tests.server.test_batches import COMPLETIONS, line


def test_page_chat_streams_counts_and_survives_reload(browser: Any, server: Server) -> None:
    with opened(browser, server) as page:
        assert page.evaluate("document.activeElement.id") == "text"
        ask(page, "<img src=x onerror=alert(1)>", max_tokens=40, temperature=0, system="Be brief")
        reply = finished(page)
        assert len(reply) == 40
        assert page.inner_text("article.user .content") == "<img src=x onerror=alert(1)>"
        assert "40 tokens" in page.inner_text("article.assistant .foot")
        assert "cut at the longest answer" in page.inner_text("#news")
        is_timed = "tokens/s" in page.inner_text("article.assistant .foot")  # not if all tokens came at once
        assert float(page.text_content("#speed")) > 0 if is_timed else page.text_content("#speed") == "–"
        page.click("#worker-section summary")
        assert "65\u202f536" in page.inner_text("#card")
        page.reload()
        page.wait_for_selector("[data-status=healthy]")
        assert page.inner_text("article.assistant .content") == reply
        assert page.input_value("[name=max_tokens]") == "40"
        with page.expect_request("**/v1/chat/completions") as sent:
            press(page, "Try again")
        assert [m["role"] for m in sent.value.post_data_json["messages"]] == ["system", "user"]
        assert finished(page) == reply
        page.click("#new")
        assert page.locator("article").count() == 0
    server.require_idle()


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_page_stop_ends_answer_in_worker(browser: Any, server: Server, how: str) -> None:
    with opened(browser, server) as page:
        ask(page, "go on for ever")
        page.wait_for_selector("article.assistant[aria-busy=true] .content:not(:empty)")
        page.click("#stop") if how == "button" else page.keyboard.press("Escape")
        assert finished(page)
        page.wait_for_selector("text=/^stopped after [0-9]+ token/")
        server.require_idle()
        ask(page, "again", max_tokens=3)
        page.wait_for_selector("article:nth-of-type(4) .foot button")
        assert len(finished(page)) == 3


def test_page_error_is_shown_and_next_message_works(browser: Any, server: Server) -> None:
    with opened(browser, server) as page:
        ask(page, "too long", stop="x" * 101)
        page.wait_for_selector(".failure")
        assert "1 to 100 characters" in page.inner_text(".failure .failed")
        assert page.inner_text(".failure .remedy") == "Change “Stop at (one a line)” in the settings."
        ask(page, "short", max_tokens=2, stop="")
        assert len(finished(page)) == 2
        ask(page, "hot", temperature=9)  # the bounds come from the server's own description
        assert page.evaluate("document.querySelector('[name=temperature]').validity.rangeOverflow")
        assert page.locator("article.user").count() == 2


def test_page_of_a_degraded_worker_works(browser: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.chat.engine, "status", lambda: "degraded")
    with opened(browser, server, status="degraded") as page:
        assert page.inner_text("#status") == "ready, some engines are not"
        ask(page, "go on", max_tokens=3)
        assert len(finished(page)) == 3


def test_page_shows_sampling_defaults_of_the_model(browser: Any, server: Server) -> None:
    with opened(browser, server) as page:
        page.wait_for_selector("[name=temperature][title]", state="attached")
        shown = {
            name: page.get_attribute(f"[name={name}]", "placeholder") for name in ("temperature", "top_p", "min_p")
        }
        assert shown == {"temperature": "0.7", "top_p": "0.95", "min_p": "0.05"}
        assert page.get_attribute("[name=temperature]", "title") == "Default: 0.7 (built-in)"
        assert "object" not in page.text_content("#card")


def test_page_shows_limits_and_step_times(browser: Any, start: Start) -> None:
    server = start({"max_batch": 96, "max_step_tokens": 2048})
    terms = StepTimeCoefficients._fields
    with opened(browser, server) as page:
        shown = model_card(page)
        assert (shown["max batch"], shown["max step tokens"], shown["max queue"]) == ("96", "2\u202f048", "384")
        assert (shown["max queued tokens"], shown["target itl"]) == ("262\u202f144", "100 ms")
        assert not [name for name in shown if name.startswith("step time")]  # no step is known yet
        server.events(server.job())
        until(lambda: server.http.get("/info").json()["step_time_model"] is not None)
        with page.expect_response("**/info") as reply:
            page.reload()
        expected = reply.value.json()["step_time_model"]
        shown = model_card(page)
        times = [shown[f"step time {term.replace('_', ' ')}"] for term in terms]
        assert times == page.evaluate("times => times.map(duration)", [expected[term] for term in terms])
        assert "object" not in page.text_content("#card")
        durations = {0: "0 ns", 3.21e-10: "0.321 ns", 4.5678e-6: "4.57 µs", 12.3e-3: "12.3 ms", 75: "75 s"}
        assert page.evaluate("times => times.map(duration)", list(durations)) == list(durations.values())


def model_card(page: Any) -> dict[str, str]:
    """Return the rows of the model's card."""
    page.wait_for_selector("#card dd", state="attached")
    return dict(zip(*(page.locator(f"#card {kind}").all_text_contents() for kind in ("dt", "dd")), strict=True))


def test_page_prompts_for_key(browser: Any, locked: Server) -> None:
    with opened(browser, locked) as page:
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#lock-why:not([hidden])")
        page.fill("#key", KEY)
        page.click("text=Use it")
        page.wait_for_selector("#card dd", state="attached")
        ask(page, "hello", max_tokens=4)
        assert len(finished(page)) == 4
        page.reload()
        page.wait_for_selector("#card dd", state="attached")
        assert not page.evaluate("document.getElementById('lock').open")


def test_page_on_phone_does_not_scroll_sideways(browser: Any, server: Server) -> None:
    with opened(browser, server, PHONE, has_touch=True, is_mobile=True, color_scheme="dark") as page:
        page.fill("#text", "a" * 300)
        assert page.is_hidden("#sidebar")
        page.tap("#options")
        page.fill("[name=max_tokens]", "300")
        assert page.evaluate("document.getElementById('chat').inert")  # it is covered
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.id") == "options"
        page.press("#text", "Enter")  # a new line
        page.tap("#send")
        assert len(finished(page)) == 300
        assert page.evaluate("document.scrollingElement.scrollWidth") <= PHONE[0]
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 21, 19)"
        assert page.evaluate("document.getElementById('send').getBoundingClientRect().bottom") <= PHONE[1]


def test_page_shows_loading_progress_then_becomes_usable(browser: Any, load: Callable[..., LLM]) -> None:
    go_on = threading.Event()

    def slowly(on_stage: OnStage) -> LLM:
        def hold(stage: Stage) -> None:
            on_stage(stage)
            if stage.stage == "weights" and 0 < stage.done < (stage.total or 0):
                assert go_on.wait(LIMIT_MS / 1000)

        return load(on_stage=hold)

    with Server(slowly, takes_on_stage=True) as server, opened(browser, server, status="loading") as page:
        page.wait_for_selector("text=preparing the weights")
        assert 0 < page.evaluate("document.getElementById('stage-bar').value") < 1
        assert page.is_hidden("#greeting")
        page.fill("#text", "early")
        assert page.is_disabled("#send")
        go_on.set()
        page.wait_for_selector("[data-status=healthy]")
        page.wait_for_selector("#card dd", state="attached")
        assert page.is_hidden("#loading")
        setup(page, max_tokens=3)
        page.press("#text", "Enter")
        assert len(finished(page)) == 3


def test_page_reports_lost_worker_and_reconnects(browser: Any, load: Callable[..., LLM]) -> None:
    """Also in the middle of an answer, which keeps its text so far."""
    first, second = Server(load, shutdown_timeout_s=0.0), Server(load)
    second.socket.close()
    second.socket = socket.socket()
    for one in (first.socket, second.socket):  # both, so that the place is free at once
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with opened_at(browser, first) as page:
        ask(page, "go on for ever")
        page.wait_for_selector("article.assistant[aria-busy=true] .content:not(:empty)")
        first.soon(first.worker.stop()).result()
        first.__exit__()
        page.wait_for_selector("[data-status=unreachable]")
        assert "cannot be reached" in page.inner_text("#status")
        page.wait_for_selector(".failure .remedy")
        assert finished(page)
        page.fill("#text", "still there?")
        assert page.is_disabled("#send")
        second.socket.bind(("127.0.0.1", first.port))
        with second:
            page.wait_for_selector("[data-status=healthy]")
            setup(page, max_tokens=3)
            page.press("#text", "Enter")
            page.wait_for_selector("article:nth-of-type(4) .foot button")
            assert len(finished(page)) == 3


@contextmanager
def opened_at(browser: Any, server: Server) -> Iterator[Any]:
    """The page of a server that ends before the page is closed."""
    server.__enter__().ready()
    with opened(browser, server) as page:
        yield page


def test_page_counts_tokens_rather_than_events(browser: Any, start: Start) -> None:
    """With accepted draft tokens an event carries several tokens; a token is one character here."""
    server = start({"speculative": "ngram", "draft_tokens": 8})
    with opened(browser, server) as page:
        ask(page, "go on", temperature=0)
        until(lambda: len(page.inner_text("article.assistant .content")) > 200)
        page.click("#stop")
        reply = finished(page)
        page.wait_for_selector(f"text=/^stopped after {len(reply)} tokens/")
        assert server.llm.engine.scheduler.stats.num_accepted_tokens > 20  # drafting may pause where it costs time


def test_page_controls_have_names(browser: Any, server: Server) -> None:
    with opened(browser, server) as page:
        ask(page, "short", max_tokens=2)
        finished(page)
        unnamed = page.evaluate(
            "[...document.querySelectorAll('input,textarea,select')]"
            ".filter(e => !e.labels[0]?.textContent.trim() && !e.ariaLabel).length"
            " + [...document.querySelectorAll('button')].filter(e => !e.textContent.trim() && !e.ariaLabel).length"
        )
        assert unnamed == 0


def test_page_is_public_with_strict_policy(locked: Server) -> None:
    reply = locked.http.get("/", headers={"authorization": ""})
    assert reply.status_code == 200
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "http://" not in reply.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in reply.text


@ON_CPU
def test_page_switches_models(browser: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_model(tmp_path / f"{name}.gguf")
    running = ServeProcess("--models-dir", tmp_path, "--backend", "reference", "--kv-memory", "16M").ready()
    try:
        page = browser.new_page()
        page.goto(running.url)
        page.wait_for_selector("[data-status=healthy]")
        assert page.locator("#model option").all_inner_texts() == ["first", "second"]
        page.select_option("#model", "second")
        page.fill("#text", ">")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.press("#text", "Enter")
        assert sent.value.post_data_json["model"] == "second"
        page.wait_for_selector("#model option:has-text('second (loaded)')", state="attached")
        assert "are in use" in page.get_attribute("#model", "title")
        page.reload()
        page.wait_for_selector("[data-status=healthy]")
        assert page.input_value("#model") == "second"
        page.click("#options")
        page.wait_for_selector("#models li:has-text('second'):has-text('loaded'):has-text('MiB')")
        assert page.inner_text("#models-state") == "1 of 2 loaded"
        assert " MiB of " in page.inner_text("#memory-used")
        page.click("[data-verb='load first']")
        page.wait_for_selector("[data-verb='unload first']:enabled")
        page.click("[data-verb='unload second']")
        page.wait_for_selector("[data-verb='load second']")
        page.fill("#pull input", "nothing")
        page.press("#pull input", "Enter")
        page.wait_for_selector("#toast:has-text('file does not exist')")
        page.close()
    finally:
        running.close()


@ON_CPU
def test_page_shows_and_stops_a_pull(browser: Any, tmp_path: Path) -> None:
    data = write_model(tmp_path / "first.gguf").read_bytes() + bytes(30 << 20)
    with running_hub({"me/slow": {"X-Q8_0.gguf": data}}) as hub:
        hub_only = {
            "HF_HUB_DOWNLOAD_TIMEOUT": "90",
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_OFFLINE": "",
        }
        running = ServeProcess("--models-dir", tmp_path, "--backend", "reference", "--kv-memory", "16M", **hub_only)
        try:
            page = browser.new_page()
            page.goto(running.ready().url)
            page.wait_for_selector("[data-status=healthy]")
            page.click("#options")
            page.fill("#pull input", "hf:me/slow:Q8_0")
            page.press("#pull input", "Enter")
            page.wait_for_selector("li[data-state=pulling]:has-text('MiB of') progress")
            page.click("[data-verb='stop hf.co/me/slow:Q8_0']")
            page.wait_for_selector("#toast:has-text('goes on from here')")
            page.wait_for_selector("li[data-state=pulling]", state="detached")
            hub.gate.set()
            page.fill("#pull input", "hf:me/slow:Q8_0")
            page.press("#pull input", "Enter")
            page.wait_for_selector("#models li:has-text('hf.co/me/slow:Q8_0'):has-text('unloaded')")
            page.close()
        finally:
            running.close()


def test_page_shows_running_batches(browser: Any, start: Start, tmp_path: Path) -> None:
    server = start(files_dir=tmp_path / "files")
    lines = "\n".join(line(f"{i}", prompt="#", max_tokens=30_000) for i in range(3)).encode()
    with opened(browser, server) as page, server.openai() as client:
        page.click("#options")
        page.click("#worker-section summary")
        assert page.is_hidden("#batches")
        file = client.files.create(file=("in.jsonl", lines), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        page.wait_for_selector("text=1 open, 3 lines at work")
        (shown,) = server.http.get("/info").json()["batches"]["open"]
        assert (shown["id"], shown["total"], shown["completed"]) == (batch.id, 3, 0)
        client.batches.cancel(batch.id)
        page.wait_for_selector("#batches", state="hidden")
    server.require_idle()
