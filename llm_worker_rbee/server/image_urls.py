"""Fetches the images of URLs, for a client that may try to reach what this machine can and it cannot.

Only hosts of `--allow-image-urls` are requested, and only at public addresses: a name is resolved once, and the
connection goes to the address that was checked. Each redirect is checked anew. Time and size are bounded. No proxy is
used.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import cast
from urllib.parse import SplitResult, urljoin, urlsplit

from ..errors import InvalidRequestError
from ..tokenizer.chat.events import Image
from .settings import ServerSettings

FETCH_S = 10.0  # of all redirects together
MAX_REDIRECTS = 3
READ_BYTES = 1 << 16
PORTS = {"http": 80, "https": 443}
# Special, though versions of `ipaddress` call them global: site-local, translation, documentation, routing, protocols.
SPECIAL = ("fec0::/10", "64:ff9b:1::/48", "::ffff:0:0:0/96", "3fff::/20", "5f00::/16", "192.0.0.0/24")
NOT_PUBLIC = tuple(map(ipaddress.ip_network, SPECIAL))
ISATAP, ISATAP_MASK = 0x5EFE, 0xFFFFFFFF & ~(0x0200 << 16)  # the upper half of an interface's identifier
REDIRECTS = (301, 302, 303, 307, 308)


def is_public(address: str) -> bool:
    """Return whether an address is of the internet, in whichever form it is written."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if int(ip) >> 32 & ISATAP_MASK == ISATAP:
            return False
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        is_nat64 = ip in ipaddress.ip_network("64:ff9b::/96") or int(ip) < 1 << 32
        if inner is not None or is_nat64:
            ip = inner or ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in NOT_PUBLIC)


def is_listed(host: str, hosts: Sequence[str]) -> bool:
    """Return whether a host is one of these: a name, or *.domain, which are the names below it."""
    return any(host == name or (name.startswith("*.") and host.endswith(name[1:])) for name in hosts)


def fetch_image(
    image: Image, settings: ServerSettings, may_connect: Callable[[str], bool] = is_public, limit_s: float = FETCH_S
) -> bytes:
    """Return the body of an image's URL; raise an error that names the image. The body itself is never quoted."""
    url, deadline = image.url, time.monotonic() + limit_s
    try:
        for _ in range(MAX_REDIRECTS + 1):
            location, data = _get(_checked(url, settings.image_hosts), settings.max_image_bytes, may_connect, deadline)
            if location is None:
                return data
            url = urljoin(url, location)
        raise ValueError(f"it redirects more than {MAX_REDIRECTS} times")
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = f"it did not come within {limit_s:g} s" if time.monotonic() >= deadline else _reason(error)
        raise InvalidRequestError(f"{image.place}: the URL is not used: {why}", "messages") from None


def _reason(error: Exception) -> str:
    """Return what is wrong, without what a server sent."""
    if isinstance(error, http.client.HTTPException):
        return "the server does not speak HTTP"
    return str(getattr(error, "strerror", None) or error)[:200]


def _checked(url: str, hosts: Sequence[str]) -> SplitResult:
    """Return the parts of a URL that may be fetched; raise for any other."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("it is none of http or https, or not written as a URL")
    if parts.username is not None or parts.password is not None:
        raise ValueError("it has a user name")
    if not hosts:
        raise ValueError("this worker fetches no images: send it as data:image/png;base64,... (or --allow-image-urls)")
    if not is_listed(parts.hostname, hosts):
        raise ValueError(f"the host {parts.hostname[:100]!r} is not one that --allow-image-urls names")
    return parts


def _get(
    parts: SplitResult, max_bytes: int, may_connect: Callable[[str], bool], deadline: float
) -> tuple[str | None, bytes]:
    """Return where a URL redirects to, or its body."""
    host, port = str(parts.hostname), parts.port or PORTS[parts.scheme]
    addresses = _resolve(host, port, deadline)
    if not addresses or not all(map(may_connect, addresses)):  # a name with both kinds is an attempt, too
        raise ValueError(f"the host {host[:100]!r} has an address that is not public")
    connection, sock = http.client.HTTPConnection(host, port), cast("socket.socket | None", None)
    watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), lambda: _cut(sock))  # of a server that trickles
    try:
        sock = socket.create_connection((addresses[0], port), max(0.1, deadline - time.monotonic()))
        if parts.scheme == "https":
            context = ssl.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        connection.sock = sock
        watchdog.start()
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        connection.request("GET", target, headers={"accept": "image/*", "user-agent": "llm-worker-rbee"})
        reply = connection.getresponse()
        if reply.status in REDIRECTS and (location := reply.getheader("location")):
            return location, b""
        if reply.status != 200:
            raise ValueError(f"the server answered with status {reply.status}")
        data = bytearray()
        while piece := reply.read(READ_BYTES):
            data += piece
            if len(data) > max_bytes:
                raise ValueError(f"it has more than {max_bytes} bytes")
        if time.monotonic() >= deadline:  # the watchdog ended it
            raise TimeoutError
        if not data:
            raise ValueError("it is empty")
        return None, bytes(data)
    finally:
        watchdog.cancel()
        connection.close()
        if sock is not None:
            sock.close()


def _resolve(host: str, port: int, deadline: float) -> list[str]:
    """Return the addresses of a host; the system's resolver knows no deadline."""
    addresses: Future[list[str]] = Future()

    def resolve() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses.set_result([str(info[4][0]) for info in infos])
        except Exception as error:
            addresses.set_exception(error)

    threading.Thread(target=resolve, name="resolve", daemon=True).start()
    return addresses.result(max(0.0, deadline - time.monotonic()))


def _cut(sock: socket.socket | None) -> None:
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
