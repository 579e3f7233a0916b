"""`llm-worker-rbee bench accuracy`: how far a path is from float32 on the dequantized weights."""

from collections.abc import Callable
from contextlib import ExitStack, closing

import typer

from llm_worker_rbee.backends import resolve_kv_type, select_backend
from llm_worker_rbee.cli.loading import set_up
from llm_worker_rbee.cli.options import LoadFlags
from llm_worker_rbee.cli.terminal import style
from llm_worker_rbee.llm import LLM
from llm_worker_rbee.progress import StepProgress, step_progress

from .. import accuracy as benchmark
from ..accuracy import LibrarySide, MeasuredPath, Side, WorkerSide
from ..results import Result, Run, describe_model
from ..synthetic import parse as parse_synthetic
from ..workload import PROMPTS, TEXT, read_prompts, read_text
from .common import parse_counts, print_table, recording
from .embed import check_embeddings
from .options import AccuracyCommand, ResultFlags

LLAMA_CPP = "llama.cpp"
AGAINST = ("reference", "transformers")
TITLES = {
    "ppl_ratio": "perplexity, ratio to the truth's",
    "kl": "KL divergence from the truth",
    "top1": "same likeliest token, in the text",
    "ppl": "perplexity",
    "ppl_truth": "perplexity of the truth",
    "mean_abs_dlogprob": "|log-probability - truth's|, mean",
    "max_abs_dlogprob": "|log-probability - truth's|, largest",
    "top1_prompts": "same likeliest token, after prompts",
    "greedy_same": "same greedy answers",
    "greedy_same_first_token": "same first token of greedy answers",
    "greedy_max_gap": "log-probability between both tokens where greedy answers diverge, largest",
}


def accuracy(options: AccuracyCommand) -> None:
    """Compare the path with the truth."""
    model, synthetic, against, tokens = options.model, options.synthetic, options.against, options.tokens
    computing, results = options.computing, options.results
    used = set_up(computing)
    if options.embedding:
        check_embeddings(model, against, options.peer_python, results, computing, used)
        return
    if against not in AGAINST:
        raise typer.BadParameter(f"--against is {against!r}: use one of {', '.join(AGAINST)}")
    if synthetic is not None:
        _check_synthetic(synthetic, model, parse_counts(options.batch, "--batch", 1), results, computing)
        return
    questions, body = read_prompts(options.prompts or PROMPTS), read_text(options.text or TEXT)
    settings = {
        "against": against,
        "tokens": tokens,
        "window": benchmark.WINDOW,
        "prompts": len(questions),
        "threads": used,
        "own_prompts": options.prompts is None,
        "own_text": options.text is None,
        "kv_type": computing.kv_type,
        "quantize": computing.quantize,
    }
    with recording("accuracy", results, _show, **settings) as recorder, step_progress() as progress:
        progress("loading", 0, 1)
        llm = _load(model, computing, progress)
        evaluation = benchmark.EvaluationSet.encode(llm, questions, body, tokens)
        recorder.model = describe_model(llm.checkpoint.path, progress)
        with ExitStack() as opened:

            def open_library(library: str, python: str) -> Side:
                progress(f"loading in {library}", 0, 1)
                side = LibrarySide(library, python, llm.checkpoint.path, evaluation.max_length, used)
                opened.enter_context(closing(side))
                recorder.details.setdefault("peers", {})[library] = side.version
                return side

            is_library = against == "transformers"
            reference = llm if is_library and not options.greedy else _reference(llm, computing, progress)
            truth = open_library(against, options.peer_python) if is_library else WorkerSide(reference)
            paths = _paths(llm, against, options.llama_cpp_python, open_library)
            recorder.settings["backend"] = paths[0].fields["backend"]
            benchmark.run(recorder, progress, truth, paths, evaluation)
            if options.greedy:
                for result in benchmark.compare_greedy(llm, reference, evaluation.prompts, options.greedy, progress):
                    recorder.add_result(result)


