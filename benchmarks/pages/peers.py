"""docs/peers.md: why other programs differ in speed; the text is constant, every figure comes from a saved run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from llm_worker_bench.results import Result, Run

from .benchmarks import OURS, busy_note, machine_name, number, ratio, table

Runs = Mapping[str, Run]
LLAMA, SERVER, MISTRAL = "llama-bench", "llama-server", "mistral.rs"
NAMES = {OURS: "this worker", LLAMA: "llama.cpp", SERVER: "llama.cpp (llama-server)", MISTRAL: "mistral.rs (Candle)"}
FILES = {"default": "Q4_1", "q4_0": "Q4_0", "q8_0": "Q8_0", "7b-q4_k_m": "7B shape, 4 layers, Q4_K_M"}
SHOWN_FUNCTIONS = 4
INTRO = """# Why other programs differ in speed

`llm-worker-rbee bench peers` runs this worker and others in turn on the same file with the same number of threads. This
page explains their differences as far as measurements show them; [benchmarks.md](benchmarks.md) has all figures. Facts
about designs come from the sources of llama.cpp (b10586), mistral.rs (0.9) and Candle (the revision that mistral.rs
names, 35d7ae7), at the paths given. Figures are tokens per second with their 95% interval."""
END = """## What was not measured

- **vLLM**: `bench peers --peer vllm` runs it where it is installed (`--peer-python PATH`), with GGUF files that its
  loader reads, or with a folder of safetensors. It was not installed on any machine of this page, so there is no
  figure.
- **mistral.rs on a GPU**: its wheels on PyPI compute on the CPU; the newest release of `mistralrs-cuda` there is 0.3.1,
  as source only.
- **Several prompts at once in mistral.rs 0.9.5**: a prefill of two prompts fails with "input tensor is not contiguous"
  on a CPU. `bench peers` sends each prompt when the previous one has its first token, and counts from the last prompt's
  first token, so it compares decoding and not the prefill of many prompts.
- A share of samples shows where the time goes, not the gain of a change: only the differences between two runs above
  (types, lengths, threads, options) show that."""

TYPES_TEXT = """
- llama.cpp repacks weights at load for matrix kernels that take several rows at once, for a list of types without
  Q4_1 (`ggml/src/ggml-cpu/repack.cpp`, `ggml_repack_get_optimal_repack_type`): here it repacked {default_bytes} of the
  Q4_1 file (its embedding is Q8_0) and {q4_0_bytes} of the Q4_0 file. Q4_1 goes through a dot product of one row with
  one token, `ggml_vec_dot_q4_1_q8_1`: {llama_prefill} of a prefill's samples.
- Candle has no SIMD code for Q4_1 and Q5_1: `BlockQ4_1::vec_dot` calls the scalar `vec_dot_unopt`
  (`candle-core/src/quantized/k_quants.rs`), with {mistral_prefill} of a prefill's samples and {mistral_decode} of a
  decode's.
- This worker repacks all block types into few layouts, which share their kernels
  (`llm_worker_rbee/backends/cpu/packed_weight.py`), so that the type of a file matters little to a prefill."""
LENGTHS_TEXT = """
- Candle takes its packed kernels for one token, or for a number of tokens that is a multiple of 4
  (`PackedKind::select`, `candle-core/src/quantized/repack.rs`). For all other prompts `matmul` in `k_quants.rs` reads
  all weights once per token, and its threads synchronize after each token. The prompt of 126 tokens shows it.
- llama.cpp and this worker keep their rate: tiles take as many tokens as possible, and the few remaining ones are
  computed separately (for llama.cpp `forward_mul_mat` in `ggml/src/ggml-cpu/repack.cpp`)."""
WAITING_TEXT = """
- llama.cpp's graph of one token has {nodes} nodes for this model (`llama-bench -v`), and its threads synchronize after
  each computed node (`ggml_barrier` in `ggml_graph_compute_thread`, `ggml/src/ggml-cpu/ggml-cpu.c`). In a decode {gomp}
  of the samples are in `libgomp`, whose barrier it uses here.
