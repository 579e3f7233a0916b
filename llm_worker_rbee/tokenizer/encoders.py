"""Text to ids with the `tokenizers` library: BPE over bytes or characters, WordPiece, unigram, tokenizer.json as it is.

Special tokens are split off first, leftmost and longest, by an automaton of the library; the model encodes the rest.
User-defined tokens are always recognised, control tokens only with `parse_special`, so that `<|im_end|>` typed by a
user stays text.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from operator import itemgetter, mul
from threading import Lock

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from ..errors import InvalidRequestError, TokenizerError
from .pre_tokenizers import PreTokenizer
from .tokenizer import BYTE_TO_CHAR, CONTINUATION, MARK, SPACE, SPECIAL_TYPES, TokenType, Vocabulary, preview


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
PLAIN_TYPES = frozenset({int(TokenType.NORMAL), int(TokenType.UNUSED), int(TokenType.UNDEFINED)})
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
MAX_DIRECT_LENGTH = 2048  # characters of a text that is merged without the library's model
MAX_WORD_LENGTH = 100  # characters of a WordPiece word; a longer one is unknown
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
            encoding = self._finder.encode_batch([text], add_special_tokens=False)[0]  # the batch call releases the GIL
        strip = False
        for local, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if local:
                token_id = self.ids[local - 1]
                strip = token_id in self.rstrip
                yield token_id, ""
                continue
            part = text[start:end].lstrip(_C_SPACE) if strip else text[start:end]
            if part:
                yield None, part


def splitters(vocabulary: Vocabulary, rstrip: frozenset[int] = frozenset()) -> dict[bool, SpecialTokenSplitter]:
    """Return splitters for user-defined tokens, by `parse_special`: with control and unknown tokens, or without."""
    always = vocabulary.ids_by_text((TokenType.USER_DEFINED,))
    parsed = {**always, **vocabulary.special_names()}
    return {False: SpecialTokenSplitter(always, rstrip), True: SpecialTokenSplitter(parsed, rstrip)}


def _library_ids(library: Tokenizer, text: str) -> list[int]:
    return library_batch(library, [text])[0]


def library_batch(library: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the library's ids of texts; without offsets, which take half of the time."""
    with encode_errors():
        return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]


