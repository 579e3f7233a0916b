"""What is measured of a whole model, under which names, and what each token of it costs at least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...config import KV_AUTO, ModelConfig
from ...weights import Checkpoint

Kind = Literal["pp", "tg"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: every length at every depth with every batch, and what is asked for beside it."""

    pp: Sequence[int] = (512,)
    tg: Sequence[int] = (128,)
    depths: Sequence[int] = (0,)
    batches: Sequence[int] = (1,)
    prefix: int = 0  # tokens that a second prompt shares with a first one; 0: not measured
    targets_ms: Sequence[int] = ()  # for answers while a long prompt is read; 0: none
    speculative: str = "off"  # with guesses too: how they are made
    draft_tokens: int | None = None  # at most so many in a step; None: the engine's own
    draft_model: str | None = None  # the file of a model that guesses
    repetitions: int = 5
    threads: int = 1
    seed: int = 0
    device: str = "auto"
    backend: str = "auto"
    kv_type: str = KV_AUTO
    quantize: str | None = None

    def cases(self) -> Iterator[Case]:
        """In the order of the table; a length of 0 leaves its part out. Several at once stand beside one."""
        beside = (1, *self.batches) if max(self.batches) > 1 else self.batches
        kinds: tuple[tuple[Kind, Sequence[int], Sequence[int]], ...] = (
            ("pp", self.pp, self.batches),
            ("tg", self.tg, beside),
        )
        for kind, lengths, batches in kinds:
            for depth in dict.fromkeys(self.depths):
                for batch in dict.fromkeys(batches):
                    yield from (Case(kind, tokens, depth, batch) for tokens in dict.fromkeys(lengths) if tokens)

    @property
    def guesses(self) -> str | None:
        """By whom: `ngram`, `draft` or nobody."""
        return "draft" if self.draft_model is not None else None if self.speculative == "off" else self.speculative


@dataclass(frozen=True, slots=True)
class Case:
    """One length at one depth with one batch."""

    kind: Kind
    tokens: int
    depth: int
    batch: int

    @property
    def name(self) -> str:
        """`pp512`, `tg128@d2048@b8`."""
        return f"{self.kind}{self.tokens}{self.suffix}"

    @property
    def suffix(self) -> str:
        """What is not as usual."""
        return (f"@d{self.depth}" if self.depth else "") + (f"@b{self.batch}" if self.batch != 1 else "")

    @property
    def needs(self) -> int:
        """Tokens of one sequence."""
        return self.depth + self.tokens


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model must read and compute, counted from its tensors."""

    weights: int  # bytes that one decode step reads: all but the rows of the embedding that are not looked up
    matrices: int  # values of the layers' matrices
    head: int  # values of the output head
    config: ModelConfig
    kv_type: str = "float32"

    @staticmethod
    def of(checkpoint: Checkpoint, config: ModelConfig, kv_type: str = "float32") -> Cost:
        """A tied head is read whole; an embedding of its own is a lookup of one row."""
        tensors = checkpoint.tensors
        table = tensors["token_embd.weight"]
        head = tensors.get("output.weight", table)
        rest = [t for t in tensors.values() if t is not table and t is not head]
        row = table.nbytes // max(1, table.shape[0]) if head is not table else 0
        matrices = sum(t.size for t in rest if len(t.shape) == 2)
        return Cost(sum(t.nbytes for t in rest) + head.nbytes + row, matrices, head.size, config, kv_type)

    def bytes_per_token(self, case: Case) -> float:
        """Weights are read once for the whole batch, keys and values for each sequence; halfway through the answer."""
        return self.weights / case.batch + self.config.kv_bytes(case.depth + case.tokens // 2, self.kv_type)

    def operations(self, case: Case) -> float:
        """Of all tokens of a prefill: two for each value of a matrix; the head is needed once a sequence."""
        return 2.0 * case.batch * (self.matrices * case.tokens + self.head)