- This worker's program of one token has {tasks} tasks in one parallel region: the work between products is part of few
  tasks (`llm_worker_rbee/backends/cpu/program.py`).
- Candle wakes its pool for each product (`BarrierPool::execute_chunked`, `candle-core/src/utils.rs`), whose workers
  spin in between: `__rust_begin_short_backtrace`, their main function, has {spin} of a decode's samples.
- Threads that spin lose more when other programs use the cores: measure on a quiet machine."""
OPTIONS_TEXT = """
- `-fa off` writes all scores to memory as separate operations; the fused kernel, which is the default, does not. This
  worker's kernel is fused too, and stops at the causal bound instead of adding a mask.
- A KV cache of 8-bit blocks saves memory and costs time here. llama.cpp and this worker keep float16 by default.
- `-ub 64` prefills in steps of 64 tokens: weights are read eight times instead of once."""
LONG_TEXT = """
- From 512 to 4,096 tokens, where attention counts most, this worker keeps {ours} of its rate and llama.cpp {llama} on
  the Q4_1 file ({command}): a slower product hides part of the attention."""
GPU_TEXT = """
llama.cpp here is the prebuilt library of node-llama-cpp 3.20.0, release b10361 by the package's metadata (the library
itself names build 1, adb92f2), built with CUDA 12 and run with cuBLAS 13; llama-bench is compiled from b10361. The
driver compiled the kernels for this GPU from PTX: a build for this GPU alone may differ. The file has random weights:
only their amount and types matter for speed."""
REQUESTS_TEXT = """
`serve` and llama-server answer over HTTP, mistral.rs in its own process. For Q4_1 llama.cpp and Candle multiply one row
with one token: each request repeats all arithmetic, and a batch only saves reading and the overhead of operations."""


class Figures(NamedTuple):
    """The runs of one machine by step: `peers-mistralrs`."""

    runs: Runs

    def find(self, step: str, name: str) -> Result | None:
        """Return a result by its name; a row's name in front may be missing, as in runs of one row."""
        run = self.runs.get(step)
        results = {} if run is None else {result.name: result for result in run.results}
        return results.get(name) or results.get(name.partition(" ")[2])

    def rate(self, step: str, name: str) -> str:
        """Return `134 (132 to 135)`, or a dash."""
        found = self.find(step, name)
        return "-" if found is None else with_interval(found)

    def quotient(self, step: str, above: str, below: str) -> str:
        """Return how many times as fast one figure is as another of the same run."""
        return quotient(self.find(step, above), self.find(step, below))

    def command(self, step: str) -> str:
        """Return the command that repeats a run."""
        run = self.runs.get(step)
        return "" if run is None else f"`{run.command}`"


def with_interval(result: Result) -> str:
    """Return `134 (132 to 135)`."""
    low, high = number(result.low), number(result.high)
    value = number(result.estimate)
    return value if low == high else f"{value} ({low} to {high})"


def quotient(above: Result | None, below: Result | None) -> str:
    """Return how many times as large one figure is as another."""
    return "-" if above is None or below is None else f"{above.estimate / below.estimate:.2f}"


def overview(figures: Figures) -> list[str]:
    """Return the table of files and lengths, with a column for each peer."""
    step, peers = "peers-mistralrs", (OURS, LLAMA, MISTRAL)
    rows = [
        [
            f"{kind} {test}",
            *(figures.rate(step, f"{row} {test}/{peer}") for peer in peers),
            *ratios(figures, f"{row} {test}"),
        ]
        for row, kind in FILES.items()
        for test in ("pp128", "tg32")
        if figures.find(step, f"{row} {test}/{OURS}")
    ]
    head = ["file and tokens", *(NAMES[peer] for peer in peers), "ours / llama.cpp", "ours / mistral.rs"]
    text = "A prompt of 128 tokens (pp128) and 32 tokens of an answer (tg32); Q4_1 is the default model as it comes."
    return [text, "", *table(head, rows), "", figures.command(step)]


