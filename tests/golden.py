"""Golden records: whether a change of structure left every answer as it was, bit for bit.

    python -m tests.golden make models/                   # random files of every family and type, once
    python -m tests.golden make models/ qwen3 lfm2        # of some
    python tests/golden.py record models/ before.json     # with PYTHONPATH=CHECKOUT for the code of another checkout
    python tests/golden.py record models/ after.json
    python tests/golden.py record models/ cpu.json cpu    # of one backend
    python tests/golden.py compare before.json after.json

A record holds tokens and log-probabilities (as exact floats): greedy, sampled, with penalties, in a batch, with prompt
log-probabilities and each KV type, on `reference` and `cpu`; guided answers and a chat of the default model and of the
real files in `LLM_WORKER_REAL_MODELS`; embeddings and scores. `record` uses the public API alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PROMPTS = ([5, 9, 200, 31, 7, 77, 150], list(range(20, 60)), [*range(3, 30), *range(3, 30)], [100])
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "min_p": 0.02, "seed": 11}
PENALTIES = {
    "temperature": 0.7,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "top_k": 20,
    "seed": 5,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
}
TYPES = ("F32", "Q8_0", "Q4_0")
CHAT = [{"role": "user", "content": "Name three fruits and their colours."}]
TEXTS = ["A cat sat on the mat.", "Measure first, then decide.", "", "x " * 100]


BACKENDS = ("reference", "cpu")


def make(folder: Path, *families: str) -> None:
    """Write the random files, of some families or all; they need torch and transformers, which a record does not."""
    import tokenizers

    from tests.helpers import model_zoo, pooling_zoo
    from tests.helpers.tiny_models import VOCAB, tokenizer_metadata

    folder.mkdir(parents=True, exist_ok=True)
    model_zoo.SHAPE["vocab_size"] = VOCAB
    for name, variant in model_zoo.ZOO.items():
        if families and name not in families:
            continue
        if variant.settings.get("vocab_size_per_layer_input"):
            variant.settings["vocab_size_per_layer_input"] = VOCAB
        model = model_zoo.make_hf(variant)
        metadata = model_zoo.gguf_metadata
        model_zoo.gguf_metadata = lambda *args, keys=metadata: {**keys(*args), **tokenizer_metadata()}
        try:
            for kind in TYPES:
                path = folder / f"{name}-{kind}.gguf"
                if kind == "F32":
                    model_zoo.save_gguf(variant, model, path)
                else:
                    model_zoo.save_quantized(variant, model, path, kind)
        except Exception as error:
            print(f"{name}: no GGUF: {error}", file=sys.stderr)
        finally:
            model_zoo.gguf_metadata = metadata
    words = {f"word{i}": i for i in range(pooling_zoo.VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for name, variant in pooling_zoo.POOLING_ZOO.items():
        if families and name not in families:
            continue
        path = pooling_zoo.save_folder(variant, pooling_zoo.make_hf(variant), folder / f"pooling-{name}")
        tokenizer.save(str(path / "tokenizer.json"))


def record(folder: Path, backends: Sequence[str] = BACKENDS) -> dict[str, Any]:
    """Return the answers of every file on the backends, by name."""
    answers: dict[str, Any] = {}
    real = Path(os.environ.get("LLM_WORKER_REAL_MODELS", folder / "none"))
    for name, path in [("default", None), *((path.stem, path) for path in sorted(real.glob("qwen*0.5b*.gguf")))]:
        _add(answers, f"real/{name}", lambda path=path: _real_answers(path))
    for path in sorted(folder.glob("*.gguf")):
        for backend in backends:
            for kv_type in ("auto", "float32", "int8") if backend == "cpu" else ("auto",):
                options = {"backend": backend, "kv_type": kv_type, "max_context": 128}
                name = f"{path.stem}/{backend}/{kv_type}"
                _add(answers, name, lambda path=path, options=options: _answers(path, options))
    for path in sorted(folder.glob("pooling-*")):
        _add(answers, path.name, lambda path=path: _rows(path, backends))
    _add(answers, "real/minilm", lambda: _rows(None, backends))
    return answers


def _add(answers: dict[str, Any], name: str, compute: Any) -> None:
    started = time.perf_counter()
    try:
        values = dict(compute())
    except Exception as error:  # a refusal is an answer too
        values = {"error": f"{type(error).__name__}: {error}"[:300]}
    answers.update({f"{name}/{key}": value for key, value in values.items()})
    print(f"{name}: {len(values)} in {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)


def _completion(value: Any) -> dict[str, Any]:
    logprobs = None if value.logprobs is None else hashlib.sha256(repr(value.logprobs).encode()).hexdigest()[:16]
    prompt = None if value.prompt_logprobs is None else hashlib.sha256(repr(value.prompt_logprobs).encode()).hexdigest()
    return {
        "tokens": value.tokens,
        "text": value.text,
        "reason": value.finish_reason,
        "logprobs": logprobs,
        "prompt": prompt,
        "calls": [[call.name, call.arguments] for call in value.tool_calls],
    }


def _answers(path: Path, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    from llm_worker_rbee import LLM

    llm = LLM(path, device="cpu", **options)
    common: dict[str, Any] = {"max_tokens": 12, "logprobs": 3, "ignore_eos": True}
    yield "greedy", _completion(llm.generate(PROMPTS[0], temperature=0, prompt_logprobs=True, **common))
    yield "sampled", _completion(llm.generate(PROMPTS[1], **SAMPLED, **common))
    yield "penalties", _completion(llm.generate(PROMPTS[2], **PENALTIES, **common))
    batch = llm.generate([list(ids) for ids in PROMPTS], temperature=0, **common)
    yield "batch", [_completion(value) for value in batch]


def _real_answers(path: Path | None) -> Iterator[tuple[str, Any]]:
    from llm_worker_rbee import LLM, SamplingParams, StructuredOutputsParams

    llm = LLM(path, device="cpu", backend="cpu", max_context=2048)
    common: dict[str, Any] = {"max_tokens": 24, "logprobs": 2}
    yield "greedy", _completion(llm.generate("The capital of France is", temperature=0, prompt_logprobs=True, **common))
    yield "sampled", _completion(llm.generate("Once upon a time", **SAMPLED, **common))
    yield "penalties", _completion(llm.generate("def fibonacci(n):", **PENALTIES, **common))
    prompts = [f"{i}. Write a word that begins with {chr(97 + i)}:" for i in range(6)]
    yield "batch", [_completion(value) for value in llm.generate(prompts, temperature=0, **common)]
    yield "chat", _completion(llm.chat(CHAT, temperature=0, max_tokens=24))
    params = SamplingParams(max_tokens=60, temperature=0, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    yield "guided", _completion(llm.chat(CHAT, params))
    params = SamplingParams(
        max_tokens=12, seed=3, structured_outputs=StructuredOutputsParams(regex="(red|green) [a-z]+")
    )
    yield "regex", _completion(llm.generate("My favourite:", params))
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": parameters}}]
    message = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: dict[str, Any] = {"tools": tools, "tool_choice": "required", "temperature": 0, "max_tokens": 60}
    yield "tool", _completion(llm.chat(message, **options))


def _rows(path: Path | None, backends: Sequence[str]) -> Iterator[tuple[str, Any]]:
    from llm_worker_rbee import Embedder, Reranker

    if path is not None and path.name.endswith("-rank"):
        with Reranker(path, device="cpu") as reranker:
            documents = ["word5 word9", " ".join(f"word{i}" for i in range(3, 20)), "word7"]
            yield (
                "scores",
                [repr(float(score)) for score in reranker.score([("word8 word9", text) for text in documents])],
            )
        return
    for backend in backends:
        with Embedder(path, device="cpu", backend=backend) as embedder:
            texts = TEXTS if path is None else ["word5 word9", " ".join(f"word{i}" for i in range(3, 30)), "word7"]
            yield backend, hashlib.sha256(embedder.embed(texts).tobytes()).hexdigest()


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print the records that differ; return their number."""
    names = [*before, *(name for name in after if name not in before)]
    differing = [name for name in names if before.get(name) != after.get(name)]
    for name in differing:
        print(f"{name}:\n  {str(before.get(name))[:200]}\n  {str(after.get(name))[:200]}")
    errors = sum(name.endswith("/error") for name in names)
    print(f"{len(names) - len(differing)} of {len(names)} records equal; {errors} of them are refusals")
    return len(differing)


def main(command: str, *paths: str) -> None:
    """Run a command of the docstring."""
    if command == "make":
        make(Path(paths[0]), *paths[1:])
    elif command == "record":
        Path(paths[1]).write_text(json.dumps(record(Path(paths[0]), paths[2:] or BACKENDS), indent=0))
    else:
        sys.exit(1 if compare(*(json.loads(Path(path).read_text()) for path in paths)) else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
