"""The LoRA adapters of an engine: what is in which slot of the model, and how many requests use it.

An adapter is known by the digest of its content, so that a name may be given to another content at any time. Names are
the front's. A request may use several adapters, each with a scale: one that it uses alone is scaled as it is applied,
several together become one adapter with all their ranks, which takes a slot until another needs it. An adapter that is
unloaded keeps its slot until the last request with it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import InvalidRequestError, NotFoundError
from ..models.lora import ModelAdapters, PackedAdapter
from ..weights.lora import Adapter, combined_adapter, read_adapter

Uses = tuple[tuple[bytes, float], ...]  # digest and scale of each adapter of a request


@dataclass(slots=True)
class Slot:
    """A slot in use."""

    uses: Uses  # what it holds: an adapter (with scale 1), or several
    packed: PackedAdapter
    path: Path | None  # of an adapter; None: it is a combination
    num_requests: int = 0
    is_loaded: bool = True  # False: it goes with its last request
    last_use: int = 0


class AdapterPool:
    """Slots of a model. All methods but those of threads belong to the engine's thread, between steps."""

    def __init__(self, adapters: ModelAdapters) -> None:
        self.adapters = adapters
        self._slots: dict[int, Slot] = {}
        self._clock = 0
        self._thread: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        return sum(slot.packed.nbytes for slot in self._slots.values())

    @property
    def num_loaded(self) -> int:
        return sum(slot.path is not None and slot.is_loaded for slot in self._slots.values())

    def start_loading(self, path: Path, digest: bytes = b"") -> Future[PackedAdapter]:
        """Read and pack an adapter, in a thread; raise if its content is not that of the digest, where there is one."""
        return self._submit(partial(self.read, path, digest))

    def read(self, path: Path, digest: bytes = b"") -> PackedAdapter:
        return self.adapters.pack(_read(path, digest))

    def place(self, packed: PackedAdapter, path: Path) -> None:
        """Give a packed adapter a slot."""
        slot = self._find(((packed.digest, 1.0),))
        if slot is not None:
            self._slots[slot].is_loaded = True
            return
        self._place(Slot(((packed.digest, 1.0),), packed, path))

    def unload(self, digest: bytes) -> None:
        """Let an adapter go once the last request with it has ended."""
        number = self._find(((digest, 1.0),))
        if number is None or not self._slots[number].is_loaded:
            raise NotFoundError("this adapter is not loaded")
        self._slots[number].is_loaded = False
        self._drop_unused()

    def start_combining(self, uses: Uses) -> Future[PackedAdapter] | None:
        """Read and pack a combination in a thread; None if a slot holds what a request needs."""
        paths = [self._slot_of(digest).path for digest, _ in uses]
        if len(uses) < 2 or self._find(uses) is not None:
            return None
        return self._submit(partial(self._combine, uses, paths))

    def _combine(self, uses: Uses, paths: Sequence[Path | None]) -> PackedAdapter:
        pairs = zip(uses, paths, strict=True)
        parts = [(_read(path, digest), scale) for (digest, scale), path in pairs if path is not None]
        return self.adapters.pack(combined_adapter(parts))

    def acquire(self, uses: Uses, combination: PackedAdapter | None = None) -> tuple[int, float]:
        """Return the slot and the scale of a request, which `release` ends; `combination` is what `start_combining`
        gave."""
        if len(uses) == 1:
            ((digest, scale),) = uses
            slot = self._slot_of(digest)
            number = self._find(slot.uses)
        else:
            scale, number = 1.0, self._find(uses)
            if number is None:
                assert combination is not None
                number = self._place(Slot(uses, combination, None))
        assert number is not None
        self._clock += 1
        self._slots[number].num_requests += 1
        self._slots[number].last_use = self._clock
        return number, scale

    def release(self, number: int) -> None:
        """Count a request out."""
        self._slots[number].num_requests -= 1
        self._drop_unused()

    def _slot_of(self, digest: bytes) -> Slot:
        number = self._find(((digest, 1.0),))
        if number is None:
            raise InvalidRequestError("the adapter of the request is not loaded any more: load it again", "model")
        return self._slots[number]

    def _find(self, uses: Uses) -> int | None:
        return next((number for number, slot in self._slots.items() if slot.uses == uses), None)

    def _place(self, slot: Slot) -> int:
        free = [number for number in range(self.adapters.num_slots) if number not in self._slots]
        if not free:  # a combination that no request uses makes room
            unused = [
                (s.last_use, number) for number, s in self._slots.items() if s.path is None and not s.num_requests
            ]
            if not unused:
                count = self.adapters.num_slots
                problem = f"all {count} places for adapters are taken (max_loras)" if count else "max_loras is 0"
                raise InvalidRequestError(f"{problem}: unload one, or start with a larger max_loras", "lora")
            free = [min(unused)[1]]
            self._remove(free[0])
        self.adapters.place(free[0], slot.packed)
        self._slots[free[0]] = slot
        return free[0]

    def _drop_unused(self) -> None:
        for number, slot in list(self._slots.items()):
            if not slot.is_loaded and not slot.num_requests:
                self._remove(number)

    def _remove(self, number: int) -> None:
        del self._slots[number]
        self.adapters.place(number, None)

    def _submit(self, work: partial[PackedAdapter]) -> Future[PackedAdapter]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "adapters")
        return self._thread.submit(work)


def _read(path: Path, digest: bytes) -> Adapter:
    adapter = read_adapter(path)
    if digest and adapter.digest != digest:
        raise InvalidRequestError(f"adapter {path.name} has changed since it was loaded: load it again", "lora")
    return adapter
