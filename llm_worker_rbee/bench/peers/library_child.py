"""Program that runs another library as a peer, perhaps under another interpreter: it imports nothing of this package.

Arguments: the library and a JSON object (model, threads, context, logits). It loads the model once, prints {"version"},
then answers each line of standard input:
  {"kind": "pp" | "tg", "tokens": n}  ->  {"seconds"} of one prefill or decode, greedy
  {"ids", "last", "file"}             ->  {"rows"}: float32 logits of all positions, or the last, are in that .npy file
A failure is {"error"}. Libraries are imported by name: they belong to the peer's environment.
"""

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Reply = dict[str, Any]
Handler = Callable[..., Reply | None]  # the fields of a request -> the reply; None: its seconds
Loader = Callable[[dict[str, Any]], tuple[str, Handler]]  # settings -> version and handler


def serve(load: Loader, settings: dict[str, Any]) -> None:
    """Load, then answer until standard input ends; whatever libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(**fields: Any) -> None:
        print(json.dumps(fields), file=replies, flush=True)

    try:
        version, handle = load(settings)
        reply(version=version)
        for line in sys.stdin:
            fields = json.loads(line)
            start = time.perf_counter()
            reply(**(handle(**fields) or {"seconds": time.perf_counter() - start}))
    except Exception as error:
        reply(error=f"{type(error).__name__}: {error}")
        raise


def save_logits(logits: Any, last: bool, file: str) -> Reply:
    """Write float32 logits: (positions, vocabulary), or (1, vocabulary) of the last position."""
    numpy = importlib.import_module("numpy")
    kept = numpy.ascontiguousarray(logits[-1:] if last else logits, numpy.float32)
    numpy.save(file, kept)
    return {"rows": len(kept)}


def load_llama_cpp(settings: dict[str, Any]) -> tuple[str, Handler]:
    """Use `Llama.generate`, greedy: the first token ends a prefill, the following ones are the decode."""
    module = importlib.import_module("llama_cpp")
    threads, context = settings["threads"], settings["context"]
    logits_options = {"n_batch": context, "logits_all": True, "seed": 0} if settings.get("logits") else {}
    llm = module.Llama(
        settings["model"], n_ctx=context, n_threads=threads, n_threads_batch=threads, n_gpu_layers=0, verbose=False,
        **logits_options,
    )  # fmt: skip
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

    return str(module.__version__), compute_logits if settings.get("logits") else measure


def load_transformers(settings: dict[str, Any]) -> tuple[str, Handler]:
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

    if settings.get("logits"):
        return str(library.__version__), compute_logits
    return f"{library.__version__} (torch {torch.__version__})", measure


LOADERS: dict[str, Loader] = {"llama-cpp-python": load_llama_cpp, "transformers": load_transformers}

if __name__ == "__main__":
    serve(LOADERS[sys.argv[1]], json.loads(sys.argv[2]))
