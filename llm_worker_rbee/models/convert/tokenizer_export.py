"""tokenizer.json to the `tokenizer.*` keys of a GGUF, for the two kinds of vocabulary that the GGUF reader knows.

Byte-level BPE becomes "gpt2" with the name of its pre-tokenizer, found by comparing how they split sample texts; BPE
over characters with U+2581 for spaces becomes "llama", with scores from the order of its merges. The keys are read
back; if they give other ids for the sample texts, the tokenizer is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from ...errors import TokenizerError, UnsupportedModelError
from ...tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_hf
from ...tokenizer.encoders import byte_level_splitter, tokenizer_errors
from ...tokenizer.pre_tokenizers import PRE_TOKENIZERS
from ...tokenizer.tokenizer import TokenType, find_end_ids, parse_byte_token, preview
from ...weights.gguf_writer import Typed
from ...weights.safetensors import read_json

Candidate = tuple[dict[str, Any], Sequence[str]]  # keys, and the texts that must get the same ids

_log = logging.getLogger("llm_worker_rbee")
_PREFIX = "tokenizer.ggml."
# Preferred names of pre-tokenizers with the same expressions; others follow.
_PREFERRED = ("llama-bpe", "qwen2", "smollm", "gpt-2", "tekken", "dbrx", "gpt-4o")
# ASCII first: some GGUF pre-tokenizers treat other cased letters differently from the model's own file.
ASCII_SAMPLES = (
    "Hello, world! It's 12345.67 o'clock; THEY'LL say we'd gone, I'm sure you've 3 cats.",
    "def f(x):\n    return {'a': [x ** 2, -1e-5]}  # done\n\n\n\tif x != y:\n        pass\r\n",
    "   leading, trailing   \n \n  and\t\ttabs  ",
    "https://example.com/a_b?c=d&e=%20f <b>HTML</b> $5 + 10% = camelCaseWords snake_case ###",
)
UNICODE_SAMPLES = (
    "Élan vital: les élèves naïfs, Straße, ÀÉÎÕÜ, œuvre.",
    "日本語のテキスト、한국어 문장, 中文字符。",
    "Привет, мир! Γειά σου. שלום مرحبا हिन्दी ไทย",
    "emoji 🙂👍🏽 x² ½ № … — “quoted” ①②③ ٣٤٥ １２３",
)


def tokenizer_keys(folder: Path, rows: int, name: str) -> dict[str, Any]:
    """Return the keys of the folder's tokenizer, for an embedding with this many rows."""
    theirs = tokenizer_from_hf(folder)
    source = read_json(folder / "tokenizer.json")
    model = source.get("model") or {}
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise UnsupportedModelError(
            f"tokenizer.json: a model of type {preview(model.get('type'))} cannot be stored in a GGUF, only BPE can"
        )
    library = Library.from_file(str(folder / "tokenizer.json"))
    byte_level = any(step.get("type") == "ByteLevel" for step in _steps(source))
    tokens = _tokens(source, rows, byte_level=byte_level)
    common = {"general.name": name} | _bos_eos(theirs, *tokens) | _padding_and_unknown(folder, theirs, tokens[1])
    makers = _bpe_keys(source, library, *tokens) if byte_level else _spm_keys(source, *tokens)
    different = None
    for candidate, texts in makers:
        keys = {key: value for key, value in {**common, **candidate}.items() if value is not None}
        different = _first_difference(theirs, keys, texts)
        if different is None:
            del keys["general.name"]
            return keys
    raise UnsupportedModelError(f"tokenizer.json: a GGUF cannot express it: {different} would get other ids")


