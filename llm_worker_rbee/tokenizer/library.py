"""Failures of the `tokenizers` library as errors of ours: it raises bare Exceptions, and its Rust code may panic."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ..errors import InvalidRequestError, TokenizerError


@contextmanager
def _guard(failure: Callable[[str], Exception]) -> Iterator[None]:
    """Turn what the library raises into our own error. A panic of its Rust code is no Exception, only by its name."""
    try:
        yield
    except BaseException as error:
        foreseen = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not foreseen or isinstance(error, MemoryError):
            raise
        raise failure(" ".join(str(error).split())[:200]) from None


@contextmanager
def building(source: str) -> Iterator[None]:
    """Around the library's calls while a tokenizer is made of `source`, a file or a key."""
    with _guard(lambda reason: TokenizerError(f"{source}: {reason}")):
        yield


def encoding() -> AbstractContextManager[None]:
    """Around the library's calls while a text is encoded."""
    return _guard(lambda reason: InvalidRequestError(f"the tokenizer failed on this text: {reason}", field="prompt"))
