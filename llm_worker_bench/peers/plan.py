"""The compared rows, each a model file with its lengths, suites of rows, and estimates of their time.

Files of rows are made here: the default model in other types, and synthetic models. Files of real models are taken from
the folder LLM_WORKER_REAL_MODELS, or from `real-models` in the cache folder; a row without its file fails by name.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from llm_worker_rbee.config import ModelConfig
from llm_worker_rbee.errors import InvalidRequestError, ModelFileError
from llm_worker_rbee.models import read_model_config
from llm_worker_rbee.models.convert import convert
from llm_worker_rbee.progress import StepProgress
from llm_worker_rbee.weights import Checkpoint, open_checkpoint
from llm_worker_rbee.weights.hub.cache_dir import cache_dir

from .. import synthetic
from ..engine_harness import encode_bundled_prompts
from ..results import describe_model
from ..roofline import Limits
from .programs import LLAMA_BENCH, LLAMA_SERVER, Task

# Packages that a peer needs; gguf only for a GGUF file.
PACKAGES = {
    "llama-cpp-python": ("llama_cpp",),
    "transformers": ("transformers", "torch", "gguf"),
    "mistral.rs": ("mistralrs",),
    "vllm": ("vllm",),
}
NAMES = (LLAMA_BENCH, *PACKAGES, LLAMA_SERVER)
# For estimates of time: a run takes about so many times the least time, a process starts, files are written and read.
DEFAULT_SHAPE = "smollm2-135m:Q4_1"  # of the default model, where its file is not needed yet
TIMES_LIMIT, START_S, WRITE_RATE, READ_RATE = 2.5, 3.0, 1e8, 1e9


class Row(NamedTuple):
    """A model file, or how to make it, and the lengths to compare."""

    name: str
    pp: Sequence[int] = (512,)
    tg: Sequence[int] = (128,)
    batches: Sequence[int] = (1,)
    model: Path | None = None
    synthetic: str = ""  # shape:types:layers, instead of a model
    converted: str = ""  # the type that the model is converted to
    real: str = ""  # the name of a real model's file, instead of a model


MIXES_7B = ("Q4_K_M", "Q4_0", "Q8_0")
FAMILY_MIXES = ("Q4_K_M", "Q8_0")
FAMILY_SHAPES = {  # four layers, of Gemma 4 six, so that one has no window; at most 16 experts
    "qwen3-moe": "qwen3-30b-a3b:{}:4:16",
    "gpt-oss": "gpt-oss-20b:{}:4:16",
    "lfm2": "lfm2-2.6b:{}:4",
    "qwen3.5": "qwen3.5-9b:{}:4",
    "gemma4": "gemma4-12b:{}:6",
    "mistral3": "ministral3-8b:{}:4",
}
CODER = "qwen2.5-coder-{}-instruct-q4_k_m.gguf"
SUITES: dict[str, tuple[Row, ...]] = {
    "cpu": (
        Row("default"),
        Row("q4_0", converted="Q4_0"),
        Row("q8_0", converted="Q8_0"),
        *(Row(f"7b-{mix.lower()}", (128,), (32,), synthetic=f"llama2-7b:{mix}:4") for mix in MIXES_7B),
        Row("long", (4096,), ()),
        Row("requests", (), (128,), (16,)),
        *(Row(f"coder-{size}", (512, 4096), (128,), (1, 8), real=CODER.format(size)) for size in ("0.5b", "1.5b")),
    ),
    "families": tuple(
        Row(f"{name}-{mix.lower()}", (128,), (32,), synthetic=shape.format(mix))
        for name, shape in FAMILY_SHAPES.items()
        for mix in FAMILY_MIXES
    ),
}


def select_rows(suite: str, pattern: str | None) -> list[Row]:
    """Return the rows of a suite whose name matches the regular expression; raise if there is none."""
    if suite not in SUITES:
        raise InvalidRequestError(f"unknown suite {suite!r}: use one of {', '.join(SUITES)}", "suite")
    try:
        rows = [row for row in SUITES[suite] if re.search(pattern or "", row.name)]
    except re.error as error:
        raise InvalidRequestError(f"--rows {pattern!r} is not a regular expression: {error}", "rows") from None
    if not rows:
        names = ", ".join(row.name for row in SUITES[suite])
        raise InvalidRequestError(f"--rows {pattern!r} matches no row (there are {names})", "rows")
    return rows


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows to compare, and the peers."""

    pp: Sequence[int] = (512,)
    tg: Sequence[int] = (128,)
    batches: Sequence[int] = (1,)  # above 1: so many answers at once, of tg tokens each
    repetitions: int = 3
    threads: int = 1
    peers: Sequence[str] = NAMES
    llama_bench: str | None = None  # path; None: search the PATH
    llama_server: str | None = None  # path; None: search the PATH
    llama_bench_args: Sequence[str] = ()  # llama-bench once more with each of these
    benches: Mapping[str, str] = field(default_factory=dict)  # further llama-bench programs: name, path
    pythons: Sequence[str] = ()  # interpreters to search for packages, before this one
    timeout_s: float = 900.0  # of one reply
    device: str = "auto"
    backend: str = "auto"

    def __post_init__(self) -> None:
        named = next((name for name in self.benches if name in (*NAMES, "") or "/" in name), None)
        if named is not None:
            raise InvalidRequestError(f"--peer {named}=PATH: give a llama-bench a name of its own, without /", "peer")
        unknown = sorted(set(self.peers) - set(NAMES))
        if unknown:
            raise InvalidRequestError(f"unknown peer {unknown[0]!r}: use some of {', '.join(NAMES)}", "peer")

    @property
    def parallel_batches(self) -> list[int]:
        return [batch for batch in dict.fromkeys(self.batches) if batch > 1 and any(self.tg)]

    def tasks(self, checkpoint: Checkpoint) -> list[Task]:
        """Return the tasks in the order of the table."""
        parts = (("pp", self.pp), ("tg", self.tg)) if 1 in self.batches else ()
        single = [Task(kind, n) for kind, lengths in parts for n in dict.fromkeys(lengths) if n]
        batches = self.parallel_batches
        prompts = tuple(map(tuple, encode_bundled_prompts(checkpoint, max(batches)))) if batches else ()
        return single + [Task("tg", n, prompts[:batch]) for batch in batches for n in dict.fromkeys(self.tg) if n]

    def for_row(self, row: Row) -> Plan:
        """Return the plan with the lengths of a row."""
        return replace(self, pp=row.pp, tg=row.tg, batches=row.batches)

    @property
    def is_on_gpu(self) -> bool:
        return self.backend == "cuda" or self.device.startswith("cuda")

    @property
    def is_on_cpu(self) -> bool:
        return self.backend in ("auto", "cpu") and not self.is_on_gpu


