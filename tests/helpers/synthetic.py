"""Models and tensors of random weights, as the benchmarks make them: the one door through which tests of the worker
use them. Tests of the benchmarks import the modules themselves."""

from __future__ import annotations

from llm_worker_bench.synthetic import Plan, Spec, checkpoint, parse, plans, random_tensor, without_weights, write
from llm_worker_bench.synthetic_shapes import Shape

__all__ = ["Plan", "Shape", "Spec", "checkpoint", "parse", "plans", "random_tensor", "without_weights", "write"]
