"""A local server with the part of the Hugging Face hub's API that a pull needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """GET /api/models/{repo}; HEAD and GET /{repo}/resolve/{revision}/{file}, also of a range of bytes. `me/broken` and
    `me/gated` are refused; a file of `me/slow` stops in the middle until `gate` is set."""

    repos: Mapping[str, Mapping[str, bytes]]
    seen: Counter[str]
    gate: threading.Event
    url: str

    def do_HEAD(self) -> None:
        self.dispatch()

    def do_GET(self) -> None:
        self.dispatch()

    def dispatch(self) -> None:
        path = unquote(urlsplit(self.path).path)
        listing = path.startswith("/api/models/")
        repo = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        self.seen[f"{self.command} {path}"] += 1
        self.seen[f"token {self.headers.get('Authorization')}"] += 1
        if repo == "me/broken":
            return self.reply(500, b"sorry")
        if repo not in self.repos:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        if listing:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.repos[repo].items()]
            return self.reply(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
        if repo == "me/gated":
            return self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        body = self.repos[repo][path.split("/resolve/")[1].partition("/")[2]]
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if (wanted := self.headers.get("Range")) is not None and self.command == "GET":
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            self.seen[f"range of {repo}"] = start
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            return self.reply(206, body[start:], headers)
        if repo == "me/damaged":
            body = body[:-1] + b"!"
        self.reply(200, body, headers, is_slow=repo == "me/slow")

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None, is_slow: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            half = len(body) // 2 if is_slow else 0
            with suppress(ConnectionError):  # the client has stopped
                self.wfile.write(body[:half])
                if is_slow:
                    self.wfile.flush()
                    self.gate.wait(60)
                self.wfile.write(body[half:])

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running_hub(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[type[Hub]]:
    """Provide a hub with these files by repository."""
    running = type("RunningHub", (Hub,), {"repos": repos, "seen": Counter(), "gate": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), running) as http:
        http.daemon_threads = True
        running.url = f"http://127.0.0.1:{http.server_address[1]}"
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield running
        running.gate.set()
        http.shutdown()
