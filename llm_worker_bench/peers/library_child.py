"""Program that runs another library as a peer, perhaps under another interpreter: it imports nothing of this package.

Arguments: the library and a JSON object (model, threads, context, batch, logits). It loads the model once, prints
{"version", "settings"}, then answers each line of standard input:
  {"kind": "pp" | "tg", "tokens": n}             ->  {"seconds"} of one prefill or decode, greedy, perhaps {"tokens"}
  {"kind": "tg", "tokens": n, "prompts": [ids]}  ->  {"answers"}: of each prompt, [time, tokens so far] as they come
  {"inputs": [text], "batch": n, "file"}         ->  {"seconds"} of embedding n texts a call; the rows are in that file
  {"ids", "last", "file"}             ->  {"rows"}: float32 logits of all positions, or the last, are in that .npy file
A failure is {"error"}. Libraries are imported by name: they belong to the peer's environment.
"""

import importlib
import importlib.metadata
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Reply = dict[str, Any]
Handler = Callable[..., Reply | None]  # the fields of a request -> the reply; None: its seconds
Loaded = tuple[str, dict[str, Any], Handler]  # version, the settings that speed depends on, and the handler
Loader = Callable[[dict[str, Any]], Loaded]
ENCODE_BATCH = 32  # the default of sentence-transformers, and its fastest on two cores
TEXTS_TRIED = 40  # for one of the right number of tokens
WORDS = ("the", "river", "runs", "past", "an", "old", "mill", "while", "a", "dog", "sleeps", "in", "warm", "grass")


def serve(load: Loader, settings: dict[str, Any]) -> None:
    """Load, then answer until standard input ends; whatever libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(**fields: Any) -> None:
        print(json.dumps(fields), file=replies, flush=True)

    try:
        version, used, handle = load(settings)
        reply(version=version, settings=used)
        for line in sys.stdin:
            fields = json.loads(line)
            start = time.perf_counter()
            reply(**(handle(**fields) or {"seconds": time.perf_counter() - start}))
    except Exception as error:
        reply(error=f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}")
        raise


def save_logits(logits: Any, last: bool, file: str) -> Reply:
    """Write float32 logits: (positions, vocabulary), or (1, vocabulary) of the last position."""
    numpy = importlib.import_module("numpy")
    kept = numpy.ascontiguousarray(logits[-1:] if last else logits, numpy.float32)
    numpy.save(file, kept)
    return {"rows": len(kept)}


def load_llama_cpp(settings: dict[str, Any]) -> Loaded:
    """Use `Llama.generate`, greedy: the first token ends a prefill, the following ones are the decode."""
    module = importlib.import_module("llama_cpp")
    threads, context = settings["threads"], settings["context"]
    logits_options = {"n_batch": context, "logits_all": True, "seed": 0} if settings.get("logits") else {}
    llm = module.Llama(
        settings["model"],
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=0,
        verbose=False,
        **logits_options,
    )
    rng = random.Random(0)

    def measure(kind: str, tokens: int) -> None:
        llm.reset()
        ids = [rng.randrange(llm.n_vocab()) for _ in range(tokens if kind == "pp" else 1)]
        generated = llm.generate(ids, temp=0.0)
        for _ in range(1 if kind == "pp" else tokens):
            next(generated)
        generated.close()

    def compute_logits(ids: list[int], last: bool, file: str) -> Reply:
        llm.reset()
        llm.eval(ids)
        return save_logits(llm.scores[: len(ids)], last, file)

    used = {"threads": threads, "n_ctx": context, "n_gpu_layers": 0}
    return str(module.__version__), used, compute_logits if settings.get("logits") else measure


def load_transformers(settings: dict[str, Any]) -> Loaded:
    """Compute in float32 on the CPU from the same file; decode is a plain greedy loop over the KV cache."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the file is here
    torch, library = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(settings["threads"])
    path = settings["model"]
    folder, name = (path, None) if os.path.isdir(path) else os.path.split(path)
    key = "dtype" if int(library.__version__.split(".")[0]) >= 5 else "torch_dtype"
    options = {key: torch.float32, **({"gguf_file": name} if name else {})}
    model = library.AutoModelForCausalLM.from_pretrained(folder or ".", **options).eval()
    generator = torch.Generator().manual_seed(0)

    def measure(kind: str, tokens: int) -> None:
        prompt, steps = (tokens, 1) if kind == "pp" else (1, tokens)
        ids = torch.randint(0, model.config.vocab_size, (1, prompt), generator=generator)
        cache = None
        with torch.inference_mode():
            for _ in range(steps):
                out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def compute_logits(ids: list[int], last: bool, file: str) -> Reply:
        with torch.inference_mode():
            return save_logits(model(torch.tensor([ids])).logits[0].float().numpy(), last, file)

    used = {"threads": settings["threads"], "dtype": "float32"}
    if settings.get("logits"):
        return str(library.__version__), used, compute_logits
    return f"{library.__version__} (torch {torch.__version__})", used, measure


