"""Images of URLs: which hosts and addresses are asked, redirects, sizes, times; against servers of the tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.server import image_urls
from llm_worker_rbee.server.image_urls import fetch_image, is_listed, is_public
from llm_worker_rbee.server.settings import ServerSettings
from llm_worker_rbee.tokenizer.chat.events import Image

PRIVATE = (
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "::127.0.0.1", "ff02::1",
    "64:ff9b::7f00:1", "2002:7f00:1::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "198.18.0.1", "192.0.2.1",
    "fec0::1", "64:ff9b:1::808:808", "::ffff:0:7f00:1", "2606:4700::5efe:7f00:1", "2606:4700::200:5efe:7f00:1",
    "3fff::1", "5f00::1", "192.0.0.9", "::ffff:192.0.0.9",
)  # fmt: skip
DATA = b"\x89PNG and more"
LOOPBACK: Callable[[str], bool] = lambda address: address.startswith("127.")  # noqa: E731


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        port = self.server.server_address[1]
        targets = {
            "/away": "http://example.com/a.png", "/private": f"http://127.0.0.2:{port}/secret", "/file": "file:///etc/passwd",
            "/loop": "/loop", "/near": "/image",
        }  # fmt: skip
        if self.path in targets:
            self.send_response(302)
            self.send_header("location", targets[self.path])
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        if self.path == "/endless":
            self.write_until_closed(b"x" * 65536, 0)
        elif self.path == "/slow":
            self.write_until_closed(b"x", 0.05)
        else:
            self.wfile.write(DATA)

    def write_until_closed(self, piece: bytes, pause_s: float) -> None:
        try:
            while True:
                self.wfile.write(piece)
                time.sleep(pause_s)
        except OSError:
            pass

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def fetch(url: str, *hosts: str, limit_s: float = 5.0, **options: Any) -> bytes:
    settings = ServerSettings(model_ref="tiny", image_hosts=hosts or ("localhost",), max_image_bytes=1 << 20)
    return fetch_image(Image(url=url, place="messages[0]"), settings, limit_s=limit_s, **options)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses_and_listed_names() -> None:
    assert all(map(is_public, ("1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1")))
    hosts = "example.com", "*.wikimedia.org"
    assert all(is_listed(host, hosts) for host in ("example.com", "upload.wikimedia.org", "a.b.wikimedia.org"))
    others = "a.example.com", "wikimedia.org", "evilwikimedia.org", "example.com.evil.org", "localhost"
    assert not any(is_listed(host, hosts) for host in others)


def test_image_is_fetched_also_behind_a_redirect(url: str) -> None:
    assert fetch(f"{url}/image", may_connect=LOOPBACK) == DATA
    assert fetch(f"{url}/near?a=b", may_connect=LOOPBACK) == DATA
    assert fetch(f"{url}/near", may_connect=LOOPBACK) == DATA
    assert Handler.asked == ["/image", "/near?a=b", "/near", "/image"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/away", "the host 'example.com' is not one that --allow-image-urls names"),
        ("/private", "the host '127.0.0.2' is not one"),
        ("/file", "none of http or https"),
        ("/loop", "redirects more than 3 times"),
        ("/none", "status 404"),
        ("/endless", "more than 1048576 bytes"),
    ],
)
def test_redirects_and_replies_are_bounded(url: str, path: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        fetch(url + path, may_connect=LOOPBACK)
    assert str(caught.value).startswith("messages[0]: the URL is not used: ")
    assert "/secret" not in Handler.asked


def test_redirect_to_a_private_address_is_refused_where_its_host_is_listed(url: str) -> None:
    first: Callable[[str], bool] = lambda address: address == "127.0.0.1"  # noqa: E731
    with pytest.raises(InvalidRequestError, match="address that is not public"):
        fetch(f"{url}/private", "localhost", "127.0.0.2", may_connect=first)
    assert Handler.asked == ["/private"]


def test_names_of_this_machine_are_refused(url: str) -> None:
    port = url.rpartition(":")[2]
    for host in ("localhost", "127.0.0.1", "[::1]", "0x7f000001", "2130706433", "127.1"):
        with pytest.raises(InvalidRequestError, match="not public"):
            fetch(f"http://{host}:{port}/image", host.strip("[]"))
    assert not Handler.asked


@pytest.mark.parametrize(
    "url",
    [
        "http://user@localhost/a", "http://localhost/a b", "http://localhost/\n", "http://", "http://localhost:99999/",
        "http://localhost\u3002example.com/", "https://[::1", "http://localhost:port/",
    ],
)  # fmt: skip
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="the URL is not used"):
        fetch(url, may_connect=LOOPBACK)


def test_time_is_bounded_however_slowly_bytes_come(url: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"did not come within 0\.5 s"):
        fetch(f"{url}/slow", limit_s=0.5, may_connect=LOOPBACK)
    assert time.monotonic() - start < 10


def test_time_of_a_resolver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(image_urls.socket, "getaddrinfo", lambda *_, **__: never.wait(60))
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"did not come within 0\.2 s"):
        fetch("http://localhost/image", limit_s=0.2)
    assert time.monotonic() - start < 30
    never.set()


def test_sockets_are_closed_where_tls_cannot_begin(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise OSError("no certificates")

    monkeypatch.setattr(image_urls.ssl, "create_default_context", refuse)
    opened: list[socket.socket] = []
    connect = socket.create_connection
    monkeypatch.setattr(
        image_urls.socket, "create_connection", lambda *args: opened.append(connect(*args)) or opened[0]
    )
    with pytest.raises(InvalidRequestError, match="no certificates"):
        fetch(url.replace("http:", "https:"), may_connect=LOOPBACK)
    assert [sock.fileno() for sock in opened] == [-1]


def test_server_that_says_nothing_and_one_that_does_not_speak_http() -> None:
    for answer in (b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nlocation: x"):
        listener = socket.create_server(("127.0.0.1", 0))

        def reply(listener: socket.socket = listener, answer: bytes = answer) -> None:
            peer, _ = listener.accept()
            peer.sendall(answer)
            if answer:
                peer.close()

        threading.Thread(target=reply, daemon=True).start()
        with pytest.raises(InvalidRequestError, match="the URL is not used"):
            fetch(f"http://localhost:{listener.getsockname()[1]}/", limit_s=0.5, may_connect=LOOPBACK)
        listener.close()


def test_one_private_address_of_several_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 80)) for address in ("1.1.1.1", "127.0.0.1")]
    monkeypatch.setattr(image_urls.socket, "getaddrinfo", lambda *_, **__: answers)
    with pytest.raises(InvalidRequestError, match="not public"):
        fetch("http://rebinding.example/", "rebinding.example")