def make_file(row: Row, folder: Path, progress: StepProgress) -> Path:
    """Return the file of a row; one that has to be made is written to the folder, unless it is there."""
    if row.synthetic:
        spec = synthetic.parse(row.synthetic)
        path = folder / f"{str(spec).replace(':', '-')}.gguf"
        return path if path.exists() else synthetic.write(spec, path, progress=progress)
    source = find_real_file(row.real) if row.real else row.model
    assert source is not None
    if not row.converted:
        return source
    digest = describe_model(source, progress)["sha256"][:8]  # two files may have one name
    path = folder / f"{source.stem}-{digest}-as-{row.converted}.gguf"
    if not path.exists():
        show = lambda what, done, total: progress(what, done, total or 0)  # noqa: E731
        convert(open_checkpoint(source), path, row.converted, progress=show)
    return path


def real_folders() -> list[Path]:
    """Return where files of real models may be."""
    named = os.environ.get("LLM_WORKER_REAL_MODELS")
    return [*([Path(named)] if named else []), cache_dir() / "real-models"]


def find_real_file(name: str) -> Path:
    """Return the path of a real model's file; raise if it is nowhere."""
    path = next((path for folder in real_folders() if (path := folder / name).is_file()), None)
    if path is None:
        raise ModelFileError(f"{name} is not in {real_folders()[0]}: `python -m tests.real.models` fetches it")
    return path


class Size(NamedTuple):
    """The quantities that determine the time of a run."""

    values: int  # of all matrices
    bytes: int
    config: ModelConfig


def size_of(row: Row) -> Size:
    """Return the size of a row's model before any conversion; a synthetic model need not be written yet."""
    path = row.model
    if row.real:
        with suppress(ModelFileError):  # its row will be left out: any size serves
            path = find_real_file(row.real)
    if path is not None:
        checkpoint = open_checkpoint(path)
        values = sum(tensor.size for tensor in checkpoint.tensors.values())
        return Size(values, checkpoint.nbytes, read_model_config(checkpoint))
    spec = synthetic.parse(row.synthetic or DEFAULT_SHAPE)
    values = sum(prod(plan.shape) for plan in synthetic.plans(spec))
    return Size(values, spec.nbytes, read_model_config(synthetic.without_weights(spec)))


def estimate_seconds(row: Row, plan: Plan, limits: Limits) -> float:
    """Return about how long a row takes with one peer: from the machine's limits, which both sides stay below."""
    size, rounds, tests = size_of(row), plan.repetitions + 1, list(planned_tests(row))
    seconds = sum(_least_seconds(size, *test, limits) for test in tests)
    read = len(tests) * (START_S / 3 + size.bytes / READ_RATE)  # llama-bench loads the model for each of them
    writing = size.bytes / WRITE_RATE if row.synthetic or row.converted else 0.0
    return writing + 2 * START_S + rounds * (2 * TIMES_LIMIT * seconds + read)


def planned_tests(row: Row) -> Iterator[tuple[str, int, int]]:
    """Yield kind, tokens and batch of each test of a row."""
    for batch in dict.fromkeys(row.batches):
        yield from (("pp", n, 1) for n in row.pp if n and batch == 1)
        yield from (("tg", n, batch) for n in row.tg if n)


def _least_seconds(size: Size, kind: str, tokens: int, batch: int, limits: Limits) -> float:
    config = size.config
    if kind == "tg":
        step = max(size.bytes / limits.memory_bandwidth, 2 * size.values * batch / limits.operations)
        return tokens * step
    pairs = 2 * tokens**2 * config.n_layers * config.n_heads * config.head_dim  # causality leaves half of them
    return (2 * size.values * tokens + pairs) / limits.operations


class TimeLeft:
    """Estimates of rows, corrected by how long the finished ones took."""

    def __init__(self, estimates: dict[str, float]) -> None:
        self._left, self._done_s, self._start = dict(estimates), 0.0, time.monotonic()

    def finish(self, row: str) -> float:
        """Return the seconds that are left after a row."""
        self._done_s += self._left.pop(row)
        return sum(self._left.values()) * (time.monotonic() - self._start) / self._done_s
