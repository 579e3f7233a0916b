"""Which peers are installed, how each is started for a row, and environments of their own for libraries.

All compute where this worker does: on the CPU with as many threads, or on the GPU.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llm_worker_rbee import machine
from llm_worker_rbee.errors import InvalidRequestError, human_bytes
from llm_worker_rbee.progress import StepProgress
from llm_worker_rbee.weights import Checkpoint
from llm_worker_rbee.weights.hub import cache_dir

from ..processes import describe_exit, library_environment, package_environment
from . import library_child, programs
from .plan import NAMES, PACKAGES, Plan
from .programs import LLAMA_BENCH, LLAMA_SERVER, OURS, LibraryPeer, LlamaBench, Peer, PeerError, Task
from .servers import LlamaServer, WorkerServer

# whether a peer runs tasks of one sequence, of many prompts, or of both
BATCHES: dict[str, tuple[bool, ...]] = {LLAMA_SERVER: (True,), "mistral.rs": (False, True), "vllm": (False, True)}
READS_SAFETENSORS = ("transformers", "vllm")
CPU_ONLY = ("llama-cpp-python", "transformers", "mistral.rs")
INSTALLED = {"mistral.rs": "mistralrs"}  # peers that `install` installs, and their packages on PyPI
PACKAGE_PROBE_S, INSTALL_S = 60, 900


def context_of(task: Task) -> int:
    """Return the tokens of the longest sequence."""
    return task.tokens + max(map(len, task.prompts), default=0)


def _split(tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """Return the tasks of one sequence, and the tasks of many prompts at once."""
    return [task for task in tasks if not task.prompts], [task for task in tasks if task.prompts]


def own_peers(model: Path, plan: Plan, tasks: Sequence[Task]) -> list[Peer]:
    """Return this worker: the engine for single sequences, `serve` for many prompts at once."""
    single, together = _split(tasks)
    peers: list[Peer] = []
    if single:
        command = [sys.executable, "-m", programs.__name__, _child_settings(model, plan, single)]
        env = package_environment(plan.threads)
        peers.append(LibraryPeer(OURS, command, env, plan.timeout_s, warm_up_runs=_warm_up_runs(plan)))
    if together:
        args = ["--device", plan.device, "--backend", plan.backend]
        args += ["--threads", str(plan.threads)] if plan.is_on_cpu else []
        peers.append(WorkerServer(str(model), *_sizes(together), args, plan.timeout_s))
    return peers


def _sizes(tasks: Sequence[Task]) -> tuple[int, int]:
    """Return the largest batch and the longest sequence."""
    return max(len(task.prompts) or 1 for task in tasks), max(map(context_of, tasks))


def _child_settings(model: Path, plan: Plan, tasks: Sequence[Task]) -> str:
    batch, context = _sizes(tasks)
    settings = {"model": str(model.absolute()), "threads": plan.threads, "context": context, "batch": batch}
    return json.dumps({**settings, "device": plan.device, "backend": plan.backend})


def find_peers(
    model: Path, checkpoint: Checkpoint, plan: Plan, tasks: Sequence[Task], left_out: dict[str, str]
) -> list[Peer]:
    """Return the peers that are installed and can run some of the tasks."""
    peers: list[Peer] = []
    for name in (*(name for name in NAMES if name in plan.peers), *plan.benches):
        own_tasks = [task for task in tasks if bool(task.prompts) in BATCHES.get(name, (False,))]
        if not own_tasks:
            continue
        try:
            _require_suitable(name, checkpoint, plan)
            make = _make_library if name in PACKAGES else _make_programs
            peers += make(name, model, checkpoint, plan, own_tasks)
        except PeerError as error:
            left_out[name] = str(error)
    return peers


def _require_suitable(name: str, checkpoint: Checkpoint, plan: Plan) -> None:
    """Raise if a peer cannot read the model, or not compute where this worker does."""
    if checkpoint.format != "gguf" and name not in READS_SAFETENSORS:
        raise PeerError("it is run with GGUF files only")
    if plan.is_on_gpu and name in CPU_ONLY:
        raise PeerError("it is run on the CPU only")
    if name == "transformers":
        _require_memory(checkpoint)


def _make_programs(name: str, model: Path, _: Checkpoint, plan: Plan, tasks: Sequence[Task]) -> list[Peer]:
    path = {LLAMA_BENCH: plan.llama_bench, LLAMA_SERVER: plan.llama_server, **plan.benches}[name]
    program = shutil.which(Path(path or name).expanduser())
    if program is None:
        where = f"{path} is not a program" if path else "it is not on the PATH"
        raise PeerError(f"{where}: {f'--peer {name}=PATH' if name in plan.benches else f'--{name} PATH'} names one")
    if name == LLAMA_SERVER:
        return [LlamaServer(program, str(model), plan.threads, *_sizes(tasks), plan.timeout_s, plan.is_on_gpu)]
    return [
        LlamaBench(program, str(model), plan.threads, plan.timeout_s, on_gpu=plan.is_on_gpu, options=options, name=name)
        for options in ("", *(plan.llama_bench_args if name == LLAMA_BENCH else ()))
    ]


def _make_library(name: str, model: Path, checkpoint: Checkpoint, plan: Plan, tasks: Sequence[Task]) -> list[Peer]:
    needed = [package for package in PACKAGES[name] if package != "gguf" or checkpoint.format == "gguf"]
    own = environment_python(name)
    pythons = dict.fromkeys([*plan.pythons, *([str(own)] if own.exists() else []), sys.executable])
    python = next((path for path in pythons if has_packages(path, needed)), None)
    if python is None:
        missing = f"{' and '.join(needed)} not installed for {', '.join(pythons)}"
        remedy = f", --install {name} installs it" if name in INSTALLED else ""
        raise PeerError(f"{missing}: --peer-python PATH names another{remedy}")
    source = Path(library_child.__file__).read_text(encoding="utf-8")  # as text: our folder must not be on its path
    env = library_environment(plan.threads) | {"RUST_BACKTRACE": "0"}
    if not plan.is_on_gpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [python, "-c", source, name, _child_settings(model, plan, tasks)]
    return [LibraryPeer(name, command, env, plan.timeout_s, BATCHES.get(name, (False,)), _warm_up_runs(plan))]


def _warm_up_runs(plan: Plan) -> int:
    """Return how often a library runs each task before it counts: on a GPU the second run may be slow too."""
    return 2 if plan.is_on_gpu else 1


def environment_python(name: str) -> Path:
    """Return the interpreter of a peer's own environment, which `install` makes."""
    return cache_dir() / "peers" / name / "bin" / "python"


