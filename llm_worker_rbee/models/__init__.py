"""One decoder for all families; what differs between them is data."""

from .decoder import Transformer
from .families import FAMILIES, read_model_config
from .loader import load_model

__all__ = ["FAMILIES", "Transformer", "load_model", "read_model_config"]
