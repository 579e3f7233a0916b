"""Micro-benchmarks: ops, the scheduler, the default model's file; on one backend, or on two in turn, against the limit.

`suite` are the benchmarks of the Rust worker. A case that needs a function beyond the op table and `op_parts` runs on
the reference. `Work` is the least that an ideal implementation would read, write and compute. On a GPU a sample is the
replay of a CUDA graph of many calls, as steps are replayed there, until the device has finished.
"""

from .. import ROUNDS
from .cases import D_FF, HEAD_DIM, HEADS, HIDDEN, ROPE_BASE, Case, consecutive_batch, rope_table
from .components import DecodingScheduler, model_file_cases, scheduler_cases
from .kernels import KERNEL, kernel_cases
from .ops import WEIGHT_TYPES, op_cases
from .runner import compare_backends, quietest_rounds, rename, run, select
from .suite import suite_cases
from .timing import Function, Measurement, TimingPlan, calibrate, measure, round_plan, seconds_per_call

__all__ = [
    "D_FF", "HEADS", "HEAD_DIM", "HIDDEN", "KERNEL", "ROPE_BASE", "ROUNDS", "WEIGHT_TYPES", "Case", "DecodingScheduler",
    "Function", "Measurement", "TimingPlan", "calibrate", "compare_backends", "consecutive_batch", "kernel_cases",
    "measure", "model_file_cases", "op_cases", "quietest_rounds", "rename", "rope_table", "round_plan", "run",
    "scheduler_cases", "seconds_per_call", "select", "suite_cases",
]  # fmt: skip
