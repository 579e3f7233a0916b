"""Which requests may use the worker: the API key (where it comes from, when one is required, the check of a request),
and without a key the check of `Host`. A key is never shown; an empty one is an error, not "no key"."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from ..config import ServerSettings
from ..errors import AuthenticationError, HostNotAllowedError, InvalidRequestError, MissingKeyError

VARIABLES = ("LLM_WORKER_API_KEY", "LLORCH_API_TOKEN")  # the second is the Rust worker's
MAX_FILE_BYTES = 4096
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+?)\.?)(?::[0-9]*)?")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Key(NamedTuple):
    """A key, and the shell expression that gives it."""

    value: str
    shell: str


def find_key(file: Path | None, environment: Mapping[str, str]) -> Key | None:
    """Return the key of the file or else of the first variable; raise if two of them differ."""
    found: list[tuple[str, Key]] = []
    if file is not None:
        quoted = "'" + str(file.absolute()).replace("'", "'\\''") + "'"
        found.append((f"--api-key-file {file}", Key(_read_key_file(file), f"$(cat {quoted})")))
    found += [(name, Key(environment[name].strip(), f"${name}")) for name in VARIABLES if name in environment]
    for origin, key in found:
        if not key.value:
            raise InvalidRequestError(f"{origin} is empty: give a key, or leave it out to serve without one", "api_key")
        if not (key.value.isascii() and key.value.isprintable() and " " not in key.value):
            raise InvalidRequestError(f"{origin} cannot be a key: it must be one word of printable ASCII", "api_key")
    for origin, key in found[1:]:
        if key.value != found[0][1].value:
            message = f"{found[0][0]} and {origin} hold different keys: leave one of them out"
            raise InvalidRequestError(message, "api_key")
    return found[0][1] if found else None


def _read_key_file(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise InvalidRequestError(f"cannot read {file}: {why}", "api_key") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequestError(f"{file} is too long for a key: at most {MAX_FILE_BYTES} bytes", "api_key")
    return data.decode("utf-8", "replace").strip()


def require_key(key: Key | None, host: str) -> None:
    """Raise if a worker without a key would listen on anything but loopback."""
    if key is None and not is_loopback(host):
        raise InvalidRequestError(
            f"--host {host} can be reached from outside and there is no key: give one with --api-key-file or "
            f"{VARIABLES[0]}, or use --host 127.0.0.1",
            "host",
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host; of names, only localhost counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_authorization(header: bytes, given: bytes, key: bytes) -> None:
    """Raise unless an Authorization header has the key, or what was `given` as X-API-Key is the key."""
    if not header and not given:
        raise MissingKeyError("no API key: send Authorization: Bearer KEY, or X-API-Key: KEY")
    scheme, _, value = header.partition(b" ")
    is_bearer = scheme.lower() == b"bearer" and hmac.compare_digest(value.strip(), key)
    if not is_bearer and not hmac.compare_digest(given.strip(), key):
        raise AuthenticationError("the API key is wrong")


def host_name(host: str) -> str | None:
    """Return the name in `name:port` or `[address]:port`, in lower case; None if it is neither."""
    found = HOST.fullmatch(host)
    return None if found is None else (found[1] or found[2]).lower()


def allowed_hosts(settings: ServerSettings) -> frozenset[str] | None:
    """Return the names that `Host` may have beside other loopback addresses; None: any.

    A page of another site reaches a worker on loopback once its own name resolves to 127.0.0.1 (DNS rebinding); `Host`
    still has that name. With a key there is no check: such a page does not know the key.
    """
    if settings.api_key is not None or "*" in settings.allowed_hosts:
        return None
    advertised = urlsplit(settings.advertise_url or "").hostname
    names = {host_name(host) for host in settings.allowed_hosts}
    return frozenset(name for name in (*LOOPBACK, advertised, *names) if name)


def check_host(values: list[bytes], http_version: str, allowed: frozenset[str] | None) -> None:
    """Raise unless the `Host` headers of a request are one, which HTTP/1.0 may leave out, with an allowed name."""
    if len(values) > 1 or (not values and http_version != "1.0"):
        raise InvalidRequestError(f"the request has {len(values)} Host headers: HTTP/1.1 requires one", "host")
    if allowed is None or not values:
        return
    name = host_name(value := values[0].decode("latin-1"))
    if name is None or not (name in allowed or is_loopback(name)):
        raise HostNotAllowedError(
            f"the host {value[:100]!r} is not a name of this worker, which has no API key: use 127.0.0.1 or localhost, "
            "or start it with --allowed-host NAME or with a key"
        )
