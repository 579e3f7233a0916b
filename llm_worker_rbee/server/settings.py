"""The settings of one server: names of its models, limits, its API key and the key's origin.

A key is never shown; an empty one is an error, not "no key".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from ..config import LoraSpec
from ..errors import InvalidRequestError

VARIABLES = ("LLM_WORKER_API_KEY", "LLORCH_API_TOKEN")  # the second is the Rust worker's
MAX_FILE_BYTES = 4096
LATEST = ":latest"  # the tag that clients of Ollama add to the name of a model, or leave out
RETRY_FAILED_S = 5.0  # so long after a failed load requests get its error, and no new try


class Key(NamedTuple):
    """A key, and the shell expression that gives it."""

    value: str
    shell: str


def find_key(file: Path | None, environment: Mapping[str, str]) -> Key | None:
    """Return the key from the file or the first variable; raise if two differ."""
    sources: list[tuple[str, Key]] = []
    if file is not None:
        quoted = "'" + str(file.absolute()).replace("'", "'\\''") + "'"
        sources.append((f"--api-key-file {file}", Key(_read_key_file(file), f"$(cat {quoted})")))
    sources += [(name, Key(environment[name].strip(), f"${name}")) for name in VARIABLES if name in environment]
    for origin, key in sources:
        if not key.value:
            raise InvalidRequestError(f"{origin} is empty: give a key, or leave it out to serve without one", "api_key")
        if not (key.value.isascii() and key.value.isprintable() and " " not in key.value):
            raise InvalidRequestError(f"{origin} cannot be a key: it must be one word of printable ASCII", "api_key")
    for origin, key in sources[1:]:
        if key.value != sources[0][1].value:
            message = f"{sources[0][0]} and {origin} hold different keys: leave one of them out"
            raise InvalidRequestError(message, "api_key")
    return sources[0][1] if sources else None


def _read_key_file(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or error
        raise InvalidRequestError(f"cannot read {file}: {why}", "api_key") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequestError(f"{file} is too long for a key: at most {MAX_FILE_BYTES} bytes", "api_key")
    return data.decode("utf-8", "replace").strip()


def is_name_of(name: str, served: str) -> bool:
    """Return whether a request names a served model, with or without the tag `:latest`."""
    return bool({name, name.removesuffix(LATEST)} & {served, served.removesuffix(LATEST)})


def model_name(reference: str) -> str:
    """Return the name of a model for clients; for a path, the file's name without its suffix, or the folder's."""
    if reference.startswith("hf:") or not (os.sep in reference or reference.endswith(".gguf")):
        return reference
    name = os.path.basename(os.path.abspath(os.path.expanduser(reference)))
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name) or reference


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server. These are the only defaults."""

    model_ref: str  # as given by the user
    served_name: str | None = None  # another name that clients may use
    has_pool: bool = False  # any of several models may be loaded; `model_ref` is the first of them
    embedding_model: str | None = None  # an additional embedding model, as the user wrote it
    rerank_model: str | None = None  # likewise one that ranks
    worker_id: str = field(default_factory=lambda: f"worker-{uuid4().hex[:12]}")
    api_key: str | None = None
    max_queue: int | None = None  # waiting requests beyond a full batch; None: 4 batches, at least 256
    max_queued_tokens: int | None = None  # prompt tokens that wait for prefill; None: 64 steps, at least 262,144
    max_body: int = 4 << 20
    max_image_body: int = 32 << 20  # of requests to a model that takes images
    max_images: int = 20  # of a request
    max_image_bytes: int = 20 << 20  # of one, as a file
    max_image_pixels: int = 50_000_000  # of one, before it is made smaller
    image_hosts: tuple[str, ...] = ()  # that image URLs may name: a host, or *.domain; others are not fetched
    max_pooling_body: int = 64 << 20  # of requests to pooling models: 2,048 long texts
    job_ttl_s: float = 300.0  # how long a finished job is kept
    ping_s: float = 15.0  # after which an idle stream gets a ping
    files_dir: Path | None = None  # of files and batches; None: there are none
    files_bytes: int = 1 << 30  # that clients may keep there
    files_age_s: float = 30 * 86400.0  # after which a file, or a batch that has ended, is deleted
    shutdown_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0  # without a step while there is work; of a reader, without reading
    ignore_unknown_fields: bool = False
    allow_priority: bool = False  # requests may say how urgent they are
    open_objects: bool = False  # objects may have properties that their schemas do not name
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names in `Host` of a worker without a key; loopback always; "*": any
    callback_url: str | None = None
    heartbeat_url: str | None = None
    advertise_url: str | None = None
    loras: tuple[LoraSpec, ...] = ()  # adapters that the model is loaded with
    lora_dir: Path | None = None  # below it are those that may be loaded over HTTP

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidRequestError("the API key is empty: give one, or none at all", "api_key")
        for spec in self.loras:
            if any(is_name_of(spec.name, name) for name in self.names):
                raise InvalidRequestError(f"{spec.name!r} is the name of the model: name the adapter otherwise", "lora")

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The model's names for lists: a path only if it was given as the name."""
        return tuple(dict.fromkeys(name for name in (self.served_name, model_name(self.model_ref)) if name))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model that requests may use; replies use the first."""
        return tuple(dict.fromkeys((*self.listed_names, self.model_ref)))

    @property
    def may_have_adapters(self) -> bool:
        return bool(self.loras) or self.lora_dir is not None

    @property
    def schema_names(self) -> tuple[str, ...]:
        """The values of `model` in bodies; none where any of several models may be named."""
        return () if self.has_pool or self.may_have_adapters else self.names

    @property
    def pooling_names(self) -> tuple[str, ...]:
        """The names of the pooling models."""
        models = () if self.has_pool else (self.embedding_model, self.rerank_model)
        return tuple(model_name(name) for name in models if name)
