"""How a family resizes and cuts images, as data: the parts of an image, each of which a tower encodes by itself; and
the records of images that pass between processes. No arrays here.

`plan_parts` returns the steps for one size before anything is decoded, so that the number of tokens is known. It agrees
with the image processors of transformers that use Pillow, rounding included.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from ..errors import InvalidRequestError

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers of filters
MAX_ASPECT_RATIO = 200
LOW_DETAIL_PIXELS = 512 * 512  # as in OpenAI's API
MAX_TILED_SIDE = 4096  # of an image that is cut into tiles


class ImageSettings(NamedTuple):
    """What a tower takes. An image becomes one part of a size of its own, one square, or square tiles.

    A size of its own is the nearest in whole tokens (`native`), that of an image whose longest edge is limited
    (`longest`), or the largest of all with so many pixels (`area`).
    """

    kind: Literal["native", "longest", "area", "square", "tiles"]
    patch: int  # pixels
    merge: int  # patches of each side of a token
    size: int = 0  # of the square or of a tile; 0: parts have sizes of their own
    longest_edge: int = 0  # of a `longest` part, or to which an image is resized before it is cut into tiles
    min_pixels: int = 0  # of a `native` or `area` part
    max_pixels: int = 0
    resample: int = BICUBIC
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    splits: bool = True  # whether tiles are cut, or the whole image is resized to one
    signed: bool = False  # normalized values 0 .. 1 become -1 .. 1

    def with_detail(self, detail: str) -> ImageSettings:
        """Return the settings for an image of which little detail is wanted ("low"): one small part."""
        if detail != "low":
            return self
        if self.kind == "longest":
            return self.with_longest_edge(math.isqrt(LOW_DETAIL_PIXELS))
        return self._replace(splits=False, max_pixels=max(self.min_pixels, min(self.max_pixels, LOW_DETAIL_PIXELS)))

    def with_longest_edge(self, most: int) -> ImageSettings:
        """Return the settings for images with no edge longer than this, and at least one token."""
        return self._replace(longest_edge=max(self.patch * self.merge, min(self.longest_edge, most)))

    def tokens(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tokens of a part."""
        unit = self.patch * self.merge
        return height // unit, width // unit


class PromptStyle(NamedTuple):
    """What a family writes for an image, in the place of what its chat template writes."""

    placeholder: str  # of the chat template
    token: str  # for each row of the encoded image
    before: str = ""  # the tokens of the whole image
    after: str = ""
    tile: str = ""  # before the tokens of a tile, which has a row and a column
    row_end: str = ""  # one token between rows
    wrapped: str = ""  # what a template writes, where that is more than the placeholder


class VisionInfo(NamedTuple):
    """What a front knows of a tower."""

    family: str
    settings: ImageSettings
    style: PromptStyle
    digest: bytes  # of its weights


class ImagePart(msgspec.Struct, frozen=True, array_like=True):
    """A part of an image in a prompt: its tokens stand from `start` on, row by row; its pixels are RGB."""

    start: int
    rows: int  # of tokens
    columns: int
    gap: int  # tokens of text between rows
    height: int  # pixels
    width: int
    digest: bytes  # of its content, and of the tower
    pixels: bytes


class PartPlan(NamedTuple):
    """How an image of one size becomes parts: it is resized, cut into a grid of tiles, then the whole resized again."""

    resizes: tuple[tuple[int, int], ...]  # (height, width), one after the other
    rows: int = 0  # of tiles, before the whole image; 0: it is the only part
    columns: int = 0
    tile: int = 0

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return the size of each part, (height, width): tiles row by row, then the whole image."""
        whole = (self.tile, self.tile) if self.rows else self.resizes[-1]
        return [(self.tile, self.tile)] * (self.rows * self.columns) + [whole]


def plan_parts(height: int, width: int, settings: ImageSettings) -> PartPlan:
    """Return the plan of an image, whose rotation is done; raise if it cannot be resized."""
    if settings.kind == "square":
        return PartPlan(((settings.size, settings.size),))
    if settings.kind == "tiles":
        return _plan_tiles(height, width, settings)
    own_size = {"native": native_size, "longest": longest_edge_size, "area": area_size}[settings.kind]
    size = own_size(height, width, settings)
    if not all(size):
        problem = f"one side of an image of {width} x {height} pixels is too long for the other"
        raise InvalidRequestError(f"{problem}: the model cannot resize it")
    return PartPlan((size,))


def count_tokens(plan: PartPlan, settings: ImageSettings) -> int:
    """Return the tokens of all parts, without those around them."""
    return sum(math.prod(settings.tokens(*size)) for size in plan.sizes)


def native_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """Return the nearest size in whole tokens whose number of pixels is allowed."""
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        problem = f"one side of an image of {width} x {height} pixels is more than {MAX_ASPECT_RATIO} times the other"
        raise InvalidRequestError(f"{problem}: the model cannot resize it")
    unit = settings.patch * settings.merge
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit * unit > settings.max_pixels:
        shrink = math.sqrt((height * width) / settings.max_pixels)
        rows = max(1, math.floor(height / shrink / unit))
        columns = max(1, math.floor(width / shrink / unit))
    elif rows * columns * unit * unit < settings.min_pixels:
        stretch = math.sqrt(settings.min_pixels / (height * width))
        rows, columns = math.ceil(height * stretch / unit), math.ceil(width * stretch / unit)
    return rows * unit, columns * unit


def longest_edge_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """Return the size with no edge longer than allowed, rounded up to whole tokens."""
    unit, ratio = settings.patch * settings.merge, max(height, width) / settings.longest_edge
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return -(-height // unit) * unit, -(-width // unit) * unit


def area_size(height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """Return the largest size in whole tokens of the same shape with at most so many pixels."""
    unit = settings.patch * settings.merge
    factor, most = math.sqrt(settings.max_pixels / (height * width)), settings.max_pixels // unit**2
    rows, columns = math.floor(factor * height / unit), math.floor(factor * width / unit)
    if rows and not columns:
        return min(height // width, most) * unit, unit
    if columns and not rows:
        return unit, min(width // height, most) * unit
    return rows * unit, columns * unit


def _plan_tiles(height: int, width: int, settings: ImageSettings) -> PartPlan:
    first, tile = _even_size(height, width, settings.longest_edge), settings.size
    if not settings.splits:
        return PartPlan((first, (tile, tile)))
    second = _whole_tiles(*first, tile)
    rows, columns = second[0] // tile, second[1] // tile
    if rows * columns == 1:
        return PartPlan((first, second))
    return PartPlan((first, second), rows, columns, tile)


def _even_size(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size with this longest edge; the other is even, and no edge is too long for tiles."""
    ratio = width / height
    if width >= height:
        height, width = int(longest / ratio), longest
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_TILED_SIDE:
        height, width = int(MAX_TILED_SIDE / ratio), MAX_TILED_SIDE
    elif height > width and height > MAX_TILED_SIDE:
        height, width = MAX_TILED_SIDE, int(MAX_TILED_SIDE * ratio)
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """Return the size with both sides rounded up to whole tiles, the shorter one from the longer one rounded up."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return math.ceil(int(width / ratio) / tile) * tile, width
    height = math.ceil(height / tile) * tile
    return height, math.ceil(int(height * ratio) / tile) * tile
