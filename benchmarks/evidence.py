"""Measure everything that the pages show again, and write them: `make evidence`.

    python -m benchmarks.evidence                          all that this machine can measure, then the pages
    python -m benchmarks.evidence --list                   the steps, and why one is left out
    python -m benchmarks.evidence --only micro,profile     some of them
    python -m benchmarks.evidence --llama-bench PATH --llama-server PATH --llama-cpp-python PYTHON   with llama.cpp, too

Each step is a command of `llm-worker-rbee`; its run goes to docs/results/MACHINE/STEP.json.gz, where MACHINE is made of
architecture, cores and GPU. A run takes about half an hour on two cores: nothing else should run meanwhile. Steps whose
program or device is missing are left out with the reason.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llm_worker_bench.peers import find
from llm_worker_bench.peers.plan import CODER, Row, find_real_file, make_file
from llm_worker_bench.results import Run, describe_machine
from llm_worker_rbee.errors import ModelFileError

from .pages import __main__ as pages

NAMED = "^(rope_forward|qkv_projection|attention_scores|causal_mask|causal_mask_cached|full_attention)/"
SHAPE_7B = "--synthetic llama2-7b:Q4_K_M"
NO_FILES = "--flame 0 --no-report"
IMAGES_CUDA = "--synthetic qwen2.5-vl-7b:BF16 --device cuda --size 1920x1080 --requests 32"
LORA_64 = "--requests 64 --streams 64 --serve-args '--device cuda'"
CUDA_CLAIMS = "--only 1 --only 3 --only 3a --only 4 --only 5 --only 9 --only 10"
LLAMA_BENCH = "--peer llama-bench --llama-bench {llama_bench}"
SERVERS = "--peer llama-bench --peer llama-server --llama-bench {llama_bench} --llama-server {llama_server}"

FAMILIES = (("gpt-oss-20b", "MXFP4_MOE", 512), ("qwen3-30b-a3b", "Q4_K_M", 512), ("qwen3.5-9b", "Q4_K_M", 2048))
PEERS = "bench peers --suite cpu --peer llama-bench --peer mistral.rs --llama-bench {llama_bench}"
REQUESTS = "bench peers --suite cpu --peer llama-server --peer mistral.rs --llama-server {llama_server}"
OPTIONS = (
    "--suite cpu --peer llama-bench --llama-bench {llama_bench} --llama-bench-args '-fa off' "
    "--llama-bench-args '-ctk q8_0 -ctv q8_0' --llama-bench-args '-ub 64'"
)
ST, LCP = "sentence-transformers", "llama-cpp-python"
LLAMA_CPP = "--llama-cpp-python {llama_cpp_python}"
CODERS = {f"coder-{size}": CODER.format(size) for size in ("0.5b", "1.5b")}
LIBRARY = "--against sentence-transformers --peer-python {sentence_transformers}"
EMBED = "--types F32,Q8_0 --llama-server {llama_server} --peer-python {sentence_transformers}"
ALL_PEERS = ("cpu", "llama-bench", "mistral.rs")
REMEDIES = {
    "ik_llama.cpp": "--ik-llama-bench PATH names its llama-bench",
    "mistral.rs": "`bench peers --install mistral.rs` installs it", "perf": "it comes with Linux's tools",
    **dict.fromkeys(CODERS, "`python -m tests.real.models` fetches it"),
}  # fmt: skip


class Step(NamedTuple):
    """A saved run: the command that makes it, and what it needs."""

    name: str
    command: str
    needs: tuple[str, ...] = ()  # cuda, programs, files and libraries by name, quiet CPU without a GPU: cpu
    convert: tuple[str, str] | None = None  # {converted} is this real file in this type


STEPS = (
    Step("micro-reference", f"bench micro --backend reference --filter '{NAMED}'"),
    Step("micro-cpu", f"bench micro --backend cpu --filter '{NAMED}'"),
    Step("micro-cuda", f"bench micro --backend cuda --filter '{NAMED}'", ("cuda",)),
    Step("experiments", "bench experiments", ("cpu",)),
    Step("experiments-cuda", f"bench experiments --backends reference,cuda {CUDA_CLAIMS}", ("cuda",)),
    Step("profile-cpu", f"profile --backend cpu {NO_FILES}"),
    Step("profile-reference", f"profile --backend reference --pp 32 --tg 8 {NO_FILES}"),
    Step("profile-attention", f"profile --attention-pass {NO_FILES}"),
    Step("profile-cuda", f"profile --device cuda {SHAPE_7B} {NO_FILES}", ("cuda",)),
    Step("profile-cuda-64", f"profile --device cuda {SHAPE_7B} --batch 64 {NO_FILES}", ("cuda",)),
    Step("accuracy", "bench accuracy", ("cpu",)),
    Step("accuracy-embedding", f"bench accuracy --embedding --quantize Q8_0 {LIBRARY}", ("cpu", ST)),
    Step("quality-coder-0.5b", f"bench accuracy {{coder_05b}} {LLAMA_CPP}", ("cpu", "coder-0.5b", LCP)),
    *(
        Step(f"quality-coder-0.5b-kv-{kind}", f"bench accuracy {{coder_05b}} --kv-type {kind}", ("cpu", "coder-0.5b"))
        for kind in ("float32", "int8")
    ),
    Step("quality-coder-1.5b", f"bench accuracy {{coder_15b}} {LLAMA_CPP}", ("cpu", "coder-1.5b", LCP)),
    *(
        Step(
            f"quality-type-{kind.lower()}",
            f"bench accuracy {{converted}} {LLAMA_CPP}",
            ("cpu", "coder-0.5b", LCP),
            (CODERS["coder-0.5b"], kind),
        )
        for kind in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
    ),
    Step("embed", f"bench embed {EMBED} -r 3", ("cpu", "llama-server", ST)),
    Step(
        "embed-cuda",
        "bench embed --device cuda --synthetic bge-large:F16 --tokenized --lengths 512 --batch 256 --texts 0",
        ("cuda",),
    ),
    Step("load", "bench load --compile", ("cpu",)),
    Step("kv", "-m benchmarks.kv_disk", ("cpu",)),
    Step(
        "kv-coder-1.5b",
        "-m benchmarks.kv_disk {coder_15b} --tokens 8000 --batch 1,4 --pairs 5 --streams 0",
        ("cpu", "coder-1.5b"),
    ),
    Step("batch", "-m benchmarks.batch", ("cpu",)),
    Step("lora", "-m benchmarks.lora", ("cpu",)),
    Step("lora-coder-1.5b", "-m benchmarks.lora {coder_15b}", ("cpu", "coder-1.5b")),
    Step("lora-cuda", f"-m benchmarks.lora {SHAPE_7B} {LORA_64}", ("cuda",)),
    Step("images", "-m benchmarks.images --synthetic smolvlm-256m:Q8_0", ("cpu",)),
    Step("images-cuda", f"-m benchmarks.images {IMAGES_CUDA}", ("cuda",)),
    Step("models", "-m benchmarks.model_switch smollm2 {coder_15b}", ("cpu", "coder-1.5b")),
    Step("e2e", "bench e2e --batch 1,16 --prefix 1000", ("cpu",)),
    Step("e2e-cuda", f"bench e2e --device cuda {SHAPE_7B} --batch 1,64 --burst 64x27", ("cuda",)),
    Step("e2e-cuda-256", f"bench e2e --device cuda {SHAPE_7B} --pp 0 --batch 256 --depth 150 -r 3", ("cuda",)),
    Step("e2e-cuda-deterministic", f"bench e2e --device cuda {SHAPE_7B} --batch 1,64 --deterministic -r 3", ("cuda",)),
    Step(
        "e2e-cuda-bf16",
        "bench e2e --device cuda --synthetic llama2-7b:BF16 --pp 0 --pg 128,128 --batch 1,256 -r 2",
        ("cuda",),
    ),
    *(
        Step(
            f"e2e-cuda-{shape}",
            f"bench e2e --device cuda --synthetic {shape}:{mix} --pp {pp} --batch 1,64 -r 3",
            ("cuda",),
        )
        for shape, mix, pp in FAMILIES
    ),
    Step("peers-cuda", f"bench peers --device cuda {SHAPE_7B} {LLAMA_BENCH} -r 5", ("cuda", "llama-bench")),
    Step(
        "peers-cpu",
        f"bench peers --suite cpu --device cpu --rows 7b --pp 512 --tg 64 {LLAMA_BENCH} -r 3",
        ("cuda", "llama-bench"),
    ),  # the processor of a machine with a GPU
    Step("serving-null", "bench serving --spawn --engine null -c 64 --serve-args '--null-step-ms 2.5'", ("cpu",)),
    Step(
        "peers",
        f"bench peers --suite cpu --rows '^(?!long|coder)' {SERVERS} -r 3",
        ("cpu", "llama-bench", "llama-server"),
    ),
    Step(
        "peers-coder",
        f"bench peers --suite cpu --rows coder {SERVERS} -r 2",
        ("cpu", "llama-bench", "llama-server", *CODERS),
    ),
    Step(
        "peers-coder-ik",
        f"bench peers --suite cpu --rows coder {SERVERS} --peer ik_llama.cpp={{ik_llamacpp}} -r 2",
        ("cpu", "llama-bench", "llama-server", "ik_llama.cpp", *CODERS),
    ),
    Step("peers-families", f"bench peers --suite families {LLAMA_BENCH} -r 3", ("cpu", "llama-bench")),
    Step("peers-long", f"bench peers --suite cpu --rows long {LLAMA_BENCH} -r 1", ("cpu", "llama-bench")),
    Step("peers-mistralrs", f"{PEERS} --rows '^(default|q4_0|q8_0|7b-q4_k_m)$' --pp 128,126 --tg 32", ALL_PEERS),
    Step("peers-one-thread", f"{PEERS} --rows '^(q4_0|q8_0)$' --pp 128 --tg 32 --threads 1", ALL_PEERS),
    Step("peers-options", f"bench peers {OPTIONS} --rows '^q4_0$'", ("cpu", "llama-bench")),
    Step("peers-requests", f"{REQUESTS} --rows '^requests$' --batch 4 --tg 64", (*ALL_PEERS, "llama-server")),
    Step("peers-profile", "-m benchmarks.peer_profile --llama-bench {llama_bench}", (*ALL_PEERS, "perf")),
)


def machine_folder() -> str:
    """Return `aarch64-2`, or `x86_64-16-h200`."""
    found = describe_machine()
    gpus = [str(gpu).partition(",")[0].split()[-1].lower() for gpu in found["gpus"]]
    return "-".join([str(found["architecture"]), str(found["cores"]), *gpus[:1]])


def missing(step: Step, programs: dict[str, str | None]) -> str | None:
    """Return why a step cannot run here."""
    has_gpu = bool(describe_machine()["gpus"])
    for need in step.needs:
        if need == "cuda" and not has_gpu:
            return "there is no NVIDIA GPU"
        if need == "cpu" and has_gpu:
            return "measured on a machine without a GPU"
        if need in programs and programs[need] is None:
            return f"{need} is not installed: {REMEDIES.get(need, f'--{need} PATH names it')}"
    return None


def find_file(name: str) -> str | None:
    """Return the path of a real model's file, or None."""
    try:
        return str(find_real_file(name))
    except ModelFileError:
        return None


