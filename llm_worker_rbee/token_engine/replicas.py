"""Several engines of one model as one: requests are routed by cached prefixes and load (`routing`).

Each engine is supervised by itself. While one is restarted the others serve, its requests included. The first engine
loads alone, since it may download and compile; the others then load what it found, all at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ..errors import InferenceError, WorkerError, copy_error
from ..progress import OnStage, Stage, TransferProgress
from .protocol import EngineStats, Load, ModelInfo, RequestState, RequestStream, TokenEngine, add_stats
from .routing import choose, prompt_hashes
from .supervisor import SupervisedEngine, SupervisedRequest


class ReplicaSet(TokenEngine):
    """A `TokenEngine` of several processes."""

    def __init__(
        self,
        loads: Sequence[Load],
        *,
        progress: TransferProgress = lambda what, done, total: None,
        on_located: Callable[[str], None] = lambda path: None,
        **options: Any,
    ) -> None:
        """Start the process of the first engine at once; each `SupervisedEngine` gets the options."""
        self._loads = [msgspec.structs.replace(load, records_blocks=True) for load in loads]
        self._options = options | {"move": self._move}
        self._last_prompt: list[int] | None = None
        self._last_hashes: list[bytes] = []
        self._engines = [SupervisedEngine(self._loads[0], progress=progress, on_located=on_located, **self._options)]

    async def start(self, on_stage: OnStage) -> ModelInfo:
        first = await self._engines[0].start(on_stage)
        start = time.perf_counter()

        def report() -> None:
            num_loaded = sum(engine.status() == "healthy" for engine in self._engines)
            on_stage(Stage("replicas", num_loaded, len(self._loads), time.perf_counter() - start))

        async def load(engine: SupervisedEngine) -> None:
            await engine.start(lambda stage: None)
            report()

        report()
        others = [_like_first(load, self._loads[0], first) for load in self._loads[1:]]
        self._engines += [SupervisedEngine(load, **self._options) for load in others]
        await asyncio.gather(*map(load, self._engines[1:]))
        first.phases["replicas"] = time.perf_counter() - start
        self.info = _describe([engine.info for engine in self._engines])
        return self.info

    def submit(self, request: RequestState) -> RequestStream:
        if request.prompt is not self._last_prompt:  # the choices of one prompt come one after another
            extra_keys, self._last_prompt = request.submitted.extra_keys, request.prompt
            self._last_hashes = prompt_hashes(request.prompt, self.info.engine, extra_keys)
        return self._route(request, self._last_hashes).submit(request, self._last_hashes)

    def _route(self, request: RequestState, hashes: Sequence[bytes]) -> SupervisedEngine:
        """Return the engine for a request: one that serves, or else one that may serve later."""
        usable = [engine for engine in self._engines if engine.status() != "failed"]
        if not usable:
            raise InferenceError("all engines have failed")
        usable = [engine for engine in usable if engine.is_serving] or usable
        return usable[choose([engine.candidate(hashes, request.submitted.loras) for engine in usable])]

    def _move(self, supervised: SupervisedRequest, is_final: bool) -> bool:
        """Give a request of an engine that died to one that serves; with `is_final` to one that may serve later.

        Return whether there is one.
        """
        if any(engine.is_serving or (is_final and engine.status() != "failed") for engine in self._engines):
            self._route(supervised.request, supervised.hashes).adopt(supervised)
            return True
        return False

    @property
    def num_requests(self) -> int:
        return sum(engine.num_requests for engine in self._engines)

    def stats(self) -> EngineStats:
        return add_stats([engine.stats() for engine in self._engines])

    def status(self) -> str:
        statuses = {engine.status() for engine in self._engines}
        if len(statuses) > 1 and "healthy" in statuses:
            return "degraded"
        return next(status for status in ("healthy", "loading", "stalled", "failed") if status in statuses)

    @property
    def last_step_age_s(self) -> float:
        """The age of the last step of the engine that is furthest behind."""
        return max(engine.last_step_age_s for engine in self._engines)

    @property
    def num_restarts(self) -> int:  # type: ignore[override]
        return sum(engine.num_restarts for engine in self._engines)

    @property
    def replicas(self) -> Sequence[TokenEngine]:
        return self._engines

    def unload_lora(self, digest: bytes) -> None:
        for engine in self._engines:
            engine.unload_lora(digest)

    async def restart(self) -> None:
        for engine in self._engines:
            await engine.restart()

    async def stop(self, error: WorkerError) -> None:
        await asyncio.gather(*(engine.stop(copy_error(error)) for engine in self._engines))


def _like_first(load: Load, first: Load, info: ModelInfo) -> Load:
    """Return the load of another engine: the first engine's files and context; on a device of the same kind also the
    size of its KV cache."""
    size = {"kv_memory": info.kv_cache_bytes} if _kind(load) == _kind(first) else {}
    return load.with_options(model=info.path, max_context=info.max_context, **size)


def _kind(load: Load) -> str:
    return load.compute.device.partition(":")[0]


def _describe(infos: Sequence[ModelInfo]) -> ModelInfo:
    """Describe the engines as one model. Every engine has at least `max_context` and `n_blocks` for one request."""
    first = infos[0]
    engine = replace(
        first.engine,
        max_context=min(info.max_context for info in infos),
        n_blocks=min(info.engine.n_blocks for info in infos),
    )
    return msgspec.structs.replace(
        first,
        engine=engine,
        num_replicas=len(infos),
        device=",".join(dict.fromkeys(info.device for info in infos)),
        weights_bytes=sum(info.weights_bytes for info in infos),
        kv_cache_bytes=sum(info.kv_cache_bytes for info in infos),
    )
