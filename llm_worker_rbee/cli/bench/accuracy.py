"""`llm-worker-rbee bench accuracy`: how far a path is from float32 on the dequantized weights."""

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...progress import StepProgress, step_progress
from ..options import MODEL_HELP, LoadOptions, gather
from ..terminal import columns, style
from .common import MEASURING_PANEL, ResultOptions, recording

if TYPE_CHECKING:
    from ...bench.accuracy import MeasuredPath as Measured
    from ...bench.accuracy import Side
    from ...bench.results import Result, Run
    from ...llm import LLM

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
}


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=MEASURING_PANEL, **more)


@gather(results=ResultOptions, computing=LoadOptions)
def accuracy(
    results: ResultOptions,
    computing: LoadOptions,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    against: Annotated[
        str, _option("--against", metavar="reference|transformers", help="Who computes the truth, in float32.")
    ] = "reference",
    peer_python: Annotated[
        str, _option("--peer-python", metavar="PYTHON", show_default="this one", help="Where transformers is.")
    ] = sys.executable,
    llama_cpp_python: Annotated[
        str | None,
        _option("--llama-cpp-python", metavar="PYTHON", help="Judge llama.cpp beside it: where its package is."),
    ] = None,
    prompts: Annotated[
        Path | None,
        _option("--prompts", metavar="FILE", show_default="20 of ours", help="One prompt a line, or .jsonl."),
    ] = None,
    text: Annotated[Path | None, _option("--text", metavar="FILE", show_default="ours", help="A text.")] = None,
    tokens: Annotated[
        int, _option("--tokens", metavar="N", min=2, max=1_000_000, help="How many tokens of the text are used.")
    ] = 512,
) -> None:
    """Measure how far a path is from float32 on the dequantized weights: the truth.

    Log-probabilities are those of the truth's five likeliest tokens at the end
    of each prompt; perplexity, divergence and agreement come from a text, in
    windows of 256 tokens.

    The reference against itself must differ by nothing: a check. What
    --kv-type and --quantize lose counts too: the truth is without them.

    \b
    Examples:
      llm-worker-rbee bench accuracy
      llm-worker-rbee bench accuracy model.gguf --tokens 1500 --json
      llm-worker-rbee bench accuracy --kv-type int8
      llm-worker-rbee bench accuracy --against transformers
      llm-worker-rbee bench accuracy --llama-cpp-python ~/lcp/bin/python
    """
    used = computing.set_up()
    from ...bench import accuracy as room
    from ...bench import environment
    from ...bench import workload as files

    if against not in AGAINST:
        raise typer.BadParameter(f"--against is {against!r}: use one of {', '.join(AGAINST)}")
    asked, body = files.read_prompts(prompts or files.PROMPTS), files.read_text(text or files.TEXT)
    settings = {
        "against": against, "tokens": tokens, "window": room.WINDOW, "prompts": len(asked), "threads": used,
        "own_prompts": prompts is None, "own_text": text is None, "kv_type": computing.kv_type,
        "quantize": computing.quantize,
    }  # fmt: skip
    with (
        recording("accuracy", results, _show, **settings) as recorder,
        step_progress() as progress,
        ExitStack() as opened,
    ):
        progress("loading", 0, 1)
        llm = _load(model, computing, progress)
        material = room.Material.of(llm, asked, body, tokens)
        path = llm.checkpoint.path
        recorder.model = environment.describe_model(path, _aside(progress))

        def peer(kind: str, python: str) -> Any:
            from ...bench.accuracy import Peer

            progress(f"loading in {kind}", 0, 1)
            made = opened.enter_context(closing(Peer(kind, python, path, material.longest, used)))
            recorder.details.setdefault("peers", {})[kind] = made.version
            return made

        truth = peer(against, peer_python) if against == "transformers" else _reference(llm, computing, progress)
        paths = _paths(llm, against, llama_cpp_python, peer)
        recorder.settings["backend"] = paths[0].fields["backend"]
        room.run(recorder, progress, truth, paths, material)


def _load(model: str | None, computing: LoadOptions, progress: StepProgress) -> "LLM":
    from ...llm import LLM

    return LLM(
        model, device=computing.device, backend=computing.backend, threads=computing.kernel_threads,
        kv_type=computing.kv_type, quantize=computing.quantize, progress=_aside(progress),
    )  # fmt: skip


def _aside(progress: StepProgress) -> Callable[[str, int, int | None], None]:
    """Work before the measuring: told in words, the bar stays at its beginning."""
    return lambda what, done, total: progress(f"{what} {done / total:.0%}" if total else what, 0, 1)


def _reference(llm: "LLM", computing: LoadOptions, progress: StepProgress) -> "Side":
    """The file's weights on the reference backend; where the path is just that, it computes twice."""
    from ...bench.accuracy import Ours

    same = Ours(llm).backend == "reference" and llm.kv_type == "float32" and computing.quantize is None
    return Ours(llm if same else _load(str(llm.checkpoint.path), LoadOptions(backend="reference"), progress))


def _paths(llm: "LLM", against: str, llama_cpp: str | None, peer: Callable[[str, str], Any]) -> list["Measured"]:
    from ...bench.accuracy import MeasuredPath as Measured
    from ...bench.accuracy import Ours

    ours = Ours(llm)
    made = [Measured(ours, "", {"backend": ours.backend, "path": ours.backend, "against": against})]
    if llama_cpp is not None:
        theirs = peer("llama-cpp-python", llama_cpp)
        made.append(Measured(theirs, LLAMA_CPP, {"path": LLAMA_CPP, "against": against}))
    return made


def _show(run: "Run") -> None:
    found = {result.name: result for result in run.results}
    suffixes = [suffix for suffix in ("", f"/{LLAMA_CPP}") if any(n + suffix in found for n in TITLES)]
    heads = [str(run.settings.get("backend")) if not suffix else LLAMA_CPP for suffix in suffixes]
    rows = [["", *(text for head in heads for text in (head.upper(), "95% INTERVAL"))]]
    for name, title in TITLES.items():
        cells = [_cells(found.get(name + suffix)) for suffix in suffixes]
        if any(value for value, _ in cells):
            rows.append([title, *(text for pair in cells for text in pair)])
    lines = columns(rows, right=range(1, 2 * len(heads), 2))
    truth = run.details.get("peers", {}).get("transformers") or "the reference backend"
    print(style(f"truth: {truth}, float32 on the dequantized weights\n", "dim"))
    print(style(lines[0], "bold"))
    print("\n".join(lines[1:]))


def _cells(result: "Result | None") -> tuple[str, str]:
    if result is None:
        return "", ""
    shares = result.name.startswith("top1")
    value, low, high = (f"{v:.1%}" if shares else f"{v:.5g}" for v in (result.estimate, result.low, result.high))
    return value, f"{low} .. {high}" if low != high else ""