def ratios(figures: Figures, test: str) -> list[str]:
    """Return the ratios of this worker's rate to each peer's rate, from single repetitions."""
    found = [figures.find("peers-mistralrs", f"{test}/{peer}") for peer in (LLAMA, MISTRAL)]
    return ["-" if one is None else ratio(one) for one in found]


def types(figures: Figures) -> list[str]:
    """Describe the cost of a type without its own kernel."""
    step = "peers-mistralrs"
    rows = [
        [NAMES[peer], *(figures.rate(step, f"{row} {test}/{peer}") for row in ("default", "q4_0")),
         figures.quotient(step, f"q4_0 {test}/{peer}", f"default {test}/{peer}"), test]
        for test in ("pp128", "tg32")
        for peer in (OURS, LLAMA, MISTRAL)
    ]  # fmt: skip
    repacked = {row: figures.find("peers-profile", f"{row}/{LLAMA}/repacked_bytes") for row in ("default", "q4_0")}
    text = TYPES_TEXT.format(
        **{f"{row}_bytes": "-" if one is None else f"{one.estimate / 1e6:.0f} MB" for row, one in repacked.items()},
        llama_prefill=share(figures, "default pp128", LLAMA, "ggml_vec_dot_q4_1_q8_1"),
        mistral_prefill=share(figures, "default pp128", MISTRAL, "BlockQ4_1::vec_dot_unopt"),
        mistral_decode=share(figures, "default tg32", MISTRAL, "BlockQ4_1::vec_dot_unopt"),
    )
    head = "The default model is Q4_1. The same weights converted to Q4_0 isolate the kernels of a type:"
    rates = table(["program", "Q4_1", "Q4_0", "Q4_0 / Q4_1", "test"], rows)
    return ["## A kernel for each type, or for some", "", head, "", *rates, text]


def lengths(figures: Figures) -> list[str]:
    """Describe the gain of products over a whole prompt, and when Candle has none."""
    step = "peers-mistralrs"
    rows = [
        [NAMES[peer], kind, *(figures.rate(step, f"{row} {test}/{peer}") for test in ("pp128", "pp126", "tg32")),
         figures.quotient(step, f"{row} pp128/{peer}", f"{row} pp126/{peer}"),
         figures.quotient(step, f"{row} pp128/{peer}", f"{row} tg32/{peer}")]
        for row, kind in FILES.items() if row != "default" and figures.find(step, f"{row} pp126/{OURS}")
        for peer in (OURS, LLAMA, MISTRAL)
    ]  # fmt: skip
    head = "A decode reads all weights for one token; a prefill can use them for many:"
    rates = table(["program", "file", "pp128", "pp126", "tg32", "pp128 / pp126", "pp128 / tg32"], rows)
    return ["## How often the weights are read for a prompt", "", head, "", *rates, LENGTHS_TEXT]


def waiting(figures: Figures) -> list[str]:
    """Describe the cost of synchronizing after each operation."""
    steps, peers = ("peers-one-thread", "peers-mistralrs"), (OURS, LLAMA, MISTRAL)
    rows = [
        [f"{FILES[row]} {test}", NAMES[peer], *(figures.rate(step, f"{row} {test}/{peer}") for step in steps),
         quotient(*(figures.find(step, f"{row} {test}/{peer}") for step in reversed(steps)))]
        for row in ("q4_0", "q8_0") for test in ("pp128", "tg32") for peer in peers
    ]  # fmt: skip
    counts = [figures.find("peers-profile", f"q4_0/{name}") for name in (f"{LLAMA}/graph_nodes", f"{OURS}/tasks")]
    nodes, tasks = ("-" if one is None else f"{one.estimate:,.0f}" for one in counts)
    text = WAITING_TEXT.format(
        nodes=nodes, tasks=tasks, gomp=share(figures, "q4_0 tg32", LLAMA, "libgomp.so.1.0.0"),
        spin=share(figures, "q4_0 tg32", MISTRAL, "backtrace::__rust_begin_short_backtrace"),
    )  # fmt: skip
    rates = table(["file and test", "program", "1 thread", "2 threads", "gain"], rows)
    return ["## Threads that wait for each other", "", *rates, "", figures.command(steps[0]), text]


