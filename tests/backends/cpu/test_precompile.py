"""Which kernels a model needs, and how processes share them out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llm_worker_rbee.backends.cpu import CpuBackend, precompile
from llm_worker_rbee.backends.cpu.forward import CpuForward
from llm_worker_rbee.backends.cpu.jit import TaskKernel
from llm_worker_rbee.backends.cpu.kernels import sampling
from llm_worker_rbee.models import load_model, read_model_config
from llm_worker_rbee.models.convert.mmproj import convert_projector
from llm_worker_rbee.models.vision import load_vision_tower
from llm_worker_rbee.models.vision_config import read_vision_config
from llm_worker_rbee.pipe_process import PipeProcess
from llm_worker_rbee.weights import open_checkpoint
from llm_worker_rbee.weights.vision_names import open_projector
from tests.helpers import model_zoo, tiny_vision

FAMILIES = (
    "gemma3", "ministral3", "qwen2moe", "glm4moe", "gpt-oss", "lfm2", "lfm2moe", "qwen3_5", "qwen3_next", "gemma4",
    "gemma4-e", "gemma4-moe",
)  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_work_orders_keep_kernels_with_common_parts_in_one_process(processes: int) -> None:
    kernels = precompile._kernels_for(["Q4_1", "Q6_K"], [3], ["float16"])
    orders = precompile._work_orders(kernels, processes)
    assert len(orders) == processes
    assert all(sorted(one.name for one in order) == sorted(one.name for one in kernels) for order in orders)
    own = len(kernels) // processes  # about: what others have left comes after that
    firsts = [{kernel.name.partition(".")[0] for kernel in order[: own // 2]} for order in orders]
    assert all(not one & other for i, one in enumerate(firsts) for other in firsts[:i])
    for order in orders:
        places = [i for i, kernel in enumerate(order) if kernel.name.startswith("sampling")]
        assert places == list(range(places[0], places[0] + 4))


def test_kernels_for_later_are_compiled_at_once_where_no_process_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a request they would hold up its answer."""
    monkeypatch.setattr(precompile.sys, "executable", "")
    loaded: list[str] = []

    class Missing(TaskKernel):
        is_cached = False  # type: ignore[assignment]

        def load(self) -> None:
            loaded.append(self.name)

    kernels = [Missing(sampling.DRAWN.function), Missing(sampling.LOGPROBS.function)]
    precompile.load_kernels(kernels)
    assert loaded == ["sampling.drawn_task", "sampling.logprobs_task"]
    assert not any(kernel.is_compiling for kernel in kernels)
    monkeypatch.undo()
    kernels[0].compiled_by = PipeProcess([sys.executable, "-c", "input()"])
    assert kernels[0].is_compiling
    kernels[0].compiled_by.stop()
    assert kernels[0].is_compiling  # it was killed before it had compiled: the reference goes on


@pytest.mark.parametrize("name", FAMILIES)
def test_model_kernels_are_all_that_a_step_runs(name: str, tmp_path: Path) -> None:
    """So nothing is compiled by the first request; helper processes know each of them."""
    variant = model_zoo.ZOO[name]
    path = tmp_path / "model.gguf"
    model_zoo.save_quantized(variant, model_zoo.make_hf(variant), path, "Q8_0")
    checkpoint = open_checkpoint(path)
    config = read_model_config(checkpoint)
    forward = CpuForward(load_model(checkpoint, CpuBackend(), config).graph(), threads=2)
    for kv_type in ("float16", "int8"):
        tasks = [task for part in forward._lower(kv_type).parts if isinstance(part.work, list) for task in part.work]
        needed = {kernel.name for task in tasks for kernel in (task.kernel, task.callee) if kernel is not None}
        listed = {kernel.name for kernel in precompile.model_kernels(checkpoint, config, kv_type)}
        assert needed <= listed
        assert listed <= {kernel.name for kernel in precompile.all_kernels()}


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "mistral3", "gemma4", "gemma4_e"])
def test_kernels_of_a_tower_and_of_steps_with_images_are_known(name: str, tmp_path: Path) -> None:
    folder, path = tiny_vision.save_model(name, tmp_path / name), tmp_path / "mmproj-F16.gguf"
    convert_projector(open_projector(folder), path, "F16")
    projector, checkpoint, ops = open_projector(path), open_checkpoint(folder), CpuBackend(threads=2)
    vision, config = read_vision_config(projector), read_model_config(checkpoint)
    tower = load_vision_tower(projector, ops, "float32")
    model = load_model(checkpoint, ops, config, image_parts=tower.row_width // config.d_model)
    known = {kernel.name for kernel in precompile.model_kernels(projector, vision.model, "float32")}
    assert isinstance(tower.fused, CpuForward)
    assert isinstance(model.fused_images, CpuForward)
    assert {kernel for line in tower.fused.program("float32") for kernel in line.runs.split(", ")} <= known
    known |= {kernel.name for kernel in precompile.model_kernels(checkpoint, config, "float32")}
    assert {kernel for line in model.fused_images.program("float32") for kernel in line.runs.split(", ")} <= known
