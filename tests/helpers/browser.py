"""A headless Chromium for tests of pages; without one they are skipped with a reason.

Playwright's own browsers are never fetched: the one of the system is used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("/usr/bin/chromium", "chromium", "chromium-browser", "google-chrome")


def executable() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a running browser, or skip the test."""
    path = executable()
    if path is None:
        how = "CI=true make test installs it as root on Debian" if os.environ.get("CI") != "true" else "apt-get failed?"
        pytest.skip(f"chromium is not installed ({how})")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Page:
    """One page in a browser, with its requests and its console messages."""

    def __init__(self, browser: Any, path: Path, *, width: int = 1200, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.console_messages: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.console_messages.append(message.text))
        self.page.on("pageerror", lambda error: self.console_messages.append(str(error)))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()
