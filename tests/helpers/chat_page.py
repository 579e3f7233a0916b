"""The chat page in a browser, for its tests: opening it, filling it in, and answers that a test plays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.helpers.server import Server, until

DESK, PHONE = (1280, 800), (390, 844)
LIMIT_MS = 15_000
EXPECTED = re.compile(r"status of (4|503)|net::ERR_(CONNECTION|EMPTY|INCOMPLETE)")
FAKE_STREAM = """
const realFetch = window.fetch;
window.sent = [];
window.fetch = (path, options = {}) => {
  if (path !== "/v1/chat/completions") return realFetch(path, options);
  sent.push(JSON.parse(options.body));
  const body = new ReadableStream({start: controller => { window.stream = controller; }}), {stream} = window;
  options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
  return Promise.resolve(new Response(body));
};
window.push = data => stream.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
window.give = (...deltas) => deltas.forEach(delta => push(JSON.stringify({choices: [{index: 0, delta}]})));
window.endStream = (finish_reason, usage) => {
  push(JSON.stringify({choices: [{index: 0, delta: {}, finish_reason}]}));
  push(JSON.stringify({choices: [], usage}));
  push("[DONE]");
};
"""
USAGE = {
    "prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 3},
}  # fmt: skip


@contextmanager
def opened(
    browser: Any,
    server: Server,
    size: tuple[int, int] = DESK,
    status: str = "healthy",
    script: str = "",
    **options: Any,
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
    if script:
        page.add_init_script(script)
    page.goto(server.url)
    page.wait_for_selector(f"[data-status={status}]")
    yield page
    context.close()
    assert all(url.startswith((server.url, "data:")) for url in urls), urls
    assert not [message for message in complaints if not EXPECTED.search(message)]


def setup(page: Any, **settings: Any) -> None:
    """Fill in settings by their names."""
    if page.is_hidden("#panel"):
        page.click("#options")
    for name, value in settings.items():
        page.eval_on_selector(f"[name={name}]", "input => { input.closest('details').open = true; }")
        page.fill(f"[name={name}]", str(value))


def ask(page: Any, text: str, **settings: Any) -> None:
    if settings:
        setup(page, **settings)
    page.fill("#text", text)
    page.press("#text", "Enter")


def finished(page: Any) -> str:
    """Return the last answer once complete; the model gives one character a token."""
    page.wait_for_selector("article.assistant[aria-busy=false]:last-child .foot button")
    return str(page.inner_text("article.assistant:last-child .content"))


def press(page: Any, name: str) -> None:
    """Press the last button of this name."""
    page.get_by_role("button", name=name, exact=True).last.click()


def give(page: Any, *deltas: dict[str, Any], finish: str | None = None) -> None:
    """Play chunks of an answer; with `finish` also its end."""
    until(lambda: page.evaluate("!!window.stream"))
    page.evaluate("deltas => give(...deltas)", list(deltas))
    if finish is not None:
        page.evaluate("([finish, usage]) => { endStream(finish, usage); window.stream = null; }", [finish, USAGE])
        page.wait_for_selector("article.assistant[aria-busy=false]:last-child")


def reply(page: Any, text: str, content: str) -> dict[str, Any]:
    """Ask and play the answer; return the request."""
    ask(page, text)
    give(page, {"content": content}, finish="stop")
    return dict(page.evaluate("sent.at(-1)"))