def _check_synthetic(
    name: str, model: str | None, batches: list[int], results: ResultFlags, computing: LoadFlags
) -> None:
    if model is not None:
        raise typer.BadParameter("both a MODEL and --synthetic are given: choose one")
    spec = parse_synthetic(name)
    settings = {"synthetic": name, "batches": batches, "kv_type": computing.kv_type, "quantize": computing.quantize}
    with recording("accuracy", results, _show_errors, **settings) as recorder, step_progress() as progress:
        backend = select_backend(computing.device, computing.backend, computing.kernel_threads)
        kv_type = resolve_kv_type(backend, computing.kv_type)
        recorder.model = {"name": str(spec), "bytes": spec.nbytes, "synthetic": True, "seed": 0}
        ours, truth = benchmark.load_synthetic_pair(spec, backend, computing.quantize, kv_type, progress)
        benchmark.measure_logit_errors(recorder, progress, ours, truth, kv_type, batches)


def _load(model: str | None, computing: LoadFlags, progress: StepProgress) -> LLM:
    """Load a model; the progress is shown in words, and the bar of the measuring stays at its beginning."""
    return LLM(
        model,
        device=computing.device,
        backend=computing.backend,
        threads=computing.kernel_threads,
        kv_type=computing.kv_type,
        quantize=computing.quantize,
        progress=lambda what, done, total: progress(f"{what} {done / total:.0%}" if total else what, 0, 1),
    )


def _reference(llm: LLM, computing: LoadFlags, progress: StepProgress) -> LLM:
    """Return the file's weights on the reference backend; the path itself if it is just that."""
    same = llm.model.ops.name == "reference" and llm.kv_type == "float32" and computing.quantize is None
    return llm if same else _load(str(llm.checkpoint.path), LoadFlags(backend="reference"), progress)


def _paths(
    llm: LLM, against: str, llama_cpp: str | None, open_library: Callable[[str, str], Side]
) -> list[MeasuredPath]:
    backend = llm.model.ops.name
    paths = [MeasuredPath(WorkerSide(llm), "", {"backend": backend, "path": backend, "against": against})]
    if llama_cpp is not None:
        side = open_library("llama-cpp-python", llama_cpp)
        paths.append(MeasuredPath(side, LLAMA_CPP, {"path": LLAMA_CPP, "against": against}))
    return paths


def _show_errors(run: Run) -> None:
    rows = [["", "BACKEND", "ERROR OF THE LOGITS"]]
    rows += [[r.name.partition("/")[2], str(r.fields["backend"]), f"{r.estimate:.1e}"] for r in run.results]
    print_table(rows, right=[2])


def _show(run: Run) -> None:
    by_name = {result.name: result for result in run.results}
    suffixes = [suffix for suffix in ("", f"/{LLAMA_CPP}") if any(n + suffix in by_name for n in TITLES)]
    heads = [str(run.settings.get("backend")) if not suffix else LLAMA_CPP for suffix in suffixes]
    rows = [["", *(text for head in heads for text in (head.upper(), "95% INTERVAL"))]]
    for name, title in TITLES.items():
        cells = [_cells(by_name.get(name + suffix)) for suffix in suffixes]
        if any(value for value, _ in cells):
            rows.append([title, *(text for pair in cells for text in pair)])
    truth = run.details.get("peers", {}).get("transformers") or "the reference backend"
    print(style(f"truth: {truth}, float32 on the dequantized weights\n", "dim"))
    print_table(rows, right=range(1, 2 * len(heads), 2))


def _cells(result: Result | None) -> tuple[str, str]:
    if result is None:
        return "", ""
    shares = result.name.startswith(("top1", "greedy_same"))
    value, low, high = (f"{v:.1%}" if shares else f"{v:.5g}" for v in (result.estimate, result.low, result.high))
    return value, f"{low} .. {high}" if low != high else ""
