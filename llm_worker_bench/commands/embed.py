"""`llm-worker-rbee bench embed`: texts a second against sentence-transformers and llama.cpp; accuracy of embeddings."""

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import typer

from llm_worker_rbee.cli.loading import set_up
from llm_worker_rbee.cli.options import LoadFlags
from llm_worker_rbee.cli.terminal import cell, note, style
from llm_worker_rbee.embedder import Embedder
from llm_worker_rbee.errors import counted
from llm_worker_rbee.progress import step_progress
from llm_worker_rbee.weights.hub import DEFAULT_EMBEDDING_MODEL

from ..embedding import accuracy as embedding_accuracy
from ..embedding import suite as benchmark
from ..embedding.sides import SENTENCE_TRANSFORMERS, TOKENIZED
from ..embedding.suite import PEERS, EmbedPlan
from ..peers.programs import OURS
from ..results import Result, Run, describe_model
from . import common
from .options import EmbedCommand, ResultFlags

AGAINST = ("reference", SENTENCE_TRANSFORMERS)
TITLES = {
    "cosine/mean": "cosine to the truth, mean",
    "cosine/p1": "cosine to the truth, 1st percentile",
    "cosine/min": "cosine to the truth, smallest",
    "ndcg@10": "nDCG@10 of the labelled set",
    "recall@1": "recall@1 of the labelled set",
    "recall@3": "recall@3 of the labelled set",
    "mrr": "mean reciprocal rank of the labelled set",
}


def _plan(options: EmbedCommand) -> EmbedPlan:
    lengths = [length for length in common.parse_counts(options.lengths, "--lengths") if length]
    return EmbedPlan(
        lengths=lengths,
        batches=common.parse_counts(options.batch, "--batch", 1),
        mixed=options.texts,
        types=[name.strip() for name in (options.types or "").split(",") if name.strip()],
        tokenized=options.tokenized,
        repetitions=options.repetitions,
        threads=set_up(options.computing),
        device=options.computing.device,
        backend=options.computing.backend,
        peers=() if options.no_peers else options.peer or PEERS,
        llama_server=options.llama_server,
        pythons=options.peer_python or (),
        folder=None if options.folder is None else str(options.folder),
        timeout_s=options.timeout,
    )


def embed(options: EmbedCommand) -> None:
    """Measure this worker and its peers in turn."""
    plan = _plan(options)
    if options.types is not None and options.synthetic is not None:
        raise typer.BadParameter("--types converts a MODEL: a synthetic one names its types itself")
    name = options.model or (None if options.synthetic else DEFAULT_EMBEDDING_MODEL)
    source = common.find_source(name, options.synthetic)
    settings = asdict(plan) | {"llama_server": plan.llama_server and Path(plan.llama_server).name}
    settings |= {"pythons": [Path(path).name for path in plan.pythons], "folder": plan.folder and "given"}
    with common.recording("embed", options.results, _show, **settings) as recorder, ExitStack() as stack:
        folder = options.files or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llm-worker-rbee-")))
        folder.mkdir(parents=True, exist_ok=True)
        benchmark.run(recorder, stack.enter_context(step_progress()), source, plan, folder)


def _show(run: Run) -> None:
    if run.model:
        print(f"{run.model['name']}, {counted(run.settings['threads'], 'thread')}\n")
    head = ["", "PROGRAM", "TOKENS/S", "95% INTERVAL", "TEXTS/S", "OURS / THIS", "95% INTERVAL", "VERSION"]
    tests = list(dict.fromkeys(result.name.rpartition("/")[0] for result in run.results))
    order = sorted(run.results, key=lambda result: tests.index(result.name.rpartition("/")[0]))
    common.print_table([head, *map(_row, order)], right=[2, 4, 5])
    for what in ("left_out", "failed"):
        for name, reason in run.details.get(what, {}).items():
            note(cell(f"{what.replace('_', ' ')}: {name}: {reason}"))


def _row(result: Result) -> list[str]:
    test, _, name = result.name.rpartition("/")
    ratio, (low, high) = result.fields["ours_over_peer"], result.fields["ratio_interval"]
    is_shown = ratio is not None and name not in (OURS, TOKENIZED)
    shown = (f"{ratio:.3g}", f"{low:.3g} .. {high:.3g}") if is_shown else ("", "")
    texts = result.estimate * result.fields["texts"] / result.fields["tokens"]
    speed = f"{result.estimate:,.0f}", f"{result.low:,.0f} .. {result.high:,.0f}", f"{texts:,.1f}"
    return [test, name, *speed, *shown, result.fields["version"]]


def check_embeddings(
    model: str | None, against: str, python: str, results: ResultFlags, computing: LoadFlags, threads: int
) -> None:
    """Measure the cosine to the truth and the retrieval of the labelled set: `bench accuracy --embedding`."""
    if against not in AGAINST:
        raise typer.BadParameter(f"--against is {against!r}: with --embedding use one of {', '.join(AGAINST)}")
    settings = {"embedding": True, "against": against, "threads": threads, "quantize": computing.quantize}
    with common.recording("accuracy", results, _show_accuracy, **settings) as recorder, step_progress() as progress:
        progress("loading", 0, 3)
        embedder = Embedder(
            model,
            device=computing.device,
            backend=computing.backend,
            threads=computing.kernel_threads,
            quantize=computing.quantize,
        )
        path = embedder.checkpoint.path
        recorder.model = describe_model(path)
        recorder.settings["backend"] = embedder.backend
        progress("the truth", 1, 3)
        if against == SENTENCE_TRANSFORMERS:
            truth = embedding_accuracy.embed_with_library(recorder, path, python, threads)
        else:
            is_truth = embedder.backend == "reference" and computing.quantize is None
            truth = embedding_accuracy.embed_with(embedder if is_truth else Embedder(path, backend="reference"))
        fields = {"backend": embedder.backend, "path": embedder.quant, "against": against}
        embedding_accuracy.compare(recorder, embedding_accuracy.embed_with(embedder), truth, **fields)


def _show_accuracy(run: Run) -> None:
    by_name = {result.name: result for result in run.results}
    rows = [["", "VALUE", "95% INTERVAL", "THE TRUTH'S"]]
    for name, title in TITLES.items():
        if (result := by_name.get(name)) is not None:
            value, low, high = (f"{number:.6f}" for number in (result.estimate, result.low, result.high))
            truth = by_name.get(f"{name}/truth")
            reference = "" if truth is None else f"{truth.estimate:.6f}"
            rows.append([title, value, "" if low == high else f"{low} .. {high}", reference])
    truth_name = run.details.get("peers", {}).get(SENTENCE_TRANSFORMERS) or "the reference backend"
    print(style(f"truth: {truth_name}, float32\n", "dim"))
    common.print_table(rows, right=[1, 3])
