"""The API key: where it comes from, and what can be one. It is never shown; an empty one is a mistake, not "no key"."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidRequestError

VARIABLES = ("LLM_WORKER_API_KEY", "LLORCH_API_TOKEN")  # the second is the name that the Rust worker reads
LONGEST_FILE = 4096


class Key(NamedTuple):
    """A key, and what a shell writes to say it."""

    value: str
    shell: str


def find_key(file: Path | None, environment: Mapping[str, str]) -> Key | None:
    """The key of this worker: the file's, or the first of the variables; two that differ are an error."""
    found: list[tuple[str, Key]] = []
    if file is not None:
        quoted = "'" + str(file.absolute()).replace("'", "'\\''") + "'"
        found.append((f"--api-key-file {file}", Key(_read(file), f"$(cat {quoted})")))
    found += [(name, Key(environment[name].strip(), f"${name}")) for name in VARIABLES if name in environment]
    for origin, key in found:
        if not key.value:
            raise InvalidRequestError(f"{origin} is empty: give a key, or leave it out to serve without one", "api_key")
        if not (key.value.isascii() and key.value.isprintable() and " " not in key.value):
            raise InvalidRequestError(f"{origin} cannot be a key: it must be one word of printable ASCII", "api_key")
    for origin, key in found[1:]:
        if key.value != found[0][1].value:
            raise InvalidRequestError(
                f"{found[0][0]} and {origin} hold different keys: leave one of them out", "api_key"
            )
    return found[0][1] if found else None


def require_key(key: Key | None, host: str) -> None:
    """Nobody but this machine may reach a worker without a key."""
    if key is None and not is_loopback(host):
        raise InvalidRequestError(
            f"--host {host} can be reached from outside and there is no key: give one with --api-key-file or "
            f"{VARIABLES[0]}, or use --host 127.0.0.1",
            "host",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it; a name counts only if it is localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(LONGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InvalidRequestError(
            f"cannot read {file}: {getattr(error, 'strerror', None) or error}", "api_key"
        ) from None
    if len(data) > LONGEST_FILE:
        raise InvalidRequestError(f"{file} is too long for a key: at most {LONGEST_FILE} bytes", "api_key")
    return data.decode("utf-8", "replace").strip()