def make_smaller(path: Path) -> None:
    """Leave out the samples that count in nothing."""
    run = Run.load(path)
    kept = [
        replace(result, fields={key: value for key, value in result.fields.items() if key != "set_aside"})
        for result in run.results
    ]
    replace(run, results=tuple(kept)).save(path)


def run_step(step: Step, folder: Path, programs: dict[str, str | None]) -> bool:
    """Run the command of a step; return whether it succeeded."""
    path = folder / f"{step.name}.json.gz"
    values = {name.replace("-", "_").replace(".", ""): str(value) for name, value in programs.items()}
    if step.convert is not None:
        source, kind = step.convert
        path_of_source = find_real_file(source)
        row = Row(step.name, model=path_of_source, converted=kind)
        values["converted"] = str(make_file(row, path_of_source.parent, lambda *_: None))
    words = [*shlex.split(step.command.format(**values)), "--save", str(path)]
    program = [sys.executable] if words[0] == "-m" else [sys.executable, "-m", "llm_worker_rbee"]
    print(f"\n== {step.name}: {shlex.join(words)}", flush=True)
    start = time.monotonic()
    done = subprocess.run([*program, *words], cwd=pages.ROOT)
    print(
        f"== {step.name}: {'done' if done.returncode == 0 else 'FAILED'} after {time.monotonic() - start:.0f} s",
        flush=True,
    )
    if done.returncode == 0:
        make_smaller(path)
    return done.returncode == 0


