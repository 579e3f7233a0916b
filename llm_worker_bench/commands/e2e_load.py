"""`llm-worker-rbee bench e2e` and `bench load`: a whole model, prefill and decode; how long a start takes."""

from dataclasses import asdict, dataclass

import typer

from llm_worker_rbee.backends.select import has_driver
from llm_worker_rbee.cli.options import ComputeFlags, LoadFlags, gather
from llm_worker_rbee.cli.terminal import columns, note
from llm_worker_rbee.errors import InvalidRequestError, counted
from llm_worker_rbee.progress import step_progress

from .. import e2e as e2e_benchmark
from .. import load as load_benchmark
from ..results import Result, Run
from ..synthetic import parse
from . import common
from .common import ModelArgument, OutputLengths, PromptLengths, Repetitions, ResultFlags, SyntheticOption, option

COMPARISONS = {
    "percent_of_products": "{:.0f}% of the products alone",
    "times_one": "{:.2f} x one sequence",
    "times_shorter": "{:.1f} x shorter",
    "times_plain": "{:.2f} x plain decoding",
    "acceptance": "{:.0%} of drafts accepted",
    "tokens_per_step": "{:.2f} tokens a step",
    "same_answers": "{:.0%} of answers as without drafts",
}
MEASURED_DRAFTERS = ("off", "ngram")  # of SPECULATIVE


@dataclass(frozen=True, kw_only=True)
class ModelBenchFlags:
    """Which model, and the scenarios to measure."""

    model: ModelArgument = None
    synthetic: list[str] | None = option(None, "SHAPE:TYPES", f"{common.SYNTHETIC_HELP} FP8 on a GPU. Repeatable.")
    pp: PromptLengths = "512"
    tg: OutputLengths = "128"
    depth: str = option("0", "N,...", "Tokens in the KV cache at the start.")
    batch: str = option("1", "N,...", "Batch sizes.")
    pg: str | None = option(None, "P,T", "Time BATCH requests of P prompt and T output tokens.")
    requests: int | None = option(None, "N", "Requests of --pg, BATCH at a time.", min=1, show_default="BATCH")
    step: list[str] | None = option(None, "PxL[+D]", "Time a step of P prompts of L tokens and D decodes. Repeatable.")
    burst: list[str] | None = option(None, "PxL", "Time to first token of P prompts at once. Repeatable.")
    max_step_tokens: int | None = option(None, "N", "Token budget of a step.", min=1, show_default="the engine's")
    prefix: int = option(0, "N", "Time two prompts that share N tokens; 0: do not.", min=0)
    target_itl_ms: str | None = option(None, "T,...", "Time decode during a prefill of 2,000 tokens; 0: no target.")
    speculative: str = option("off", "HOW", "Decode real text with this drafter too: ngram.")
    draft_tokens: int | None = option(None, "K", "Maximum number of draft tokens per step.", min=1, max=16)
    draft_model: str | None = option(None, "MODEL", "Decode real text with this model as drafter too.")
    deterministic: bool = option(False, None, "Batch-invariant kernels, as `serve --deterministic` uses them.")
    repetitions: Repetitions = 5

    def plan(self, computing: LoadFlags, threads: int) -> e2e_benchmark.Plan:
        """Return the plan; raise on options that are invalid or exclude each other."""
        if self.speculative not in MEASURED_DRAFTERS:
            names = ", ".join(MEASURED_DRAFTERS)
            raise typer.BadParameter(f"--speculative is {self.speculative!r}: use one of {names}, or --draft-model")
        if self.speculative != "off" and self.draft_model is not None:
            raise typer.BadParameter("both --speculative and --draft-model are given: choose one")
        pg = [] if self.pg is None else common.parse_counts(self.pg, "--pg", 1)
        if len(pg) not in (0, 2):
            raise typer.BadParameter(f"--pg is {self.pg!r}: use two numbers, such as 128,128")
        targets = [] if self.target_itl_ms is None else common.parse_counts(self.target_itl_ms, "--target-itl-ms")
        try:
            return e2e_benchmark.Plan(
                pp=common.parse_counts(self.pp, "--pp"), tg=common.parse_counts(self.tg, "--tg"),
                depths=common.parse_counts(self.depth, "--depth"),
                batches=common.parse_counts(self.batch, "--batch", 1), prefix=self.prefix, pg=pg,
                requests=self.requests, steps=self.step or [], bursts=self.burst or [],
                max_step_tokens=self.max_step_tokens, speculative=self.speculative, draft_tokens=self.draft_tokens,
                targets_ms=targets,
                draft_model=None if self.draft_model is None else str(common.find_source(self.draft_model, None)),
                repetitions=self.repetitions, threads=threads, device=computing.device, backend=computing.backend,
                kv_type=computing.kv_type, quantize=computing.quantize, deterministic=self.deterministic,
            )  # fmt: skip
        except InvalidRequestError as error:
            raise typer.BadParameter(str(error)) from None


