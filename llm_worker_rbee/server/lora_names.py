"""The names of LoRA adapters: which of them a request means, by model name, by id or by default; loading and unloading.

Engines know adapters by their content (engine/lora.py); the routes are in dialects/openai_lora.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from ..config import LoraUse
from ..errors import ConflictError, InvalidRequestError, ModelFileError, ModelNotFoundError, NotFoundError
from ..generation import NamedLora, named_loras
from ..token_engine.protocol import ModelInfo, TokenEngine
from .settings import ServerSettings, is_name_of

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")  # of a model or an adapter


class LoraNames:
    """The names of a model's adapters, in the order in which they came; engines know adapters by their content."""

    def __init__(self, engine: TokenEngine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self._named: dict[str, NamedLora] = {}
        self._changing = asyncio.Lock()
        self.defaults: dict[str, float] = {}  # scales of requests that name no adapter

    @property
    def listed(self) -> list[NamedLora]:
        return list(self._named.values())

    def add_loaded(self, info: ModelInfo) -> None:
        """Add those that the engine was loaded with."""
        self._named = named_loras(self._settings.loras, info)

    def find(self, name: str) -> NamedLora | None:
        """Return the adapter of a model's name: its own, or `base:adapter`."""
        bases = (f"{base}:" for base in self._settings.names)
        written = [name, *(name.removeprefix(base) for base in bases if name.startswith(base))]
        return next((own for key, own in self._named.items() if any(is_name_of(text, key) for text in written)), None)

    def name_of(self, name: str | None) -> str:
        """Return what a reply has as its model: the adapter's name, or the model's."""
        named = None if name is None else self.find(name)
        return self._settings.names[0] if named is None else named.name

    def uses_of(self, name: str | None, scales: Sequence[tuple[int, float]] | None) -> list[LoraUse]:
        """Return the adapters of a request: what it names as its model, or by ids, or what it has by default."""
        named = None if name is None else self.find(name)
        if scales is not None:
            if named is not None:
                raise InvalidRequestError(f"the model {named.name!r} is an adapter, and lora names others", "lora")
            self._require_numbers(scales)
            listed = self.listed
            return [listed[number].use(scale) for number, scale in scales if scale]
        if named is not None:
            return [named.use(named.scale)] if named.scale else []
        is_base = name is None or any(is_name_of(name, own) for own in self._settings.names)
        if self._settings.may_have_adapters and not is_base:  # it was unloaded since the request came
            raise ModelNotFoundError(f"there is no adapter {(name or '')[:100]!r} any more: see /lora-adapters")
        return [self._named[key].use(scale) for key, scale in self.defaults.items()]

    def set_defaults(self, scales: Sequence[tuple[int, float]]) -> None:
        """Set the scales of requests that name no adapter; of adapters that are left out, 0."""
        self._require_numbers(scales)
        self.defaults = {self.listed[number].name: scale for number, scale in scales if scale}

    def _require_numbers(self, scales: Sequence[tuple[int, float]]) -> None:
        numbers = [number for number, _ in scales]
        for number in numbers:
            if number >= len(self._named):
                raise NotFoundError(f"there is no adapter {number}: see /lora-adapters")
        if len(set(numbers)) < len(numbers):
            raise InvalidRequestError("lora names an adapter twice", "lora")

    def require_path(self, text: str) -> str:
        """Return the path of an adapter below --lora-dir; raise for any other."""
        folder = self._settings.lora_dir
        if folder is None:
            raise NotFoundError("adapters are loaded over HTTP from a folder: start with --lora-dir")
        try:
            path = (folder / text).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            path = Path("/")
        if not path.is_relative_to(folder.resolve()) or path == folder.resolve():
            raise InvalidRequestError(f"there is no adapter {text[:200]!r} below --lora-dir", "lora_path")
        return str(path)

    async def load(self, name: str, path: str, scale: float, *, replaces: bool) -> NamedLora:
        """Load an adapter under a name; `replaces` gives a name that is taken to the new one."""
        if not NAME.fullmatch(name):
            allowed = "use up to 128 letters, digits and . _ : / @ + -"
            raise InvalidRequestError(f"lora_name {name[:100]!r}: {allowed}", "lora_name")
        async with self._changing:
            if any(is_name_of(name, served) for served in self._settings.names):
                raise ConflictError(f"{name!r} is the name of the model: give the adapter another one")
            old = self._named.get(name)
            if old is not None and not replaces:
                raise ConflictError(f"the adapter {name!r} is loaded already: unload it first, or use load_inplace")
            others = {named.info.digest for named in self._named.values() if named is not old}
            if len(others) >= (most := self._engine.info.max_loras) > 0:
                problem = f"all {most} places for adapters are taken (max_loras, max_cpu_loras)"
                raise InvalidRequestError(f"{problem}: unload one, or start with more", "lora")
            try:
                info = await self._engine.load_lora(path)
            except ModelFileError as error:
                raise InvalidRequestError(str(error), "lora_path") from error
            self._named[name] = NamedLora(name, path, scale, info)
            self._drop(old)
            return self._named[name]

    async def unload(self, name: str) -> None:
        """Take a name away; its adapter goes with the last request that uses it."""
        async with self._changing:
            if name not in self._named:
                raise ModelNotFoundError(f"there is no adapter {name[:100]!r}: see /lora-adapters")
            self.defaults.pop(name, None)
            self._drop(self._named.pop(name))

    def _drop(self, old: NamedLora | None) -> None:
        """Let the engine forget a content that has no name any more."""
        if old is not None and all(named.info.digest != old.info.digest for named in self._named.values()):
            self._engine.unload_lora(old.info.digest)
