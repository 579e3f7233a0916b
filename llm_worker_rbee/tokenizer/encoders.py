"""Text to ids with the `tokenizers` library: byte-level BPE, SentencePiece-style BPE, and tokenizer.json as it is.

Special tokens are split off first, leftmost and longest, by an automaton of the library; the model encodes the rest.
User-defined tokens are always recognised, control tokens only with `parse_special`, so that `<|im_end|>` typed by a
user stays text.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from threading import Lock

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from ..errors import InvalidRequestError, TokenizerError
from .pre_tokenizers import PreTokenizer
from .tokenizer import BYTE_TO_CHAR, SPACE, SPECIAL_TYPES, TokenType, Vocabulary, preview


@contextmanager
def _guard(failure: Callable[[str], Exception]) -> Iterator[None]:
    """Convert exceptions of the library; a panic of its Rust code is a BaseException known only by name."""
    try:
        yield
    except BaseException as error:
        is_library_error = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_library_error or isinstance(error, MemoryError):
            raise
        raise failure(" ".join(str(error).split())[:200]) from None


def tokenizer_errors(source: str) -> AbstractContextManager[None]:
    """Raise TokenizerError for failures of the library while it reads `source`, a file or a key."""
    return _guard(lambda reason: TokenizerError(f"{source}: {reason}"))


def encode_errors() -> AbstractContextManager[None]:
    """Raise InvalidRequestError for failures of the library while it encodes a text."""
    return _guard(lambda reason: InvalidRequestError(f"the tokenizer failed on this text: {reason}", field="prompt"))


_log = logging.getLogger("llm_worker_rbee")
_SPACES = re.compile(" {2,}")
_C_SPACE = " \t\n\v\f\r"
# Limits for derived merges, which take time and memory with the square of a token's length.
_MAX_SPM_LENGTH = 512
_MAX_SPM_WORK = 256_000_000  # sum of squared lengths; usual vocabularies of 256,000 tokens have about 15 million
_MAX_SPM_MERGES = 32_000_000  # characters of all derived merges; such a vocabulary has about 5 million


class SpecialTokenSplitter:
    """Splits a text into special tokens (id, "") and the text between them (None, text)."""

    def __init__(self, tokens: Mapping[str, int], rstrip: frozenset[int] = frozenset()) -> None:
        self.ids = list(tokens.values())
        self.rstrip = rstrip
        # The library's ids: 0 is plain text, 1 + i the i-th special token.
        with tokenizer_errors("tokenizer.ggml.tokens"):
            self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
            self._finder.add_tokens([AddedToken(text, normalized=False) for text in tokens])

    def split(self, text: str) -> Iterator[tuple[int | None, str]]:
        if not self.ids:
            if text:
                yield None, text
            return
        with encode_errors():
            found = self._finder.encode_batch([text], add_special_tokens=False)[0]  # the batch call releases the GIL
        strip = False
        for local, (start, end) in zip(found.ids, found.offsets, strict=True):
            if local:
                token_id = self.ids[local - 1]
                strip = token_id in self.rstrip
                yield token_id, ""
                continue
            part = text[start:end].lstrip(_C_SPACE) if strip else text[start:end]
            if part:
                yield None, part


def _splitters(vocabulary: Vocabulary, rstrip: frozenset[int] = frozenset()) -> dict[bool, SpecialTokenSplitter]:
    """Return splitters for user-defined tokens, by `parse_special`: with control and unknown tokens, or without."""
    always = vocabulary.ids_by_text((TokenType.USER_DEFINED,))
    parsed = {**always, **vocabulary.special_names()}
    return {False: SpecialTokenSplitter(always, rstrip), True: SpecialTokenSplitter(parsed, rstrip)}


def _library_ids(library: Tokenizer, text: str) -> list[int]:
    """Return the library's ids; without offsets, which take half of the time."""
    with encode_errors():
        ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


