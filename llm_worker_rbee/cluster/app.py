"""The application of a cluster: two deployments of Ray Serve and their options.

`app` takes one flat table of arguments, from `serve run llm_worker_rbee.cluster:app NAME=VALUE ...` or the `args` of a
YAML file: the fields of `ClusterOptions` and `ServerSettings`, and the arguments of `LLM`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from ..config import LoadOptions, parse_size
from ..errors import InvalidRequestError
from ..server import log
from ..server.app import application
from ..server.model_source import fixed_front, open_text
from ..server.settings import VARIABLES, Key, ServerSettings, find_key
from ..text_model import TextModel
from ..token_engine.protocol import ModelInfo
from ..weights.hub import DEFAULT_MODEL, locate_model
from . import reports
from .engine import Engine
from .ray_engine import RayEngine
from .router import PrefixRouter

MAX_ONGOING_REQUESTS = 10_000  # of a replica: fronts refuse requests by the rules of `serve`, engines queue them
TARGET_CPU = 0.7  # of a core that a front uses
SERVER_SETTINGS = {field.name for field in fields(ServerSettings)} - {"api_key", "model_ref"}


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The number of replicas, and the resources of each."""

    engines: int = 1
    max_engines: int = 0  # 0: no autoscaling
    target_waiting_tokens: int = 8192  # prompt tokens that wait for prefill, for one more engine
    fronts: int = 1
    max_fronts: int = 0
    gpus: float | None = None  # of an engine; one with device cuda
    engine_restarts: int = 5  # of the child process of an engine, in a minute
    restart_on_stall: bool = False  # also restart a child process that makes no step for `stall_timeout_s`
    drain_timeout_s: float = 120.0  # for the requests of a replica that is stopped
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 600.0
    api_key_file: str | None = None
    keyless: bool = False  # serve without a key where none is found
    chat_template: str | None = None  # a Jinja file
    null_step_ms: float | None = None  # replace the model by a fixed text whose steps take so long


def app(arguments: dict[str, Any]) -> Application:
    """Return the application for arguments whose values may be text."""
    own, server, model = split_arguments(arguments)
    device, resources = choose_resources(model, own.gpus)
    settings = ServerSettings(model_ref=model.model or DEFAULT_MODEL, **server)
    common = {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "graceful_shutdown_timeout_s": own.drain_timeout_s,
        "logging_config": LoggingConfig(enable_access_log=False),  # the front logs requests itself
    }
    engine = serve.deployment(
        Engine,
        ray_actor_options=resources,
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=reports.INTERVAL_S
        ),
        **_replicas(own.engines, own.max_engines, own),
        **common,
    )
    front = serve.deployment(
        Front, ray_actor_options={"num_cpus": 0}, **_replicas(own.fronts, own.max_fronts, own), **common
    )  # it reserves nothing: engines may take all cores of a machine
    dummy_step_s = None if own.null_step_ms is None else own.null_step_ms / 1000
    engines = engine.bind(
        replace(model, device=device),
        target_waiting_tokens=own.target_waiting_tokens,
        restart_on_stall=own.restart_on_stall,
        max_restarts=own.engine_restarts,
        stall_timeout_s=settings.stall_timeout_s,
        dummy_step_s=dummy_step_s,
    )
    return front.bind(engines, model.model, server, own)


@serve.ingress()
class Front:
    """The HTTP application of `serve`, with tokenizer and template, for the engines of a cluster."""

    def __init__(
        self, engines: DeploymentHandle, model: str | None, settings: dict[str, Any], options: ClusterOptions
    ) -> None:
        log.set_up(os.environ)
        key = find_required_key(options, os.environ)
        api_key = None if key is None else key.value
        server = ServerSettings(model_ref=model or DEFAULT_MODEL, api_key=api_key, **settings)
        self._worker = fixed_front(server, RayEngine(engines), partial(open_text_model, model, options.chat_template))
        self._cpu_clock = time.monotonic(), time.process_time()

    def __serve_build_asgi_app__(self) -> Any:
        return application(self._worker)

    def check_health(self) -> None:
        """Raise if the text side of the model could not be loaded."""
        if self._worker.failure is not None:
            raise self._worker.failure

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of fronts that this one's CPU time calls for."""
        before, self._cpu_clock = self._cpu_clock, (time.monotonic(), time.process_time())
        wall, cpu = (now - then for now, then in zip(self._cpu_clock, before, strict=True))
        return {"load": cpu / max(wall, 1e-3) / TARGET_CPU}


