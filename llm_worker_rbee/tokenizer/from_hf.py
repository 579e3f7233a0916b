"""`Tokenizer` from a folder in the Hugging Face layout: tokenizer.json and the small JSON files next to it.

The library reads tokenizer.json and encodes; decoding joins the bytes of tokens here, so that it can stream. The other
files give BOS and EOS. A broken file is an error; a missing one is not, except tokenizer.json.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import models

from ..errors import TokenizerError
from .encoders import LibraryEncoder, tokenizer_errors
from .tokenizer import (
    CONTINUATION,
    MARK,
    BosEos,
    PairTemplate,
    Style,
    Tokenizer,
    TokenType,
    Vocabulary,
    check_special_lengths,
    find_end_ids,
    parse_byte_token,
    preview,
)

_MAX_JSON_BYTES = 256 << 20
# Decoders that only join the bytes of tokens, with the style of their vocabulary.
_DECODER_STYLES: dict[str, Style] = {
    "ByteLevel": "byte",
    "ByteFallback": "spm",
    "Metaspace": "spm",
    "WordPiece": "wordpiece",
}


def tokenizer_from_hf(folder: Path) -> Tokenizer:
    """Build the tokenizer of a folder with tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{folder}: no tokenizer.json (other tokenizer files are not supported)")
    source = _read_json(path)
    library = _library(path, source)
    names = ("tokenizer_config", "config", "generation_config", "special_tokens_map")
    files = {name: _read_json(folder / f"{name}.json") for name in names}
    steps = list(_decoder_steps(source.get("decoder")))
    style = _style(steps)
    unknown = "" if style else f"unknown decoder {', '.join(str(step.get('type')) for step in steps) or 'none'}"
    vocabulary = _vocabulary(library, source, style or "verbatim", _id_limit(files["config"]))
    _hide_special(library, source, vocabulary)
    return Tokenizer(
        kind=f"tokenizer.json ({unknown}: encoding only)" if unknown else "tokenizer.json",
        vocabulary=vocabulary,
        encoder=LibraryEncoder(library, vocabulary.special_names()),
        ends=_read_bos_eos(library, vocabulary, files),
        pair=_pair_template(library),
        space_at_start=_strips_space(steps),
        chat_template=_chat_template(folder, files["tokenizer_config"]),
        decode_error=f"{path}: {unknown}; known: {', '.join(_DECODER_STYLES)}" if unknown else None,
    )


def _library(path: Path, source: Mapping[str, Any]) -> Library:
    """Load the library's tokenizer without training settings: truncation, padding, BPE dropout."""
    added = source.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    contents = [(entry.get("id"), entry.get("content")) for entry in entries]
    check_special_lengths((token_id, text) for token_id, text in contents if isinstance(text, str))
    with tokenizer_errors(str(path)):
        library = Library.from_file(str(path))
        library.no_truncation()
        library.no_padding()
        if getattr(library.model, "dropout", None):
            library.model.dropout = None
    return library


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise TokenizerError(f"{path}: larger than {_MAX_JSON_BYTES >> 20} MiB")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not valid JSON ({error})") from None
    except OSError as error:
        raise TokenizerError(f"{path}: not readable ({error.strerror})") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must hold a JSON object")
    return value


def _decoder_steps(decoder: object) -> Iterator[dict[str, Any]]:
    if isinstance(decoder, dict):
        if decoder.get("type") == "Sequence":
            for inner in decoder.get("decoders") or ():
                yield from _decoder_steps(inner)
        else:
            yield decoder


def _style(steps: list[dict[str, Any]]) -> Style | None:
    """Return the style of the vocabulary by its decoder; None if the decoder does more than join bytes."""
    styled = (step for step in steps if step.get("type") in _DECODER_STYLES)
    step = next((step for step in styled if step.get("prefix", CONTINUATION) == CONTINUATION), None)
    return _DECODER_STYLES[step["type"]] if step is not None else None


def _strips_space(steps: list[dict[str, Any]]) -> bool:
    for step in steps:
        if step.get("type") == "Strip" and step.get("content") == " " and step.get("start"):
            return True
        if step.get("type") == "WordPiece":
            return True
        if step.get("type") == "Metaspace":
            return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is not False
    return False


def _vocabulary(library: Library, source: Mapping[str, Any], style: Style, id_limit: int) -> Vocabulary:
    ids: dict[str, int] = library.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if size > 2 * len(ids) + 1_000_000:
        raise TokenizerError(f"tokenizer.json: token id {size - 1} is far beyond the {len(ids)} tokens")
    texts, token_types = [""] * size, [int(TokenType.UNUSED)] * size
    for text, index in ids.items():
        texts[index] = text
        is_byte = style == "spm" and parse_byte_token(text) is not None
        token_types[index] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for token_id, added in library.get_added_tokens_decoder().items():
        token_types[token_id] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    named = (source.get("model") or {}).get("unk_token")
    unknown = ids.get(named) if isinstance(named, str) else None
    if unknown is not None:
        token_types[unknown] = TokenType.UNKNOWN
    return Vocabulary(texts, token_types, style, id_limit=id_limit)


