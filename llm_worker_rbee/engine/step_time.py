"""The time of a step, learnt from earlier steps, and the number of prompt tokens that fit into a step.

    seconds = constant + prefill_constant + per_token * tokens + per_context * context

`prefill_constant` counts where a request computes several tokens (a part of its prompt, or drafts): on a GPU such a
step has more kernels to launch. `context` is the number of keys that attention reads: a decoding token reads all keys
of its request once. So does each token of a prompt on a CPU; on a GPU a tile of them reads the keys together, and its
products take about as long as the memory traffic of one decoding token.

Samples are kept by size, the last few of each, so that prefill is still known after hours of decode. A size counts with
the mean of its middle samples, so slow steps (a page fault, a compilation) move nothing; the coefficients are the least
squares of relative errors, none negative, where sizes that were not seen lately count less. Effects that samples do not
separate count as `per_token`, the careful guess. No arrays here.

`BatchShare` is the share of batch work, requests with `BATCH_PRIORITY`, in a step. Where no other request is present,
a step takes at most `MAX_BATCH_STEP_S`: a request that arrives waits until it has ended. Where steps can be given up
for such a request they may take `LONG_STEP_S`, which shares the cost of a step among more tokens, once there was no
other request for `QUIET_S`: what is given up is little of the whole. Beside other requests, batch rows join a step
while its predicted time grows by at most `MAX_GROWTH`: on a CPU usually none, on a GPU many. So that batch work ends
even if others never do, it gets one step every `TURN_S` in any case.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter, mul
from typing import Literal, NamedTuple

from .request import BATCH_PRIORITY, Request, ScheduledTokens

StepKind = Literal["prefill", "decode", "mixed"]
STEP_KINDS: tuple[StepKind, ...] = ("prefill", "decode", "mixed")

TARGET_FRACTION = 0.8  # of the target: steps vary
MAX_SLOWDOWN = 1.25  # by prefill, of a step whose decodes alone exceed the target: many tokens may cost hardly more
FIRST_BUDGET = 64  # prompt tokens while nothing is known: a small first guess is soon corrected, a large one is felt
MAX_EXTRAPOLATION = 4  # times the largest step so far: a larger one may be another kernel with another cost

MIN_STEP_S = 1e-6  # a clock may show less
SAMPLES_PER_SIZE, MAX_LEFT_OUT = 9, 3  # the fastest and the slowest are left out
MAX_SIZES = 32
EAGER_SAMPLES = 16  # the first ones are fitted at once
# Samples between two fits, which take 50 to 100 us: usually, where budgets are set, after a prediction that was wrong.
FIT_INTERVAL, MIXED_FIT_INTERVAL, ERROR_FIT_INTERVAL = 32, 8, 4
LARGE_ERROR = 0.2
STEADY_INTERVAL = 4  # decode steps, as long as predicted, between two that are learnt from: each takes 10 us
HALF_LIFE_STEPS = 12  # in which the weight of a size halves that does not occur
MIN_AGE_WEIGHT = 0.01
RIDGE = (1e-3, 2e-3, 0.0, 5e-4)  # relative penalty of each coefficient: decides where samples cannot tell them apart
MIN_PIVOT = 1e-9  # of an equation, relative to its diagonal: below it a coefficient is not determined

MAX_BATCH_STEP_S = 0.08  # of batch work: a first token may come 0.1 s later for it, and steps vary
LONG_STEP_S = 0.3  # likewise, where a request that arrives ends it
QUIET_S = 5.0  # since another request, before such a step
MAX_GROWTH = 0.05  # of a step of other requests
TURN_S = 5.0  # between two steps that batch work joins beside others in any case
FIRST_ROWS = 8  # in a step while nothing is known of its time
MIN_CHUNK = 16  # prompt tokens: fewer are not worth a step with prefill

_seconds_of = itemgetter(2)


class StepSize(NamedTuple):
    """The quantities that determine the time of a step."""

    kind: StepKind
    is_uniform: bool  # each request computes one token
    tokens: int
    context: float  # keys that attention reads, in passes over all heads and layers


NOTHING = StepSize("decode", True, 0, 0.0)


class StepTimeCoefficients(NamedTuple):
    """Seconds per step, per token and per key that is read."""

    constant: float = 0.0
    prefill_constant: float = 0.0
    per_token: float = 0.0
    per_context: float = 0.0


@dataclass(slots=True)
class StepTimes:
    """Steps of one kind: their number, and sums of seconds."""

    num_steps: int = 0
    measured_s: float = 0.0
    predicted_s: float = 0.0
    error_s: float = 0.0  # of the absolute differences


def step_size(scheduled: Sequence[ScheduledTokens], query_tile: int) -> StepSize:
    """Return the size of a step; `query_tile` tokens of one prompt share a pass over its keys."""
    stops = tokens = 0
    for _, start, stop, _ in scheduled:
        stops += stop
        tokens += stop - start
    if tokens == len(scheduled):
        return StepSize("decode", True, tokens, stops)
    context, num_prefills = float(stops), 0
    for request, start, stop, _ in [row for row in scheduled if row[2] - row[1] > 1]:
        context += chunk_context(start, stop - start, query_tile) - stop
        num_prefills += stop - start > 1 + len(request.drafts)
    kind: StepKind = "decode" if not num_prefills else "prefill" if num_prefills == len(scheduled) else "mixed"
    return StepSize(kind, False, tokens, context)


def chunk_context(start: int, count: int, query_tile: int) -> float:
    """Return the keys that attention reads for `count` tokens of one request after `start` others."""
    return -(-count // query_tile) * (start + (count + 1) / 2)


class SizeSamples:
    """The latest steps of about one size: (tokens, context, seconds) of each."""

    __slots__ = ("is_uniform", "last_step", "middle", "samples")

    def __init__(self, *, is_uniform: bool) -> None:
        self.is_uniform = is_uniform
        self.samples: deque[tuple[int, float, float]] = deque(maxlen=SAMPLES_PER_SIZE)
        self.middle: tuple[float, float, float] | None = None
        self.last_step = 0

    def add(self, size: StepSize, seconds: float, step: int) -> None:
        self.samples.append((size.tokens, size.context, seconds))
        self.middle, self.last_step = None, step

    def middle_mean(self) -> tuple[float, float, float]:
        """Return the mean of the samples around the median; of two samples the faster."""
        if self.middle is None:
            count = len(self.samples)
            left_out = min((count - 1) // 2, MAX_LEFT_OUT)  # at each end
            kept = sorted(self.samples, key=_seconds_of)[left_out : count - max(left_out, int(count == 2))]
            tokens, context, seconds = map(sum, zip(*kept, strict=True))
            self.middle = tokens / len(kept), context / len(kept), seconds / len(kept)
        return self.middle


class StepTimeModel:
    """Predicts the seconds of a step and learns from measurements."""

    def __init__(self, query_tile: int = 1) -> None:
        self.query_tile = query_tile
        self.coefficients: StepTimeCoefficients | None = None  # None: no step is known yet
        self.totals = {kind: StepTimes() for kind in STEP_KINDS}  # of steps that were predicted
        self._sizes: dict[tuple[bool, int, int], SizeSamples] = {}
        self.ignores_first_runs = True  # of a size, which may compile, load or capture
        self._seen: set[tuple[bool, int]] = set()
        self._max_tokens = 0  # of a step so far
        self._num_samples = self._num_fitted = 0

    def predict(self, size: StepSize) -> float | None:
        """Return the seconds of a step; None while nothing is known."""
        if self.coefficients is None:
            return None
        constant, prefill_constant, per_token, per_context = self.coefficients
        fixed = constant if size.is_uniform else constant + prefill_constant
        return fixed + per_token * size.tokens + per_context * size.context

    def observe(self, size: StepSize, seconds: float) -> None:
        """Learn the time of a step. The first step of a size is ignored, except on a GPU after its warm-up."""
        predicted, interval = self.predict(size), FIT_INTERVAL
        if predicted is None or self._num_samples < EAGER_SAMPLES:
            interval = 1
        elif abs(seconds - predicted) > LARGE_ERROR * predicted:
            interval = ERROR_FIT_INTERVAL
        elif size.kind == "mixed":
            interval = MIXED_FIT_INTERVAL
        if predicted is not None:
            totals = self.totals[size.kind]
            totals.num_steps += 1
            totals.measured_s += seconds
            totals.predicted_s += predicted
            totals.error_s += abs(seconds - predicted)
            if interval == FIT_INTERVAL and size.kind == "decode" and totals.num_steps % STEADY_INTERVAL:
                return
        tokens = size.tokens
        shift = max(0, tokens.bit_length() - 3)
        first_run = size.is_uniform, (tokens >> shift) + (shift << 3)  # four sizes up to the next power of two
        if self.ignores_first_runs and first_run not in self._seen:
            self._seen.add(first_run)
            return
        self._num_samples += 1
        self._max_tokens = max(self._max_tokens, tokens)
        self._samples_of(size).add(size, max(seconds, MIN_STEP_S), self._num_samples)
        if self._num_samples - self._num_fitted >= interval:
            self._fit()

    def max_prefill_tokens(self, target_s: float, decodes: StepSize, start: int, max_tokens: int) -> int:
        """Return the number of prompt tokens, after `start` others, that fit with `decodes` into a step of `target_s`.

        Where the decodes alone take longer, prefill may add a quarter.
        """
        if self.coefficients is None:
            return min(max_tokens, FIRST_BUDGET)
        step_s = max(TARGET_FRACTION * target_s, MAX_SLOWDOWN * self._seconds_before(decodes))
        return self.prefill_tokens_within(step_s, decodes, start, max_tokens)

    def prefill_tokens_within(self, step_s: float, others: StepSize, start: int, max_tokens: int) -> int:
        """Return the number of prompt tokens, after `start` others, with which a step takes at most `step_s`."""
        if self.coefficients is None:
            return min(max_tokens, FIRST_BUDGET)
        _, _, per_token, per_context = self.coefficients
        seconds = max(0.0, step_s - self._seconds_before(others))
        # left = linear * n + square * n ** 2, where the n tokens read `start` + n / 2 keys each, a tile in one pass
        square = per_context / (2 * self.query_tile)
        linear = per_token + per_context * start / self.query_tile
        slope = linear + math.sqrt(linear * linear + 4 * square * seconds)
        limit = max(FIRST_BUDGET, MAX_EXTRAPOLATION * self._max_tokens - others.tokens)
        return min(max_tokens, limit, int(2 * seconds / slope) if slope else limit)

    def _seconds_before(self, others: StepSize) -> float:
        """Return the seconds of a step with prefill before its prompt tokens."""
        constant, prefill_constant, per_token, per_context = self.coefficients or StepTimeCoefficients()
        return constant + prefill_constant + per_token * others.tokens + per_context * others.context

    def _samples_of(self, size: StepSize) -> SizeSamples:
        """Return the samples of a size: tokens up to twice, context up to four times as many."""
        key = size.is_uniform, size.tokens.bit_length(), int(size.context).bit_length() >> 1
        samples = self._sizes.get(key)
        if samples is None:
            if len(self._sizes) == MAX_SIZES:
                del self._sizes[min(self._sizes, key=lambda size_key: self._sizes[size_key].last_step)]
            samples = self._sizes[key] = SizeSamples(is_uniform=size.is_uniform)
        return samples

    def _fit(self) -> None:
        """Set the coefficients to the weighted least squares of relative errors."""
        fitted, rows = self.coefficients or StepTimeCoefficients(), []
        for samples in self._sizes.values():
            tokens, context, seconds = samples.middle_mean()
            chunk = 0.0 if samples.is_uniform else 1.0
            predicted = fitted[0] + fitted[1] * chunk + fitted[2] * tokens + fitted[3] * context
            scale = max(seconds, predicted)  # a step that was too fast to be true has no more weight than another
            age = self._num_samples - samples.last_step
            weight = len(samples.samples) * max(MIN_AGE_WEIGHT, 0.5 ** (age / HALF_LIFE_STEPS)) / (scale * scale)
            weighted = weight, weight * chunk, weight * tokens, weight * context
            rows.append((*weighted, 1.0, chunk, tokens, context, seconds))
        columns = list(zip(*rows, strict=True))
        matrix = [[sum(map(mul, left, right)) for right in columns[4:]] for left in columns[:4]]
        for i, penalty in enumerate(RIDGE):
            matrix[i][i] *= 1.0 + penalty
        self.coefficients = StepTimeCoefficients(*solve_nonnegative(matrix))
        self._num_fitted = self._num_samples


class Room(NamedTuple):
    """The time that a step may take with batch rows."""

    limit_s: float
    is_turn: bool  # at least one of them joins, whatever its predicted time
    others: StepSize  # the rest of the step


class BatchShare:
    """Decides which batch rows join a step."""

    def __init__(self, step_time: StepTimeModel | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.step_time, self.clock = step_time or StepTimeModel(), clock
        self.max_step_s, self.long_step_s = MAX_BATCH_STEP_S, 0.0  # 0: no step can be given up
        self.is_long = False  # the present step, which can be given up
        self._last_turn, self._last_other = clock(), -math.inf

    def room(self, others: Sequence[ScheduledTokens], *, is_alone: bool) -> Room | None:
        """Return the room beside the other requests of a step; None: batch work waits."""
        now = self.note_request(BATCH_PRIORITY if is_alone else 0)
        self.is_long = now - self._last_other >= QUIET_S
        if is_alone:
            return Room(max(self.max_step_s, self.long_step_s * self.is_long), True, NOTHING)
        size = step_size(others, self.step_time.query_tile) if others else NOTHING
        seconds, coefficients = self.step_time.predict(size) or 0.0, self.step_time.coefficients
        if now - self._last_turn >= TURN_S:
            return Room(seconds + self.max_step_s, True, size)
        if not others or coefficients is None or coefficients.per_token > MAX_GROWTH * seconds:  # as on most CPUs
            return None
        return Room((1 + MAX_GROWTH) * seconds, False, size)

    def decodes(self, room: Room, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the first of these requests, each at its last token, whose tokens fit into the step."""
        if (coefficients := self.step_time.coefficients) is None:
            return requests[:FIRST_ROWS]
        seconds = self.step_time.predict(room.others) or 0.0
        for i, request in enumerate(requests):
            tokens = 1 + len(request.drafts)
            seconds += tokens * (coefficients.per_token + coefficients.per_context * len(request.ids))
            if seconds > room.limit_s and (i or not room.is_turn):
                return requests[:i]
        return requests

    def prefill_tokens(self, room: Room, decodes: Sequence[ScheduledTokens], start: int, max_tokens: int) -> int:
        """Return the prompt tokens that fit into the step beside other requests and these batch rows."""
        size, others = step_size(decodes, self.step_time.query_tile) if decodes else NOTHING, room.others
        both = StepSize("mixed", False, size.tokens + others.tokens, size.context + others.context)
        count = self.step_time.prefill_tokens_within(room.limit_s, both, start, max_tokens - both.tokens)
        return count if count >= MIN_CHUNK else MIN_CHUNK * room.is_turn

    def note_request(self, priority: int = 0) -> float:
        """Record that a request has come, which the scheduler may not have yet; return the time."""
        now = self.clock()
        self._last_other = now if priority < BATCH_PRIORITY else self._last_other
        return now

    def end_turn(self) -> None:
        """Record that batch rows joined a step."""
        self._last_turn = self.clock()


