"""All kernels, one model's kernels, and loading them before use: from disk, or compiled by several processes.

Numba compiles one kernel at a time in a process, so helper processes share the work: each starts with its share, then
walks backwards through the shares of the others, and skips what is cached by then. Kernels with parts in common are in
one share: a part is compiled once in a process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

from ... import machine
from ...config import KV_DEFAULT, AttentionSpec, ModelConfig
from ...pipe_process import PipeProcess, package_command
from ...weights import Checkpoint
from .. import cpu_info
from ..kernel_folder import CACHE_VARIABLE
from ..ops import COMPILING, KV_TYPES, Progress
from . import repack
from .jit import NativeKernel, compiler
from .kernels import program
from .kernels.attention import attention_kernels, split_work_kernel
from .kernels.matmul.linear import linear_kernel
from .kernels.rope import rope_store_kernel
from .packed_weight import LAYOUT_BY_TYPE

# Modules whose kernels every model needs that generates, and every encoder: kept under names of their own, in a tuple
# or in a table.
COMMON_MODULES, ENCODER_MODULES = ("elementwise", "rope", "sampling"), ("elementwise", "rope", "encoder")
HEADS_PER_KV_HEAD = (1, 2, 3, 4, 5, 6, 7, 8)  # of known models
MATRICES_OF_ONE_ROW = "ffn_gate_inp_shexp.weight"  # vectors in files
KERNELS_PER_HELPER = 4  # fewer are compiled before a helper has started
MAX_HELPERS = 7
# About what the kernels of a module take to compile, to make shares of one length; others take 0.7 s.
SECONDS_PER_KERNEL = {"attention": 2.6, "linear": 2.2, "repack": 2.7, "gated_delta": 3.0, "program": 0.25}
HELPER_START_SECONDS = 1.2
HELPER = f"import numba; from {__name__} import run_helper; run_helper(0)"
LAST_PRIORITY = HELPER.replace("0", "19")
LATER = "sampling.drawn_task", "sampling.penalized_task", "sampling.logprobs_task"  # until then: the reference
# Kernels of the common modules that some families need
NEEDED_BY: dict[str, Callable[[AttentionSpec], object]] = {
    "elementwise.head_norms": lambda attention: attention.qk_norm,
    "elementwise.sigmoid_gate": lambda attention: attention.gated,
}


def all_kernels() -> list[NativeKernel]:
    """Return every kernel of any known model."""
    kernels = _kernels_for(LAYOUT_BY_TYPE, HEADS_PER_KV_HEAD, KV_TYPES)
    modules = "encoder", "experts", "per_layer_inputs", "causal_conv", "gated_delta", "lora"
    return kernels + [kernel for name in modules for kernel in _kernels_of(name)]


def model_kernels(checkpoint: Checkpoint, config: ModelConfig, kv_type: str = KV_DEFAULT) -> list[NativeKernel]:
    """Return the kernels that a model needs."""
    tensors = checkpoint.tensors.values()
    types = {t.kind.name for t in tensors if len(t.shape) >= 2 or t.name.endswith(MATRICES_OF_ONE_ROW)}
    if not (config.family.gguf or config.family.hf):  # a vision tower, which packs some matrices as float32
        types |= {"F32"}
    groups = sorted({config.n_heads // config.kv_shape(i)[0] for i in range(config.n_layers)})
    layouts = sorted(types & LAYOUT_BY_TYPE.keys())
    # a causal model may pool too: kernels of means and activations are then compiled when first used
    generates = config.causal and not config.family.is_encoder
    kernels = _kernels_for(layouts, groups, [kv_type], COMMON_MODULES if generates else ENCODER_MODULES)
    modules = ["experts"] if config.experts is not None else []
    modules += ["per_layer_inputs"] if config.layer_input_dim else []
    modules += ["causal_conv"] if config.state_bytes else []
    modules += ["gated_delta"] if config.linear is not None else []
    kernels += [kernel for name in modules for kernel in _kernels_of(name)]
    attention = config.family.attention
    return [kernel for kernel in kernels if kernel.name not in NEEDED_BY or NEEDED_BY[kernel.name](attention)]


def _kernels_for(
    types: Collection[str], groups: Collection[int], kv_types: Collection[str], modules: Sequence[str] = COMMON_MODULES
) -> list[NativeKernel]:
    """Return the kernels for matrices of these quantization types, heads per KV head and KV types, and of modules."""
    kernels = _common_kernels(modules)
    kernels += map(repack.kernel_for, types)
    kernels += [linear_kernel(LAYOUT_BY_TYPE[name]) for name in types]
    for kv_type, group in product(kv_types, groups):
        kernels += split_work_kernel(group), rope_store_kernel(kv_type), *attention_kernels(group, kv_type)
    return list({kernel.name: kernel for kernel in kernels}.values())


def _common_kernels(modules: Sequence[str]) -> list[NativeKernel]:
    own = [kernel for name in modules for kernel in _kernels_of(name)]
    return [program.WORKER_LOOP, program.POOL_LOOP, program.RUN_REGION, *own]


def _kernels_of(name: str) -> list[NativeKernel]:
    module = importlib.import_module(f"{__package__}.kernels.{name}")
    return [kernel for value in list(vars(module).values()) for kernel in _kernels_in(value)]


def _kernels_in(value: Any) -> Iterable[NativeKernel]:
    if isinstance(value, NativeKernel):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    return [item for item in inner if isinstance(item, NativeKernel)]


def load_kernels(kernels: Sequence[NativeKernel], progress: Progress | None = None, *, defers_some: bool = True) -> int:
    """Load these, compiling missing ones; return the number compiled.

    With `defers_some` a process of the lowest priority compiles `LATER`. It ends when it has, or a worker that
    answers one short prompt after the other would never have them.
    """
    missing = [kernel for kernel in kernels if not kernel.is_cached]
    later = [kernel for kernel in missing if defers_some and kernel.name in LATER]
    missing = [kernel for kernel in missing if kernel not in later]
    report = progress or (lambda what, done, total: None)
    helpers = min(cpu_info.choose_thread_count() - 1, MAX_HELPERS, len(missing) // KERNELS_PER_HELPER)
    own, *others = _work_orders(missing, 1 + helpers)
    with _helper_processes(others), machine.without_collection():
        for kernel in own:
            report(COMPILING, sum(item.is_cached for item in missing), len(missing))
            if not kernel.is_cached:
                kernel.load()
    if missing:
        report(COMPILING, len(missing), len(missing))
    for kernel in kernels:
        if kernel not in later:
            kernel.load()
    process = next(iter(_start_helpers([later], LAST_PRIORITY) if later else ()), None)
    for kernel in later:
        kernel.compiled_by = process
        if process is None:  # none can be started, or nothing be kept: now, and not under a request
            kernel.load()
    machine.release_code("libllvmlite")
    return len(missing)


def split_work(missing: Sequence[NativeKernel], processes: int) -> list[list[NativeKernel]]:
    """Return the share of each process, of about one length."""
    groups: dict[str, list[NativeKernel]] = {}
    for kernel in missing:
        groups.setdefault(kernel.name.partition(".")[0], []).append(kernel)
    shares: list[list[NativeKernel]] = [[] for _ in range(processes)]
    busy = [0.0] + [HELPER_START_SECONDS] * (processes - 1)
    fair = _seconds(missing) / processes
    parts = [
        group[i::count]
        for group in groups.values()
        for count in [1 + int(_seconds(group) / (fair + 1))]
        for i in range(count)
    ]
    for part in sorted(parts, key=_seconds, reverse=True):
        first_free = busy.index(min(busy))
        shares[first_free] += part
        busy[first_free] += _seconds(part)
    return shares


def _seconds(kernels: Sequence[NativeKernel]) -> float:
    """Return about how long kernels take to compile."""
    return sum(SECONDS_PER_KERNEL.get(kernel.name.partition(".")[0], 0.7) for kernel in kernels)


def _work_orders(missing: Sequence[NativeKernel], processes: int) -> list[list[NativeKernel]]:
    """Return the order in which each process goes through the kernels, so that two seldom meet at one."""
    shares = split_work(missing, processes)
    return [
        shares[i] + [kernel for j in range(1, processes) for kernel in reversed(shares[(i + j) % processes])]
        for i in range(processes)
    ]


@contextmanager
def _helper_processes(orders: Sequence[Sequence[NativeKernel]]) -> Iterator[None]:
    """Run helper processes for as long as the block lasts."""
    processes = _start_helpers(orders, HELPER)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.stop()


def _start_helpers(orders: Sequence[Sequence[NativeKernel]], program: str) -> list[PipeProcess]:
    """Start a process for each order, which compiles its kernels into the folder of this one."""
    started: list[PipeProcess] = []
    folder = compiler.cache_dir() if orders else None
    if folder is not None and sys.executable:
        with suppress(OSError):  # no more processes may be started: it only takes longer
            for order in orders:
                command = package_command(program, ends_with_parent=program == HELPER)
                started.append(PipeProcess(command, {CACHE_VARIABLE: str(folder.parent)}))
                names = json.dumps([kernel.name for kernel in order]).encode()
                started[-1].write(names + b"\n", time.monotonic() + HELPER_START_SECONDS)
    return started


def run_helper(niceness: int) -> None:
    """Compile the kernels that standard input names, except those cached by then."""
    gc.disable()
    os.nice(niceness)
    kernels = {kernel.name: kernel for kernel in all_kernels()}
    for name in json.loads(sys.stdin.readline()):
        if name in kernels and not kernels[name].is_cached:
            kernels[name].load()
