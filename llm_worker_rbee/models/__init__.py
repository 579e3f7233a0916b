"""One decoder for all families; what differs between them is data."""

from .decoder import Transformer
from .families import FAMILIES, describe
from .loader import load_model

__all__ = ["FAMILIES", "Transformer", "describe", "load_model"]