class BpeEncoder:
    """Byte-level BPE of a GGUF: pre-tokenizer, then merges in order."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], pre: PreTokenizer) -> None:
        self._splitters = _splitters(vocabulary)
        missing = [byte for byte, char in BYTE_TO_CHAR.items() if char not in vocabulary.ids]
        # Placeholders keep neighbours from merging across a missing byte.
        self._missing = {len(vocabulary) + index: byte for index, byte in enumerate(missing)}
        placeholders = {BYTE_TO_CHAR[byte]: token_id for token_id, byte in self._missing.items()}
        special = vocabulary.special_names()
        kept = [merge for merge in merges if "".join(merge) not in special]  # no control token from plain text
        if len(kept) < len(merges) or not placeholders.keys().isdisjoint(chain.from_iterable(merges)):
            _check_merges(vocabulary, merges)
        try:
            with tokenizer_errors("tokenizer.ggml.merges"):
                vocab = {**vocabulary.ids, **placeholders}
                self._library = Tokenizer(models.BPE(vocab=vocab, merges=kept, ignore_merges=pre.ignore_merges))
                self._library.pre_tokenizer = byte_level_splitter(pre)
        except TokenizerError:  # the library checks all merges faster, and names none
            _check_merges(vocabulary, merges)
            raise

    def encode(self, text: str, parse_special: bool, mark: str = "") -> list[int]:
        ids: list[int] = []
        for token_id, part in self._splitters[parse_special].split(text):
            if token_id is None:
                ids += _library_ids(self._library, part.replace(mark, "") if mark else part)
            else:
                ids.append(token_id)
        return self._without_missing(ids) if self._missing else ids

    def _without_missing(self, ids: list[int]) -> list[int]:
        """Drop bytes that the vocabulary lacks: the default model has none for planes 4 to 11 and U+0004."""
        lost = self._missing.keys() & set(ids)
        if not lost:
            return ids
        names = ", ".join(f"0x{self._missing[token_id]:02X}" for token_id in sorted(lost))
        _log.warning("the vocabulary has no token for byte %s of the text: dropped", names)
        return [token_id for token_id in ids if token_id not in lost]


def _check_merges(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]]) -> None:
    """Raise for the first merge of tokens, or to a token, that the vocabulary lacks."""
    for left, right in merges:
        for text in (left, right, left + right):
            if text not in vocabulary.ids:
                merge = f"merge {preview(left)} + {preview(right)}"
                raise TokenizerError(f"tokenizer.ggml.merges: {merge} needs token {preview(text)}, which is missing")


def byte_level_splitter(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Return the library's form of a pre-tokenizer: its patterns in turn, then the byte alphabet."""
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


