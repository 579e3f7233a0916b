"""The LoRA adapters of an engine: what is in which slot of the model, and how many requests use it.

An adapter is known by the digest of its content, so that a name may be given to another content at any time. Names are
the front's. An adapter is read from its file, in a thread, when a request needs it and no slot has it; without a free
slot it takes the slot of the least recently used one that no request has. A request may use several adapters, each with
a scale: one that it uses alone is scaled as it is applied, several together become one adapter with all their ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ..config import LoraUse
from ..errors import InvalidRequestError
from ..models.lora import ModelAdapters, PackedAdapter
from ..weights.lora import Adapter, combined_adapter, read_adapter

Key = tuple[tuple[bytes | str, float], ...]  # digest, or path if that is not known yet, and scale of each adapter


@dataclass(slots=True)
class Slot:
    """A slot in use."""

    key: Key  # of what it holds, or of what is read for it
    reading: Future[PackedAdapter] | None = None
    packed: PackedAdapter | None = None  # once it is in the model
    num_requests: int = 0
    is_unloaded: bool = False  # it goes with its last request
    last_use: int = 0


class AdapterPool:
    """Slots of a model. All methods belong to the engine's thread, between steps."""

    def __init__(self, adapters: ModelAdapters) -> None:
        self.adapters = adapters
        self._slots: dict[int, Slot] = {}
        self._clock = count(1)
        self._thread = ThreadPoolExecutor(1, "adapters")
        # Beside a device's memory the host's keeps them, the last ones used; on a CPU their files do.
        self._num_kept = adapters.max_loaded if adapters.model.ops.has_device_memory else 0
        self._kept: dict[bytes, Adapter] = {}

    @property
    def nbytes(self) -> int:
        return sum(slot.packed.nbytes for slot in self._slots.values() if slot.packed is not None)

    @property
    def reading(self) -> list[Future[PackedAdapter]]:
        """What is read, or was, for requests that wait for it."""
        return [slot.reading for slot in self._slots.values() if slot.packed is None and slot.reading is not None]

    def add(self, packed: PackedAdapter) -> None:
        """Give an adapter a slot, before there are requests."""
        key, number = ((packed.digest, 1.0),), len(self._slots)
        if self._find(key) is None:
            self._slots[number] = Slot(key, packed=packed)
            self.adapters.place(number, packed)

    def forget_failures(self, waiting: Iterable[Sequence[LoraUse]]) -> None:
        """Drop what could not be read, but for requests that still wait for its error: a file may be there again."""
        kept = {_key(uses) for uses in waiting}
        for number, slot in list(self._slots.items()):
            reading = slot.reading if slot.packed is None and slot.key not in kept else None
            if reading is not None and reading.done() and reading.exception() is not None:
                del self._slots[number]

    def emptiest(self) -> int:
        """Return the slot that is likely to be free first."""
        return min(self._slots, key=lambda number: (self._slots[number].num_requests, number))

    def find(self, uses: Sequence[LoraUse]) -> int | None:
        """Return the slot that has the adapters of a request, or gets them."""
        return self._find(_key(uses))

    def assign(self, uses: Sequence[LoraUse]) -> bool:
        """Let a slot have the adapters of a request; return whether there is one."""
        key = _key(uses)
        if self._find(key) is not None:
            return True
        number = self._vacate()
        if number is not None:
            self._slots[number] = Slot(key, self._thread.submit(self._read, uses))
        return number is not None

    def acquire(self, uses: Sequence[LoraUse]) -> tuple[int, float, PackedAdapter] | None:
        """Return the slot and the scale of a request, which `release` ends, and what the slot holds; None while it is
        read. Raise if it cannot be read, or does not fit the model."""
        key = _key(uses)
        number = self._find(key)
        assert number is not None, "assigned before"
        slot = self._slots[number]
        if slot.packed is None:
            assert slot.reading is not None
            if not slot.reading.done():
                return None
            number = self._place(number, slot.reading)
            slot = self._slots[number]
        assert slot.packed is not None
        slot.num_requests, slot.last_use, slot.is_unloaded = slot.num_requests + 1, next(self._clock), False
        return number, uses[0].scale if len(uses) == 1 else 1.0, slot.packed

    def release(self, number: int) -> None:
        """Count a request out."""
        self._slots[number].num_requests -= 1
        self._drop(number)

    def unload(self, digest: bytes) -> None:
        """Let an adapter go once the last request with it has ended."""
        self._kept.pop(digest, None)
        for number, slot in list(self._slots.items()):
            if any(part == digest for part, _ in slot.key):
                slot.is_unloaded = True
                self._drop(number)

    def _find(self, key: Key) -> int | None:
        return next((number for number, slot in self._slots.items() if slot.key == key), None)

    def _place(self, number: int, reading: Future[PackedAdapter]) -> int:
        """Put what was read into the model; return its slot, which is another one if that has the same content."""
        slot = self._slots.pop(number)
        packed = reading.result()
        if len(slot.key) == 1:
            slot.key = ((packed.digest, 1.0),)
        if (same := self._find(slot.key)) is not None and self._slots[same].packed is not None:
            return same
        self.adapters.place(number, packed)
        slot.packed, self._slots[number] = packed, slot
        return number

    def _vacate(self) -> int | None:
        """Return a free slot, or one that no request uses: of several adapters first, then the least recently used."""
        free = (number for number in range(self.adapters.num_slots) if number not in self._slots)
        if (number := next(free, None)) is not None:
            return number
        pending = [future for future in self.reading if not future.done()]
        idle = [
            (len(slot.key) == 1, slot.last_use, number)
            for number, slot in self._slots.items()
            if not slot.num_requests and slot.reading not in pending
        ]
        if not idle:
            return None
        number = min(idle)[2]
        self._remove(number)
        return number

    def _drop(self, number: int) -> None:
        slot = self._slots[number]
        if slot.is_unloaded and not slot.num_requests and slot.packed is not None:
            self._remove(number)

    def _remove(self, number: int) -> None:
        if self._slots.pop(number).packed is not None:
            self.adapters.place(number, None)

    def _read(self, uses: Sequence[LoraUse]) -> PackedAdapter:
        parts = [(self._read_one(use), use.scale) for use in uses]
        return self.adapters.pack(parts[0][0] if len(parts) == 1 else combined_adapter(parts))

    def _read_one(self, use: LoraUse) -> Adapter:
        adapter = self._kept.pop(use.digest, None) or read_adapter(Path(use.path))
        if use.digest and adapter.digest != use.digest:
            problem = f"adapter {adapter.path.name} has changed since it was loaded"
            raise InvalidRequestError(f"{problem}: load it again", "model")
        self._kept[adapter.digest] = adapter
        for digest in list(self._kept)[: max(0, len(self._kept) - self._num_kept)]:
            self._kept.pop(digest, None)
        return adapter


def _key(uses: Sequence[LoraUse]) -> Key:
    scales = [1.0] if len(uses) == 1 else [use.scale for use in uses]
    return tuple((use.digest or use.path, scale) for use, scale in zip(uses, scales, strict=True))