def select(only: str | None) -> Iterable[Step]:
    """Return the steps that are named, or whose name begins so where none has exactly that name; all without a list."""
    names = [""] if only is None else [name.strip() for name in only.split(",")]
    exact = {step.name for step in STEPS} & set(names)
    begins = tuple(name for name in names if name not in exact)
    chosen = [step for step in STEPS if step.name in exact or step.name.startswith(begins)]
    if not chosen:
        sys.exit(f"error: --only {only} names no step: there are {', '.join(step.name for step in STEPS)}")
    return chosen


def main() -> int:
    """Run the steps, then write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="STEP,...", help="some steps, by the beginning of their names")
    parser.add_argument("--list", action="store_true", help="show the steps and exit")
    parser.add_argument(
        "--machine", metavar="NAME", help="folder in docs/results (default: made of the machine's parts)"
    )
    parser.add_argument("--llama-bench", metavar="PATH", default=shutil.which("llama-bench"))
    parser.add_argument("--llama-server", metavar="PATH", default=shutil.which("llama-server"))
    parser.add_argument("--ik-llama-bench", metavar="PATH", help="llama-bench of ik_llama.cpp")
    parser.add_argument("--sentence-transformers", metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--llama-cpp-python", metavar="PYTHON", help="an interpreter that has it")
    given = parser.parse_args()
    mistralrs = find.environment_python("mistral.rs")
    programs = {
        "llama-bench": given.llama_bench, "llama-server": given.llama_server, "perf": shutil.which("perf"),
        "mistral.rs": str(mistralrs) if mistralrs.exists() else None, ST: given.sentence_transformers,
        LCP: given.llama_cpp_python, "ik_llama.cpp": given.ik_llama_bench,
        **{name: find_file(file) for name, file in CODERS.items()},
    }  # fmt: skip
    folder, failed = pages.RESULTS / (given.machine or machine_folder()), []
    for step in select(given.only):
        reason = missing(step, programs)
        if given.list or reason:
            program = "python" if step.command.startswith("-m ") else "llm-worker-rbee"
            print(f"{step.name}: {f'left out, {reason}' if reason else f'{program} {step.command}'}")
        elif not run_step(step, folder, programs):
            failed.append(step.name)
    if given.list:
        return 0
    pages.main([])
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