class SpmEncoder:
    """SentencePiece-style BPE of a GGUF: the file has no merges; the token with the best score is merged first.

    The space prefix goes before the first character and after a control token, not after a user-defined one: in
    SentencePiece a control token starts a new text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        scores: Sequence[float],
        *,
        add_space_prefix: bool,
        squeeze_spaces: bool = False,
        unknown_id: int | None = None,
        rstrip: frozenset[int] = frozenset(),
    ) -> None:
        self._splitters = _splitters(vocabulary, rstrip)
        self._special = frozenset(i for i, kind in enumerate(vocabulary.token_types) if kind in SPECIAL_TYPES)
        self._prefix = SPACE if add_space_prefix else ""
        self._squeeze_spaces = squeeze_spaces
        self._library, self._characters = _spm_library(vocabulary, scores, unknown_id)

    def encode(self, text: str, parse_special: bool, mark: str = "") -> list[int]:
        if self._squeeze_spaces:
            text = _SPACES.sub(" ", text.strip(" "))
        ids: list[int] = []
        starts = True
        for token_id, part in self._splitters[parse_special].split(text):
            if token_id is None:
                part = part.replace(mark, "") if mark else part
                ids += self._segment((self._prefix if starts else "") + part.replace(" ", SPACE))
                starts = False
                continue
            if starts and self._prefix and token_id not in self._special:
                ids += self._segment(self._prefix)
            ids.append(token_id)
            starts = token_id in self._special
        return ids

    def _segment(self, text: str) -> list[int]:
        ids = _library_ids(self._library, text)
        if not self._characters:
            return ids
        out: list[int] = []
        for token_id in ids:
            out += self._characters.get(token_id, (token_id,))
        return out


def _spm_library(
    vocabulary: Vocabulary, scores: Sequence[float], unknown_id: int | None
) -> tuple[Tokenizer, dict[int, tuple[int, ...]]]:
    """Return the library's model, and the byte tokens of characters that occur only within longer tokens."""
    kept = (TokenType.NORMAL, TokenType.UNUSED, TokenType.UNDEFINED)
    vocab = {text: index for text, index in vocabulary.ids.items() if vocabulary.token_types[index] in kept}
    _check_spm_lengths(vocab)
    merges = derive_merges(vocab, scores)
    byte_ids = {t: i for t, i in vocabulary.ids.items() if vocabulary.token_types[i] == TokenType.BYTE}
    characters: dict[int, tuple[int, ...]] = {}
    for part in {part for pair in merges for part in pair if len(part) == 1 and part not in vocab}:
        extra = len(vocabulary) + len(characters)
        fallback = tuple(byte_ids.get(f"<0x{byte:02X}>", -1) for byte in part.encode())
        if -1 in fallback:
            fallback = (unknown_id,) if unknown_id is not None else ()
        characters[extra] = fallback
        vocab[part] = extra
    unknown = vocabulary.texts[unknown_id] if unknown_id is not None else None
    if unknown is not None and unknown_id is not None:
        vocab[unknown] = unknown_id
    vocab = {**vocab, **byte_ids}
    with tokenizer_errors("tokenizer.ggml.tokens"):
        model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token=unknown, fuse_unk=True)
        return Tokenizer(model), characters


def _check_spm_lengths(vocab: Mapping[str, int]) -> None:
    """Raise if `derive_merges` would take too long."""
    for text, index in vocab.items():
        if len(text) > _MAX_SPM_LENGTH:
            raise TokenizerError(
                f"tokenizer.ggml.tokens: token {index} has {len(text)} characters; at most {_MAX_SPM_LENGTH} in a"
                " 'llama' vocabulary"
            )
    work = sum(len(text) ** 2 for text in vocab)
    if work > _MAX_SPM_WORK:
        raise _too_many_merges(f"the squares of their lengths add up to {work}; at most {_MAX_SPM_WORK}")


def _too_many_merges(figures: str) -> TokenizerError:
    return TokenizerError(f"tokenizer.ggml.tokens: too many long tokens for a 'llama' vocabulary ({figures})")


def derive_merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every pair of parts that forms a token, best score first.

    A part is a token or a single character. Pairs that form the same token are ordered by their split point.
    """
    ranked: list[tuple[float, int, str, str]] = []
    characters = 0
    for text, index in vocab.items():
        score = -scores[index]
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if (cut == 1 or left in vocab) and (cut == len(text) - 1 or right in vocab):
                ranked.append((score, cut, left, right))
                characters += len(text)
        if characters > _MAX_SPM_MERGES:
            raise _too_many_merges(f"their merges have more than {_MAX_SPM_MERGES} characters")
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]


class LibraryEncoder:
    """A tokenizer.json as it is. Whether special tokens are parsed is state of the library, hence the lock."""

    def __init__(self, library: Tokenizer, control: Mapping[str, int]) -> None:
        self._library = library
        self._control = control  # the special tokens: name -> id
        self._lock = Lock()

    def encode(self, text: str, parse_special: bool, mark: str = "") -> list[int]:
        if mark and mark in text:
            return self._encode_marked(text, mark)
        with self._lock:
            self._library.encode_special_tokens = not parse_special
            return _library_ids(self._library, text)

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Split off the template's own tokens; the library encodes each text between them alone."""
        ids: list[int] = []
        for token_id, part in SpecialTokenSplitter(self._control).split(text):
            ids += self.encode(part.replace(mark, ""), False) if token_id is None else [token_id]
        return ids