def _steps(source: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield all steps of pre-tokenizer and decoder, including those of sequences."""
    waiting = [source.get("pre_tokenizer"), source.get("decoder")]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            yield step
            waiting += [*(step.get("pretokenizers") or ()), *(step.get("decoders") or ())]


def _bos_eos(theirs: Tokenizer, texts: Sequence[str], token_types: Sequence[int]) -> dict[str, Any]:
    """Return the keys of BOS and EOS; end tokens that readers know by name need no key."""
    begin = [theirs.bos_id] if theirs.add_bos else []
    if theirs.encode("") != begin + ([theirs.eos_id] if theirs.add_eos else []):
        raise UnsupportedModelError(
            "tokenizer.json: its post_processor adds more than one token, which a GGUF cannot express"
        )
    further = sorted(theirs.eos_ids - {theirs.eos_id} - set(find_end_ids(texts, token_types)))
    return {
        _PREFIX + "bos_token_id": _uint32_or_none(theirs.bos_id),
        _PREFIX + "eos_token_id": _uint32_or_none(theirs.eos_id),
        _PREFIX + "eot_token_id": _uint32_or_none(further[0] if further else None),
        _PREFIX + "eos_token_ids": Typed("uint32", sorted(theirs.eos_ids)) if len(further) > 1 else None,
        _PREFIX + "add_bos_token": theirs.add_bos,
        _PREFIX + "add_eos_token": theirs.add_eos,
        "tokenizer.chat_template": theirs.chat_template,
    }


def _uint32_or_none(token: int | None) -> Typed | None:
    return None if token is None else Typed("uint32", token)


def _padding_and_unknown(folder: Path, theirs: Tokenizer, token_types: Sequence[int]) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    value = read_json(path).get("pad_token") if path.is_file() else None
    text = value.get("content") if isinstance(value, dict) else value
    padding = theirs.token_id(text) if isinstance(text, str) else None
    unknown = next((index for index, kind in enumerate(token_types) if kind == TokenType.UNKNOWN), None)
    ids = {"padding_token_id": padding, "unknown_token_id": unknown}
    return {_PREFIX + key: _uint32_or_none(token_id) for key, token_id in ids.items()}


def _tokens(source: Mapping[str, Any], rows: int, *, byte_level: bool) -> tuple[list[str], list[int]]:
    """Return texts and types for every row of the embedding; rows without a token are padded."""
    vocab: Mapping[str, int] = source["model"]["vocab"]
    texts, token_types = [f"[PAD{i}]" for i in range(rows)], [int(TokenType.UNUSED)] * rows
    added = [(entry["content"], entry["id"], entry.get("special")) for entry in source.get("added_tokens") or ()]
    beyond = [text for text, index in vocab.items() if index >= rows]
    if beyond:
        raise TokenizerError(f"tokenizer.json: the embedding of {rows} rows has no row for {preview(beyond[0])}")
    for text, index in vocab.items():
        texts[index] = text
        is_byte = not byte_level and parse_byte_token(text) is not None
        token_types[index] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for text, index, special in added:
        if index < rows:
            texts[index] = text
            token_types[index] = TokenType.CONTROL if special else TokenType.USER_DEFINED
        else:
            _log.warning("the model's embedding has no row for token %s: dropped", preview(text))
    unknown = source["model"].get("unk_token")
    if unknown in vocab:
        token_types[vocab[unknown]] = TokenType.UNKNOWN
    return texts, token_types


def _read_merges(source: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return merges as pairs; older files write them as one string."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in source["model"]["merges"])
    return [(left, right) for left, right in pairs]


def _bpe_keys(
    source: Mapping[str, Any], library: Library, texts: list[str], token_types: list[int]
) -> Iterator[Candidate]:
    pre, agreed = _find_pre_tokenizer(library, ignore_merges=bool(source["model"].get("ignore_merges")))
    keys = {
        _PREFIX + "model": "gpt2",
        _PREFIX + "pre": pre,
        _PREFIX + "tokens": texts,
        _PREFIX + "token_type": Typed("int32", token_types),
        _PREFIX + "merges": Typed("string", [" ".join(pair) for pair in _read_merges(source)]),
    }
    yield keys, agreed


def _find_pre_tokenizer(library: Library, *, ignore_merges: bool) -> tuple[str, Sequence[str]]:
    """Return the GGUF pre-tokenizer that splits all samples (or at least ASCII) like this one, and those samples."""
    names = [*_PREFERRED, *(name for name in PRE_TOKENIZERS if name not in _PREFERRED)]
    names = [name for name in names if PRE_TOKENIZERS[name].ignore_merges == ignore_merges]
    for texts in ((*ASCII_SAMPLES, *UNICODE_SAMPLES), ASCII_SAMPLES):
        wanted = [_pre_tokenize(library.pre_tokenizer, text) for text in texts]
        for name in names:
            if wanted == [_pre_tokenize(byte_level_splitter(PRE_TOKENIZERS[name]), text) for text in texts]:
                if texts is ASCII_SAMPLES:
                    _log.warning("the GGUF pre-tokenizer %r may split non-ASCII letters differently", name)
                return name, texts
    raise UnsupportedModelError("tokenizer.json: its pre_tokenizer splits text like none that GGUF has a name for")


def _pre_tokenize(pre_tokenizer: Any, text: str) -> list[str]:
    with tokenizer_errors("tokenizer.json"):
        return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def _spm_keys(source: Mapping[str, Any], texts: list[str], token_types: list[int]) -> Iterator[Candidate]:
    merges = _read_merges(source)
    normal = {text for text, kind in zip(texts, token_types, strict=True) if kind == TokenType.NORMAL}
    _check_merges_complete(normal, merges)
    keys = {
        _PREFIX + "model": "llama",
        _PREFIX + "pre": "default",
        _PREFIX + "tokens": texts,
        _PREFIX + "scores": Typed("float32", _derive_scores(texts, token_types, merges)),
        _PREFIX + "token_type": Typed("int32", token_types),
    }
    for prefix in (True, False):
        yield {**keys, _PREFIX + "add_space_prefix": prefix}, (*ASCII_SAMPLES, *UNICODE_SAMPLES)


def _derive_scores(texts: Sequence[str], token_types: Sequence[int], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Return scores: the earlier a token is merged, the better; one that is never merged is the worst."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    normal = (TokenType.NORMAL, TokenType.UNUSED)
    return [-float(ranks.get(t, len(ranks))) if k in normal else 0.0 for t, k in zip(texts, token_types, strict=True)]


def _check_merges_complete(normal: set[str], merges: Sequence[tuple[str, str]]) -> None:
    """Raise if a merge is missing: a 'llama' vocabulary joins any two tokens that form a third."""
    known = set(merges)
    for text in normal:
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair not in known and pair[0] in normal and pair[1] in normal:
                raise UnsupportedModelError(
                    f"tokenizer.json: its merges lack {preview(pair[0])} + {preview(pair[1])}, which a GGUF of this "
                    "kind joins: it cannot be expressed there"
                )


def _first_difference(theirs: Tokenizer, keys: Mapping[str, Any], texts: Sequence[str]) -> str | None:
    """Return the first text that gets other ids from the keys, or None."""
    plain = {key: value.value if isinstance(value, Typed) else value for key, value in keys.items()}
    ours = tokenizer_from_gguf(plain)
    differ = (t for t in texts if ours.encode(t, add_special=False) != theirs.encode(t, add_special=False))
    return next(map(preview, differ), None)
