"""Every error that the worker raises on purpose: a small tree, each with its code and HTTP status.

A message names the thing that is wrong (a key, a tensor, a field, a file) and, where there is one, the remedy. Nothing
here is caught and ignored: the command line prints one line, the server answers with the code.
"""


class WorkerError(Exception):
    """The root: anything that is our own, foreseen failure."""

    code = "INFERENCE_FAILED"
    status = 500
    retriable = False


class ModelFileError(WorkerError):
    """The bytes of a model file, or of a file beside it, are not what they must be."""

    code = "INVALID_MODEL"


class UnsupportedModelError(ModelFileError):
    """A sound file that holds something this worker does not implement."""

    code = "UNSUPPORTED_MODEL"


class TokenizerError(ModelFileError):
    """The tokenizer described by a model file is broken or unknown."""

    code = "INVALID_TOKENIZER"


class NotFoundError(WorkerError):
    """A name that leads nowhere."""

    code = "NOT_FOUND"
    status = 404


class ModelNotFoundError(NotFoundError):
    """A model reference that leads nowhere."""


class DownloadError(WorkerError):
    """A model could not be brought here: network, disk, checksum or a missing tool."""

    code = "DOWNLOAD_FAILED"
    retriable = True


class MissingDependencyError(WorkerError):
    """An optional package or device is needed for what was asked."""

    code = "MISSING_DEPENDENCY"


class InferenceError(WorkerError):
    """The forward pass gave something that no token can be chosen from."""


class RequestCancelledError(WorkerError):
    """Somebody ended a request before its answer was complete."""

    code = "CANCELLED"
    status = 499


class DeadlineError(WorkerError):
    """A request was not answered in the time that it was given."""

    code = "TIMEOUT"
    status = 504
    retriable = True


class QueueFullError(WorkerError):
    """More waits already than may wait; `retry_after` is when there should be room, in seconds."""

    code = "QUEUE_FULL"
    status = 429
    retriable = True

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelLoadingError(QueueFullError):
    """The worker is here, its model is not yet."""

    code = "MODEL_LOADING"
    status = 503


class ShuttingDownError(WorkerError):
    """The worker is about to end."""

    code = "SHUTTING_DOWN"
    status = 503
    retriable = True


class ConflictError(WorkerError):
    """Something of that name is here already."""

    code = "CONFLICT"
    status = 409


class PayloadTooLargeError(WorkerError):
    """A body that is longer than bodies may be."""

    code = "PAYLOAD_TOO_LARGE"
    status = 413


class HeadersTooLargeError(PayloadTooLargeError):
    """Headers that are longer than headers may be."""

    status = 431


class AuthenticationError(WorkerError):
    """No key, or not the right one."""

    code = "INVALID_API_KEY"
    status = 401


class MissingKeyError(AuthenticationError):
    """No key at all."""

    code = "MISSING_API_KEY"


class InsufficientMemoryError(WorkerError):
    """There is not enough memory for what was asked."""

    code = "INSUFFICIENT_MEMORY"
    status = 503


class InvalidRequestError(WorkerError):
    """A request, option or argument that cannot be honoured; `field` is its name."""

    code = "INVALID_REQUEST"
    status = 400

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ChatTemplateError(InvalidRequestError):
    """A chat template is missing, refuses these messages, or misbehaves."""


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit into the context; the message holds all the figures."""

    code = "CONTEXT_LENGTH_EXCEEDED"


def human_bytes(count: int) -> str:
    """A number of bytes as messages show it."""
    for size, unit in ((1e3, "kB"), (1e6, "MB")):
        if count < 999.95 * size:  # no 1,000.0 of a unit
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e9:,.2f} GB"