def options(figures: Figures) -> list[str]:
    """Describe the effect of llama.cpp's own options."""
    step, tests = "peers-options", ("pp512", "tg128")
    rows = []
    for change in ("", " -fa off", " -ctk q8_0 -ctv q8_0", " -ub 64"):
        rates = [figures.rate(step, f"q4_0 {test}/{LLAMA}{change}") for test in tests]
        gains = [figures.quotient(step, f"q4_0 {test}/{LLAMA}{change}", f"q4_0 {test}/{LLAMA}") for test in tests]
        rows.append([f"`{change.strip()}`" if change else "as it comes", *rates, *gains])
    rows.append(["this worker", *(figures.rate(step, f"q4_0 {test}/{OURS}") for test in ("pp512", "tg128")), "", ""])
    head = "llama.cpp's options separate the parts of its design (Q4_0):"
    shown = table(["llama-bench", *tests, *(f"{test} / as it comes" for test in tests)], rows)
    title = "## Attention, KV cache and the size of a step"
    return [title, "", head, "", *shown, "", figures.command(step), OPTIONS_TEXT + long_prompt(figures)]


def long_prompt(figures: Figures) -> str:
    """Describe the rate of a prefill at 4,096 tokens."""
    pairs = [
        [figures.find("peers", f"{test}/{peer}") for test in ("long pp4096", "default pp512")] for peer in (OURS, LLAMA)
    ]
    kept = [f"{above.estimate / below.estimate:.0%}" for above, below in pairs if above and below]
    return LONG_TEXT.format(ours=kept[0], llama=kept[1], command=figures.command("peers")) if len(kept) == 2 else ""


def requests(figures: Figures) -> list[str]:
    """Describe the gain of concurrent requests."""
    step, rows = "peers-requests", []
    for peer, alone in ((OURS, OURS), (SERVER, LLAMA), (MISTRAL, MISTRAL)):
        many, one = f"requests tg64@b4/{peer}", f"default tg32/{alone}"
        gain = quotient(figures.find(step, many), figures.find("peers-mistralrs", one))
        rows.append([NAMES[peer], figures.rate("peers-mistralrs", one), figures.rate(step, many), gain])
    head = "Tokens per second of all requests while all decode, compared with one sequence of the run above (Q4_1):"
    rates = table(["program", "1 sequence", "4 requests", "gain"], rows)
    return ["## Many requests at once", "", head, "", *rates, "", figures.command(step), REQUESTS_TEXT]


def share(figures: Figures, test: str, peer: str, function: str) -> str:
    """Return the share of a function in the samples."""
    found = figures.find("peers-profile", f"{test}/{peer}/{function}")
    return "-" if found is None else f"{found.estimate:.0%}"


def profile(figures: Figures) -> list[str]:
    """Return the functions that take most of the samples."""
    run = figures.runs["peers-profile"]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in run.results:
        test, peer, _ = result.name.split("/", 2)
        if " " in test:
            groups.setdefault((test, peer), []).append(result)
    rows = [
        [test.replace("default", "Q4_1").replace("q4_0", "Q4_0"), NAMES[peer], functions(found)]
        for (test, peer), found in groups.items()
    ]
    return [
        "## Where their time goes",
        "",
        f"Functions with the most samples of `perf`, {run.settings['threads']} threads; this worker's own are in",
        "[profile.md](profile.md). `libgomp` and `__rust_begin_short_backtrace` are threads that wait.",
        "",
        *table(["file and test", "program", "share of samples"], rows),
        "",
        figures.command("peers-profile"),
    ]


