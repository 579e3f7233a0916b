"""Images within a prompt: what stands for them in its text, their tokens and positions, the arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ChatTemplateError, ContextLengthError
from .decoder import DecodedImage
from .sizes import ImagePart, ImageSettings, PartPlan, PromptStyle, count_tokens

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
AXES = 3  # time, row, column
PADDING = 0  # its id


def require_images_fit(images: Sequence[DecodedImage], settings: ImageSettings, context: int) -> None:
    """Raise for images that have more tokens than the context."""
    if (tokens := sum(count_tokens(image.plan, settings) for image in images)) >= context:
        remedy = "send fewer or smaller ones, or allow a longer context (max_context)"
        raise ContextLengthError(f"the images have {tokens} tokens, the context {context}: {remedy}", "messages")


def locate_parts(
    ids: Sequence[int], token: int, images: Sequence[DecodedImage], settings: ImageSettings
) -> list[ImagePart]:
    """Return the parts of images at their places in a prompt."""
    parts = [pair for image in images for pair in zip(image.parts, image.digests, strict=True)]
    spans = find_spans(ids, token, [settings.tokens(*pixels.shape[:2]) for pixels, _ in parts])
    pairs = zip(spans, parts, strict=True)
    return [
        ImagePart(*span, pixels.shape[0], pixels.shape[1], digest, pixels.tobytes()) for span, (pixels, digest) in pairs
    ]


def expand_prompt(prompt: str, style: PromptStyle, plans: Sequence[PartPlan], settings: ImageSettings) -> str:
    """Return a rendered prompt with all tokens of its images."""
    texts = prompt.split(style.placeholder)
    if len(texts) != len(plans) + 1:
        raise ChatTemplateError(
            f"the chat template wrote {len(texts) - 1} of {len(plans)} images: a template for images is needed",
            "messages",
        )
    images = [_image_text(style, plan, settings) for plan in plans]
    return texts[0] + "".join(image + text for image, text in zip(images, texts[1:], strict=True))


def _image_text(style: PromptStyle, plan: PartPlan, settings: ImageSettings) -> str:
    *tiles, whole = (
        style.row_end.join([style.token * columns] * rows)
        for rows, columns in (settings.tokens(*size) for size in plan.sizes)
    )
    text = ""
    for i, tokens in enumerate(tiles):
        row, column = divmod(i, plan.columns)
        text += style.tile.format(row=row + 1, column=column + 1) + tokens + "\n" * (column + 1 == plan.columns)
    return f"{text}{chr(10) if tiles else ''}{style.before}{whole}{style.after}"


def find_spans(ids: Sequence[int], token: int, sizes: Sequence[tuple[int, int]]) -> list[ImageSpan]:
    """Return where the parts of images stand, each of so many rows and columns of a token. Another may end rows."""
    if not sizes and token not in ids:  # a text alone, which may be long
        return []
    places, spans, at = [i for i, other in enumerate(ids) if other == token], list[ImageSpan](), 0
    for rows, columns in sizes:
        own = places[at : at + rows * columns]
        span = ImageSpan(own[0] if own else 0, rows, columns, int(bool(own) and own[-1] - own[0] >= rows * columns))
        if own != (span.start + span.offsets()).tolist():
            raise ChatTemplateError("the tokens of an image are not adjacent in the prompt", "messages")
        spans.append(span)
        at += len(own)
    if at != len(places):
        raise ChatTemplateError("the prompt has tokens of images without an image", "messages")
    return spans


class ImageSpan(NamedTuple):
    """Adjacent tokens of a prompt that stand for one part of an image, row by row."""

    start: int
    rows: int
    columns: int
    gap: int = 0  # tokens of text between rows

    @property
    def stop(self) -> int:
        return self.start + self.rows * (self.columns + self.gap) - self.gap

    def offsets(self) -> Ints:
        """Return the places of the image's tokens in the span: (rows * columns,)."""
        row, column = np.divmod(np.arange(self.rows * self.columns), self.columns)
        return np.asarray(row * (self.columns + self.gap) + column)


def rope_positions(spans: Sequence[ImageSpan]) -> Ints:
    """Return the positions of the tokens up to the end of the last image: (tokens, AXES).

    Text advances on all axes alike; an image stands still in time, and what follows it begins behind its longer side.
    """
    pieces, place, position = [np.empty((0, AXES), np.int64)], 0, 0
    for span in spans:
        text = np.arange(position, position + span.start - place)
        pieces.append(np.repeat(text[:, None], AXES, axis=1))
        position += span.start - place
        row, column = np.divmod(np.arange(span.rows * span.columns), span.columns)
        pieces.append(position + np.stack((np.zeros_like(row), row, column), axis=1))
        place, position = span.stop, position + max(span.rows, span.columns)
    return np.concatenate(pieces)


