"""Blocks of prompts that somebody computes at this moment: who needs one of them had better wait. No arrays here."""

from __future__ import annotations

from collections.abc import Sequence

from .request import Request


class InFlight:
    """Hash of a block -> who computes it; the first who began, if several do."""

    def __init__(self) -> None:
        self._by: dict[bytes, Request] = {}

    def begin(self, hashes: Sequence[bytes], request: Request) -> None:
        """It has been admitted and computes these."""
        for known_as in hashes:
            self._by.setdefault(known_as, request)

    def end(self, hashes: Sequence[bytes], request: Request) -> None:
        """They are computed, or it will not compute them."""
        for known_as in hashes:
            if self._by.get(known_as) is request:
                del self._by[known_as]

    def is_worth_waiting(self, missing: bytes | None, request: Request) -> bool:
        """Whether somebody as urgent computes what is missing."""
        by = None if missing is None else self._by.get(missing)
        return by is not None and by.priority <= request.priority

    def __bool__(self) -> bool:
        return bool(self._by)

    def check(self, running: Sequence[Request]) -> None:
        """Nobody waits for what nobody computes."""
        assert set(self._by.values()) <= set(running), "somebody waits for what nobody computes"
