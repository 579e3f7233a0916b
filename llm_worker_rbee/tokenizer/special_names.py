"""Tokens that end a text or a turn, known by their names, for files that name only one of them.

A model that was taught to end its turn with one of these goes on for ever if the worker does not know. The names are
those of the published chat formats; a token counts only where the vocabulary has exactly this text.
"""

from collections.abc import Sequence

from .vocabulary import Kind

END_NAMES = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",  # Llama 3
    "<|im_end|>", "<|endoftext|>",  # ChatML, GPT-2
    "<|end|>", "<|return|>", "<|call|>",  # Phi-3; harmony
    "<end_of_turn>", "<eos>",  # Gemma
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",  # DeepSeek
})  # fmt: skip
# A name that is also mark-up: it ends a text only where it is no ordinary token, and no <eos> does it instead.
_MARKUP = "</s>"


def end_ids_by_name(texts: Sequence[str], kinds: Sequence[int]) -> list[int]:
    """The ids of the tokens whose name says that they end a text."""
    found = {text: index for index, text in enumerate(texts) if text in END_NAMES or text == _MARKUP}
    if _MARKUP in found and (kinds[found[_MARKUP]] == Kind.NORMAL or "<eos>" in found):
        del found[_MARKUP]
    if "<|return|>" in found and "<|call|>" in found:
        found.pop("<|end|>", None)  # harmony: <|end|> ends a message, and the turn goes on
    return sorted(found.values())
