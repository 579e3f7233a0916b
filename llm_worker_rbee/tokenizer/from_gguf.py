"""`Tokenizer` from the metadata of a GGUF, a plain mapping of keys. Reads no files.

Lengths, ids, byte tokens and names are checked before the library sees them; an error names the key.
"""

import logging
import math
from collections.abc import Mapping, Sequence

from ..errors import TokenizerError
from .encoders import BpeEncoder, SpmEncoder, unigram_encoder, word_piece_encoder
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from .tokenizer import (
    BosEos,
    PairTemplate,
    Style,
    Tokenizer,
    TokenType,
    Vocabulary,
    find_end_ids,
    ids_of_types,
    parse_byte_token,
    preview,
)

_log = logging.getLogger("llm_worker_rbee")
_PREFIX = "tokenizer.ggml."
# Ids for files without these keys, by tokenizer.ggml.model: SentencePiece's, BERT's and T5's.
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    "gemma4": {"bos_token_id": 1, "eos_token_id": 2},
    "bert": {"bos_token_id": 101, "seperator_token_id": 102, "unknown_token_id": 100},
    "t5": {"eos_token_id": 1, "unknown_token_id": 2},
}
_SEPARATOR = "seperator_token_id"  # the key's spelling in files
# Models whose special tokens strip the white space after them; GGUF has no key for it.
_RSTRIP_MODELS = ("phi-3", "phi3")
_RSTRIP_EXCEPT = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that the `tokenizer.*` keys of a GGUF describe."""
    model = metadata.get(_PREFIX + "model")
    makers = {
        "llama": _spm_tokenizer,
        "gpt2": _bpe_tokenizer,
        "gemma4": _gemma4_tokenizer,
        "bert": _bert_tokenizer,
        "t5": _unigram_tokenizer,
    }
    if model is None:
        raise TokenizerError("tokenizer.ggml.model is missing: the file has no tokenizer")
    if not isinstance(model, str) or model not in makers:
        raise TokenizerError(f"unknown tokenizer {preview(model)} (tokenizer.ggml.model); known: {', '.join(makers)}")
    return makers[model](metadata, _read_tokens(metadata))


def _bpe_tokenizer(metadata: Mapping[str, object], texts: list[str]) -> Tokenizer:
    name, pre = _pre_tokenizer(metadata)
    merges = _read_merges(metadata)
    vocabulary, ends = _read_vocabulary(metadata, texts, "byte", add_bos=pre.add_bos)
    return Tokenizer(
        kind=f"gpt2 (BPE, {name})",
        vocabulary=vocabulary,
        encoder=BpeEncoder(vocabulary, merges, pre),
        ends=ends,
        pair=_pair_template(metadata, texts, ends, two_separators=pre.roberta, one_separator=name == "modern-bert"),
        chat_template=_chat_template(metadata),
    )


def _spm_tokenizer(metadata: Mapping[str, object], texts: list[str]) -> Tokenizer:
    scores = _read_scores(metadata, len(texts))
    vocabulary, ends = _read_vocabulary(metadata, texts, "spm", add_bos=True)
    prefix = _read_flag(metadata, "add_space_prefix", True)
    encoder = SpmEncoder(
        vocabulary,
        scores,
        add_space_prefix=prefix,
        squeeze_spaces=_read_flag(metadata, "remove_extra_whitespaces", False),
        unknown_id=_read_token_id(metadata, "unknown_token_id", texts),
        rstrip=_find_rstrip_ids(metadata, vocabulary),
    )
    return Tokenizer(
        kind="llama (SPM)",
        vocabulary=vocabulary,
        encoder=encoder,
        ends=ends,
        pair=_pair_template(metadata, texts, ends, two_separators=False),
        space_at_start=prefix,
        space_after_special=prefix,
        chat_template=_chat_template(metadata),
    )


def _gemma4_tokenizer(metadata: Mapping[str, object], texts: list[str]) -> Tokenizer:
    """Return a SentencePiece-style vocabulary with merges; it always begins a text with BOS, whatever the file says."""
    merges = _read_merges(metadata)
    vocabulary, ends = _read_vocabulary({**metadata, _PREFIX + "add_bos_token": True}, texts, "spm", add_bos=True)
    unknown = _read_token_id(metadata, "unknown_token_id", texts)
    encoder = SpmEncoder(vocabulary, None, merges=lambda: merges, add_space_prefix=False, unknown_id=unknown)
    return Tokenizer(
        kind="gemma4 (BPE)", vocabulary=vocabulary, encoder=encoder, ends=ends, chat_template=_chat_template(metadata)
    )


def _bert_tokenizer(metadata: Mapping[str, object], texts: list[str]) -> Tokenizer:
    """Return a WordPiece vocabulary: [CLS] before a text, [SEP] after it; uncased unless the file says otherwise."""
    first = _read_token_id(metadata, "cls_token_id", texts)
    ids = {"bos_token_id": first if first is not None else _read_token_id(metadata, "bos_token_id", texts)}
    ids |= {key: _read_token_id(metadata, key, texts) for key in (_SEPARATOR, "unknown_token_id")}
    missing = next((key for key, token_id in ids.items() if token_id is None), None)
    if missing is not None:
        raise TokenizerError(f"{_PREFIX}{missing} is missing: a 'bert' tokenizer needs it")
    begin, separator, unknown = (token_id for token_id in ids.values() if token_id is not None)
    token_types = _read_token_types(metadata, texts)
    if _PREFIX + "token_type" not in metadata:
        _infer_token_types(token_types, texts, [begin, separator, unknown], spm=False)
    vocabulary = Vocabulary(texts, token_types, "spm")
    lowercase = _read_flag(metadata, "normalizer.lowercase", True)
    strip_accents = _read_flag(metadata, "normalizer.strip_accents", lowercase)
    ends = ((begin, 0),), ((separator, 0),), ((separator, 1),)
    return Tokenizer(
        kind="bert (WordPiece)",
        vocabulary=vocabulary,
        encoder=word_piece_encoder(vocabulary, unknown, lowercase=lowercase, strip_accents=strip_accents),
        ends=BosEos(begin, separator, frozenset({separator}), (begin,), (separator,)),
        pair=PairTemplate(*ends, types=(0, 1)),
        space_at_start=True,
    )


def _unigram_tokenizer(metadata: Mapping[str, object], texts: list[str]) -> Tokenizer:
    scores = _read_scores(metadata, len(texts))
    add_eos = _read_flag(metadata, "add_eos_token", True)
    vocabulary, ends = _read_vocabulary({**metadata, _PREFIX + "add_eos_token": add_eos}, texts, "spm", add_bos=False)
    unknown = _read_token_id(metadata, "unknown_token_id", texts)
    if unknown is None:
        raise TokenizerError(f"{_PREFIX}unknown_token_id is missing: a 't5' tokenizer needs it")
    prefix = _read_flag(metadata, "add_space_prefix", True)
    encoder = unigram_encoder(
        vocabulary,
        scores,
        unknown,
        characters=_read_bytes(metadata, "precompiled_charsmap"),
        squeeze_spaces=_read_flag(metadata, "remove_extra_whitespaces", False),
        add_space_prefix=prefix,
    )
    return Tokenizer(
        kind="t5 (unigram)",
        vocabulary=vocabulary,
        encoder=encoder,
        ends=ends,
        pair=_pair_template(metadata, texts, ends, two_separators=True),
        space_at_start=prefix,
        chat_template=_chat_template(metadata),
    )


def _pair_template(
    metadata: Mapping[str, object],
    texts: Sequence[str],
    ends: BosEos,
    *,
    two_separators: bool,
    one_separator: bool = False,
) -> PairTemplate | None:
    """Return the template of an encoder: EOS between the texts, and a separator if the file says so.

    `two_separators` is for files that do not say so, `one_separator` overrides what they say.
    """
    separator = _read_token_id(metadata, _SEPARATOR, texts)
    separator = ends.eos_id if separator is None else separator
    if separator is None or not (ends.prefix and ends.suffix):
        return None
    before, after = (tuple((token_id, 0) for token_id in part) for part in (ends.prefix, ends.suffix))
    end = ((separator, 0),) if _read_flag(metadata, "add_sep_token", two_separators) and not one_separator else ()
    return PairTemplate(before, (*after, *end), after)


def _pre_tokenizer(metadata: Mapping[str, object]) -> tuple[str, PreTokenizer]:
    name = metadata.get(_PREFIX + "pre")
    if name is None:
        _log.warning("tokenizer.ggml.pre is missing: using the pre-tokenizer 'default', which may split text wrongly")
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"unknown pre-tokenizer {preview(name)} (tokenizer.ggml.pre); known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return name, PRE_TOKENIZERS[name]


def _read_vocabulary(
    metadata: Mapping[str, object], texts: list[str], style: Style, *, add_bos: bool
) -> tuple[Vocabulary, BosEos]:
    spm = style == "spm"
    token_types = _read_token_types(metadata, texts)
    bos = _read_token_id(metadata, "bos_token_id", texts)
    end_ids = _read_end_ids(metadata, texts)
    named = find_end_ids(texts, token_types)
    if _PREFIX + "token_type" not in metadata:
        _infer_token_types(
            token_types, texts, [bos, *end_ids, _read_token_id(metadata, "unknown_token_id", texts)], spm=spm
        )
    for token_id in named:
        token_types[token_id] = TokenType.CONTROL
    eos = end_ids[0] if end_ids else None
    adds_bos = bos is not None and _read_flag(metadata, "add_bos_token", add_bos)
    adds_eos = eos is not None and _read_flag(metadata, "add_eos_token", False)
    ends = BosEos(
        bos_id=bos,
        eos_id=eos,
        eos_ids=frozenset([*end_ids, *named]),
        prefix=(bos,) if adds_bos and bos is not None else (),
        suffix=(eos,) if adds_eos and eos is not None else (),
    )
    return Vocabulary(texts, token_types, style), ends


def _infer_token_types(
    token_types: list[int], texts: Sequence[str], special: Sequence[int | None], *, spm: bool
) -> None:
    """Infer types for a file without them: ids that it names are control tokens, `<0xNN>` is a byte (SPM)."""
    for token_id in special:
        if token_id is not None:
            token_types[token_id] = TokenType.CONTROL
    if spm:
        for index, text in enumerate(texts):
            if parse_byte_token(text) is not None:
                token_types[index] = TokenType.BYTE


def _read_tokens(metadata: Mapping[str, object]) -> list[str]:
    tokens = metadata.get(_PREFIX + "tokens")
    if not isinstance(tokens, list) or not tokens or set(map(type, tokens)) != {str}:
        raise TokenizerError("tokenizer.ggml.tokens must be a non-empty list of strings")
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        bad = next(i for i, text in enumerate(tokens) if any("\ud800" <= char <= "\udfff" for char in text))
        raise TokenizerError(f"tokenizer.ggml.tokens: token {bad} is not valid UTF-8") from None
    return tokens


def _read_numbers(metadata: Mapping[str, object], key: str, length: int) -> list[float]:
    values = metadata.get(_PREFIX + key)
    tolist = getattr(values, "tolist", None)
    numbers = tolist() if tolist is not None else values
    if not isinstance(numbers, list) or not all(issubclass(kind, (int, float)) for kind in set(map(type, numbers))):
        raise TokenizerError(f"{_PREFIX}{key} must be an array of numbers")
    if len(numbers) < length:
        raise TokenizerError(f"{_PREFIX}{key} has {len(numbers)} entries for {length} tokens")
    return numbers[:length]


def _read_scores(metadata: Mapping[str, object], length: int) -> list[float]:
    if _PREFIX + "scores" not in metadata:
        raise TokenizerError(f"tokenizer.ggml.scores is missing: a {metadata[_PREFIX + 'model']!r} tokenizer needs it")
    scores = _read_numbers(metadata, "scores", length)
    if math.isnan(sum(scores)) and any(map(math.isnan, scores)):  # opposite infinities have no sum
        raise TokenizerError("tokenizer.ggml.scores holds NaN")
    return scores


def _read_token_types(metadata: Mapping[str, object], texts: Sequence[str]) -> list[int]:
    if _PREFIX + "token_type" not in metadata:
        return [int(TokenType.NORMAL)] * len(texts)
    numbers = _read_numbers(metadata, "token_type", len(texts))
    for index, number in enumerate(numbers) if float in set(map(type, numbers)) else ():
        if isinstance(number, float) and not number.is_integer():
            raise TokenizerError(f"tokenizer.ggml.token_type: entry {index} is {number}, not an integer")
    token_types = list(map(int, numbers))
    for index in ids_of_types(token_types, (TokenType.BYTE,)):
        if parse_byte_token(texts[index]) is None:
            raise TokenizerError(f"token {index} has type byte, but its text {preview(texts[index])} is not <0xNN>")
    return token_types


def _read_merges(metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    merges = metadata.get(_PREFIX + "merges")
    if merges is None:
        raise TokenizerError(f"tokenizer.ggml.merges is missing: a {metadata[_PREFIX + 'model']!r} tokenizer needs it")
    if not isinstance(merges, list):
        raise TokenizerError("tokenizer.ggml.merges must be a list of strings")
    if set(map(type, merges)) <= {str}:
        pairs = [merge.partition(" ")[::2] for merge in merges]
        if all(map(all, pairs)):  # both parts have text
            return pairs
    return [_split_merge(index, merge) for index, merge in enumerate(merges)]


def _split_merge(index: int, merge: object) -> tuple[str, str]:
    """Return the two parts of an unusual merge: a leading space belongs to the left part."""
    cut = merge.find(" ", 1) if isinstance(merge, str) else -1
    if not isinstance(merge, str) or cut < 0 or cut == len(merge) - 1:
        raise TokenizerError(f"tokenizer.ggml.merges: entry {index} ({preview(merge)}) is not two parts and a space")
    return merge[:cut], merge[cut + 1 :]


def _read_flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{_PREFIX}{key} must be true or false, not {preview(value)}")
    return value


def _read_bytes(metadata: Mapping[str, object], key: str) -> bytes:
    """Return an array of bytes, which files write as signed or unsigned numbers, or nothing if the key is missing."""
    if _PREFIX + key not in metadata:
        return b""
    values = metadata[_PREFIX + key]
    tolist = getattr(values, "tolist", None)
    numbers = tolist() if tolist is not None else values
    if isinstance(numbers, list) and set(map(type, numbers)) == {int} and min(numbers) >= -128 and max(numbers) < 256:
        return bytes(map((255).__and__, numbers))
    raise TokenizerError(f"{_PREFIX}{key} must be an array of bytes")


def _read_token_id(metadata: Mapping[str, object], key: str, texts: Sequence[str]) -> int | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        default = _DEFAULT_IDS.get(str(metadata.get(_PREFIX + "model")), {}).get(key)
        return default if default is not None and default < len(texts) else None
    return _validate_id(value, _PREFIX + key, len(texts))


def _validate_id(value: object, key: str, length: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < length:
        raise TokenizerError(f"{key} = {preview(value)} is not an id of the vocabulary (0 to {length - 1})")
    return value


def _read_end_ids(metadata: Mapping[str, object], texts: Sequence[str]) -> list[int]:
    """Return every id that ends a text, the EOS first. A key may hold one id or an array."""
    ids: list[int] = []
    for key in ("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id"):
        value = metadata.get(_PREFIX + key)
        tolist = getattr(value, "tolist", None)
        value = tolist() if tolist is not None else value
        if isinstance(value, list):
            ids += [_validate_id(item, _PREFIX + key, len(texts)) for item in value]
        else:
            token_id = _read_token_id({**metadata, _PREFIX + key: value}, key, texts)
            ids += [] if token_id is None else [token_id]
    return list(dict.fromkeys(ids))


def _find_rstrip_ids(metadata: Mapping[str, object], vocabulary: Vocabulary) -> frozenset[int]:
    name = str(metadata.get("general.name", "")).lower()
    if not any(part in name for part in _RSTRIP_MODELS):
        return frozenset()
    special = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    tokens = enumerate(zip(vocabulary.texts, vocabulary.token_types, strict=True))
    return frozenset(i for i, (text, kind) in tokens if kind in special and text not in _RSTRIP_EXCEPT)


def _chat_template(metadata: Mapping[str, object]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TokenizerError("tokenizer.chat_template must be a string")
    return template