def solve_nonnegative(matrix: Sequence[Sequence[float]]) -> list[float]:
    """Solve symmetric equations (right side in the last column); unknowns that would be negative are zero."""
    active = [i for i in range(len(matrix)) if matrix[i][i] > 0.0]
    while True:
        solution = solve([[*(matrix[i][j] for j in active), matrix[i][-1]] for i in active])
        if not solution or min(solution) >= 0.0:
            values = dict(zip(active, solution, strict=True))
            return [values.get(i, 0.0) for i in range(len(matrix))]
        # the one whose absence is cheapest: its share of the fit, not its unit, decides
        share = [value * math.sqrt(matrix[i][i]) for i, value in zip(active, solution, strict=True)]
        del active[share.index(min(share))]


def solve(rows: list[list[float]]) -> list[float]:
    """Solve symmetric positive definite equations by elimination; an undetermined unknown is zero."""
    count = len(rows)
    diagonal = [rows[i][i] for i in range(count)]
    for i in range(count):
        pivot = rows[i][i]
        if pivot <= MIN_PIVOT * diagonal[i]:
            rows[i] = [0.0] * (count + 1)
            continue
        for k in range(i + 1, count):
            factor = rows[k][i] / pivot
            if factor:
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    values = [0.0] * count
    for i in range(count - 1, -1, -1):
        if rows[i][i]:
            rest = sum(rows[i][j] * values[j] for j in range(i + 1, count))
            values[i] = (rows[i][-1] - rest) / rows[i][i]
    return values
