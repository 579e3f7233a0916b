"""The parsers of all bodies by name, with the type of the record that each returns."""

from __future__ import annotations

from typing import Any

from .bodies import Conversation, PackedIds, parse_apply_template, parse_detokenize, parse_tokenize
from .dialects import Parse, dialect_parsers

PARSERS: dict[str, tuple[Parse, Any]] = {
    **dialect_parsers(),
    "tokenize": (parse_tokenize, dict[str, Any]),
    "detokenize": (parse_detokenize, PackedIds),
    "apply_template": (parse_apply_template, Conversation),
}
