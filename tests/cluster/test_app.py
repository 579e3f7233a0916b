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

from llm_worker_rbee.cluster.app import ClusterOptions, scale_by_load, split_arguments
from llm_worker_rbee.errors import InvalidRequestError

from .conftest import Cluster, until
from .streams import bodies, read_all


def test_arguments_may_be_text() -> None:
    given = {"engines": "2", "model": "smollm2", "threads": "4", "kv_memory": "1GiB", "max_queue": "8",
             "allowed_hosts": ["a.example"], "prefix_cache": "false"}  # fmt: skip
    options, server, model = split_arguments(given)
    assert options == ClusterOptions(engines=2)
    assert server == {"max_queue": 8, "allowed_hosts": ("a.example",)}
    assert model == {"model": "smollm2", "threads": 4, "kv_memory": 1 << 30, "prefix_cache": False, "device": "auto",
                     "backend": "auto", "kv_type": "auto"}  # fmt: skip


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
    ("loads", "wanted"), [({}, 3), ({"a": 0.0}, 0), ({"a": 0.4, "b": 0.5}, 1), ({"a": 0.6, "b": 0.5}, 2)]
)
def test_replicas_follow_the_sum_of_loads(loads: dict[str, float], wanted: int) -> None:
    context = SimpleNamespace(aggregated_metrics={"load": loads} if loads else {}, target_num_replicas=3)
    assert scale_by_load(context) == (wanted, {})


def test_example_file_is_valid() -> None:
    text = (Path(__file__).parents[2] / "examples" / "ray-serve.yaml").read_text()
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    options, _, model = split_arguments(application.args)
    assert (application.import_path, options.max_engines, model["device"]) == ("llm_worker_rbee.cluster:app", 8, "cuda")


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
