"""A peer at work in a process of its own, perhaps under another interpreter: it imports nothing of this package.

Arguments: the peer's name and a JSON object (model, threads, context). It loads once, says {"version": ...}, then
answers each line {"kind": "pp" | "tg", "tokens": n} with {"seconds": x}. A peer that can answer several prompts at once
may be given "prompts" too, and says how many "tokens" those seconds made. The libraries are imported by name, because
they belong to the peer's environment, not to this package's.
"""

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Measure = Callable[..., dict[str, float] | None]  # one run of a kind and a length; an answer, if it has its own clock
Maker = Callable[[dict[str, Any]], tuple[str, Measure]]  # settings -> version and the function above


def serve(make: Maker, given: dict[str, Any]) -> None:
    """Load, then answer until there are no more questions; whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    version, measure = make(given)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        answer = measure(**asked) or {"seconds": time.perf_counter() - start}
        print(json.dumps(answer), file=answers, flush=True)


def llama_cpp_python(given: dict[str, Any]) -> tuple[str, Measure]:
    """Through `Llama.generate`, greedy: the first token ends a prefill, the following ones are the decode."""
    module = importlib.import_module("llama_cpp")
    threads = given["threads"]
    llm = module.Llama(
        given["model"],
        n_ctx=given["context"],
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=0,
        verbose=False,
    )
    rng = random.Random(0)

    def measure(kind: str, tokens: int) -> None:
        llm.reset()
        ids = [rng.randrange(llm.n_vocab()) for _ in range(tokens if kind == "pp" else 1)]
        made = llm.generate(ids, temp=0.0)
        for _ in range(1 if kind == "pp" else tokens):
            next(made)
        made.close()

    return str(module.__version__), measure


def transformers(given: dict[str, Any]) -> tuple[str, Measure]:
    """float32 on the CPU, from the same file; decode is a plain loop over the cache, greedy."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the file is here
    torch, library = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(given["threads"])
    folder, name = (given["model"], None) if os.path.isdir(given["model"]) else os.path.split(given["model"])
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

    return f"{library.__version__} (torch {torch.__version__})", measure


PEERS: dict[str, Maker] = {"llama-cpp-python": llama_cpp_python, "transformers": transformers}

if __name__ == "__main__":
    serve(PEERS[sys.argv[1]], json.loads(sys.argv[2]))
