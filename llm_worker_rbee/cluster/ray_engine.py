"""The front's end of the protocol in a cluster: requests go to replicas of `Engine` through Ray's deployment handle.

A replica or a machine that dies in the middle of a request is survived as an engine's death in `serve`: the request is
submitted again, to whatever replica the router chooses, with the tokens that were delivered. A replica's actor only
passes messages, so its death says little about its requests: one is refused after `MAX_DEATHS` replicas in a row died
while they ran it, without a token in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextvars import Context
from dataclasses import replace
from typing import cast

import grpc
import msgspec
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatus

from ..errors import DeadlineError, EngineCrashError, InferenceError, WorkerError, copy_error, counted
from ..progress import OnStage, Stage
from ..token_engine.protocol import (
    VERSION,
    EngineStats,
    ModelInfo,
    RequestState,
    RequestStream,
    StepResult,
    Submit,
    TokenEngine,
    add_stats,
)
from ..token_engine.routing import prompt_hashes
from ..token_engine.supervisor import DEADLINE_GRACE_S
from ..token_engine.wire import FrameReader, FromEngine, encode
from . import reports
from .reports import EngineReport

MAX_DEATHS = 5
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
WATCH_INTERVAL_S = 1.0
STAGE = "engines"  # of loading: the first replica has loaded the model
logger = logging.getLogger("llm_worker_rbee.server")


class RayEngine(TokenEngine):
    """All replicas of a deployment as one `TokenEngine`."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines
        self._generate = engines.options(method_name="generate", stream=True)
        self._open: dict[int, tuple[RequestStream, asyncio.Task[None]]] = {}  # by the ids of requests
        self._watching: asyncio.Task[None] | None = None
        self._reports: dict[str, EngineReport] = {}  # by replica
        self._ended: dict[str, EngineReport] = {}  # last reports of replicas that are gone: their counters still count
        self._is_complete = True  # no replica is missing

    async def start(self, on_stage: OnStage) -> ModelInfo:
        start = time.perf_counter()
        on_stage(Stage(STAGE, 0, None, 0.0))
        (info,) = FrameReader[ModelInfo](FromEngine).feed(await self._engines.describe.remote())
        self.info = info
        on_stage(Stage(STAGE, 1, 1, time.perf_counter() - start))
        self._watching = asyncio.ensure_future(self._watch())
        return self.info

    def submit(self, request: RequestState) -> RequestStream:
        stream = RequestStream(request, self._abort, asyncio.Event())
        # without the context of the HTTP request, which a job outlives
        self._open[request.id] = stream, asyncio.create_task(self._run(stream), context=Context())
        return stream

    def _abort(self, request: RequestState) -> None:
        _, task = self._open.pop(request.id, (None, None))
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def stop(self, error: WorkerError) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for stream, _ in list(self._open.values()):
            stream.finish_with(copy_error(error))

    @property
    def num_requests(self) -> int:
        return len(self._open)

    async def restart(self) -> None:
        raise InferenceError("Ray restarts its replicas: deploy the application again, or scale it")

    def stats(self) -> EngineStats:
        return add_stats([r.stats for r in self._reports.values()], [r.stats for r in self._ended.values()])

    def status(self) -> str:
        statuses = {report.status for report in self._reports.values()}
        if "healthy" not in statuses:
            return "stalled" if statuses == {"stalled"} else "loading"  # Ray replaces one that has failed
        return "healthy" if self._is_complete and len(statuses) == 1 else "degraded"

    @property
    def last_step_age_s(self) -> float:
        return max((report.last_step_age_s for report in self._reports.values()), default=0.0)

    @property
    def num_restarts(self) -> int:  # type: ignore[override]
        return sum(report.num_restarts for report in (*self._reports.values(), *self._ended.values()))

    @property
    def replicas(self) -> Sequence[TokenEngine]:
        return cast(Sequence[TokenEngine], [ReportedEngine(self.info, report) for report in self._reports.values()])

    async def _watch(self) -> None:
        """Keep what replicas report, and whether Ray misses one."""
        while True:
            self._take_reports(reports.latest)
            try:
                status = await asyncio.to_thread(serve.status)
                deployment = status.applications[self._engines.app_name].deployments[self._engines.deployment_name]
                self._is_complete = deployment.status != DeploymentStatus.UNHEALTHY
            except Exception as error:  # the controller is restarted, or the application is deleted
                self._is_complete = False
                logger.debug("the state of the cluster is not known: %s", error)
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _take_reports(self, latest: dict[str, EngineReport]) -> None:
        for replica in self._reports.keys() - latest.keys():
            self._ended[replica] = msgspec.structs.replace(self._reports[replica], hashes=b"")  # up to 128 KiB
        for replica in latest:
            self._ended.pop(replica, None)  # its report was missing for a while
        self._reports = latest
        self.info = msgspec.structs.replace(self.info, num_replicas=max(1, len(latest)))

    async def _run(self, stream: RequestStream) -> None:
        """Submit a request until it is finished, or its deadline has passed."""
        request, timeout_s = stream.request, stream.request.submitted.timeout_s
        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s + DEADLINE_GRACE_S):
                await self._replay(stream, None if timeout_s is None else time.monotonic() + timeout_s)
        except TimeoutError:
            tokens = counted(len(request.tokens), "output token")
            stream.finish_with(DeadlineError(f"the request timed out after {tokens}"))
        except WorkerError as error:
            stream.finish_with(error)
        except Exception as error:
            logger.exception("a request could not be sent to an engine")
            stream.finish_with(InferenceError(f"the request could not be sent to an engine ({type(error).__name__})"))
        finally:
            self._open.pop(request.id, None)

    async def _replay(self, stream: RequestStream, deadline: float | None) -> None:
        """Submit a request; again, after a pause, whenever its replica is lost."""
        request, num_deaths, num_losses, num_tokens = stream.request, 0, 0, -1
        while True:
            how = await self._generate_once(stream, deadline)
            if request.is_finished:
                return
            if len(request.tokens) > num_tokens:
                num_deaths = num_losses = 0
            num_deaths, num_losses, num_tokens = num_deaths + request.is_running, num_losses + 1, len(request.tokens)
            if num_deaths >= MAX_DEATHS:
                message = f"{MAX_DEATHS} engines in a row died while they ran this request: it is not tried again"
                raise EngineCrashError(message)
            request.is_running, request.num_computed_tokens = False, 0
            request.num_restarts += 1
            pause = min(FIRST_BACKOFF_S * 2 ** (num_losses - 1), MAX_BACKOFF_S)
            logger.warning("an engine was lost (%s): its request goes on in %.1f s", how, pause)
            await asyncio.sleep(pause)

    async def _generate_once(self, stream: RequestStream, deadline: float | None) -> str:
        """Pass the results of one submission to the stream; return how the replica was lost, if it is not finished."""
        request, how = stream.request, "it failed"
        message, hashes = (
            encode(_submission(request, deadline)),
            b"".join(prompt_hashes(request.prompt, self.info.engine, request.submitted.extra_keys)),
        )
        response = self._generate.remote(VERSION, message, hashes, request.num_prompt_tokens)
        reader: FrameReader[StepResult] = FrameReader(FromEngine)
        try:
            async for frame in response:
                for result in reader.feed(frame):
                    for event in result.events:
                        request.num_restarts += event.kind == "admitted" and request.is_running  # inside the replica
                        request.apply(event)
                    for output in result.outputs:
                        stream.put(output)
        except RayTaskError as error:
            raise InferenceError(f"the engine refused the request: {error.cause}") from None
        except (RayError, grpc.RpcError) as error:
            how = type(error).__name__
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            how = "it cancelled the request"
        finally:
            if not request.is_finished:
                response.cancel()
        return how


def _submission(request: RequestState, deadline: float | None) -> Submit:
    """Return the message of a request with the tokens that were delivered."""
    params = request.submitted.params
    if request.prompt_logprobs is not None:  # delivered already
        params = replace(params, prompt_logprobs=False)
    timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
    return msgspec.structs.replace(request.submitted, generated=request.tokens, params=params, timeout_s=timeout_s)


class ReportedEngine:
    """The data of one replica for `/info` and metrics."""

    def __init__(self, info: ModelInfo, report: EngineReport) -> None:
        self.info = msgspec.structs.replace(info, device=report.device)
        self.num_restarts, self.num_requests = report.num_restarts, report.num_requests
        self._report = report

    def status(self) -> str:
        return self._report.status

    def stats(self) -> EngineStats:
        return self._report.stats
