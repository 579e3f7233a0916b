"""All errors of the worker, each with its code, HTTP status and whether a retry may help.

A message names the thing that is wrong (a key, a tensor, a field, a file) and the remedy where there is one. The
command line prints it as one line, the server sends it with the code.
"""

import os
import traceback
from copy import copy
from typing import Any


class WorkerError(Exception):
    """Base class of all expected failures; a subclass gives what differs: `class X(WorkerError, code="X")`."""

    code = "INFERENCE_FAILED"
    status = 500
    retriable = False

    def __init_subclass__(
        cls, code: str | None = None, status: int | None = None, retriable: bool | None = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in (("code", code), ("status", status), ("retriable", retriable)):
            if value is not None:
                setattr(cls, name, value)


class ModelFileError(WorkerError, code="INVALID_MODEL"):
    """A model file, or a file next to it, is invalid."""


class UnsupportedModelError(ModelFileError, code="UNSUPPORTED_MODEL"):
    """A valid file needs something that is not implemented."""


class TokenizerError(ModelFileError, code="INVALID_TOKENIZER"):
    """The tokenizer of a model file is invalid or unknown."""


class NotFoundError(WorkerError, code="NOT_FOUND", status=404):
    """No such job, route or the like."""


class ModelNotFoundError(NotFoundError):
    """No such model, file or folder."""


class MethodNotAllowedError(WorkerError, code="METHOD_NOT_ALLOWED", status=405):
    """The route has no such method."""


class UnsupportedMediaTypeError(WorkerError, code="UNSUPPORTED_MEDIA_TYPE", status=415):
    """The body of a request is encoded in a way that is not supported."""


class DownloadError(WorkerError, code="DOWNLOAD_FAILED", retriable=True):
    """A model could not be fetched: network, disk, checksum or a missing tool."""


class MissingDependencyError(WorkerError, code="MISSING_DEPENDENCY"):
    """An optional package or device is missing."""


class InferenceError(WorkerError):
    """The forward pass gave logits from which no token can be sampled."""


class EngineCrashError(InferenceError):
    """A request ended the engine's process each time that it was computed alone."""


class GrammarDeadEndError(WorkerError, code="GRAMMAR_DEAD_END", status=422):
    """The grammar of a structured output allows no token: it cannot be satisfied, or is too complex."""


class GrammarTooSlowError(WorkerError, code="GRAMMAR_TOO_SLOW", status=422):
    """The grammar of a structured output takes too much processor time for each token."""


class RequestCancelledError(WorkerError, code="CANCELLED", status=499):
    """A request was aborted before it was finished."""


class DeadlineError(WorkerError, code="TIMEOUT", status=504, retriable=True):
    """A request was not finished before its deadline."""


class QueueFullError(WorkerError, code="QUEUE_FULL", status=429, retriable=True):
    """The queue is full; `retry_after` estimates, in seconds, when it will have room."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelLoadingError(QueueFullError, code="MODEL_LOADING", status=503):
    """The model is still loading."""


class ShuttingDownError(WorkerError, code="SHUTTING_DOWN", status=503, retriable=True):
    """The worker is draining and takes no new requests."""


class UnavailableError(WorkerError, code="SERVICE_UNAVAILABLE", status=503, retriable=True):
    """A part of the worker was ended from outside; the next request starts it again."""


class ConflictError(WorkerError, code="CONFLICT", status=409):
    """The name is in use."""


class PayloadTooLargeError(WorkerError, code="PAYLOAD_TOO_LARGE", status=413):
    """The body of a request is too long."""


class HeadersTooLargeError(PayloadTooLargeError, status=431):
    """The headers of a request are too long."""


class AuthenticationError(WorkerError, code="INVALID_API_KEY", status=401):
    """The API key is missing or wrong."""


class MissingKeyError(AuthenticationError, code="MISSING_API_KEY"):
    """The request has no API key."""


class HostNotAllowedError(WorkerError, code="HOST_NOT_ALLOWED", status=403):
    """The `Host` of a request is not a name of this worker."""


class InsufficientMemoryError(WorkerError, code="INSUFFICIENT_MEMORY", status=503):
    """There is not enough memory."""


class StorageFullError(WorkerError, code="INSUFFICIENT_STORAGE", status=507, retriable=True):
    """A file could not be written: the disk is full, or what clients may keep on it."""


class InvalidRequestError(WorkerError, code="INVALID_REQUEST", status=400):
    """A request, option or argument is invalid; `field` is its name."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ChatTemplateError(InvalidRequestError):
    """A chat template is missing, rejects the messages, or fails."""


class ContextLengthError(InvalidRequestError, code="CONTEXT_LENGTH_EXCEEDED"):
    """Prompt and output do not fit into the context; the message holds the lengths."""


def counted(number: int, noun: str) -> str:
    """Return `1 token`, `2 tokens`."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def human_bytes(count: int) -> str:
    """Return a number of bytes for messages, such as 1.2 kB."""
    for size, unit in ((1e3, "kB"), (1e6, "MB")):
        if count < 999.95 * size:  # never 1,000.0 of a unit
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e9:,.2f} GB"


def describe_failure(error: BaseException) -> str:
    """Return the type and the place of an error; its text, which may quote a prompt, is left out."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"


def copy_error(error: WorkerError) -> WorkerError:
    """Return the same error for one more request: one object raised in several places would gather all tracebacks."""
    own = copy(error)
    own.__cause__ = error.__cause__
    return own
