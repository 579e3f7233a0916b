"""`hf:owner/repo[:quant]`: what such a reference means, and which files of a repository make the one model meant.

Pure rules over a list of file names, the same for a hub's listing and for a cached snapshot; huggingface.py fetches.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ...errors import ModelNotFoundError, UnsupportedModelError, WorkerError
from ..filenames import PICKLES, SPLIT_NAME

PREFERRED_QUANTS = ("Q4_K_M", "Q4_0", "Q8_0")
REFERENCE = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w./-]+))?", re.ASCII)
QUANT_WORD = re.compile(r"(?<![A-Za-z0-9])((?:UD-)?I?Q\d\w*|TQ\d_0|MXFP4\w*|NVFP4|BF16|F16|F32)(?!\w)", re.IGNORECASE)
NOT_A_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
BESIDE_WEIGHTS = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)


@dataclass(frozen=True)
class HubModel:
    """A model on the hub; `quant` is a quantization or a whole file name."""

    repo: str
    quant: str | None = None

    @property
    def reference(self) -> str:
        """As a person writes it."""
        return f"hf:{self.repo}" + (f":{self.quant}" if self.quant else "")


def parse(reference: str) -> HubModel:
    """Read `hf:owner/repo[:quant]`."""
    match = REFERENCE.fullmatch(reference)
    if match is None or ".." in reference:
        raise ModelNotFoundError(f"{reference!r} is not of the form hf:owner/repo or hf:owner/repo:quant")
    return HubModel(match["repo"], match["quant"])


def choose(model: HubModel, listing: list[str]) -> list[str]:
    """The files of the one model meant, the entry file first."""
    safe = [name for name in listing if not name.startswith("/") and ".." not in PurePosixPath(name).parts]
    sets = _gguf_sets(safe)
    if model.quant:
        return _by_quant(model, model.quant, sets)
    if "config.json" in safe and (weights := _safetensors(safe)):
        return [name for name in BESIDE_WEIGHTS if name in safe] + weights
    if not sets:
        raise _nothing_usable(model, safe)
    if len(sets) == 1:
        return _complete(model, next(iter(sets.values())))
    for quant in PREFERRED_QUANTS:
        found = _matching(quant, sets)
        if len(found) == 1:
            return _complete(model, sets[found[0]])
    raise ModelNotFoundError(f"{model.reference} holds several models, say which: {_offers(model, sets)}")


def _safetensors(names: list[str]) -> list[str]:
    """The weights at the top of the repository; only `model*` where other sets (consolidated, adapters) lie beside."""
    top = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    return [name for name in top if name.startswith("model")] or top


def _gguf_sets(names: list[str]) -> dict[str, list[str]]:
    """First file -> all files of that model, in order."""
    sets: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not NOT_A_MODEL.search(name):
            match = SPLIT_NAME.fullmatch(name)
            sets.setdefault((match["stem"], match["parts"]) if match else (name, ""), []).append(name)
    return {files[0]: files for files in sets.values()}


def _matching(quant: str, sets: Mapping[str, list[str]]) -> list[str]:
    """Entries whose name holds `quant` as a word: Q4_K is no part of Q4_K_M, nor F16 of BF16."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}(?!\w)", re.IGNORECASE)
    return [name for name in sets if word.search(name)]


def _by_quant(model: HubModel, quant: str, sets: dict[str, list[str]]) -> list[str]:
    found = [name for name in sets if quant in (name, PurePosixPath(name).name)] or _matching(quant, sets)
    if len(found) == 1:
        return _complete(model, sets[found[0]])
    if found:
        raise ModelNotFoundError(
            f"{model.reference} fits several files, give the whole name after the colon: {', '.join(found)}"
        )
    if not sets:
        raise ModelNotFoundError(f"{model.repo} holds no GGUF file, so no {quant}: try hf:{model.repo}")
    raise ModelNotFoundError(f"{model.repo} holds no {quant}; it holds: {_offers(model, sets)}")


def _complete(model: HubModel, files: list[str]) -> list[str]:
    match = SPLIT_NAME.fullmatch(files[0])
    if match and len(files) != int(match["parts"]):
        held = f"{len(files)} of {int(match['parts'])} parts"
        raise ModelNotFoundError(f"{model.reference} is not whole: there are {held} of {match['stem']}")
    return files


def _offers(model: HubModel, sets: Mapping[str, list[str]]) -> str:
    """What could be asked for, in the words to ask for it."""
    words = [(QUANT_WORD.findall(PurePosixPath(name).name) or [""])[-1] for name in sets]
    unambiguous = all(words) and len(set(words)) == len(words)
    return ", ".join(words if unambiguous else (PurePosixPath(name).name for name in sets))


def _nothing_usable(model: HubModel, names: list[str]) -> WorkerError:
    if any(name.endswith(PICKLES) for name in names):
        return UnsupportedModelError(
            f"{model.repo} holds pickled weights only, which are refused: use a repository with safetensors or GGUF"
        )
    held = ", ".join(names[:8]) or "nothing"
    return ModelNotFoundError(f"{model.repo} holds no GGUF and no config.json with safetensors; it holds: {held}")