@gather(options=ModelBenchFlags, results=ResultFlags, computing=LoadFlags)
def e2e(options: ModelBenchFlags, results: ResultFlags, computing: LoadFlags) -> None:
    """Measure a whole model: prefill, decode, time to first token, memory.

    ppN and tgN are what llama-bench measures: N prompt tokens at once, and N
    tokens one after the other from DEPTH cached ones. This worker goes through
    the engine and samples greedily; llama-bench does not sample. With a batch,
    the tokens of all sequences count, and decode is compared with the matrix
    products alone at the same number of rows, and with one sequence.

    OF LIMIT: for decode, the bytes that a token needs times the rate, over the
    memory bandwidth measured just before; for prefill, the operations over the
    measured rate of their arithmetic (int8, float32, on a GPU float16).

    A synthetic model has random weights and llama.cpp's real mix of types: it
    is for speed only. Several of them run in a process each. On a GPU an engine
    is warmed up as that of `serve` is, and the time of a decode step is split
    into device_step and host_step, which the device does not hide.

    --step times one step of an exact composition: 20x26 is 20 prompts of 26
    tokens, 1x27+63 one prompt of 27 and 63 requests that decode at DEPTH,
    0x0+256 decode alone. --burst submits prompts to an idle engine at once.

    \b
    Examples:
      llm-worker-rbee bench e2e
      llm-worker-rbee bench e2e model.gguf --pp 128,512 --tg 64 --depth 0,2048
      llm-worker-rbee bench e2e --synthetic llama2-7b:Q4_K_M:4 --pp 32 --tg 4 -r 3
      llm-worker-rbee bench e2e --quantize Q8_0 --kv-type int8 --threads 2
      llm-worker-rbee bench e2e --pp 0 --tg 64 --batch 16
      llm-worker-rbee bench e2e --pp 0 --tg 128 --speculative ngram
      llm-worker-rbee bench e2e --pp 0 --tg 0 --target-itl-ms 50,100,0
      llm-worker-rbee bench e2e --device cuda --synthetic llama2-7b:Q4_K_M --batch 1,64
      llm-worker-rbee bench e2e --pp 0 --tg 0 --step 20x26 --step 1x27+63 --burst 64x27
      llm-worker-rbee bench e2e --pp 0 --tg 0 --pg 128,128 --batch 16 --requests 64
      llm-worker-rbee bench e2e --save-baseline before
    """
    plan, synthetic = options.plan(computing, computing.set_up()), options.synthetic or []
    source = common.find_source(options.model, synthetic[0] if synthetic else None)
    with common.recording("e2e", results, _show_e2e, **asdict(plan)) as recorder, step_progress() as progress:
        if len(synthetic) > 1:
            e2e_benchmark.run_isolated(recorder, progress, [parse(name) for name in synthetic], plan)
        else:
            e2e_benchmark.run(recorder, progress, source, plan)


def _show_e2e(run: Run) -> None:
    timed = [result for result in run.results if result.samples]
    single = [result for result in run.results if not result.samples]
    if run.model:
        size, threads = common.quantity(run.model["bytes"], "B"), counted(run.settings["threads"], "thread")
        print(f"{run.model['name']}, {size}, {threads}\n")
    head = ["", "RESULT", "95% INTERVAL", "OF LIMIT", "BOUND BY", "RUNS", "BESIDE"]
    common.print_table([head, *map(_e2e_row, timed)], right=[1, 3, 5])
    if single:
        counts = [[result.name.replace("_", " "), common.quantity(result.estimate, result.unit)] for result in single]
        print("\n" + "\n".join(columns(counts, right=[1])))
    for name, reason in run.details.get("failed", {}).items():
        note(f"failed: {name}: {reason}")
    if any(result.unit == "tok/s" for result in timed):
        note("greedy sampling included; llama-bench does not sample")


def _e2e_row(result: Result) -> list[str]:
    part, fields = result.fields.get("percent_of_limit"), result.fields
    of_limit, bound = "" if part is None else f"{part:.1f}%", str(fields.get("bound_by", ""))
    beside = ", ".join(text.format(fields[key]) for key, text in COMPARISONS.items() if key in fields)
    return [result.name, *_value_cells(result), of_limit, bound, str(len(result.samples)), beside]


