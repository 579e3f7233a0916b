"""What a server is told, with its defaults, which are written nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import uuid4

from ..errors import InvalidRequestError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One worker on the wire."""

    model_ref: str  # as it was asked for
    served_name: str | None = None  # what clients may call it besides
    worker_id: str = field(default_factory=lambda: f"worker-{uuid4().hex[:12]}")
    api_key: str | None = None
    max_queue: int = 256  # requests that wait, besides those that can be computed at once
    max_queued_tokens: int = 262_144  # of prompts that are not read yet
    max_body: int = 4 * MIB
    job_ttl_s: float = 300.0  # how long a job is kept after its end
    ping_s: float = 15.0  # an idle stream says so
    shutdown_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0  # without a step while there is work
    ignore_unknown_fields: bool = False
    cors_origins: tuple[str, ...] = ()
    callback_url: str | None = None
    heartbeat_url: str | None = None
    advertise_url: str | None = None

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidRequestError("the API key is empty: give one, or none at all", "api_key")

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may call the model; the first is what it is called."""
        return tuple(name for name in (self.served_name, self.model_ref) if name)
