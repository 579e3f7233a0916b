"""Which peers are installed, and how each is started for a row."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ... import machine
from ...errors import InvalidRequestError, human_bytes
from ...weights import Checkpoint
from ..processes import library_environment, package_environment
from . import library_child, programs
from .plan import NAMES, PACKAGES, Plan
from .programs import LLAMA_BENCH, LLAMA_SERVER, OURS, LibraryPeer, LlamaBench, Peer, PeerError, Task
from .servers import LlamaServer, WorkerServer

PACKAGE_PROBE_S = 60


def context_of(task: Task) -> int:
    """Return the tokens of the longest sequence."""
    return task.tokens + max(map(len, task.prompts), default=0)


def _split(tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """Return the tasks of one sequence, and those of many prompts at once."""
    return [task for task in tasks if not task.prompts], [task for task in tasks if task.prompts]


def own_peers(model: Path, plan: Plan, tasks: Sequence[Task]) -> list[Peer]:
    """Return this worker: the engine for single sequences, `serve` for many prompts at once."""
    single, together = _split(tasks)
    found: list[Peer] = []
    if single:
        command = [sys.executable, "-m", programs.__name__, _child_settings(model, plan, single)]
        found.append(LibraryPeer(OURS, command, package_environment(plan.threads), plan.timeout_s))
    if together:
        args = ["--device", plan.device, "--backend", plan.backend]
        args += ["--threads", str(plan.threads)] if plan.is_on_cpu else []
        found.append(WorkerServer(str(model), *_sizes(together), args, plan.timeout_s))
    return found


def _sizes(tasks: Sequence[Task]) -> tuple[int, int]:
    """Return the largest batch and the longest sequence."""
    return max(len(task.prompts) for task in tasks), max(map(context_of, tasks))


def _child_settings(model: Path, plan: Plan, tasks: Sequence[Task]) -> str:
    settings = {"model": str(model.absolute()), "threads": plan.threads, "context": max(map(context_of, tasks))}
    return json.dumps({**settings, "device": plan.device, "backend": plan.backend})


def find_peers(
    model: Path, checkpoint: Checkpoint, plan: Plan, tasks: Sequence[Task], left_out: dict[str, str]
) -> list[Peer]:
    """Return the peers that are installed and can run some of the tasks."""
    found: list[Peer] = []
    for name in (name for name in NAMES if name in plan.peers):
        own_tasks = _split(tasks)[name == LLAMA_SERVER]
        if not own_tasks:
            continue
        try:
            if name == "transformers":
                _require_memory(checkpoint)
            elif checkpoint.format != "gguf":
                raise PeerError("it reads GGUF files only")
            make = _make_library if name in PACKAGES else _make_program
            found.append(make(name, model, checkpoint, plan, own_tasks))
        except PeerError as error:
            left_out[name] = str(error)
    return found


def _make_program(name: str, model: Path, _: Checkpoint, plan: Plan, tasks: Sequence[Task]) -> Peer:
    path = plan.llama_bench if name == LLAMA_BENCH else plan.llama_server
    program = shutil.which(path or name)
    if program is None:
        where = f"{path} is not a program" if path else "it is not on the PATH"
        raise PeerError(f"{where}: --{name} PATH names one")
    if name == LLAMA_BENCH:
        return LlamaBench(program, str(model), plan.threads, plan.timeout_s)
    return LlamaServer(program, str(model), plan.threads, *_sizes(tasks), plan.timeout_s)


def _make_library(name: str, model: Path, checkpoint: Checkpoint, plan: Plan, tasks: Sequence[Task]) -> Peer:
    needed = [package for package in PACKAGES[name] if package != "gguf" or checkpoint.format == "gguf"]
    pythons = dict.fromkeys([*plan.pythons, sys.executable])
    python = next((path for path in pythons if _has_packages(path, needed)), None)
    if python is None:
        missing = f"{' and '.join(needed)} not installed for {', '.join(pythons)}"
        raise PeerError(f"{missing}: --peer-python PATH names another")
    source = Path(library_child.__file__).read_text(encoding="utf-8")  # as text: our folder must not be on its path
    env = library_environment(plan.threads)
    return LibraryPeer(name, [python, "-c", source, name, _child_settings(model, plan, tasks)], env, plan.timeout_s)


def _has_packages(python: str, packages: Sequence[str]) -> bool:
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