def _value_cells(result: Result | None) -> list[str]:
    return ["", ""] if result is None else [common.quantity(result.estimate, result.unit), common.interval(result)]


@dataclass(frozen=True, kw_only=True)
class StartFlags:
    """Which model, and how often it is started."""

    model: ModelArgument = None
    synthetic: SyntheticOption = None
    compile: bool = option(False, None, "Also measure a start that compiles all kernels.")
    no_warm_up: bool = option(False, None, "On a GPU: start as `run` does, not as `serve`.", "--no-warm-up")
    max_batch: int | None = option(None, "N", "Maximum number of requests in a batch.", min=1, show_default="serve's")
    max_step_tokens: int | None = option(None, "N", "Token budget of a step.", min=1, show_default="serve's")
    repetitions: int = option(3, "N", "Number of cold and of warm starts.", "-r", min=1)


@gather(options=StartFlags, results=ResultFlags, computing=ComputeFlags)
def load(options: StartFlags, results: ResultFlags, computing: ComputeFlags) -> None:
    """Measure a start: import, open, kernels, weights, warm-up, first token.

    Every start is a process of its own. COLD: the model's file was dropped from
    the page cache before; WARM: it was read just before. TOTAL is the time from
    starting the process to the first token of a short prompt.

    KERNELS is the time to load their machine code; the first start after an
    installation may compile it, so there is a start before those that count.

    On a CPU, COMMANDS are timed as a user sees them: the version, help texts,
    the first piece of an answer of `run`, `serve` until it is healthy.

    On a GPU it is the start of `serve`'s engine: READY is when all kernels are
    compiled and loaded and all CUDA graphs captured, which are counted. Its
    memory is measured too, also after batches of many sizes.

    \b
    Examples:
      llm-worker-rbee bench load
      llm-worker-rbee bench load model.gguf -r 5
      llm-worker-rbee bench load --device cuda --synthetic llama2-7b:Q4_K_M --compile
      llm-worker-rbee bench load --json
    """
    used, repetitions = computing.set_up(), options.repetitions
    source = common.find_source(options.model, options.synthetic)
    settings = {"repetitions": repetitions, "backend": computing.backend, "device": computing.device, "threads": used}
    with common.recording("load", results, _show_load, **settings) as recorder, step_progress() as progress:
        arguments = {"device": computing.device, "backend": computing.backend, "threads": computing.kernel_threads}
        limits = {"max_batch": options.max_batch, "max_step_tokens": options.max_step_tokens}
        arguments |= {name: value for name, value in limits.items() if value is not None}
        with common.model_file(source, progress) as path:
            load_benchmark.run(
                recorder,
                progress,
                path,
                repetitions,
                arguments,
                compile_kernels=options.compile,
                warms_up=_uses_gpu(computing) and not options.no_warm_up,
            )


def _uses_gpu(computing: ComputeFlags) -> bool:
    """Return whether a model goes to a GPU if it fits there."""
    if computing.device.startswith("cuda") or computing.backend == "cuda":
        return True
    return computing.options().is_automatic and has_driver()


def _show_load(run: Run) -> None:
    by_name = {result.name: result for result in run.results if not result.name.startswith("command/")}
    times = dict.fromkeys(name.partition("/")[0] for name, result in by_name.items() if result.unit == "s")
    counts = dict.fromkeys(name.partition("/")[0] for name, result in by_name.items() if result.unit not in ("s", "B"))
    phases = sorted(times, key=lambda name: name == "total")
    caches = ["cold", "warm", *(["compiling"] if "total/compiling" in by_name else [])]
    rows = [["", *(text for cache in caches for text in (cache.upper(), "95% INTERVAL"))]]
    for phase in (*phases, *counts):
        sides = [by_name.get(f"{phase}/{cache}", by_name.get(phase)) for cache in caches]
        rows.append([phase.replace("_", " "), *(cell for side in sides for cell in _value_cells(side))])
    common.print_table(rows, right=range(1, 2 * len(caches), 2))
    sizes = [[n.replace("memory/", "memory, "), *_value_cells(r)] for n, r in by_name.items() if r.unit == "B"]
    print("\n" + "\n".join(columns(sizes, right=[1])))
    commands = [result for result in run.results if result.name.startswith("command/")]
    if commands:
        cells = [[result.name.partition("/")[2].replace("_", " "), *_value_cells(result)] for result in commands]
        print("\n" + "\n".join(columns([["COMMAND", "", "95% INTERVAL"], *cells], right=[1])))
    for what, reason in run.details.get("left_out", {}).items():
        note(f"left out {what}: {reason}")
    if "warning" in run.details:
        note(run.details["warning"])