def find_required_key(options: ClusterOptions, environment: Mapping[str, str]) -> Key | None:
    """Return the key of a front; raise if there is none and `keyless` does not allow that.

    A front does not know who reaches it: where it listens is a setting of Ray; behind HAProxy that is every address.
    """
    key = find_key(None if options.api_key_file is None else Path(options.api_key_file), environment)
    if key is None and not options.keyless:
        raise InvalidRequestError(
            f"there is no API key: give one with api_key_file or {VARIABLES[0]} on the machines of fronts, or "
            "keyless=true where only trusted clients reach them",
            "api_key",
        )
    return key


def open_text_model(model: str | None, template_path: str | None, info: ModelInfo) -> TextModel:
    """Open tokenizer, sampling defaults and chat template; raise if a given template cannot be used."""
    template = None if template_path is None else Path(template_path).read_text(encoding="utf-8")
    text = open_text(locate_model(model), template, None if template_path is None else f"chat_template {template_path}")
    text.max_context = info.max_context
    return text


def choose_resources(model: LoadOptions, gpus: float | None) -> tuple[str, dict[str, float]]:
    """Return the device of an engine and what Ray reserves for it: a GPU, or as many CPUs as it has threads.

    The arguments must say which: this runs before Ray is started, and on a machine that may differ from the engines'.
    """
    threads, device, backend = model.threads, model.device, model.backend
    if device == "auto":
        device = "cuda" if gpus or backend == "cuda" else "cpu"
    is_gpu = device.startswith("cuda")
    if not is_gpu and threads is None and backend != "reference":  # Ray sets the threads of NumPy to `num_cpus`
        raise InvalidRequestError(
            "say what an engine computes on: device=cuda for a GPU each, or threads=N for N CPU cores each", "device"
        )
    return device, {"num_cpus": threads or 1, "num_gpus": float(is_gpu) if gpus is None else gpus}


def split_arguments(arguments: Mapping[str, Any]) -> tuple[ClusterOptions, dict[str, Any], LoadOptions]:
    """Return the options of the cluster, of the server and of the model; raise on any other argument."""
    plain = {name: _read_value(value) for name, value in arguments.items()}
    server = {name: plain.pop(name) for name in SERVER_SETTINGS & plain.keys()}
    for name, value in server.items():
        if isinstance(value, list):
            server[name] = tuple(value)
    own = {name: plain.pop(name) for name in ClusterOptions.__struct_fields__ if name in plain}
    try:
        options = msgspec.convert(own, ClusterOptions)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"arguments of the cluster: {error}") from None
    if isinstance(size := plain.get("kv_memory"), str):
        plain["kv_memory"] = parse_size(size)
    return options, server, LoadOptions.from_arguments(plain)


def _read_value(value: Any) -> Any:
    """Return the value of a text as JSON (4, true, null); other text as it is."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return value


def _replicas(lowest: int, highest: int, options: ClusterOptions) -> dict[str, Any]:
    """Return the number of replicas of a deployment, or the bounds of its autoscaling."""
    if highest <= lowest:
        return {"num_replicas": lowest}
    config = AutoscalingConfig(
        min_replicas=lowest,
        max_replicas=highest,
        upscale_delay_s=options.upscale_delay_s,
        downscale_delay_s=options.downscale_delay_s,
        look_back_period_s=options.upscale_delay_s or 1.0,
        policy=AutoscalingPolicy(policy_function=scale_by_load),
    )
    return {"autoscaling_config": config}


def scale_by_load(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for the reported `load` of all of them; Ray applies bounds and delays."""
    loads = (context.aggregated_metrics or {}).get("load", {})
    return (math.ceil(sum(loads.values())) if loads else context.target_num_replicas), {}
