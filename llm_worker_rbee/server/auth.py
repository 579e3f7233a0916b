"""The API key: where it comes from, when one is required, and the check of a request's header. It is never shown; an
empty key is an error, not "no key"."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import AuthenticationError, InvalidRequestError, MissingKeyError

VARIABLES = ("LLM_WORKER_API_KEY", "LLORCH_API_TOKEN")  # the second is the Rust worker's
MAX_FILE_BYTES = 4096


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


def check_authorization(header: bytes, key: bytes) -> None:
    """Raise unless an Authorization header has the key."""
    if not header:
        raise MissingKeyError("no API key: send Authorization: Bearer KEY")
    scheme, _, value = header.partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(value.strip(), key):
        raise AuthenticationError("the API key is wrong")
