"""Encodes the images of requests: a kind of step of its own, between the steps of the decoder.

A request with images waits, held, until those that the prefix cache lacks are encoded. A step takes images of several
requests together, as many as fit into a budget of tokens, and at least one. Rows are kept by content, so that the same
picture is encoded once. While rows of requests that are not computed yet take much memory, other requests wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..backends.ops import Array, Batch, Progress, StepLimits, WarmUp
from ..config import IMAGE_ROWS_BYTES
from ..images.prompt import ImageSpan, PromptImages, step_arrays
from ..models import Transformer
from ..models.kv_cache import KVCache
from ..models.vision import VisionTower
from .model_runner import forward
from .request import Request, ScheduledTokens

Floats = NDArray[np.float32]
Pixels = NDArray[np.uint8]


class ImageEncoder:
    """The tower of an engine, requests that wait for it, and the rows of the last images."""

    def __init__(self, tower: VisionTower, max_step_tokens: int, max_bytes: int = IMAGE_ROWS_BYTES) -> None:
        self.tower, self.max_step_tokens, self.max_bytes = tower, max_step_tokens, max_bytes
        self.waiting: dict[Request, int] = {}  # the prompt tokens that the prefix cache had
        self._row_bytes = np.dtype(np.float32).itemsize * tower.row_width
        self.num_encoded = 0  # parts of images
        self._rows: OrderedDict[bytes, Floats] = OrderedDict()
        self._num_bytes = 0

    def warm_up(self, model: Transformer, cache: KVCache, limits: StepLimits, progress: Progress) -> WarmUp:
        """Do the one-time work of the tower, and of steps of the decoder with images."""
        ops, width = model.ops, self.tower.row_width
        room = min(limits.max_tokens, limits.max_context, cache.n_blocks * cache.block_size)

        def run(batch: Batch) -> Array:
            count = len(batch.ids)
            images = PromptImages([ImageSpan(0, 1, count)], [], [])
            images.rows = [np.zeros((count, width), np.float32)]
            chunk = [(images, 0, count)]
            ids = batch.ids if model.pads_images else None
            fields = step_arrays(chunk, has_axes=model.has_axes, sees_both_ways=model.sees_both_ways, ids=ids)
            return forward(model, replace(batch, **fields), cache)

        own = self.tower.warm_up(self.max_step_tokens, progress)
        # None: a fused forward would be launched without `run`, on steps that have no images
        more = ops.warm_up(run, None, cache.layers, limits._replace(max_tokens=room), progress)
        return WarmUp(own.kernels + more.kernels, own.compiled + more.compiled)

    def hold(self, request: Request, num_cached: int) -> None:
        """Let a request wait for its images behind the first `num_cached` tokens, if they are not encoded yet."""
        if self._missing(request, num_cached):
            request.is_held = True
            self.waiting[request] = num_cached

    def next_requests(self, queue: Sequence[Request], running: Sequence[Request]) -> list[Request]:
        """Return the requests whose images the next step encodes, of a queue in its order; forget those that ended.

        Where the rows of all these requests take more than `max_bytes`, only the first of the queue is encoded.
        """
        self.waiting = {request: count for request, count in self.waiting.items() if not request.is_finished}
        images = [request.images for request in (*queue, *running) if request.images is not None]
        kept = {id(rows): rows.nbytes for item in images for rows in item.rows if rows is not None}
        chosen, tokens, num_bytes = list[Request](), 0, sum(kept.values())
        for place, request in enumerate(queue):
            if tokens >= self.max_step_tokens or (place and num_bytes > self.max_bytes):
                break
            if request in self.waiting:
                chosen.append(request)
                count = sum(len(_span(request, i)) for i in self._missing(request, self.waiting[request]))
                tokens, num_bytes = tokens + count, num_bytes + count * self._row_bytes
        return chosen

    def run_step(self, requests: Sequence[Request]) -> None:
        """Encode images of these requests, up to the budget; those that have all of theirs go on."""
        chosen_parts, tokens = list[tuple[Request, int]](), 0
        for request in requests:
            for i in self._missing(request, self.waiting[request]):
                if chosen_parts and tokens + len(_span(request, i)) > self.max_step_tokens:
                    break
                chosen_parts.append((request, i))
                tokens += len(_span(request, i))
        self._encode(chosen_parts)
        for request in requests:
            if not self._missing(request, self.waiting[request]):
                del self.waiting[request]
                request.is_held = False

    def drop(self, requests: Sequence[Request]) -> None:
        """Forget requests that failed."""
        for request in requests:
            self.waiting.pop(request, None)

    def prepare(self, scheduled: Sequence[ScheduledTokens]) -> None:
        """Encode what a step lacks, where cached blocks went away meanwhile; drop rows that are behind it."""
        needed = list[tuple[Request, int]]()
        for request, start, stop, _ in scheduled:
            if request.images is not None:
                needed += [(request, i) for i in request.images.inside(start, stop) if request.images.rows[i] is None]
                for i, span in enumerate(request.images.spans):
                    if span.stop <= start:
                        request.images.rows[i] = None
        self._encode(needed)

    def _missing(self, request: Request, num_cached: int) -> list[int]:
        """Return the numbers of a request's images that are behind so many tokens and not encoded."""
        images = request.images
        assert images is not None
        return [i for i in images.inside(num_cached, len(request.ids)) if not self._recall(images, i)]

    def _recall(self, images: PromptImages, i: int) -> bool:
        """Give an image its rows, if they are kept; return whether it has them."""
        if images.rows[i] is None and (rows := self._rows.get(images.digests[i])) is not None:
            self._rows.move_to_end(images.digests[i])
            images.rows[i] = rows
        return images.rows[i] is not None

    def _encode(self, items: Sequence[tuple[Request, int]]) -> None:
        """Encode images, each content once."""
        named = [(request.images, i) for request, i in items if request.images is not None]
        parts = {images.digests[i]: images.parts[i] for images, i in named if not self._recall(images, i)}
        encoded = dict[bytes, Floats]()
        for group in self._groups(parts):
            rows_of_group = self.tower.encode([parts[digest] for digest in group])
            for digest, rows in zip(group, rows_of_group, strict=True):
                encoded[digest] = rows.copy()  # not a part of the rows of all
                self._keep(digest, encoded[digest])
            self.num_encoded += len(group)
        for images, i in named:
            if images.rows[i] is None:
                images.rows[i] = encoded[images.digests[i]]

    def _groups(self, parts: Mapping[bytes, Pixels]) -> Iterator[list[bytes]]:
        """Yield parts of images that the tower encodes together: as many patches as memory was planned for."""
        config, group, patches = self.tower.config, list[bytes](), 0
        for digest, pixels in parts.items():
            count = pixels.shape[0] * pixels.shape[1] // config.images.patch**2
            if group and patches + count > config.step_patches:
                yield group
                group, patches = [], 0
            group.append(digest)
            patches += count
        if group:
            yield group

    def _keep(self, digest: bytes, rows: Floats) -> None:
        self._rows[digest] = rows
        self._num_bytes += rows.nbytes
        while self._num_bytes > self.max_bytes:
            self._num_bytes -= self._rows.popitem(last=False)[1].nbytes


def _span(request: Request, i: int) -> range:
    assert request.images is not None
    return range(request.images.spans[i].start, request.images.spans[i].stop)
