"""Pictures on the chat page, in a real browser: chosen, pasted, dropped, removed, sent, and kept."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_worker_rbee import LLM
from tests.helpers import vision_chat
from tests.helpers.chat_page import FAKE_STREAM, PHONE, ask, finished, give, opened
from tests.helpers.server import Server, until

PICTURES = [vision_chat.picture_file(seed, *size) for seed, size in enumerate(((180, 240), (240, 150)))]
LARGE = vision_chat.picture_file(9, 1200, 2400)
FILES = [{"name": f"{i}.png", "mimeType": "image/png", "buffer": data} for i, data in enumerate((*PICTURES, LARGE))]
TRANSFER = """([event, selector, data, type]) => {
  const bytes = Uint8Array.from(atob(data), letter => letter.charCodeAt(0)), transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "photo", {type}));
  const target = document.querySelector(selector), options = {bubbles: true, cancelable: true};
  target.dispatchEvent(event === "paste" ? new ClipboardEvent(event, {...options, clipboardData: transfer})
    : new DragEvent(event, {...options, dataTransfer: transfer}));
}"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model that takes images."""
    folder = vision_chat.save_chat_model("qwen3_vl", tmp_path_factory.mktemp("seeing"))
    with Server(lambda: LLM(folder, device="cpu")) as running:
        yield running.ready()


def transfer(page: Any, event: str, selector: str, data: bytes, kind: str = "image/png") -> None:
    page.evaluate(TRANSFER, [event, selector, base64.b64encode(data).decode(), kind])


def test_pictures_are_chosen_pasted_dropped_removed_and_sent(browser: Any, seeing: Server, tmp_path: Path) -> None:
    with opened(browser, seeing, script=FAKE_STREAM) as page:
        page.wait_for_selector("#attach")
        assert page.is_disabled("#send")
        page.set_input_files("#files", FILES[0])
        page.wait_for_selector("#pictures img")
        assert page.is_enabled("#send")
        transfer(page, "paste", "#text", PICTURES[1])
        page.wait_for_selector("#pictures span:nth-child(2)")
        transfer(page, "dragover", "#log", LARGE)
        assert page.is_visible("#chat.dropping")
        transfer(page, "drop", "#log", LARGE)
        page.wait_for_selector("#pictures span:nth-child(3)")
        assert page.query_selector(".dropping") is None
        page.screenshot(path=tmp_path / "composer.png")
        page.get_by_role("button", name="Remove picture 2").click()
        assert page.locator("#pictures img").count() == 2
        ask(page, "What is this?")
        assert page.is_hidden("#pictures")
        give(page, {"content": "Waves."}, finish="stop")
        (message,) = page.evaluate("sent.at(-1).messages")
        kinds = [part["type"] for part in message["content"]]
        assert kinds == ["image_url", "image_url", "text"]
        urls = [part["image_url"]["url"] for part in message["content"][:2]]
        assert base64.b64decode(urls[0].partition(",")[2]) == PICTURES[0], "a small one is sent as it is"
        assert urls[1].startswith("data:image/jpeg;base64,"), "a large one is made smaller"
        assert len(urls[1]) < len(LARGE)
        assert page.locator(".user .pictures img").count() == 2
        page.screenshot(path=tmp_path / "sent.png")
        page.reload()
        page.wait_for_selector(".user .pictures img >> nth=1")
        page.hover(".user")
        page.get_by_role("button", name="Edit", exact=True).click()
        page.fill(".editor textarea", "And now?")
        page.get_by_role("button", name="Send", exact=True).first.click()
        until(lambda: page.evaluate("sent.length") == 1)
        assert len(page.evaluate("sent.at(-1).messages")[0]["content"]) == 3, "an edited question keeps its pictures"


def test_model_answers_a_picture_alone_on_a_phone(browser: Any, seeing: Server, tmp_path: Path) -> None:
    with opened(browser, seeing, PHONE) as page:
        page.wait_for_selector("#attach")
        page.set_input_files("#files", FILES[:2])
        page.wait_for_selector("#pictures span:nth-child(2)")
        page.screenshot(path=tmp_path / "phone.png")
        page.click("#send")
        finished(page)
        assert "failed" not in page.inner_text("article.assistant")
        page.screenshot(path=tmp_path / "phone-sent.png")
        transfer(page, "paste", "#text", b"no picture at all")
        page.wait_for_selector("#toast:has-text('cannot be read')")


def test_model_without_a_tower_has_no_button(browser: Any, server: Server) -> None:
    with opened(browser, server) as page:
        assert page.is_hidden("#attach")
        transfer(page, "paste", "#text", PICTURES[0])
        page.wait_for_selector("#toast:has-text('takes no pictures')")
        assert page.locator("#pictures img").count() == 0
