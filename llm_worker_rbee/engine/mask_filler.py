"""The masks of a step of guided requests, and consuming the sampled tokens.

`MaskFiller` computes the masks of a step while the forward pass runs: in a thread, as llguidance needs no interpreter
lock. The mask of a single request is computed at once: waking a thread takes as long as most masks. A request with a
slow grammar delays no other request: steps leave it out while a thread consumes its tokens and fills its next mask. One
that stays slow ends with an error. CPU time counts, so that the same request gets the same answer on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ..backends.ops import TokenMask
from ..errors import GrammarDeadEndError, GrammarTooSlowError
from ..structured_outputs.constraint import MAX_STEP_S, SLOW_STEP_S, Constraint, lower_thread_priority
from .request import NO_TOKEN, Request, StepOutput, error_output

HELD_WAIT_S = 0.005  # of a step in which all requests wait for their grammars


class MaskFiller:
    """Fills the masks of a step's guided requests: `start` before the forward pass, `wait` before sampling.

    `advance` computes the next step of a slow grammar in the background; `collect` returns its outputs.
    """

    def __init__(self, make_executor: Callable[[], Any]) -> None:
        self._make_executor = make_executor
        self._executor: Any = None
        self._thread: ThreadPoolExecutor | None = None
        self._background: ThreadPoolExecutor | None = None
        self._buffer: TokenMask = np.zeros((0, 0), np.int32)
        self.pending: Future[None] | None = None  # masks that are being filled
        self.held: dict[Request, tuple[list[StepOutput], Future[int]]] = {}  # requests whose slow grammars advance
        self._is_suspicious = False  # the last masks took long, and it is not known which of them

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to fill the masks of guided requests: for the next token, and after each draft."""
        guided = [request for request in requests if request.constraint is not None]
        if not guided:
            return
        self.wait()
        self._assign(guided)
        rows = [(row, request) for row, request in self._rows(guided) if not request.constraint.take_next_mask()]
        if len(rows) == 1:
            rows[0][1].constraint.fill(rows[0][1].drafts)
        elif rows:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self.pending = self._thread.submit(self._fill, rows)

    def wait(self) -> None:
        """Wait until `masks` of all constraints are filled."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def advance(self, request: Request, outputs: list[StepOutput]) -> None:
        """Let a thread consume the tokens of a request and fill its next mask; steps leave it out meanwhile."""
        if self._background is None:
            self._background = ThreadPoolExecutor(1, "slow-masks", initializer=lower_thread_priority)
        tokens = [output.token for output in outputs]
        request.is_held = True
        self.held[request] = outputs, self._background.submit(request.constraint.advance, tokens)

    def collect(self, *, is_idle: bool) -> list[tuple[list[StepOutput], int]]:
        """Return the outputs of requests whose next masks are ready, and the number of consumed tokens.

        An idle engine waits a moment for one of them.
        """
        if is_idle and self.held:
            wait([future for _, future in self.held.values()], HELD_WAIT_S, FIRST_COMPLETED)
        done = [request for request, (_, future) in self.held.items() if future.done() or request.is_finished]
        collected = []
        for request in done:
            outputs, future = self.held.pop(request)
            request.is_held = False
            if not request.is_finished:
                collected.append((outputs, future.result()))
        return collected

    def _assign(self, guided: Sequence[Request]) -> None:
        """Give each constraint its rows of one array."""
        words = guided[0].constraint.num_words
        rows = sum(1 + len(request.drafts) for request in guided)
        if self._buffer.shape[0] < rows or self._buffer.shape[1] != words:
            self._buffer = np.zeros((max(rows, 2 * self._buffer.shape[0]), words), np.int32)
        for row, request in self._rows(guided):
            request.constraint.masks = self._buffer[row : row + 1 + len(request.drafts)]

    @staticmethod
    def _rows(guided: Sequence[Request]) -> list[tuple[int, Request]]:
        """Return the first row of each request."""
        rows, row = [], 0
        for request in guided:
            rows.append((row, request))
            row += 1 + len(request.drafts)
        return rows

    def _fill(self, rows: Sequence[tuple[int, Request]]) -> None:
        start = time.perf_counter()
        if self._is_suspicious:
            for _, request in rows:
                request.constraint.fill(request.drafts)
        else:
            self._fill_together(rows)
        self._is_suspicious = time.perf_counter() - start > SLOW_STEP_S

    def _fill_together(self, rows: Sequence[tuple[int, Request]]) -> None:
        """Fill masks in llguidance's threads, which do not report the time of each."""
        if self._executor is None:
            self._executor = self._make_executor()
        plain: list[tuple[Any, int]] = []
        drafted: list[tuple[Any, int, list[int]]] = []
        for row, request in rows:
            if request.constraint.prepare():
                request.constraint.masks[:] = 0
                if request.drafts:
                    drafted.append((request.constraint.matcher, row, request.drafts))
                else:
                    plain.append((request.constraint.matcher, row))
        place = self._buffer.ctypes.data, self._buffer.strides[0], len(self._buffer)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *place)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        for _, request in rows:
            if request.constraint.matcher.is_error():
                request.constraint.fill(request.drafts)
            else:
                request.constraint.finish_masks()
                request.constraint.end_step()


