"""The pre-tokenizers of byte-level BPE vocabularies, by the name that `tokenizer.ggml.pre` gives.

A pre-tokenizer is a list of regular expressions, applied in turn: each one splits every piece that the ones before it
left, and both matches and the text between them stay pieces. The expressions are data of the format, taken from the
models' tokenizer.json files in the form that llama.cpp gives them (see NOTICE); they are written for Oniguruma. Where
llama.cpp deviates from the model's own file, we deviate with it, for a GGUF is made for it: gpt-4o and tekken count
every letter beyond ASCII as both upper and lower case and leave combining marks aside; the CJK ranges of deepseek hold
no white space. What remains different is the version of the Unicode tables.
"""

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_NOT_LOWER, _NOT_UPPER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"


def _cased(suffix: str, digits: str) -> str:
    """Words split where the case changes, as in gpt-4o; `suffix` may end a word."""
    word = r"[^\r\n\p{L}\p{N}]?"
    lower = f"{word}{_NOT_LOWER}*{_NOT_UPPER}+{suffix}"
    upper = f"{word}{_NOT_LOWER}+{_NOT_UPPER}*{suffix}"
    return f"{lower}|{upper}|{digits}|{_TAIL_SLASH}"


_GPT4O = _cased(_CONTRACTIONS + "?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_CJK = r"[[一-龥ࠀ-一가-퟿]&&[^\s]]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼι"
    "ῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3001\u3002]+",
    r"\s+\z",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging, and what the format lets a file leave unsaid."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token stays one, whatever the merges say
    add_bos: bool = False  # where the file has no add_bos_token


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    "gpt-2": PreTokenizer((_GPT2,)),
    "phi-2": PreTokenizer((_GPT2,)),
    "mpt": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,)),
    "falcon": PreTokenizer(_FALCON),
    "starcoder": PreTokenizer(_DIGITS_THEN_GPT2),
    "refact": PreTokenizer(_DIGITS_THEN_GPT2),
    "command-r": PreTokenizer(_DIGITS_THEN_GPT2),
    "smollm": PreTokenizer(_DIGITS_THEN_GPT2),
    "codeshell": PreTokenizer(_DIGITS_THEN_GPT2),
    "exaone": PreTokenizer(_DIGITS_THEN_GPT2),
    "llama-bpe": PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama-v3": PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "falcon3": PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
}


def _byte_alphabet() -> dict[int, str]:
    """The printable stand-ins that byte-level vocabularies use for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(0x100 + len(alphabet) - len(printable))
    return alphabet


BYTE_TO_CHAR = _byte_alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}
