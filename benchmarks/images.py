"""What images cost: from decoded pixels to the first token, and images a second.

    python -m benchmarks.images model.gguf --size 512x512             its projector lies beside it
    python -m benchmarks.images --synthetic qwen2.5-vl-7b:BF16 --device cuda --size 1920x1080 --requests 32

`first_token`: seconds of the tower and the prompt of a request with one image; `again`: of another question about the
same image; `text`: of a prompt of as many tokens of text. `decode`: seconds in which the image is read from a file and
resized, which happens in a process of its own before a request and is in none of the others. `images`: of requests that
come at once, each with an image of its own, until the last one has its first token.
"""

from __future__ import annotations

import argparse
import io
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from PIL import Image

from llm_worker_bench.commands import common
from llm_worker_bench.commands.options import ResultFlags
from llm_worker_bench.results import Recorder, describe_model
from llm_worker_bench.synthetic_vision import write_pair
from llm_worker_rbee.errors import WorkerError
from llm_worker_rbee.llm import LLM, together
from llm_worker_rbee.progress import StepProgress, step_progress
from llm_worker_rbee.text_model import EncodedPrompt
from llm_worker_rbee.token_engine.launch import warm_up
from llm_worker_rbee.weights.hub import locate_model

from .batch import show

OPTIONS: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how often."""

    size: tuple[int, int]  # width and height
    requests: int
    repetitions: int


class Pictures:
    """Seeded pictures, each of them once."""

    def __init__(self, llm: LLM, size: tuple[int, int]) -> None:
        self.llm, self.size = llm, size
        self._seed = 0

    def file(self) -> bytes:
        """Return a PNG file with slow and fast changes."""
        self._seed += 1
        random, (width, height) = np.random.default_rng(self._seed), self.size
        y, x = np.mgrid[:height, :width]
        waves = [np.sin(x * random.uniform(0.01, 0.3) + y * random.uniform(0.01, 0.3)) for _ in range(3)]
        pixels = np.stack(waves, axis=-1) * 90 + 128 + random.normal(0, 20, (height, width, 3))
        file = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "PNG", compress_level=1)
        return file.getvalue()

    def prompt(self, question: str = "What is this?", file: bytes | None = None) -> EncodedPrompt:
        """Return a prompt with an image, decoded."""
        parts = [{"type": "image", "image": file or self.file()}, {"type": "text", "text": question}]
        return self.llm.prepare_chat([{"role": "user", "content": parts}])


def first_tokens(llm: LLM, prompts: Sequence[EncodedPrompt]) -> float:
    """Return the seconds until each of these requests has its first token."""
    start = time.perf_counter()
    streams = [llm.streams(prompt, **OPTIONS)[0] for prompt in prompts]
    for stream in together(streams):
        stream.raise_error()
    return time.perf_counter() - start


def measure(recorder: Recorder, progress: StepProgress, plan: Plan, llm: LLM) -> None:
    """Measure what the plan has."""
    pictures, random = Pictures(llm, plan.size), np.random.default_rng(0)
    progress("warming up", 0, 1)
    warm_up(llm.engine, llm.loading)
    first_tokens(llm, [pictures.prompt()])
    for i in range(plan.repetitions):
        progress("one image", i, plan.repetitions)
        file, start = pictures.file(), time.perf_counter()
        prompt = pictures.prompt(file=file)
        recorder.add_sample("decode", "s", time.perf_counter() - start, "lower")
        again = pictures.prompt("Is it blue?", file)
        text = EncodedPrompt(
            random.integers(llm.config.vocab_size // 3, llm.config.vocab_size // 2, len(prompt.ids)).tolist()
        )
        for name, each in (("first_token", prompt), ("again", again), ("text", text)):
            recorder.add_sample(name, "s", first_tokens(llm, [each]), "lower")
    recorder.add_sample("prompt", "tokens", len(prompt.ids), "lower")
    for i in range(plan.repetitions if plan.requests else 0):
        progress(f"{plan.requests} images at once", i, plan.repetitions)
        files = [pictures.file() for _ in range(plan.requests)]
        with ThreadPoolExecutor() as threads:
            prompts = list(threads.map(lambda file: pictures.prompt(file=file), files))
        recorder.add_sample("images", "images/s", plan.requests / first_tokens(llm, prompts), "higher")


def main(words: Sequence[str]) -> int:
    """Measure, show and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a file, a folder or a name")
    parser.add_argument("--mmproj", metavar="FILE", type=Path, help="its projector, if it does not lie beside it")
    parser.add_argument("--synthetic", metavar="SHAPE:TYPE", help="a model of random weights instead")
    parser.add_argument("--device", metavar="NAME", default="auto", help="(%(default)s)")
    parser.add_argument("--threads", metavar="N", type=int, help="of a CPU; physical cores without it")
    parser.add_argument("--size", metavar="WxH", default="512x512", help="of the images (%(default)s)")
    parser.add_argument("--requests", metavar="N", type=int, default=0, help="at once; 0: none (%(default)s)")
    parser.add_argument("-r", "--repetitions", metavar="N", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the run to a file")
    given = parser.parse_args(words)
    try:
        if (given.model is None) == (given.synthetic is None):
            raise ValueError("name a MODEL, or --synthetic with a shape")
        width, height = map(int, given.size.split("x"))
        plan = Plan(size=(width, height), requests=given.requests, repetitions=given.repetitions)
        _measure(plan, given, words)
    except (WorkerError, typer.BadParameter, ValueError) as error:
        sys.exit(f"error: {error}")
    return 0


def _measure(plan: Plan, given: argparse.Namespace, words: Sequence[str]) -> None:
    settings = {"size": list(plan.size), "requests": plan.requests, "repetitions": plan.repetitions}
    with ExitStack() as stack:
        recorder = stack.enter_context(common.recording("images", ResultFlags(save=given.save), show, **settings))
        progress = stack.enter_context(step_progress())
        command = shlex.split(common.repeatable_command(words))[1:]
        recorder.command = shlex.join(["python", "-m", "benchmarks.images", *command])
        if given.synthetic is None:
            model, projector = locate_model(given.model), given.mmproj
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model, projector = write_pair(given.synthetic, folder, progress)
        recorder.model = describe_model(model, progress)
        llm = LLM(model, mmproj=projector, device=given.device, threads=given.threads, prefix_cache=True)
        measure(recorder, progress, plan, llm)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
