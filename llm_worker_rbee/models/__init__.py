"""One decoder for all families; what differs between them is data."""

from .decoder import Transformer
from .families import FAMILIES, read_model_config, require_decoder
from .loader import load_model, load_model_with_head
from .lora import ModelAdapters, PackedAdapter
from .mtp import MtpHead, require_head

__all__ = [
    "FAMILIES",
    "ModelAdapters",
    "MtpHead",
    "PackedAdapter",
    "Transformer",
    "load_model",
    "load_model_with_head",
    "read_model_config",
    "require_decoder",
    "require_head",
]