def install(name: str, progress: StepProgress) -> str:
    """Install a peer into an environment of its own, unless it is there; return the interpreter."""
    if name not in INSTALLED:
        own = f"install {name} yourself, and name its interpreter with --peer-python PATH"
        raise InvalidRequestError(f"--install {name}: only {', '.join(INSTALLED)} can be installed; {own}", "install")
    python = environment_python(name)
    if not (python.exists() and has_packages(str(python), PACKAGES[name])):
        folder = str(python.parents[1])
        for number, (what, command) in enumerate(
            (
                (f"making {folder}", [sys.executable, "-m", "venv", "--clear", folder]),
                (f"installing {INSTALLED[name]}", [str(python), "-m", "pip", "install", "-q", INSTALLED[name]]),
            )
        ):
            progress(what, number, 2)
            try:
                done = subprocess.run(command, capture_output=True, timeout=INSTALL_S, env=library_environment(1))
            except subprocess.TimeoutExpired:
                raise PeerError(f"{what} did not end within {INSTALL_S} s") from None
            if done.returncode:
                raise PeerError(describe_exit(what, done.returncode, done.stderr or done.stdout))
    return str(python)


def has_packages(python: str, packages: Sequence[str]) -> bool:
    """Return whether an interpreter can import these packages."""
    program = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {list(packages)!r})))"
    command, env = [python, "-c", program], library_environment(1)
    try:
        return not subprocess.run(command, capture_output=True, timeout=PACKAGE_PROBE_S, env=env).returncode
    except subprocess.TimeoutExpired:
        return False
    except OSError as error:
        raise InvalidRequestError(f"--peer-python {python}: {error.strerror}", "peer_python") from None


def _require_memory(checkpoint: Checkpoint) -> None:
    """Raise unless float32 weights fit: transformers keeps them so."""
    needed, (_, free) = 4 * sum(t.size for t in checkpoint.tensors.values()), machine.memory()
    if free is not None and needed > 0.8 * free:
        raise PeerError(f"its float32 weights take {human_bytes(needed)}, and {human_bytes(free)} of memory are free")
