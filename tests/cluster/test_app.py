"""Options of a cluster, its autoscaling, and what an environment without Ray says."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from llm_worker_rbee import LLM
from llm_worker_rbee.cluster import app
from llm_worker_rbee.cluster.app import (
    ClusterOptions,
    choose_resources,
    find_required_key,
    open_text_model,
    scale_by_load,
    split_arguments,
)
from llm_worker_rbee.config import LoadOptions
from llm_worker_rbee.errors import InvalidRequestError

from .conftest import Cluster, until
from .streams import bodies, read_all

USER = {"role": "user", "content": "hi"}


def test_arguments_may_be_text() -> None:
    given = {"engines": "2", "model": "smollm2", "threads": "4", "kv_memory": "1GiB", "max_queue": "8",
             "allowed_hosts": ["a.example"], "prefix_cache": "false"}  # fmt: skip
    options, server, model = split_arguments(given)
    assert options == ClusterOptions(engines=2)
    assert server == {"max_queue": 8, "allowed_hosts": ("a.example",)}
    assert model == LoadOptions(model="smollm2", threads=4, kv_memory=1 << 30, prefix_cache=False)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"engine": "2"}, "unknown option 'engine'"),
        ({"engines": "two"}, "engines"),
        ({"max_batch": "0"}, "max_batch is 0"),
        ({"kv_memory": "much"}, "much"),
    ],
)
def test_bad_arguments_are_named(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        split_arguments(given)


@pytest.mark.parametrize(
    ("given", "gpus", "device", "num_cpus", "num_gpus"),
    [
        ({"threads": 4}, None, "cpu", 4, 0.0),
        ({"device": "cpu", "threads": 4}, None, "cpu", 4, 0.0),
        ({"backend": "reference"}, None, "cpu", 1, 0.0),
        ({"device": "cuda"}, None, "cuda", 1, 1.0),
        ({"device": "cuda"}, 0.5, "cuda", 1, 0.5),
        ({"backend": "cuda"}, None, "cuda", 1, 1.0),
        ({}, 1.0, "cuda", 1, 1.0),
    ],
)
def test_ray_reserves_what_an_engine_uses(
    given: dict[str, Any], gpus: float | None, device: str, num_cpus: int, num_gpus: float
) -> None:
    _, _, model = split_arguments(given)
    assert choose_resources(model, gpus) == (device, {"num_cpus": num_cpus, "num_gpus": num_gpus})


@pytest.mark.parametrize("given", [{}, {"device": "cpu"}, {"backend": "cpu"}])
def test_engine_without_device_or_threads_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="device=cuda for a GPU each, or threads=N"):
        app(given)


def test_front_needs_a_key_unless_told_otherwise(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"api_key_file or LLM_WORKER_API_KEY .* keyless=true"):
        find_required_key(ClusterOptions(), {})
    assert find_required_key(ClusterOptions(keyless=True), {}) is None
    file = tmp_path / "key"
    file.write_text("secret")
    for key in (
        find_required_key(ClusterOptions(api_key_file=str(file)), {}),
        find_required_key(ClusterOptions(keyless=True), {"LLM_WORKER_API_KEY": "secret"}),
    ):
        assert key is not None
        assert key.value == "secret"


def test_broken_chat_template_is_refused(llm: LLM, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ nothing.of.it }}")
    with pytest.raises(InvalidRequestError, match=f"^chat_template {file} cannot be used: .*'nothing' is undefined"):
        open_text_model(str(model), str(file), llm.info)
    file.write_text("{{ messages[0].content }}")
    assert open_text_model(str(model), str(file), llm.info).apply_chat_template([USER]) == "hi"


@pytest.mark.parametrize(
    ("loads", "wanted"), [({}, 3), ({"a": 0.0}, 0), ({"a": 0.4, "b": 0.5}, 1), ({"a": 0.6, "b": 0.5}, 2)]
)
def test_replicas_follow_the_sum_of_loads(loads: dict[str, float], wanted: int) -> None:
    context = SimpleNamespace(aggregated_metrics={"load": loads} if loads else {}, target_num_replicas=3)
    assert scale_by_load(context) == (wanted, {})


def test_example_file_is_valid() -> None:
    text = (Path(__file__).parents[2] / "examples" / "ray-serve.yaml").read_text()
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    options, _, model = split_arguments(application.args)
    assert (application.import_path, options.max_engines, model.device) == ("llm_worker_rbee.cluster:app", 8, "cuda")


def test_error_without_ray_names_the_extra() -> None:
    code = "import sys; sys.modules['ray'] = None; import llm_worker_rbee; import llm_worker_rbee.cluster"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install 'llm-worker-rbee[ray]'" in done.stderr.splitlines()[-1]


def test_waiting_tokens_start_another_engine(ray_url: str, model: Path, texts: list[str]) -> None:
    options = {"engines": 1, "max_engines": 2, "max_batch": 2, "target_waiting_tokens": 16, "upscale_delay_s": 0}
    cluster = Cluster(ray_url, model, **options)
    cluster.deploy()
    try:
        assert asyncio.run(read_all(cluster.url, bodies(), lambda: None)) == texts
        until(lambda: cluster.num_running() == 2)
    finally:
        cluster.delete()