class PartsEncoder:
    """Splits special tokens off; the library encodes each text between them alone."""

    def __init__(self, vocabulary: Vocabulary, library: Tokenizer) -> None:
        self._splitters, self._library = splitters(vocabulary), library

    def encode(self, text: str, parse_special: bool, mark: str = "") -> list[int]:
        return self._encode_all([text], self._splitters[parse_special], mark)[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode_all(texts, self._splitters[False], "")

    def _encode_all(self, texts: Sequence[str], splitter: SpecialTokenSplitter, mark: str) -> list[list[int]]:
        pieces = [list(splitter.split(text)) for text in texts]
        parts = [part.replace(mark, "") if mark else part for piece in pieces for i, part in piece if i is None]
        ids = iter(library_batch(self._library, parts))
        return [list(chain.from_iterable(next(ids) if i is None else [i] for i, _ in piece)) for piece in pieces]


class BpeEncoder(PartsEncoder):
    """Byte-level BPE of a GGUF: pre-tokenizer, then merges in order."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], pre: PreTokenizer) -> None:
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
                library = Tokenizer(models.BPE(vocab=vocab, merges=kept, ignore_merges=pre.ignore_merges))
                library.pre_tokenizer = byte_level_splitter(pre)
        except TokenizerError:  # the library checks all merges faster, and names none
            _check_merges(vocabulary, merges)
            raise
        super().__init__(vocabulary, library)

    def _encode_all(self, texts: Sequence[str], splitter: SpecialTokenSplitter, mark: str) -> list[list[int]]:
        rows = super()._encode_all(texts, splitter, mark)
        return [self._without_missing(ids) for ids in rows] if self._missing else rows

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


def _check_spm_merges(vocab: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
    """Raise for a merge of tokens, or to a token, that the vocabulary lacks; single characters may be missing."""
    unknown = set(map("".join, merges)) - vocab.keys()
    missing = unknown or {part for part in set(chain.from_iterable(merges)) - vocab.keys() if len(part) > 1}
    if missing:
        raise TokenizerError(f"tokenizer.ggml.merges: a merge needs token {preview(min(missing))}, which is missing")


class SpmEncoder:
    """SentencePiece-style BPE of a GGUF. Without merges in the file the token with the best score is merged first.

    The library's model of 262,144 tokens takes seconds to make, so it is made when a long text comes, or by `prepare`;
    until then short texts are merged here, with the same result.

    The space prefix goes before the first character and after a control token, not after a user-defined one: in
    SentencePiece a control token starts a new text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        scores: Sequence[float] | None,
        *,
        merges: Callable[[], Sequence[tuple[str, str]]] | None = None,
        add_space_prefix: bool,
        squeeze_spaces: bool = False,
        unknown_id: int | None = None,
        rstrip: frozenset[int] = frozenset(),
    ) -> None:
        self._splitters = splitters(vocabulary, rstrip)
        self._special = frozenset(i for i, kind in enumerate(vocabulary.token_types) if kind in SPECIAL_TYPES)
        self._prefix = SPACE if add_space_prefix else ""
        self._squeeze_spaces = squeeze_spaces
        vocab = dict(vocabulary.ids)
        for text in vocabulary.ids_by_text(set(vocabulary.token_types) - PLAIN_TYPES):
            del vocab[text]
        byte_ids = {t: vocabulary.ids[t] for t in BYTE_TOKENS if _is_byte_token(vocabulary, t)}
        work = 0
        if scores is not None:
            work, merges = _check_spm_lengths(vocab), partial(derive_merges, vocab, scores)
        assert merges is not None
        if scores is None:
            _check_spm_merges(vocab, merges())
        self._make_library = partial(_spm_library, vocabulary, vocab, byte_ids, merges, unknown_id)
        self._made: tuple[Tokenizer, dict[int, tuple[int, ...]]] | None = None
        self._lock = Lock()
        self._merger: ScoreMerger | None = None
        if scores is not None and len(byte_ids) == len(BYTE_TOKENS) and work <= _MAX_SPM_MERGES:
            self._merger = ScoreMerger(vocab, scores, tuple(byte_ids.values()))
        elif scores is not None:
            self.prepare()  # which may find errors

    def prepare(self) -> None:
        """Make the library's model."""
        with self._lock:
            if self._made is None:
                self._made = self._make_library()

    def encode(self, text: str, parse_special: bool, mark: str = "") -> list[int]:
        if self._squeeze_spaces:
            text = _SPACES.sub(" ", text.lstrip(" ").rstrip(" " + SPACE))  # SentencePiece trims both at the end
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

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if sum(map(len, texts)) > MAX_DIRECT_LENGTH:
            self.prepare()
        return [self.encode(text, False) for text in texts]

    def _segment(self, text: str) -> list[int]:
        if self._made is None and self._merger is not None and len(text) <= MAX_DIRECT_LENGTH:
            return self._merger.encode(text)
        if self._made is None:
            self.prepare()
        assert self._made is not None
        library, characters = self._made
        ids = _library_ids(library, text)
        if not characters:
            return ids
        out: list[int] = []
        for token_id in ids:
            out += characters.get(token_id, (token_id,))
        return out


class ScoreMerger:
    """Merges without a table of merges: of all neighbours that form a token, the pair with the best score first."""

    def __init__(self, vocab: Mapping[str, int], scores: Sequence[float], byte_ids: tuple[int, ...]) -> None:
        self._ids, self._scores, self._byte_ids = vocab, scores, byte_ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; characters without a token become bytes."""
        ids: list[int] = []
        for part in self._merge(text):
            index = self._ids.get(part)
            ids += [self._byte_ids[byte] for byte in part.encode()] if index is None else [index]
        return ids

    def _merge(self, text: str) -> list[str]:
        """Merge pairs by score; ties go to the shortest left part, then to the lower id, then to the leftmost place."""
        parts = list(text)
        before, after = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
        heap: list[tuple[float, int, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            index = self._ids.get(parts[left] + parts[right])
            if index is not None:
                sizes = len(parts[left]), len(parts[right])
                heappush(heap, (-self._scores[index], sizes[0], index, left, sizes[1]))

        for left in range(len(parts) - 1):
            offer(left, left + 1)
        while heap:
            _, size, _, left, right_size = heappop(heap)
            right = after[left]
            if right == len(parts) or len(parts[left]) != size or len(parts[right]) != right_size:
                continue  # one of them has been merged since
            parts[left], parts[right] = parts[left] + parts[right], ""
            after[left] = after[right]
            if after[left] < len(parts):
                before[after[left]] = left
                offer(left, after[left])
            if before[left] >= 0:
                offer(before[left], left)
        return list(filter(None, parts))


def _is_byte_token(vocabulary: Vocabulary, text: str) -> bool:
    return text in vocabulary.ids and vocabulary.token_types[vocabulary.ids[text]] == TokenType.BYTE


def _spm_library(
    vocabulary: Vocabulary,
    vocab: Mapping[str, int],
    byte_ids: Mapping[str, int],
    make_merges: Callable[[], Sequence[tuple[str, str]]],
    unknown_id: int | None,
) -> tuple[Tokenizer, dict[int, tuple[int, ...]]]:
    """Return the library's model, and the byte tokens of characters that occur only within longer tokens."""
    merges, vocab = make_merges(), dict(vocab)
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
    vocab |= byte_ids
    with tokenizer_errors("tokenizer.ggml.tokens"):
        model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token=unknown, fuse_unk=True)
        return Tokenizer(model), characters