def _hide_special(library: Library, source: Mapping[str, Any], vocabulary: Vocabulary) -> None:
    """Keep a unigram model, whose pieces have the names of control tokens, from making these of plain text."""
    model = source.get("model") or {}
    if model.get("type") != "Unigram":
        return
    special = set(vocabulary.special_names().values())
    pieces = [(f"{MARK}{i}" if i in special else text, score) for i, (text, score) in enumerate(model["vocab"])]
    with tokenizer_errors("tokenizer.json"):
        library.model = models.Unigram(pieces, model.get("unk_id"), bool(model.get("byte_fallback")))


def _id_limit(config: Mapping[str, Any]) -> int:
    """Return the rows of the model's embedding; ids beyond the tokenizer's are padding."""
    text_config = config.get("text_config")
    size = config.get("vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    return size if isinstance(size, int) and 0 < size < 1 << 24 else 0


def _read_bos_eos(library: Library, vocabulary: Vocabulary, files: Mapping[str, dict[str, Any]]) -> BosEos:
    settings = files["tokenizer_config"]
    bos = _named_id("bos_token", vocabulary, files)
    named_eos = _named_id("eos_token", vocabulary, files)
    listed = [i for name in ("generation_config", "config") for i in _listed_ids(name, files[name], vocabulary)]
    eos = named_eos if named_eos is not None else (listed[0] if listed else None)
    prefix, suffix = _template_tokens(library)
    if isinstance(settings.get("add_bos_token"), bool) and bos is not None:
        prefix = (bos,) if settings["add_bos_token"] else tuple(i for i in prefix if i != bos)
    if isinstance(settings.get("add_eos_token"), bool) and eos is not None:
        suffix = (eos,) if settings["add_eos_token"] else tuple(i for i in suffix if i != eos)
    if bos is None:
        bos = prefix[0] if prefix else None
    special = [i for i in find_end_ids(vocabulary.texts, vocabulary.token_types) if vocabulary.is_special(i)]
    eos_ids = frozenset([*([] if eos is None else [eos]), *listed, *special])
    return BosEos(bos_id=bos, eos_id=eos, eos_ids=eos_ids, prefix=prefix, suffix=suffix)


def _named_id(key: str, vocabulary: Vocabulary, files: Mapping[str, dict[str, Any]]) -> int | None:
    for name in ("tokenizer_config", "special_tokens_map"):
        value = files[name].get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str) or text not in vocabulary.ids:
            raise TokenizerError(f"{name}.json: {key} {preview(text)} is not in the vocabulary")
        return vocabulary.ids[text]
    return None


def _listed_ids(name: str, config: Mapping[str, Any], vocabulary: Vocabulary) -> list[int]:
    """Return `eos_token_id` of a config as a list."""
    nested = config.get("text_config")
    value = config.get("eos_token_id", nested.get("eos_token_id") if isinstance(nested, dict) else None)
    ids = value if isinstance(value, list) else ([] if value is None else [value])
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocabulary.id_limit:
            raise TokenizerError(
                f"{name}.json: eos_token_id {preview(token_id)} is not an id below {vocabulary.id_limit}"
            )
    return ids


def _template_tokens(library: Library) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that the post-processor adds before and after a text, by encoding a letter."""
    with tokenizer_errors("tokenizer.json"):
        bare: list[int] = library.encode("a", add_special_tokens=False).ids
        full: list[int] = library.encode("a", add_special_tokens=True).ids
    if len(full) <= len(bare):
        return (), ()
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise TokenizerError("tokenizer.json: its post_processor changes the tokens of the text, which is not supported")


def _pair_template(library: Library) -> PairTemplate | None:
    """Return the post-processor's tokens around two texts, by encoding two letters; None: none between them."""
    with tokenizer_errors("tokenizer.json"):
        bare = [library.encode(text, add_special_tokens=False).ids for text in ("a", "b")]
        full = library.encode("a", "b", add_special_tokens=True)
    texts = [i for i, sequence in enumerate(full.sequence_ids) if sequence is not None]
    first, second = ([i for i in texts if full.sequence_ids[i] == number] for number in (0, 1))
    if [[full.ids[i] for i in part] for part in (first, second)] != bare or not (first and second):
        return None
    tokens = list(zip(full.ids, full.type_ids, strict=True))
    middle = tuple(tokens[first[-1] + 1 : second[0]])
    types = full.type_ids[first[0]], full.type_ids[second[0]]
    return PairTemplate(tuple(tokens[: first[0]]), middle, tuple(tokens[second[-1] + 1 :]), types) if middle else None


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return chat_template.jinja if it exists, else the setting: a string or a list of named templates."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise TokenizerError(f"{path}: not readable as UTF-8 text ({error})") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in template):
            raise TokenizerError("tokenizer_config.json: chat_template is a list with an entry without name")
        template = {entry["name"]: entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError("tokenizer_config.json: chat_template must be a string or a list of named templates")
    return template
