"""The options that say how requests share a model: memory for keys and values, batches, guesses. The same for every
command that answers. The defaults are those of `EngineConfig`, which also knows what may be."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from ..config.engine import SPECULATIVE, EngineConfig
from ..engine.kv_cache_budget import bytes_of
from ..errors import InvalidRequestError

ENGINE_PANEL = "Memory and batches"
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}
KV_MEMORY_HELP = "Memory for keys and values: 512M, 1.5GB, 2GiB."


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=ENGINE_PANEL, **more)


@dataclass(frozen=True, kw_only=True)
class CapacityOptions:
    """How much is held."""

    kv_memory: Annotated[
        str | None,
        _option("--kv-memory", metavar="SIZE", show_default="from the memory that is free", help=KV_MEMORY_HELP),
    ] = None
    max_batch: Annotated[
        int, _option("--max-batch", metavar="N", help="Requests that are computed at once; others wait.")
    ] = DEFAULTS["max_batch"]

    def arguments(self) -> dict[str, Any]:
        """What an `LLM` is told; a value that cannot be is wrong usage, and its option is named."""
        return {
            "kv_memory": None if self.kv_memory is None else _named(bytes_of, self.kv_memory),
            "max_batch": self._checked(max_batch=self.max_batch)["max_batch"],
        }

    @staticmethod
    def _checked(**given: Any) -> dict[str, Any]:
        _named(EngineConfig, max_context=1, n_blocks=1, **given)
        return given


@dataclass(frozen=True, kw_only=True)
class EngineOptions(CapacityOptions):
    """How much is held, and how a step is divided."""

    target_itl_ms: Annotated[
        float,
        _option("--target-itl-ms", metavar="X",
                help="While prompts are read, running answers get a token within X milliseconds."),
    ] = DEFAULTS["target_itl_ms"]  # fmt: skip
    no_prefix_cache: Annotated[
        bool, _option("--no-prefix-cache", help="Compute every prompt anew, also where it begins like another.")
    ] = not DEFAULTS["prefix_cache"]
    speculative: Annotated[
        str | None,
        _option("--speculative", metavar="|".join(SPECULATIVE), show_default=DEFAULTS["speculative"],
                help="ngram: guess tokens from what was said before. The answer stays the same."),
    ] = None  # fmt: skip
    draft_tokens: Annotated[
        int | None,
        _option("--draft-tokens", metavar="K", show_default=str(DEFAULTS["draft_tokens"]),
                help="Guess at most K tokens a step."),
    ] = None  # fmt: skip
    draft_model: Annotated[
        str | None,
        _option("--draft-model", metavar="MODEL", help="Let a small model with the same vocabulary guess."),
    ] = None
    deterministic: Annotated[
        bool,
        _option("--deterministic",
                help="The same answer alone and among others: a CPU always gives it, a GPU in a slower mode."),
    ] = False  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """What an `LLM` is told; a value that cannot be is wrong usage, and its option is named."""
        off = self.speculative in (None, "off")
        if self.draft_model is not None and not off:
            raise typer.BadParameter(f"--draft-model and --speculative {self.speculative} both guess: choose one")
        if self.draft_tokens is not None and off and self.draft_model is None:
            raise typer.BadParameter("--draft-tokens goes with --speculative ngram or --draft-model")
        given = {
            "target_itl_ms": self.target_itl_ms,
            "prefix_cache": not self.no_prefix_cache,
            "speculative": DEFAULTS["speculative"] if self.speculative is None else self.speculative,
            "draft_tokens": DEFAULTS["draft_tokens"] if self.draft_tokens is None else self.draft_tokens,
        }
        more = {"draft_model": self.draft_model, "deterministic": self.deterministic}
        return {**super().arguments(), **self._checked(**given), **more}


def _named(check: Any, *given: Any, **more: Any) -> Any:
    """What is wrong with an option is wrong usage, and names it."""
    try:
        return check(*given, **more)
    except InvalidRequestError as error:
        field = error.field or ""
        raise typer.BadParameter(str(error).replace(field, "--" + field.replace("_", "-"), 1)) from None
