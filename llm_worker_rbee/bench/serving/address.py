"""Where a server is, taken from what people write for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from ...errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `http://host:port/base`."""

    scheme: str
    host: str
    port: int
    base: str  # the path before each request's own, without a slash at its end

    @staticmethod
    def parse(url: str) -> Address:
        """Take a URL apart; one without a scheme is http."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise InvalidRequestError(f"{url!r} is not a URL: {error}", "url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"{url!r} is not the URL of a server: give http://host:port", "url")
        if parts.username is not None or parts.query or parts.fragment:
            raise InvalidRequestError(
                "the URL must hold a host, a port and a path only: a key goes into --api-key", "url"
            )
        if not url.isascii() or re.search(r"[\s\x00-\x1f\x7f]", url):
            raise InvalidRequestError(f"{url!r} holds characters that no URL has", "url")
        return Address(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Host and port, as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"
