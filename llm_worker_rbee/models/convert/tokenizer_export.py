"""tokenizer.json to the `tokenizer.*` keys of a GGUF, for the kinds of vocabulary that the GGUF reader knows.

Byte-level BPE becomes "gpt2" with the name of its pre-tokenizer, found by comparing how they split sample texts; BPE
over characters with U+2581 for spaces becomes "llama", with scores from the order of its merges; WordPiece becomes
"bert", unigram "t5". The keys are read back; if they give other ids for the sample texts, or for pairs of them, the
tokenizer is refused.
"""

from __future__ import annotations

import json
import logging
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from ...errors import TokenizerError, UnsupportedModelError
from ...tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_hf
from ...tokenizer.encoders import byte_level_splitter, tokenizer_errors
from ...tokenizer.pre_tokenizers import PRE_TOKENIZERS
from ...tokenizer.tokenizer import (
    CONTINUATION,
    SPACE,
    VERBATIM_TYPES,
    TokenType,
    find_end_ids,
    parse_byte_token,
    preview,
)
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
    kind = _vocabulary_kind(source)
    texts, token_types = _tokens(source, rows, byte_level=kind == "gpt2")
    common = {"general.name": name} | _bos_eos(theirs, texts, token_types)
    common |= _named_tokens(folder, theirs, token_types)
    makers = {"gpt2": _bpe_keys, "llama": _spm_keys, "bert": _word_piece_keys, "t5": _unigram_keys}
    different: list[str] = []
    for candidate, samples in makers[kind](source, texts, token_types):
        keys = {key: value for key, value in {**common, **candidate}.items() if value is not None}
        difference = _first_difference(theirs, keys, samples)
        if difference is None:
            del keys["general.name"]
            return keys
        different.append(difference)
    raise UnsupportedModelError(f"tokenizer.json: a GGUF cannot express it: {different[0]} would get other ids")


def _vocabulary_kind(source: Mapping[str, Any]) -> str:
    """Return the value of tokenizer.ggml.model."""
    model = source.get("model") or {}
    kind = model.get("type", "BPE")
    if kind in ("WordPiece", "Unigram"):
        return "bert" if kind == "WordPiece" else "t5"
    if kind != "BPE" or "merges" not in model:
        raise UnsupportedModelError(
            f"tokenizer.json: a model of type {preview(kind)} cannot be stored in a GGUF, only BPE, WordPiece and "
            "Unigram can"
        )
    steps = _steps(source, "pre_tokenizer", "decoder")
    return "gpt2" if any(step.get("type") == "ByteLevel" for step in steps) else "llama"


def _steps(source: Mapping[str, Any], *parts: str) -> Iterator[Mapping[str, Any]]:
    """Yield all steps of these parts, including the steps inside sequences."""
    waiting = [source.get(part) for part in parts]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            yield step
            waiting += [inner for key in ("pretokenizers", "decoders", "normalizers") for inner in step.get(key) or ()]


def _bos_eos(theirs: Tokenizer, texts: Sequence[str], token_types: Sequence[int]) -> dict[str, Any]:
    """Return the keys of BOS and EOS; end tokens that readers know by name need no key."""
    begin, end = theirs.affixes
    if len(begin) > 1 or len(end) > 1 or (begin and not theirs.add_bos):
        raise UnsupportedModelError(
            "tokenizer.json: its post_processor adds more than one token, which a GGUF cannot express"
        )
    eos = end[0] if end else theirs.eos_id
    further = sorted(theirs.eos_ids - {eos} - set(find_end_ids(texts, token_types)))
    keys = {
        _PREFIX + "bos_token_id": _uint32_or_none(theirs.bos_id),
        _PREFIX + "eos_token_id": _uint32_or_none(eos),
        _PREFIX + "eot_token_id": _uint32_or_none(further[0] if further else None),
        _PREFIX + "eos_token_ids": Typed("uint32", sorted(theirs.eos_ids)) if len(further) > 1 else None,
        _PREFIX + "add_bos_token": theirs.add_bos,
        _PREFIX + "add_eos_token": bool(end),
        "tokenizer.chat_template": theirs.chat_template,
    }
    if begin and end and theirs.pair is not None:  # of an encoder: one or two separators between texts
        keys[_PREFIX + "seperator_token_id"] = _uint32_or_none(theirs.pair.middle[-1][0])
        keys[_PREFIX + "add_sep_token"] = len(theirs.pair.middle) > len(end)
    return keys


def _uint32_or_none(token: int | None) -> Typed | None:
    return None if token is None else Typed("uint32", token)


def _named_tokens(folder: Path, theirs: Tokenizer, token_types: Sequence[int]) -> dict[str, Any]:
    """Return the keys of padding, mask and unknown tokens."""
    path = folder / "tokenizer_config.json"
    stated = read_json(path) if path.is_file() else {}
    ids = {"unknown": next((index for index, kind in enumerate(token_types) if kind == TokenType.UNKNOWN), None)}
    for key, field in (("padding", "pad_token"), ("mask", "mask_token")):
        value = stated.get(field)
        text = value.get("content") if isinstance(value, dict) else value
        ids[key] = theirs.token_id(text) if isinstance(text, str) else None
    return {f"{_PREFIX}{key}_token_id": _uint32_or_none(token_id) for key, token_id in ids.items()}


