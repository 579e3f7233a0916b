"""Makes tests/tokenizer/data: a small vocabulary of our own, nasty texts, and the ids that llama.cpp gives for them.

llama-cpp-python is no dependency of this project: install it next to the [dev] extra, in an environment of its own, and
    python tools/llama_cpp_token_table.py train                       # parts.json -> vocabulary.json, *texts.json
    python tools/llama_cpp_token_table.py table --model MODEL.gguf    # -> llama_cpp_ids.json
    python tools/llama_cpp_token_table.py encoders                    # -> encoder_vocabularies.json, with ids
MODEL.gguf is the built-in default model. Only its vocabulary is loaded, and only ids are kept.
"""

import argparse
import ctypes
import functools
import json
import random
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "tokenizer" / "data"
sys.path.insert(0, str(ROOT))
# Tokens that no merge makes: only pre-tokenizers with `ignore_merges` give them.
UNREACHABLE = ["\u0120leading", "trailing", "CamelCase", "Hello"]


def make_texts(count: int = 160) -> list[str]:
    """The sentences, then seeded mixtures of the fragments."""
    rng = random.Random(20240607)
    parts_of = _parts()
    texts = list(parts_of["sentences"])
    while len(texts) < count:
        parts = [rng.choice(parts_of["fragments"]) for _ in range(rng.randint(2, 14))]
        texts.append(rng.choice(["", "", " "]).join(parts))
    return texts


def make_unicode_texts(count: int = 400) -> list[str]:
    """Seeded mixtures of characters from all of Unicode."""
    rng = random.Random(3)
    return [_random_text(rng) for _ in range(count)]


def _random_text(rng: random.Random) -> str:
    """Characters by kind, so that rare kinds are not rare; those that every Unicode table since 3.2 agrees about."""
    alphabet = _alphabet()
    kinds = [*rng.sample(sorted(alphabet), rng.randint(1, 5)), "ascii", "space"]
    return "".join(rng.choice(alphabet[rng.choice(kinds)]) for _ in range(rng.randint(1, 24)))


@functools.cache
def _alphabet() -> dict[str, list[str]]:
    alphabet = {"ascii": [chr(code) for code in range(32, 127)], "space": list(" \n\t\r\u00a0\u3000")}
    for code in range(1, sys.maxunicode + 1):
        kind = unicodedata.ucd_3_2_0.category(chr(code))
        if kind == unicodedata.category(chr(code)) and kind not in ("Cn", "Cs", "Co"):
            alphabet.setdefault(kind, []).append(chr(code))
    return alphabet


def make_corpus() -> list[str]:
    """Text to train on: mixtures with other seeds, so that merges cross every boundary a pre-tokenizer may set."""
    rng = random.Random(7)
    fragments, sentences = _parts()["fragments"], _parts()["sentences"]
    common = [rng.choice(fragments) for _ in range(90)]
    lines = []
    for _ in range(6000):
        pool = common if rng.random() < 0.6 else fragments
        lines.append(rng.choice(["", " ", " "]).join(rng.choice(pool) for _ in range(rng.randint(2, 10))))
    return lines + sentences * 20


def train() -> None:
    """Train a byte-level BPE vocabulary that ignores word boundaries, and write it with the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_corpus(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens += [token for token in UNREACHABLE if token not in model["vocab"]]
    _write("vocabulary.json", {"tokens": tokens, "merges": merges, "control": [0, 1, 2]})
    _write("texts.json", make_texts())
    _write("unicode_texts.json", make_unicode_texts())


def bpe_metadata(vocabulary: dict[str, Any], pre: str) -> dict[str, Any]:
    """GGUF metadata of the trained vocabulary with this pre-tokenizer."""
    kinds = np.ones(len(vocabulary["tokens"]), np.int32)
    kinds[vocabulary["control"]] = 3
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary["tokens"],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": vocabulary["merges"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }


def llama_cpp_ids(path: Path, texts: list[str]) -> list[list[int]]:
    """Return llama.cpp's ids of the texts, without BOS and without special tokens."""
    import llama_cpp

    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    vocab = llama_cpp.llama_model_get_vocab(model)
    rows = []
    for text in texts:
        raw = text.encode()
        buffer = (ctypes.c_int32 * (len(raw) + 16))()
        count = llama_cpp.llama_tokenize(vocab, raw, len(raw), buffer, len(buffer), False, False)
        if count < 0:
            raise SystemExit(f"llama.cpp needs more room for {text!r}")
        rows.append(list(buffer[:count]))
    llama_cpp.llama_model_free(model)
    return rows