def load_sentence_transformers(settings: dict[str, Any]) -> Loaded:
    """Embed in float32 on the CPU, sorted by length and in batches of 32: the defaults of `encode`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the folder is here
    torch, library = importlib.import_module("torch"), importlib.import_module("sentence_transformers")
    numpy = importlib.import_module("numpy")
    torch.set_num_threads(settings["threads"])
    model = library.SentenceTransformer(settings["model"], device="cpu").float()

    def embed(inputs: list[str], batch: int, file: str = "", **_: Any) -> Reply:
        start = time.perf_counter()
        calls = (inputs[i : i + batch] for i in range(0, len(inputs), batch))
        rows = [model.encode(call, batch_size=ENCODE_BATCH, show_progress_bar=False) for call in calls]
        passed = time.perf_counter() - start
        if file:
            numpy.save(file, numpy.concatenate(rows))
        return {"seconds": passed}

    used = {"threads": settings["threads"], "dtype": "float32", "batch_size": ENCODE_BATCH}
    return f"{library.__version__} (torch {torch.__version__})", used, embed


def load_mistralrs(settings: dict[str, Any]) -> Loaded:
    """Use `Runner` on a GGUF file: it takes text, so prompts are words cut to a number of tokens.

    The word before a decode may be several tokens: its own time from the first token on is taken. Many prompts are
    streamed chat requests, since only those are streamed, read by a thread each without HTTP. Each is sent when the one
    before has its first token: 0.9.5 fails on a prefill of several prompts ("input tensor is not contiguous").
    """
    module = importlib.import_module("mistralrs")
    folder, name = os.path.split(settings["model"])
    batch = settings.get("batch", 1)
    which = module.Which.GGUF(quantized_model_id=folder, quantized_filename=name)
    runner = module.Runner(which, max_seqs=batch, prefix_cache_n=0, token_source="none")
    rng = random.Random(0)

    def make_text(tokens: int) -> str:
        for tried in range(TEXTS_TRIED):  # a first token may be added, and a cut word be other tokens
            ids = runner.tokenize_text(" ".join(rng.choice(WORDS) for _ in range(2 * tokens)), False, None)
            text = str(runner.detokenize_text(ids[: max(tokens - tried % 4, 1)], False))
            if len(runner.tokenize_text(text, True, None)) == tokens:
                break
        return text

    def measure(kind: str, tokens: int, prompts: list[list[int]] | None = None) -> Reply:
        if prompts is not None:
            streams = [send(ids, tokens) for ids in prompts]
            with ThreadPoolExecutor(len(streams)) as pool:
                return {"answers": list(pool.map(read, streams))}
        request = module.CompletionRequest(
            make_text(tokens if kind == "pp" else 1),
            "default",
            max_tokens=1 if kind == "pp" else tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        start = time.perf_counter()
        usage = runner.send_completion_request(request).usage
        if kind == "pp":
            return {"seconds": time.perf_counter() - start, "tokens": usage.prompt_tokens}
        return {"seconds": usage.total_completion_time_sec, "tokens": usage.completion_tokens - 1}

    def send(ids: list[int], tokens: int) -> tuple[float, Any]:
        request = module.ChatCompletionRequest(
            runner.detokenize_text(ids, False),
            "default",
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            stream=True,
        )
        chunks = iter(runner.send_chat_completion_request(request))
        next(chunks)
        return time.perf_counter(), chunks

    def read(sent: tuple[float, Any]) -> list[tuple[float, int]]:
        first, chunks = sent
        return [(first, 1), *((time.perf_counter(), count) for count, _ in enumerate(chunks, 2))]

    used = {"threads": settings["threads"], "dtype": "auto", "max_seqs": batch, "prefix_cache_n": 0}
    return f"{importlib.metadata.version('mistralrs')} (Candle)", used, measure


def load_vllm(settings: dict[str, Any]) -> Loaded:
    """Drive the steps of `LLMEngine` in this process, with token ids and without a prefix cache."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", DO_NOT_TRACK="1")
    module = importlib.import_module("vllm")
    batch, length = settings.get("batch", 1), settings["context"] + 1
    llm = module.LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_seqs=batch,
        enable_prefix_caching=False,
        seed=0,
    )
    engine, rng, numbers = llm.llm_engine, random.Random(0), itertools.count()
    config = engine.model_config
    vocabulary = config.get_vocab_size()

    def generate(prompts: list[list[int]], tokens: int) -> list[list[tuple[float, int]]]:
        params = module.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        answers: dict[str, list[tuple[float, int]]] = {str(next(numbers)): [] for _ in prompts}
        for name, ids in zip(answers, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id].append((time.perf_counter(), len(output.outputs[0].token_ids)))
        return list(answers.values())

    def measure(kind: str, tokens: int, prompts: list[list[int]] | None = None) -> Reply | None:
        if prompts is not None:
            return {"answers": generate(prompts, tokens)}
        ids = [rng.randrange(vocabulary) for _ in range(tokens if kind == "pp" else 1)]
        generate([ids], 1 if kind == "pp" else tokens)
        return None

    used = {"dtype": str(config.dtype), "quantization": config.quantization, "max_model_len": length}
    return str(module.__version__), used | {"max_num_seqs": batch, "enable_prefix_caching": False}, measure


LOADERS: dict[str, Loader] = {
    "llama-cpp-python": load_llama_cpp,
    "transformers": load_transformers,
    "mistral.rs": load_mistralrs,
    "vllm": load_vllm,
    "sentence-transformers": load_sentence_transformers,
}

if __name__ == "__main__":
    serve(LOADERS[sys.argv[1]], json.loads(sys.argv[2]))