def _tokens(source: Mapping[str, Any], rows: int, *, byte_level: bool) -> tuple[list[str], list[int]]:
    """Return texts and types for every row of the embedding; rows without a token are padded."""
    vocab = _vocab(source["model"])
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
    model = source["model"]
    unknown = model.get("unk_id", vocab.get(model.get("unk_token")))
    if unknown is not None:
        token_types[unknown] = TokenType.UNKNOWN
    return texts, token_types


def _vocab(model: Mapping[str, Any]) -> Mapping[str, int]:
    """Return tokens and ids; a unigram model has a list of tokens and scores."""
    vocab = model["vocab"]
    return {text: index for index, (text, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab


def _read_merges(source: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return merges as pairs; older files write them as one string."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in source["model"]["merges"])
    return [(left, right) for left, right in pairs]


def _bpe_keys(source: Mapping[str, Any], texts: list[str], token_types: list[int]) -> Iterator[Candidate]:
    with tokenizer_errors("tokenizer.json"):
        library = Library.from_str(json.dumps(source))
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
    """Return the GGUF pre-tokenizer that splits all samples (or at least ASCII) like this one, and the samples."""
    names = [*_PREFERRED, *(name for name in PRE_TOKENIZERS if name not in _PREFERRED)]
    names = [name for name in names if PRE_TOKENIZERS[name].ignore_merges == ignore_merges]
    for texts in ((*ASCII_SAMPLES, *UNICODE_SAMPLES), ASCII_SAMPLES):
        expected = [_pre_tokenize(library.pre_tokenizer, text) for text in texts]
        for name in names:
            if expected == [_pre_tokenize(byte_level_splitter(PRE_TOKENIZERS[name]), text) for text in texts]:
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


def _word_piece_keys(source: Mapping[str, Any], texts: list[str], token_types: list[int]) -> Iterator[Candidate]:
    normalizer = next((s for s in _steps(source, "normalizer") if s.get("type") == "BertNormalizer"), {})
    lowercase = bool(normalizer.get("lowercase", True))
    accents = normalizer.get("strip_accents")
    tokens = zip(texts, token_types, strict=True)
    kinds = [TokenType.CONTROL if kind == TokenType.UNKNOWN else kind for kind in token_types]
    yield (
        {
            _PREFIX + "model": "bert",
            _PREFIX + "pre": "default",
            _PREFIX + "tokens": [text if kind in VERBATIM_TYPES else _phantom_space(text) for text, kind in tokens],
            _PREFIX + "token_type": Typed("int32", kinds),
            _PREFIX + "normalizer.lowercase": None if lowercase else False,
            _PREFIX + "normalizer.strip_accents": None if accents in (None, lowercase) else accents,
        },
        (*ASCII_SAMPLES, *UNICODE_SAMPLES),
    )


def _phantom_space(text: str) -> str:
    """Return a WordPiece token in GGUF form: with U+2581 where a word begins."""
    return text.removeprefix(CONTINUATION) if text.startswith(CONTINUATION) else SPACE + text


def _unigram_keys(source: Mapping[str, Any], texts: list[str], token_types: list[int]) -> Iterator[Candidate]:
    scores = [score for _, score in source["model"]["vocab"]]
    maps = [step["precompiled_charsmap"] for step in _steps(source, "normalizer") if step.get("type") == "Precompiled"]
    keys = {
        _PREFIX + "model": "t5",
        _PREFIX + "pre": "default",
        _PREFIX + "tokens": texts,
        _PREFIX + "scores": Typed("float32", scores + [0.0] * (len(texts) - len(scores))),
        _PREFIX + "token_type": Typed("int32", token_types),
        _PREFIX + "precompiled_charsmap": Typed("uint8", list(b64decode(maps[0]))) if maps else None,
    }
    for squeeze, prefix in product((True, False), repeat=2):
        flags = {_PREFIX + "remove_extra_whitespaces": squeeze, _PREFIX + "add_space_prefix": prefix}
        yield {**keys, **flags}, (*ASCII_SAMPLES, *UNICODE_SAMPLES)


def _derive_scores(texts: Sequence[str], token_types: Sequence[int], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Return scores: the earlier a token is merged, the better; one that is never merged is the worst."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    normal = (TokenType.NORMAL, TokenType.UNUSED)
    return [-float(ranks.get(t, len(ranks))) if k in normal else 0.0 for t, k in zip(texts, token_types, strict=True)]


def _check_merges_complete(normal: set[str], merges: Sequence[tuple[str, str]]) -> None:
    """Raise if a merge is missing: a 'llama' vocabulary joins any two tokens that form a third."""
    pairs = set(merges)
    for text in normal:
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair not in pairs and pair[0] in normal and pair[1] in normal:
                raise UnsupportedModelError(
                    f"tokenizer.json: its merges lack {preview(pair[0])} + {preview(pair[1])}, which a GGUF of this "
                    "kind joins: it cannot be expressed there"
                )


def _first_difference(theirs: Tokenizer, keys: Mapping[str, Any], texts: Sequence[str]) -> str | None:
    """Return the first text that gets other ids from the keys, or None."""
    plain = {key: value.value if isinstance(value, Typed) else value for key, value in keys.items()}
    ours = tokenizer_from_gguf(plain)
    has_pairs = _PREFIX + "add_sep_token" in plain
    return next((preview(text) for text in texts if _ids(ours, text, has_pairs) != _ids(theirs, text, has_pairs)), None)


def _ids(tokenizer: Tokenizer, text: str, has_pairs: bool) -> tuple[list[int], list[int]]:
    return tokenizer.encode(text), tokenizer.encode_pair(text, text)[0] if has_pairs else []
