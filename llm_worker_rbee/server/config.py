"""The settings of a server. Their defaults are written here only."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import uuid4

from ..errors import InvalidRequestError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one worker."""

    model_ref: str  # as given by the user
    served_name: str | None = None  # another name that clients may use
    worker_id: str = field(default_factory=lambda: f"worker-{uuid4().hex[:12]}")
    api_key: str | None = None
    max_queue: int = 256  # waiting requests, beside those of a full batch
    max_queued_tokens: int = 262_144  # prompt tokens that wait for prefill
    max_body: int = 4 * MIB
    job_ttl_s: float = 300.0  # how long a finished job is kept
    ping_s: float = 15.0  # after which an idle stream gets a ping
    shutdown_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0  # without a step while there is work; of a reader, without reading
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
        """The names of the model that requests may use; replies use the first."""
        return tuple(name for name in (self.served_name, self.model_ref) if name)