def table(default_model: Path) -> None:
    """Write llama.cpp's ids: per pre-tokenizer on our vocabulary, and on the default model."""
    from llm_worker_rbee.tokenizer.pre_tokenizers import PRE_TOKENIZERS
    from llm_worker_rbee.weights.gguf_writer import write_gguf

    vocabulary = json.loads((DATA / "vocabulary.json").read_text(encoding="utf-8"))
    files = [DATA / "texts.json", DATA / "unicode_texts.json"]
    texts = [text for file in files for text in json.loads(file.read_text(encoding="utf-8"))]
    pool: dict[str, int] = {}
    rows: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRE_TOKENIZERS:
            path = Path(folder) / f"{pre}.gguf"
            write_gguf(path, bpe_metadata(vocabulary, pre))
            rows[pre] = [pool.setdefault(json.dumps(ids), len(pool)) for ids in llama_cpp_ids(path, texts)]
    model_rows = llama_cpp_ids(default_model, texts)
    _write("llama_cpp_ids.json", {"pool": [json.loads(ids) for ids in pool], "pre": rows, "default_model": model_rows})


# What the map of characters of the unigram vocabulary does: white space, full-width letters, a ligature.
CHARACTER_RULES = {"\t": " ", "\n": " ", "\r": " ", "\u3000": " ", "\uff21": "A", "\uff01": "!", "\ufb01": "fi"}


def train_word_piece(lines: list[str]) -> dict[str, Any]:
    """GGUF metadata of an uncased WordPiece vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    library.train_from_iterator([line.replace("\u2581", "") for line in lines], trainer)
    vocab = library.get_vocab()
    texts = sorted(vocab, key=lambda text: vocab[text])
    words = [t if t in special else t[2:] if t.startswith("##") else "\u2581" + t for t in texts]
    names = {"bos": 2, "seperator": 3, "unknown": 1}
    return {
        "model": "bert", "tokens": words, "token_type": [3 if text in special else 1 for text in texts],
        **{f"{name}_token_id": number for name, number in names.items()},
    }  # fmt: skip


def train_unigram(lines: list[str]) -> dict[str, Any]:
    """GGUF metadata of a unigram vocabulary with a map of characters."""
    from io import BytesIO

    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    model, proto = BytesIO(), sentencepiece_model_pb2.ModelProto()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        for old, new in CHARACTER_RULES.items():
            rules.write(f"{ord(old):x}\t{' '.join(f'{ord(char):x}' for char in new)}\n")
        rules.flush()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(line for line in lines if "\x00" not in line), model_writer=model,
            model_type="unigram", vocab_size=500, hard_vocab_limit=False, minloglevel=2, character_coverage=0.98,
            normalization_rule_tsv=rules.name,
        )  # fmt: skip
    proto.ParseFromString(model.getvalue())
    return {
        "model": "t5", "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces], "token_type": [piece.type for piece in proto.pieces],
        "precompiled_charsmap": list(proto.normalizer_spec.precompiled_charsmap), "remove_extra_whitespaces": True,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True,
    }  # fmt: skip


def encoders() -> None:
    """Train vocabularies of encoders, and write them with llama.cpp's ids of the texts."""
    from llm_worker_rbee.weights.gguf_writer import Typed, write_gguf

    arrays = {"token_type": "int32", "scores": "float32", "precompiled_charsmap": "uint8"}
    texts, corpus = make_texts(), make_corpus()
    made: dict[str, Any] = {}
    for keys in (train_word_piece(corpus), train_unigram(corpus)):
        typed = {key: Typed(arrays[key], value) if key in arrays else value for key, value in keys.items()}
        named = {f"tokenizer.ggml.{key}": value for key, value in typed.items()}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "encoder.gguf"
            write_gguf(path, {"general.architecture": "bert", **named})
            made[keys["model"]] = {"keys": keys, "ids": llama_cpp_ids(path, texts)}
    _write("encoder_vocabularies.json", made)


def _parts() -> dict[str, list[str]]:
    parts: dict[str, list[str]] = json.loads((DATA / "parts.json").read_text(encoding="utf-8"))
    return parts


def _write(name: str, value: object) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    (DATA / name).write_text(text + "\n", encoding="utf-8")
    print(f"{DATA / name}: {len(text)} bytes", file=sys.stderr)


def main() -> None:
    """The steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "table", "encoders"])
    parser.add_argument("--model", type=Path, help="the default model's GGUF (for `table`)")
    arguments = parser.parse_args()
    if arguments.step == "train":
        train()
    elif arguments.step == "encoders":
        encoders()
    elif arguments.model is None:
        parser.error("table needs --model")
    else:
        table(arguments.model)


if __name__ == "__main__":
    main()
