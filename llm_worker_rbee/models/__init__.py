"""One decoder for all families; what differs between them is data."""

from .architectures import FAMILIES, describe
from .loader import load_model
from .transformer import Transformer

__all__ = ["FAMILIES", "Transformer", "describe", "load_model"]
