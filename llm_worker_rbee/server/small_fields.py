"""The fields of the small routes: text and tokens, and ending a job by its name."""

from __future__ import annotations

from .fields import Field
from .kinds import Flag, Ids, Messages, Name, Text

TOKENIZE = {
    "text": Field(Text(), required=True, is_secret=True),
    "add_special": Field(Flag(), True),
    "parse_special": Field(Flag(), False),
}
DETOKENIZE = {"tokens": Field(Ids(), required=True, is_secret=True)}
APPLY_TEMPLATE = {"messages": Field(Messages(), required=True, is_secret=True)}
CANCEL = {"job_id": Field(Name(), required=True)}