def next_position(spans: Sequence[ImageSpan]) -> int:
    """Return the position of the token after the last image."""
    inside = sum(span.rows * span.columns for span in spans)
    last = spans[-1].stop if spans else 0
    return last - inside + sum(max(span.rows, span.columns) for span in spans)


@dataclass(eq=False)
class PromptImages:
    """The images of one request, and their rows where they are encoded."""

    spans: Sequence[ImageSpan]  # in their order
    parts: Sequence[NDArray[np.uint8]]  # the pixels of each
    digests: Sequence[bytes]  # of what each shows
    rows: list[Floats | None] = field(init=False)  # (tokens, width) of each
    positions: Ints = field(init=False)  # (tokens up to the end of the last image, AXES)
    delta: int = field(init=False)  # the position of a later token less its place in the cache

    def __post_init__(self) -> None:
        self.rows = [None] * len(self.spans)
        self.positions = rope_positions(self.spans)
        self.delta = next_position(self.spans) - len(self.positions)

    @property
    def extra_keys(self) -> list[tuple[int, bytes]]:
        """What the hashes of blocks have beside tokens: the content of an image at its first token."""
        return [(span.start, digest) for span, digest in zip(self.spans, self.digests, strict=True)]

    def inside(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the images with tokens in start .. stop - 1."""
        return [i for i, span in enumerate(self.spans) if span.start < stop and span.stop > start]

    def whole_stop(self, start: int, stop: int) -> int:
        """Return an end near `stop` that cuts no image in two: before the last one, or behind it."""
        cut = next((span for span in self.spans if span.start < stop < span.stop), None)
        if cut is None:
            return stop
        return cut.start if cut.start > start else cut.stop

    def rope_positions(self, start: int, stop: int) -> Ints:
        """Return the positions of tokens start .. stop - 1: (tokens, AXES)."""
        known = len(self.positions)
        later = np.arange(max(start, known), max(stop, known)) + self.delta
        return np.concatenate((self.positions[start:stop], np.repeat(later[:, None], AXES, axis=1)))


NO_IMAGES = PromptImages((), (), ())
Chunk = tuple[PromptImages | None, int, int]  # of a request's tokens: first, last + 1


def step_arrays(
    chunks: Sequence[Chunk], *, has_axes: bool, sees_both_ways: bool, ids: Ints | None = None
) -> dict[str, Any]:
    """Return the fields of a `Batch` for the chunks of a step.

    `has_axes`: RoPE positions of the model have several axes; `sees_both_ways`: tokens of an image see each other;
    `ids`: of the step, for a model in which tokens of images have the id of padding.
    """
    fields: dict[str, Any] = {}
    if has_axes:
        fields["rope_positions"] = np.concatenate([(i or NO_IMAGES).rope_positions(a, b) for i, a, b in chunks])
    if not any(images is not None and images.inside(start, stop) for images, start, stop in chunks):
        return fields
    ends = np.concatenate([np.arange(start + 1, stop + 1) for _, start, stop in chunks])
    image_rows, pieces, at, first = np.full(len(ends), -1), list[Floats](), 0, 0
    for images, start, stop in chunks:
        for i in [] if images is None else images.inside(start, stop):
            span, rows = images.spans[i], images.rows[i]  # type: ignore[union-attr]
            assert rows is not None, "an image is encoded before its tokens are computed"
            begin, end = max(span.start, start), min(span.stop, stop)
            places, offsets = span.start + span.offsets(), slice(first + begin - start, first + end - start)
            low, high = np.searchsorted(places, (begin, end))
            pieces.append(rows[low:high])
            image_rows[places[low:high] - start + first] = np.arange(at, at + high - low)
            ends[offsets] = span.stop
            at += int(high - low)
        first += stop - start
    fields |= {"images": np.concatenate(pieces) if len(pieces) > 1 else pieces[0], "image_rows": image_rows}
    if ids is not None:
        fields["ids"] = np.where(image_rows < 0, ids, PADDING)
    if sees_both_ways:
        fields["spans"] = np.stack((np.zeros_like(ends), ends), axis=1)
    return fields
