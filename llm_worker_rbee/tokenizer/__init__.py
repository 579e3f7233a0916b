"""Text to token ids and back: tokenizers from GGUF metadata or tokenizer.json, chat templates, detokenizer.

Nothing here knows models or arrays.
"""

from .chat.template import ChatTemplate
from .from_gguf import tokenizer_from_gguf
from .from_hf import tokenizer_from_hf
from .tokenizer import Detokenizer, Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Tokenizer", "tokenizer_from_gguf", "tokenizer_from_hf"]
