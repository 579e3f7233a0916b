"""Model files to named tensors. `open_checkpoint` is the entry point; nothing here knows what the tensors mean."""

from pathlib import Path

from ..errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from .checkpoint import PICKLE_SUFFIXES, Checkpoint, Tensor
from .gguf import list_gguf_models, open_gguf
from .lora import Adapter, read_adapter
from .safetensors import open_hf

__all__ = ["Adapter", "Checkpoint", "Tensor", "open_checkpoint", "read_adapter"]
MODEL_FILES = ("config.json", "tokenizer.json")  # of a folder; one of them is enough for `inspect` and `tokenize`


def open_checkpoint(path: Path, *, weights: bool = True) -> Checkpoint:
    """Open a GGUF file (or the first of a split set), or a folder: config.json and safetensors, or one GGUF.

    With `weights=False` a folder without weights is opened too, for its tokenizer.
    """
    try:
        path.stat()
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path}: no such file or folder") from error
    except (OSError, ValueError) as error:  # name too long, no permission, NUL byte
        raise ModelNotFoundError(f"{str(path)[:200]!r} cannot be opened: {error}") from error
    if path.is_dir():
        return _open_folder(path, weights=weights)
    if not path.is_file():
        raise ModelFileError(f"{path} is neither a regular file nor a folder")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise UnsupportedModelError(
            f"{path.name}: pickled weights can execute code and are refused: convert them to safetensors or GGUF"
        )
    if path.suffix == ".safetensors":
        raise ModelFileError(f"{path.name}: open the folder that holds it and config.json, not the file")
    return open_gguf(path)


def _open_folder(folder: Path, *, weights: bool) -> Checkpoint:
    paths = [] if (folder / "config.json").exists() else list_gguf_models(folder)
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths[:8])
        raise ModelFileError(f"{folder} holds several models, open one of them: {names}")
    if (
        not paths
        and not any((folder / name).exists() for name in MODEL_FILES)
        and not any(folder.glob("*.safetensors"))
    ):
        raise ModelFileError(f"{folder} holds no model: no .gguf file, no {', no '.join(MODEL_FILES)}")
    return open_gguf(paths[0]) if paths else open_hf(folder, weights=weights)
