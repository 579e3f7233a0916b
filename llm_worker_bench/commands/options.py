"""The options and the text of each command that measures, apart from its body, which is imported when it is called.

`E2eCommand` is `bench e2e`, as in cli/commands.py of the worker; common.py has what their bodies share.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llm_worker_rbee.cli.options import MODEL_HELP, ComputeFlags, LoadFlags, option_fields
from llm_worker_rbee.config import MAX_VOCABULARY

from .. import ROUNDS

SYNTHETIC_HELP = (
    "Random weights of a known shape in place of a model: llama2-7b:Q4_K_M, or :4 after it for 4 layers, :4:16 for 4 "
    "layers with 16 experts."
)
RUN_HELP = "a file that --save wrote, or the name of a baseline."
_option = option_fields(None)
_result, _measuring, _peer = map(option_fields, ("Results", "Measuring", "Peers"))
_server, _own, _load, _prompts = map(option_fields, ("Server", "Server to start", "Load", "Prompts"))
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


@dataclass(kw_only=True, eq=False, repr=False)
class ResultFlags:
    """The options for saving and comparing a run."""

    as_json: bool = _result(False, None, "Print one JSON object and nothing else.", "--json")
    save: Path | None = _result(None, "FILE", "Write the run, with its samples, to a JSON file.")
    save_baseline: str | None = _result(None, "NAME", "Keep the run as a baseline of this name.")
    baseline: str | None = _result(None, "NAME|FILE", "Compare with a baseline; exit 1 on a regression.")
    threshold: float = _result(0.10, "X", "Smallest regression that fails; 0.10 is 10%.", min=0.0)
    force: bool = _result(False, None, "Compare also with a run of another machine.", "--force")


@dataclass(kw_only=True, eq=False, repr=False)
class ProfileCommand:
    """Show where the time goes, by component, for prefill and decode.

    Steps go through the engine as a server's do. On the CPU every task of a
    step is timed where it runs, on a GPU every kernel; HOST is what none of
    them covers. OF LIMIT compares with the measured rates of this machine:
    memory, and the arithmetic that a component is computed in.

    Writes report.html, report.md, flame graphs (SVG, and JSON for speedscope.app) and the run itself.

    \b
    Examples:
      llm-worker-rbee profile
      llm-worker-rbee profile model.gguf --pp 512 --tg 32 --out before
      llm-worker-rbee profile --prompt "Once upon a time"
      llm-worker-rbee profile --pp 0 --tg 32 --batch 16 --depth 1024
      llm-worker-rbee profile --synthetic llama2-7b:Q4_K_M:4 --backend reference
      llm-worker-rbee profile --device cuda --synthetic llama2-7b:Q4_K_M --batch 64
      llm-worker-rbee profile --attention-pass
      llm-worker-rbee profile --py-spy --native
    """

    model: ModelArgument = None
    synthetic: str | None = _measuring(None, "SHAPE:TYPES", SYNTHETIC_HELP)
    pp: int = _measuring(128, "N", "Length of the prompt in tokens; 0: no prefill.", min=0)
    tg: int = _measuring(16, "N", "Tokens to generate; 0: no decode.", min=0)
    prompt: str | None = _measuring(None, "TEXT", "A real prompt, from text to text, in place of --pp random tokens.")
    depth: int = _measuring(0, "N", "Tokens in the KV cache before the prompt.", min=0)
    batch: int = _measuring(1, "N", "Requests at once.", min=1)
    repetitions: int = _measuring(5, "N", "Number of repetitions.", "-r", min=1)
    flame: float = _measuring(3.0, "S", "Seconds for each flame graph; 0: none.", min=0, max=600)
    attention_pass: bool = _measuring(
        False, None, "One attention pass, 128 tokens at width 4096, on every backend, with the Rust worker's shares."
    )
    no_report: bool = _measuring(False, None, "Write no folder: print, and what --save says.")
    py_spy: bool = _measuring(False, None, "Sample with py-spy (extra `bench`).")
    native: bool = _measuring(False, None, "With --py-spy: include native frames.")
    out: Path | None = _measuring(None, "FOLDER", "Folder of the report.", "-o", show_default="profile-MODEL-DATE")
    results: ResultFlags
    computing: LoadFlags


@dataclass(kw_only=True, eq=False, repr=False)
class MicroCommand:
    """Measure the ops and parts one by one, each with the limit of this machine.

    TIME is that of one call: the mean of the middle half of the samples. OF LIMIT is the least time that the memory
    or the arithmetic of this machine, measured just before, allows for the task's bytes and operations, over that.

    The first six families are the Rust worker's suite, on any backend: a part that kernels fuse with others, or do
    not need, is computed with the backend's own means, and the field `note` of its result says so. What else only the
    reference can do runs there, whatever the backend. On a GPU a sample is the replay of a CUDA graph of many calls,
    until the device has finished.

    The kernels of the CPU (kernel/) are shown with billions of multiply-adds and bytes of the file a second.
    --cpu-isa takes several instruction sets here, separated by commas, or all: each is measured in its own process.

    \b
    Examples:
      llm-worker-rbee bench micro --filter rope
      llm-worker-rbee bench micro --filter kernel/ --cpu-isa all --rounds 3
      llm-worker-rbee bench micro --save-baseline before
      llm-worker-rbee bench micro --baseline before --threshold 0.05
      llm-worker-rbee bench micro --filter ^causal_mask/ --save-baseline masks
      llm-worker-rbee bench micro --filter ^causal_mask_cached/ --as causal_mask --baseline masks
      llm-worker-rbee bench micro --filter 'rope_forward|qkv|scores|mask|full' --backend cpu --original
      llm-worker-rbee bench micro --ab backend=reference,reference --filter linear/Q4
    """

    filter: str | None = _measuring(None, "RE", "Only benchmarks whose name matches this expression.")
    ab: str | None = _measuring(None, "backend=A,B", "Measure two backends in turn and compare them.")
    seconds: float = _measuring(0.5, "X", "Seconds per benchmark.", min=0.01, max=600)
    rounds: int = _measuring(ROUNDS, "N", "Rounds over all benchmarks; fewer take less time.", min=1, max=100)
    rename: str | None = _measuring(None, "FAMILY", "Name the results of the one selected family so.", "--as")
    original: bool = _measuring(False, None, "Show what the Rust worker's own suite printed, on an unnamed CPU.")
    names: bool = _measuring(False, None, "List the benchmarks and exit.", "--list")
    results: ResultFlags
    computing: ComputeFlags


@dataclass(kw_only=True, eq=False, repr=False)
class E2eCommand:
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

    model: ModelArgument = None
    synthetic: list[str] | None = _measuring(None, "SHAPE:TYPES", f"{SYNTHETIC_HELP} FP8 on a GPU. Repeatable.")
    pp: str = _measuring("512", "N,...", "Prompt lengths in tokens; 0: no prefill.")
    tg: str = _measuring("128", "N,...", "Tokens to generate; 0: no decode.")
    depth: str = _measuring("0", "N,...", "Tokens in the KV cache at the start.")
    batch: str = _measuring("1", "N,...", "Batch sizes.")
    pg: str | None = _measuring(None, "P,T", "Time BATCH requests of P prompt and T output tokens.")
    requests: int | None = _measuring(None, "N", "Requests of --pg, BATCH at a time.", min=1, show_default="BATCH")
    step: list[str] | None = _measuring(
        None, "PxL[+D]", "Time a step of P prompts of L tokens and D decodes. Repeatable."
    )
    burst: list[str] | None = _measuring(None, "PxL", "Time to first token of P prompts at once. Repeatable.")
    max_step_tokens: int | None = _measuring(None, "N", "Token budget of a step.", min=1, show_default="the engine's")
    prefix: int = _measuring(0, "N", "Time two prompts that share N tokens; 0: do not.", min=0)
    target_itl_ms: str | None = _measuring(None, "T,...", "Time decode during a prefill of 2,000 tokens; 0: no target.")
    speculative: str = _measuring("off", "HOW", "Decode real text with this drafter too: ngram.")
    draft_tokens: int | None = _measuring(None, "K", "Maximum number of draft tokens per step.", min=1, max=16)
    draft_model: str | None = _measuring(None, "MODEL", "Decode real text with this model as drafter too.")
    deterministic: bool = _measuring(False, None, "Batch-invariant kernels, as `serve --deterministic` uses them.")
    repetitions: int = _measuring(5, "N", "Number of repetitions.", "-r", min=1)
    results: ResultFlags
    computing: LoadFlags


@dataclass(kw_only=True, eq=False, repr=False)
class LoadCommand:
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

    model: ModelArgument = None
    synthetic: str | None = _measuring(None, "SHAPE:TYPES", SYNTHETIC_HELP)
    compile: bool = _measuring(False, None, "Also measure a start that compiles all kernels.")
    no_warm_up: bool = _measuring(False, None, "On a GPU: start as `run` does, not as `serve`.", "--no-warm-up")
    max_batch: int | None = _measuring(
        None, "N", "Maximum number of requests in a batch.", min=1, show_default="serve's"
    )
    max_step_tokens: int | None = _measuring(None, "N", "Token budget of a step.", min=1, show_default="serve's")
    repetitions: int = _measuring(3, "N", "Number of cold and of warm starts.", "-r", min=1)
    results: ResultFlags
    computing: ComputeFlags


@dataclass(kw_only=True, eq=False, repr=False)
class EmbedCommand:
    """Measure embeddings: texts and tokens a second, by length and batch, against peers.

    This worker, sentence-transformers (float32) and llama-server embed the same
    seeded texts in turn, with the same number of threads. Tokenizing counts for
    all of them; `tokenized` is this worker without it. What a peer cannot read
    is left out with the reason.

    lenN bM: texts of N tokens, M of them a call. mixedN: N texts of 20 to 200
    tokens in one call. --types converts the model first and makes a row of each
    type: all rows show sentence-transformers, and llama-server reads the same
    file.

    \b
    Examples:
      llm-worker-rbee bench embed
      llm-worker-rbee bench embed --types F32,Q8_0 --llama-server PATH --peer-python PATH
      llm-worker-rbee bench embed model.gguf --lengths 0 --texts 1000
      llm-worker-rbee bench embed --synthetic bge-large:F16 --device cuda --tokenized --lengths 512 --batch 256
    """

    model: ModelArgument = None
    synthetic: str | None = _measuring(None, "SHAPE:TYPES", SYNTHETIC_HELP)
    lengths: str = _measuring("32,128", "N,...", "Lengths of texts in tokens; 0: only mixed ones.")
    batch: str = _measuring("1,32", "N,...", "Texts of a call.")
    texts: int = _measuring(1000, "N", "Texts of 20 to 200 tokens in one call; 0: none.", min=0)
    types: str | None = _measuring(None, "TYPE,...", "Convert the model first, a row each: F32,Q8_0.")
    tokenized: bool = _measuring(False, None, "Random token ids in place of texts: speed without tokenizing.")
    files: Path | None = _measuring(
        None, "DIR", "Folder for model files that are made: kept, and used again.", show_default="a temporary one"
    )
    repetitions: int = _measuring(3, "N", "Number of repetitions.", "-r", min=1)
    peer: list[str] | None = _peer(None, "NAME", "Measure only this peer. Repeatable.", show_default="all")
    no_peers: bool = _peer(False, None, "Measure this worker alone.")
    folder: Path | None = _peer(None, "DIR", "Folder of the model for sentence-transformers.", show_default="MODEL")
    llama_server: str | None = _peer(None, "PATH", "Path of llama-server.", show_default="on the PATH")
    peer_python: list[str] | None = _peer(
        None, "PATH", "Python with sentence-transformers. Repeatable.", show_default="this one"
    )
    timeout: float = _peer(900.0, "S", "Timeout of one answer, in seconds.", min=0.1)
    results: ResultFlags
    computing: ComputeFlags


@dataclass(kw_only=True, eq=False, repr=False)
class ServerFlags:
    """The server and the fields of its requests."""

    endpoint: str | None = _server(
        None, "chat|completions", "Route to measure.", show_default="chat; completions with --token-prompts"
    )
    model: str | None = _server(None, "NAME", "Name of the model.", "-m", show_default="the first it lists")
    api_key: str | None = _server(None, "KEY", "Sent as a bearer token.", envvar="LLM_WORKER_RBEE_API_KEY")
    header: list[str] | None = _server(None, "'NAME: VALUE'", "Additional header. Repeatable.")
    timeout: float = _server(600.0, "S", "Timeout of a request, in seconds.", min=0.001, max=86400)
    temperature: float = _server(0.0, "X", "Sampling temperature of the requests.", min=0, max=100)
    ignore_eos: bool = _server(
        False, None, "Ask for answers of full length (not every server knows the field).", "--ignore-eos"
    )
    no_usage: bool = _server(False, None, "Do not ask the server for token counts: count pieces of text.", "--no-usage")


@dataclass(kw_only=True, eq=False, repr=False)
class OwnFlags:
    """A server started for the length of the load."""

    spawn: bool = _own(False, None, "Start `serve` with the model of -m and measure it; give no URL.", "--spawn")
    synthetic: str | None = _own(None, "SHAPE:TYPES", SYNTHETIC_HELP)
    engine: str | None = _own(None, "model|null", "null: compute nothing, to measure the server alone.")
    serve_args: str | None = _own(None, "'...'", "More options of `serve`, quoted as in a shell.")
    health: bool = _own(False, None, "Poll /health during the run; always with --spawn.", "--health")


@dataclass(kw_only=True, eq=False, repr=False)
class TrafficFlags:
    """How many requests, when, and with which prompts."""

    requests: int | None = _load(
        None, "N", "How many requests.", "-n", min=1, max=1_000_000, show_default="100, or all of --prompts"
    )
    rate: float = _load(math.inf, "R", "Requests per second; inf: all at once.", "-r")
    burstiness: float = _load(1.0, "X", "1: Poisson arrivals; less: bursts; more: regular.", min=0.001, max=1e6)
    concurrency: int | None = _load(
        None, "N", "Maximum number of requests in flight.", "-c", min=1, max=4096, show_default="4096"
    )
    duration: float | None = _load(None, "S", "Send no request after S seconds.", min=0.001)
    warm_up: int = _load(1, "N", "Requests before the run, not measured.", min=0, max=1000)
    input_len: str = _prompts("128", "LEN", "Words (or token ids) per prompt: N, LOW-HIGH or normal:MEAN,SD.")
    output_len: str = _prompts("64", "LEN", "Maximum tokens per answer, in the same form.")
    prompts: Path | None = _prompts(None, "FILE.jsonl", 'Lines of {"prompt": ...} or {"messages": [...]}.')
    token_prompts: int = _prompts(
        0,
        "VOCABULARY",
        "Send random token ids below VOCABULARY, not words; always with --synthetic.",
        min=0,
        max=MAX_VOCABULARY,
        show_default="words",
    )
    shared_prefix: int = _prompts(0, "N", "Begin each prompt with the same N words or ids.", min=0, max=1_000_000)
    prefix_groups: int = _prompts(1, "K", "Number of different shared prefixes.", min=1, max=1_000_000)
    seed: int = _prompts(0, "N", "Seed of the prompts.", min=0)


@dataclass(kw_only=True, eq=False, repr=False)
class ServingCommand:
    """Put load on any OpenAI-compatible server; measure what its users would see.

    With --rate, arrivals are fixed beforehand: a slow server cannot hold them
    back. Without it, --concurrency says how many requests are under way.

    Failed requests are counted by kind and in no latency. Prompts are plain
    English words, about a token each. With --token-prompts they are token ids:
    --input-len is then exact, and so is --output-len with --ignore-eos.

    \b
    Examples:
      llm-worker-rbee bench serving localhost:8080 -n 50 -c 4
      llm-worker-rbee bench serving localhost:8080 --rate 2 --duration 60
      llm-worker-rbee bench serving localhost:8080 --prompts mine.jsonl
      llm-worker-rbee bench serving localhost:8080 --shared-prefix 1000
      llm-worker-rbee bench serving --spawn -c 16
      llm-worker-rbee bench serving --spawn --engine null -c 64 --output-len 256
      llm-worker-rbee bench serving --spawn --synthetic smollm2-135m:Q8_0 --input-len 27
    """

    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="The server: http://host:port, with its path if not /v1. Or --spawn."),
    ] = None
    server: ServerFlags
    own: OwnFlags
    load: TrafficFlags
    results: ResultFlags


@dataclass(kw_only=True, eq=False, repr=False)
class AccuracyCommand:
    """Measure how far a path is from float32 on the dequantized weights: the truth.

    Log-probabilities are those of the truth's five likeliest tokens at the end
    of each prompt; perplexity, divergence and agreement come from a text, in
    windows of 256 tokens. Of a synthetic model, the error of the logits as a
    part of their standard deviation, for prompts and for decode in batches.

    The reference against itself must differ by nothing: a check. What
    --kv-type and --quantize lose counts too: the truth is without them.

    --embedding: the cosine of each text's embedding to the truth's, and how well
    both find the relevant passages of a labelled set that comes with the package.

    \b
    Examples:
      llm-worker-rbee bench accuracy
      llm-worker-rbee bench accuracy model.gguf --tokens 1500 --json
      llm-worker-rbee bench accuracy --kv-type int8
      llm-worker-rbee bench accuracy --against transformers
      llm-worker-rbee bench accuracy --llama-cpp-python ~/lcp/bin/python
      llm-worker-rbee bench accuracy --device cuda --greedy 24
      llm-worker-rbee bench accuracy --device cuda --synthetic llama2-7b:Q4_K_M:2
      llm-worker-rbee bench accuracy --embedding --quantize Q8_0 --against sentence-transformers
    """

    model: ModelArgument = None
    synthetic: str | None = _measuring(None, "SHAPE:TYPES", SYNTHETIC_HELP)
    batch: str = _measuring("1,2,4,8,16,24,64,128", "N,...", "With --synthetic: batch sizes to compare logits at.")
    greedy: int = _measuring(0, "N", "Compare greedy answers of N tokens; 0: do not.", min=0)
    embedding: bool = _measuring(
        False, None, "Of an embedding model: cosine to the truth, retrieval of a labelled set."
    )
    against: str = _measuring("reference", "NAME", "Compare with reference, transformers, sentence-transformers.")
    peer_python: str = _measuring(sys.executable, "PYTHON", "Python with the library.", show_default="this one")
    llama_cpp_python: str | None = _measuring(None, "PYTHON", "Python with llama-cpp-python: measure it too.")
    prompts: Path | None = _measuring(None, "FILE", "Prompts: one per line, or .jsonl.", show_default="20 built-in")
    text: Path | None = _measuring(None, "FILE", "Text to score.", show_default="built-in")
    tokens: int = _measuring(512, "N", "Number of tokens of the text.", min=2, max=1_000_000)
    results: ResultFlags
    computing: LoadFlags


@dataclass(kw_only=True, eq=False, repr=False)
class PeersCommand:
    """Measure this worker against llama.cpp, mistral.rs, vLLM and transformers.

    The same file, the same lengths, the same number of threads, in turn;
    with --device cuda llama.cpp and vLLM compute on the GPU too, and the
    others are left out. Each peer but llama-bench keeps the model loaded;
    loading is not counted. transformers computes in float32. llama-bench
    does not sample, the others sample greedily.

    With --batch 16 `serve` and llama-server with 16 slots answer 16 real
    prompts at once over HTTP, TG tokens each: tokens per second of all
    requests while all of them decode. mistral.rs and vLLM answer them in
    their own process.

    --suite cpu compares the built-in model in three types, the shape of
    Llama-2-7B with 4 layers in three types, a prompt of 4,096 tokens, 16
    requests at once, and Qwen2.5-Coder 0.5B and 1.5B where their files are;
    --suite families six newer shapes in two types.

    OURS / PEER is the ratio of single repetitions, with its interval. How
    many cores were busy before and after a row is part of the run: ratios of
    a machine that does other work are worth little.

    A peer that is not installed is left out, one that fails is named, with
    its own error. --install mistral.rs makes an environment for it, which
    later runs find; it stands on Candle.

    \b
    Examples:
      llm-worker-rbee bench peers --llama-bench ~/llama.cpp/build/bin/llama-bench
      llm-worker-rbee bench peers model-folder --device cuda --peer vllm --peer-python ~/vllm/bin/python
      llm-worker-rbee bench peers --peer llama-bench --llama-bench-args '-fa off' --llama-bench-args '-ub 64'
      llm-worker-rbee bench peers --peer llama-bench --peer ik_llama.cpp=~/ik_llama.cpp/build/bin/llama-bench
      llm-worker-rbee bench peers --batch 16 --llama-server ~/llama.cpp/build/bin/llama-server
      llm-worker-rbee bench peers --synthetic llama2-7b:Q4_0:4 --peer llama-bench
      llm-worker-rbee bench peers --suite cpu --list
      llm-worker-rbee bench peers --suite cpu --rows '7b|long' --llama-bench PATH --save run.json --markdown run.md
    """

    model: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help=f"{MODEL_HELP} Several: a row each.")
    ] = None
    synthetic: list[str] | None = _measuring(None, "SHAPE:TYPES", f"{SYNTHETIC_HELP} Repeatable.")
    suite: str | None = _measuring(
        None, "NAME", "A list of rows: cpu or families. MODEL takes the place of the built-in model."
    )
    rows: str | None = _measuring(None, "RE", "Only rows of the suite whose name matches this expression.")
    list_rows: bool = _measuring(False, None, "List the rows, with about how long each takes, and exit.", "--list")
    files: Path | None = _measuring(
        None, "DIR", "Folder for model files that rows make: kept, and used again.", show_default="a temporary one"
    )
    pp: str | None = _measuring(
        None, "N,...", "Prompt lengths in tokens; 0: no prefill.", show_default="512, or the suite's"
    )
    tg: str | None = _measuring(None, "N,...", "Tokens to generate; 0: no decode.", show_default="128, or the suite's")
    batch: str | None = _measuring(
        None,
        "N,...",
        "Batch sizes; above 1, decode only, with llama-server, mistral.rs and vllm.",
        show_default="1, or the suite's",
    )
    repetitions: int = _measuring(3, "N", "Number of repetitions.", "-r", min=1)
    markdown: Path | None = _result(None, "FILE", "Write the comparison as a table in Markdown.")
    peer: list[str] | None = _peer(
        None, "NAME", "Measure only this peer; NAME=PATH: the llama-bench of a fork. Repeatable.", show_default="all"
    )
    llama_bench: str | None = _peer(None, "PATH", "Path of llama-bench.", show_default="on the PATH")
    llama_server: str | None = _peer(None, "PATH", "Path of llama-server.", show_default="on the PATH")
    llama_bench_args: list[str] | None = _peer(
        None, "ARGS", "Measure llama-bench once more with these options, such as '-fa off'. Repeatable."
    )
    peer_python: list[str] | None = _peer(
        None,
        "PATH",
        "Python with mistralrs, vllm, transformers or llama-cpp-python. Repeatable.",
        show_default="this one",
    )
    install: list[str] | None = _peer(
        None, "NAME", "Install this peer first, into an environment of its own in the cache folder: mistral.rs."
    )
    timeout: float = _peer(900.0, "S", "Timeout of one answer, in seconds.", min=0.1)
    results: ResultFlags
    computing: ComputeFlags


@dataclass(kw_only=True, eq=False, repr=False)
class ExperimentsCommand:
    """Judge the claims about optimisations on this machine.

    Each is tested on every backend that is there, decode and prefill apart, and ends in a line: confirmed, refuted,
    within noise, or mixed where backends differ, with the numbers. Under 5 minutes on 2 cores.

    \b
    Examples:
      llm-worker-rbee bench experiments
      llm-worker-rbee bench experiments --only 3a --only 5
      llm-worker-rbee bench experiments --backends reference,cpu
      llm-worker-rbee bench experiments --all --claims claims.md
    """

    only: list[str] | None = _measuring(None, "CLAIM", "This claim alone, such as 3a. Repeatable.")
    all: bool = _measuring(False, None, "More lengths, and longer.")
    model: str | None = _measuring(None, "MODEL", f"The model of whole steps. {MODEL_HELP}", "-m")
    backends: str | None = _measuring(
        None, "NAME,...", "Test these: reference, cpu, cuda.", show_default="all that are there"
    )
    threads: int | None = _measuring(None, "N", "Threads of the reference's matrix library.", min=1, show_default="1")
    claims: Path | None = _measuring(None, "FILE", "Write the claims with their verdicts as Markdown.")
    results: ResultFlags


@dataclass(kw_only=True, eq=False, repr=False)
class CompareCommand:
    """Compare two saved runs.

    Exit status 1 if a benchmark became worse by more than the threshold, beyond noise.

    \b
    Examples:
      llm-worker-rbee bench compare before after
      llm-worker-rbee bench compare main.json branch.json --threshold 0.05
    """

    before: Annotated[str, typer.Argument(metavar="BEFORE", help=f"The earlier run: {RUN_HELP}")]
    after: Annotated[str, typer.Argument(metavar="AFTER", help=f"The later run: {RUN_HELP}")]
    threshold: float = _result(0.10, "X", "Smallest regression that fails; 0.10 is 10%.", min=0.0)
    as_json: bool = _result(False, None, "Print one JSON object and nothing else.", "--json")
    force: bool = _result(False, None, "Compare runs of different machines too.")


@dataclass(kw_only=True, eq=False, repr=False)
class ReportCommand:
    """Write one HTML page with tables and plots of saved runs.

    The page needs no other file and no network: send it as it is.

    Several runs of one kind make a history and a comparison. Plots need matplotlib (the extra `bench`).

    \b
    Examples:
      llm-worker-rbee bench report micro.json e2e.json -o report.html
      llm-worker-rbee bench report before after --title "Faster attention"
    """

    results: Annotated[list[str], typer.Argument(metavar="RESULTS", help="Files that --save wrote, or baselines.")]
    output: Path = _option(Path("report.html"), "FILE", "HTML file to write.", "-o")
    title: str | None = _option(None, "TEXT", "Title of the page.", show_default="what was measured")