def _check_spm_lengths(vocab: Mapping[str, int]) -> int:
    """Return the sum of the squared lengths; raise if `derive_merges` would take too long."""
    lengths = list(map(len, vocab))
    if max(lengths, default=0) > _MAX_SPM_LENGTH:
        text, index = next((text, index) for text, index in vocab.items() if len(text) > _MAX_SPM_LENGTH)
        raise TokenizerError(
            f"tokenizer.ggml.tokens: token {index} has {len(text)} characters; at most {_MAX_SPM_LENGTH} in a"
            " 'llama' vocabulary"
        )
    work = int(sum(map(mul, lengths, lengths)))
    if work > _MAX_SPM_WORK:
        raise _too_many_merges(f"the squares of their lengths add up to {work}; at most {_MAX_SPM_WORK}")
    return work


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
    ranked.sort(key=itemgetter(0, 1))
    return [(left, right) for _, _, left, right in ranked]


def word_piece_encoder(
    vocabulary: Vocabulary, unknown_id: int, *, lowercase: bool, strip_accents: bool
) -> PartsEncoder:
    """Return the encoder of a WordPiece vocabulary: the longest token first, or the whole word is unknown.

    A GGUF writes a token that begins a word with U+2581, and one that continues a word as it is.
    """
    vocab = {}
    for text, index in vocabulary.ids.items():
        if vocabulary.token_types[index] in PLAIN_TYPES:
            vocab[text.removeprefix(SPACE) if text.startswith(SPACE) else CONTINUATION + text] = index
    vocab[MARK] = unknown_id  # no word: the normalizer drops it
    with tokenizer_errors("tokenizer.ggml.tokens"):
        library = Tokenizer(models.WordPiece(vocab, unk_token=MARK, max_input_chars_per_word=MAX_WORD_LENGTH))
        library.normalizer = normalizers.BertNormalizer(strip_accents=strip_accents, lowercase=lowercase)
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PartsEncoder(vocabulary, library)


def unigram_encoder(
    vocabulary: Vocabulary,
    scores: Sequence[float],
    unknown_id: int,
    *,
    characters: bytes,
    squeeze_spaces: bool,
    add_space_prefix: bool,
) -> PartsEncoder:
    """Return the encoder of a unigram vocabulary: the tokens of a text with the best sum of scores.

    `characters` is SentencePiece's compiled map of characters, empty for none.
    """
    types, ids = vocabulary.token_types, vocabulary.ids
    pieces = [
        (text, scores[i]) if types[i] == TokenType.NORMAL and ids.get(text) == i else (f"{MARK}{i}", 0.0)
        for i, text in enumerate(vocabulary.texts)
    ]
    steps: list[normalizers.Normalizer] = []
    with tokenizer_errors("tokenizer.ggml.precompiled_charsmap"):
        steps += [normalizers.Precompiled(characters)] if characters else []
    if squeeze_spaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", SPACE))
    steps += [normalizers.Prepend(SPACE)] if add_space_prefix else []
    with tokenizer_errors("tokenizer.ggml.tokens"):
        library = Tokenizer(models.Unigram(pieces, unknown_id, False))
        library.normalizer = normalizers.Sequence(steps)
        if not any(SPACE in text.lstrip(SPACE) for text, _ in pieces):  # no token is of two words
            library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return PartsEncoder(vocabulary, library)


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

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with self._lock:
            self._library.encode_special_tokens = True
            return library_batch(self._library, texts)

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Split off the template's own tokens; the library encodes each text between them alone."""
        ids: list[int] = []
        for token_id, part in SpecialTokenSplitter(self._control).split(text):
            ids += self.encode(part.replace(mark, ""), False) if token_id is None else [token_id]
        return ids