def consume_outputs(
    outputs: Sequence[StepOutput], remove: Callable[[Request], object], filler: MaskFiller
) -> list[StepOutput]:
    """Let constraints consume the tokens of a step; return the resulting outputs.

    A request whose grammar is complete ends as if it had sampled the end of the text; one with a token that its
    grammar refuses, because none was possible, ends with an error. `remove` takes it from the scheduler. The outputs of
    a slow grammar are for `filler` to return later.
    """
    checked: list[StepOutput] = []
    ended: set[Request] = set()
    slow: dict[Request, list[StepOutput]] = {}
    for output in outputs:
        request = output.request
        constraint: Constraint | None = request.constraint
        if request in ended:
            continue
        if constraint is None or output.error is not None or output.finish_reason == "stop":
            checked.append(output)
        elif constraint.is_slow and not request.is_finished:
            slow.setdefault(request, []).append(output)
        else:
            results = follow_output(output, is_allowed=constraint.consume(output.token))
            checked += results
            if results[-1] is not output:
                ended.add(request)
    for request in ended:
        remove(request)
    for request, held in slow.items():
        filler.advance(request, held)
    return checked


def follow_output(output: StepOutput, *, is_allowed: bool) -> list[StepOutput]:
    """Return the output of a consumed token, or the output that ends its request instead."""
    request, constraint = output.request, output.request.constraint
    if not is_allowed:
        return [error_output(request, GrammarDeadEndError(constraint.describe_error()))]
    if constraint.is_complete:  # perhaps with the last token that the limit allows
        return [output._replace(finish_reason=None), StepOutput(request, NO_TOKEN, None, "stop")]
    if constraint.is_too_slow:
        message = f"the grammar takes more than {1000 * MAX_STEP_S:.0f} ms of processor time for a token"
        return [output, error_output(request, GrammarTooSlowError(message))]
    return [output]


def collect_held(filler: MaskFiller, remove: Callable[[Request], object], *, is_idle: bool) -> list[StepOutput]:
    """Return the resulting outputs of slow grammars that consumed their tokens meanwhile."""
    collected: list[StepOutput] = []
    for outputs, count in filler.collect(is_idle=is_idle):
        request, consumed = outputs[0].request, outputs[:count]
        if count == len(outputs) or request.constraint.is_complete:
            end = follow_output(consumed.pop(), is_allowed=True)
        else:
            end = follow_output(outputs[count], is_allowed=False)
        collected += consumed + end
        if end[-1].finish_reason is not None:
            remove(request)
    return collected
