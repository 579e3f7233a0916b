"""The page in a real browser."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llm_worker_rbee import LLM
from llm_worker_rbee.engine.step_time import StepTimeCoefficients
from llm_worker_rbee.progress import OnStage, Stage
from tests.helpers.browser import chromium
from tests.helpers.server import Server, until
from tests.server.conftest import KEY, Start

DESK, PHONE = (1280, 800), (390, 844)
LIMIT_MS = 15_000
EXPECTED = re.compile(r"status of (4|503)|net::ERR_(CONNECTION|EMPTY|INCOMPLETE)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@contextmanager
def opened(
    browser: Any, server: Server, size: tuple[int, int] = DESK, status: str = "healthy", **options: Any
) -> Iterator[Any]:
    """Open the page; require that it contacts only the server and logs only refusals and lost connections."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    urls: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(server.url)
    page.wait_for_selector(f"[data-status={status}]")
    yield page
    context.close()
    assert all(url.startswith((server.url, "data:")) for url in urls), urls
    assert not [message for message in complaints if not EXPECTED.search(message)]


def ask(page: Any, text: str, **options: Any) -> None:
    for name, value in options.items():
        page.fill(f"[name={name}]", str(value))
    page.fill("#text", text)
    page.press("#text", "Enter")


def finished(page: Any) -> str:
    """Return the last answer once complete; the model gives one character a token."""
    page.wait_for_selector("article.assistant[aria-busy=false]:last-child .foot button")
    return str(page.inner_text("article.assistant:last-child .content"))


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
        assert float(page.inner_text("#speed")) > 0 if is_timed else page.inner_text("#speed") == "–"
        assert "65\u202f536" in page.inner_text("#card")
        page.reload()
        page.wait_for_selector("[data-status=healthy]")
        assert page.inner_text("article.assistant .content") == reply
        assert page.input_value("[name=max_tokens]") == "40"
        with page.expect_request("**/execute") as sent:
            page.click("text=Try again")
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
        assert page.inner_text("article.assistant .foot span").startswith("stopped after ")
        server.require_idle()
        ask(page, "again", max_tokens=3)
        page.wait_for_selector("article:nth-of-type(4) .foot button")
        assert len(finished(page)) == 3


def test_page_error_is_shown_and_next_message_works(browser: Any, server: Server) -> None:
    with opened(browser, server) as page:
        ask(page, "too long", stop="x" * 101)
        page.wait_for_selector(".foot .failed")
        assert "1 to 100 characters" in page.inner_text(".foot .failed")
        ask(page, "short", max_tokens=2, stop="")
        assert len(finished(page)) == 2
        ask(page, "hot", temperature=9)  # the bounds come from the server's own description
        assert page.evaluate("document.querySelector('[name=temperature]').validity.rangeOverflow")
        assert page.locator("article.user").count() == 2


def test_page_of_a_degraded_worker_works(browser: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.worker.engine, "status", lambda: "degraded")
    with opened(browser, server, status="degraded") as page:
        assert page.inner_text("#status") == "ready, some engines are not"
        ask(page, "go on", max_tokens=3)
        assert len(finished(page)) == 3


def test_page_shows_sampling_defaults_of_the_model(browser: Any, server: Server) -> None:
    with opened(browser, server) as page:
        page.wait_for_selector("[name=temperature][title]")
        shown = {
            name: page.get_attribute(f"[name={name}]", "placeholder") for name in ("temperature", "top_p", "min_p")
        }
        assert shown == {"temperature": "0.7", "top_p": "0.95", "min_p": "0.05"}
        assert page.get_attribute("[name=temperature]", "title") == "Default: 0.7 (built-in)"
        assert "object" not in page.inner_text("#card")


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
        assert "object" not in page.inner_text("#card")
        durations = {0: "0 ns", 3.21e-10: "0.321 ns", 4.5678e-6: "4.57 µs", 12.3e-3: "12.3 ms", 75: "75 s"}
        assert page.evaluate("times => times.map(duration)", list(durations)) == list(durations.values())


def model_card(page: Any) -> dict[str, str]:
    """Return the rows of the model's card."""
    page.wait_for_selector("#card dd")
    return dict(zip(*(page.locator(f"#card {kind}").all_inner_texts() for kind in ("dt", "dd")), strict=True))


def test_page_prompts_for_key(browser: Any, locked: Server) -> None:
    with opened(browser, locked) as page:
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#lock-why:not([hidden])")
        page.fill("#key", KEY)
        page.click("text=Use it")
        page.wait_for_selector("#card dd")
        ask(page, "hello", max_tokens=4)
        assert len(finished(page)) == 4
        page.reload()
        page.wait_for_selector("#card dd")
        assert not page.evaluate("document.getElementById('lock').open")


def test_page_on_phone_does_not_scroll_sideways(browser: Any, server: Server) -> None:
    with opened(browser, server, PHONE, has_touch=True, is_mobile=True, color_scheme="dark") as page:
        page.fill("#text", "a" * 300)
        page.tap("#options")
        page.fill("[name=max_tokens]", "300")
        assert page.inner_text("#options") == "Close"
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.id") == "options"
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
        page.wait_for_selector("#card dd")
        assert page.is_hidden("#loading")
        page.fill("[name=max_tokens]", "3")
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
        page.wait_for_selector(".foot .failed")
        assert finished(page)
        page.fill("#text", "still there?")
        assert page.is_disabled("#send")
        second.socket.bind(("127.0.0.1", first.port))
        with second:
            page.wait_for_selector("[data-status=healthy]")
            page.fill("[name=max_tokens]", "3")
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
        assert page.inner_text("article.assistant .foot span") == f"stopped after {len(reply)} tokens"
        assert server.llm.engine.scheduler.stats.num_accepted_tokens > 20  # drafting may pause where it costs time


def test_page_controls_have_labels_and_answers_are_text(browser: Any, server: Server) -> None:
    with opened(browser, server) as page:
        unnamed = page.evaluate(
            "[...document.querySelectorAll('input,textarea')].filter(e => !e.labels[0]?.textContent.trim()).length"
            " + [...document.querySelectorAll('button')].filter(e => !e.textContent.trim()).length"
        )
        assert unnamed == 0
        drawn = page.evaluate(
            "text => element('div', {}, ...renderText(text)).innerHTML", "**a** `b` <i>c</i>\n```py\n<b>x</b>\n```\nend"
        )
        assert drawn == (
            "<strong>a</strong> <code>b</code> &lt;i&gt;c&lt;/i&gt;\n"
            '<pre tabindex="0"><code>&lt;b&gt;x&lt;/b&gt;\n</code></pre>end'
        )


def test_page_is_public_with_strict_policy(locked: Server) -> None:
    reply = locked.http.get("/", headers={"authorization": ""})
    assert reply.status_code == 200
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "http://" not in reply.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in reply.text