def functions(found: Iterable[Result]) -> str:
    """Return the functions with the largest shares."""
    largest = sorted(found, key=lambda result: -result.estimate)[:SHOWN_FUNCTIONS]
    return ", ".join(f"`{result.name.split('/', 2)[2]}` {result.estimate:.0%}" for result in largest)


def gpu(figures: Figures) -> list[str]:
    """Return the comparison on a GPU."""
    run = figures.runs["peers-cuda"]
    tests = list(dict.fromkeys(result.name.partition("/")[0] for result in run.results))
    rows = [
        [test, *(figures.rate("peers-cuda", f"{test}/{peer}") for peer in (OURS, LLAMA)),
         "-" if (one := figures.find("peers-cuda", f"{test}/{LLAMA}")) is None else ratio(one)]
        for test in tests
    ]  # fmt: skip
    failed = [f"- {name}: {reason}" for name, reason in run.details.get("failed", {}).items()]
    model = (run.model or {}).get("name")
    return [
        "## On a GPU", "", f"`{model}` on {machine_name(run)}.", "",
        *table(["test", "this worker", "llama.cpp (CUDA)", "ours / llama.cpp"], rows), "", *versions(run), *failed, "",
        figures.command("peers-cuda"), GPU_TEXT,
    ]  # fmt: skip


def versions(run: Run) -> list[str]:
    """Return a line for each program, with its version and settings."""
    found = run.details.get("peers", {})
    return [f"- {name} {one['version']}: {settings(one['settings'])}" for name, one in found.items()]


def settings(values: Mapping[str, object]) -> str:
    """Return `threads 2, dtype auto`."""
    return ", ".join(f"{key} {value}" for key, value in values.items() if value not in (None, ""))


def notes(figures: Figures) -> list[str]:
    """Return versions and settings, and omitted or failed peers."""
    run = figures.runs["peers-mistralrs"]
    models = run.details.get("models", {})
    files = [
        [FILES.get(row, row), f"`{one['name']}`", f"{one['bytes']:,}", f"`{one['sha256'][:16]}`"]
        for row, one in models.items()
    ]
    problems = [
        f"- {what.replace('_', ' ')}: {name}: {reason}"
        for step in figures.runs.values()
        for what in ("left_out", "failed")
        for name, reason in step.details.get(what, {}).items()
    ]
    return [
        *versions(run),
        "",
        *table(["file", "name", "bytes", "SHA-256"], files),
        *[""] * bool(problems),
        *problems,
    ]


PARTS: Sequence[tuple[tuple[str, ...], Callable[[Figures], list[str]]]] = (
    (("peers-mistralrs",), overview),
    (("peers-mistralrs",), notes),
    (("peers-mistralrs", "peers-profile"), types),
    (("peers-mistralrs",), lengths),
    (("peers-mistralrs", "peers-one-thread", "peers-profile"), waiting),
    (("peers-options",), options),
    (("peers-requests", "peers-mistralrs"), requests),
    (("peers-profile",), profile),
    (("peers-cuda",), gpu),
)


STEPS = ("peers", *dict.fromkeys(step for needed, _ in PARTS for step in needed))


def markdown(runs: Runs) -> str:
    """Return the page: for each machine the parts whose runs are there."""
    machines: dict[str, dict[str, Run]] = {}
    for name, run in runs.items():
        folder, _, file = name.rpartition("/")
        machines.setdefault(folder, {})[file.removesuffix(".json.gz")] = run
    lines = [INTRO]
    for found in machines.values():
        figures = Figures(found)
        parts = [part(figures) for needed, part in PARTS if all(step in found for step in needed)]
        if parts:
            run = found[first_step(found)]
            place = ["", f"Measured on {machine_name(run)}{busy_note(run)}."]
            lines += [] if parts[0][0].startswith("#") else place  # that section names its machine
            lines += [line for part in parts for line in ("", *part)]
    return "\n".join([*lines, "", END])


def first_step(found: Runs) -> str:
    """Return the first step of PARTS that a machine has."""
    return next(step for step in STEPS if step in found)
