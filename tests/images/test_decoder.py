"""Decoding: pixels equal to those of transformers' processors that use Pillow, and files that want to do harm."""

from __future__ import annotations

import io
import os
import resource
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from llm_worker_rbee.errors import InvalidRequestError
from llm_worker_rbee.images import decode_process
from llm_worker_rbee.images.decode_process import cut_parts
from llm_worker_rbee.images.decoder import ImageDecoder
from llm_worker_rbee.images.sizes import ImageSettings, native_size, plan_parts
from tests.helpers import tiny_vision

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "llava", "mistral3", "gemma4")
CASES = 130  # pictures of each family
MODES = ("RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "PA")
FORMATS = {"RGB": ("PNG", "JPEG", "WEBP", "BMP"), "L": ("PNG", "JPEG"), "CMYK": ("JPEG",), "PA": ("PNG",)}
ODD_SIZES = ((1, 1), (1, 2), (3, 500), (500, 3), (2, 1), (27, 29), (56, 56), (48, 48), (49, 48), (600, 590))
ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def decoders() -> Iterator[dict[str, ImageDecoder]]:
    made = {name: ImageDecoder(tiny_vision.settings_of(name)) for name in FAMILIES}
    yield made
    for decoder in made.values():
        decoder.close()


def odd_picture(rng: np.random.Generator, case: int) -> bytes:
    """Return the file of a picture of an odd size, mode, format and rotation."""
    height, width = ODD_SIZES[case] if case < len(ODD_SIZES) else (int(n) for n in rng.integers(1, 420, 2))
    mode = MODES[case % len(MODES)]
    picture = Image.fromarray(tiny_vision.picture(rng, height, width))
    if mode in ("RGBA", "LA", "PA"):
        picture.putalpha(Image.fromarray(rng.integers(0, 256, (height, width)).astype(np.uint8)))
    picture = picture.quantize(31) if mode == "P" else picture.convert("LA" if mode == "PA" else mode)
    kind, options = str(rng.choice(FORMATS.get(mode, ("PNG",)))), dict[str, Any]()
    if case % 3 == 0 and kind in ("PNG", "JPEG", "WEBP"):
        exif = Image.Exif()
        exif[ORIENTATION] = int(rng.integers(1, 9))
        options["exif"] = exif
    if mode == "P" and case % 2:
        options["transparency"] = 3
    if kind == "PNG" and case % 5 == 0:
        options |= (
            {"save_all": True, "append_images": [ImageOps.invert(picture.convert("RGB")).convert(mode)]}
            if mode == "RGB"
            else {}
        )
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def expected_parts(name: str, data: bytes) -> list[Any]:
    """Return the parts that transformers makes, before rescaling and normalization."""
    processor = tiny_vision.image_processor(name)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    plain = {"do_rescale": False, "do_normalize": False}
    if name.startswith("qwen"):
        patches = processor(upright, return_tensors="np", **plain)
        _, rows, columns = patches["image_grid_thw"][0]
        size, merge = processor.patch_size, processor.merge_size
        grid = patches["pixel_values"].reshape(rows // merge, columns // merge, merge, merge, 3, 2, size, size)[
            :, :, :, :, :, 0
        ]
        return [grid.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * size, columns * size, 3)]
    if name == "gemma4":
        patches = processor(upright, return_tensors="np", **plain)
        size, places = processor.patch_size, patches["image_position_ids"][0]
        (columns, rows), count = places.max(axis=0) + 1, int((places[:, 0] >= 0).sum())
        grid = patches["pixel_values"][0, :count].reshape(rows, columns, size, size, 3)
        return [grid.transpose(0, 2, 1, 3, 4).reshape(rows * size, columns * size, 3)]
    pixels = processor([[upright]] if name == "idefics3" else [upright], return_tensors="np", **plain)["pixel_values"]
    return [part.transpose(1, 2, 0) for part in (pixels[0] if name == "idefics3" else pixels)]


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_are_those_of_transformers(name: str, decoders: dict[str, ImageDecoder]) -> None:
    rng, settings, compared = np.random.default_rng(41), decoders[name].settings, 0
    for case in range(CASES):
        data = odd_picture(rng, case)
        try:
            expected = expected_parts(name, data)
        except ValueError:  # an aspect ratio that it refuses
            with pytest.raises(InvalidRequestError, match=r"times the other|too long for the other"):
                decoders[name].decode(data)
            continue
        image = decoders[name].decode(data)
        assert len(image.parts) == len(expected)
        for part, other in zip(image.parts, expected, strict=True):
            np.testing.assert_array_equal(part, other)
        assert image.plan == plan_parts(image.height, image.width, settings)
        compared += 1
    assert compared > CASES * 0.9


def test_first_frame_of_an_animation_and_rotation_are_taken(decoders: dict[str, ImageDecoder]) -> None:
    frames = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    image = decoders["gemma3"].decode(file.getvalue())
    assert image.parts[0][..., 0].min() > 200 > 50 > image.parts[0][..., 2].max()
    assert (image.width, image.height) == (40, 30)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    turned = io.BytesIO()
    frames[0].save(turned, "JPEG", exif=exif)
    image = decoders["gemma3"].decode(turned.getvalue())
    assert (image.width, image.height) == (30, 40)
    np.testing.assert_array_equal(image.parts[0], expected_parts("gemma3", turned.getvalue())[0])


def test_very_long_image_is_refused_by_families_with_native_sizes(decoders: dict[str, ImageDecoder]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (10_000, 3)).save(file, "PNG")
    with pytest.raises(InvalidRequestError, match="10000 x 3 pixels is more than 200 times the other"):
        decoders["qwen3_vl"].decode(file.getvalue())
    assert decoders["idefics3"].decode(file.getvalue()).plan.resizes[0] == (1, 120)


def png_bomb(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size that its few bytes decompress to."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(height * (width + 1)), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_bomb_is_refused_before_a_pixel_is_decoded(decoders: dict[str, ImageDecoder]) -> None:
    data = png_bomb(20_000, 9_000)
    assert len(data) < 1 << 20
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match="20000 x 9000 pixels, and at most 50000000 are decoded"):
        decoders["gemma3"].decode(data)
    assert time.monotonic() - started < 30  # of a busy machine; it decodes nothing


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "none of PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG, JPEG"),
        (b"%PDF-1.4\n%\xff\xff", "none of PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG, JPEG"),
        (b"GIF89a" + bytes(5), "none of PNG, JPEG|damaged"),
        (b"\xff\xd8\xff\xe0" + bytes(40), "none of PNG, JPEG|damaged"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str, decoders: dict[str, ImageDecoder]) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        decoders["gemma3"].decode(data)


def test_cut_and_large_files_are_refused(decoders: dict[str, ImageDecoder]) -> None:
    rng = np.random.default_rng(3)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        file = io.BytesIO()
        Image.fromarray(tiny_vision.picture(rng, 200, 200)).save(file, kind)
        with pytest.raises(InvalidRequestError, match=r"damaged or cut off|none of"):
            decoders["gemma3"].decode(file.getvalue()[: len(file.getvalue()) // 2])
    small = ImageDecoder(decoders["gemma3"].settings, max_bytes=1000, max_pixels=100)
    with pytest.raises(InvalidRequestError, match="1001 bytes, and at most 1000"):
        small.decode(bytes(1001))
    small.close()


def test_grey_of_16_bits_is_refused(decoders: dict[str, ImageDecoder]) -> None:
    file = io.BytesIO()
    Image.fromarray(np.arange(100, dtype=np.uint16).reshape(10, 10)).save(file, "PNG")
    with pytest.raises(InvalidRequestError, match="more than 8 bits"):
        decoders["gemma3"].decode(file.getvalue())


def test_mutated_files_leave_the_process_working(decoders: dict[str, ImageDecoder]) -> None:
    rng, decoder, refused = np.random.default_rng(17), decoders["gemma3"], 0
    sources = [np.frombuffer(odd_picture(rng, case), np.uint8) for case in range(20, 36)]
    good = odd_picture(rng, 24)
    expected = decoder.decode(good)
    for case in range(120):
        data = sources[case % len(sources)].copy()
        data[rng.integers(0, len(data), 1 + case % 8)] = rng.integers(0, 256, 1 + case % 8)
        try:
            image = decoder.decode(data[: len(data) - case % 5].tobytes())
            assert all(part.size for part in image.parts)
        except InvalidRequestError:
            refused += 1
    assert refused
    again = decoder.decode(good)
    assert again.digests == expected.digests
    assert len(decoder._idle) == 1


def test_process_that_was_ended_is_replaced(decoders: dict[str, ImageDecoder]) -> None:
    decoder, data = decoders["gemma3"], odd_picture(np.random.default_rng(1), 8)
    first = decoder.decode(data)
    os.kill(decoder._idle[0].pid, 9)
    assert decoder.decode(data).digests == first.digests


def test_memory_of_a_child_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    # more than what this process may have freed and not given back
    data, settings = png_bomb(24_000, 24_000), ImageSettings("square", 14, 4, size=896)
    request = {"max_pixels": 600_000_000, "cpu_s": 20, "settings": settings}
    monkeypatch.setattr(decode_process, "BYTES_PER_PIXEL", 0)
    monkeypatch.setattr(decode_process, "SPARE_BYTES", 32 << 20)
    assert b"too much memory" in decode_process.run_request(request, data)


def test_child_gives_up_its_rights() -> None:
    if not (child := os.fork()):
        status = 1
        try:
            decode_process.limit_child(7)
            assert Path("/proc/self/oom_score_adj").read_text(encoding="ascii") == "1000\n"
            assert resource.getrlimit(resource.RLIMIT_CPU) == (7, 7)
            assert resource.getrlimit(resource.RLIMIT_NPROC) == (0, 0)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_process_has_no_keys(decoders: dict[str, ImageDecoder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    decoder = ImageDecoder(decoders["gemma3"].settings)
    assert decoder.decode(odd_picture(np.random.default_rng(1), 8)).cpu_s > 0
    assert b"secret" not in Path(f"/proc/{decoder._idle[0].pid}/environ").read_bytes()
    decoder.close()


def test_digest_is_of_pixels_and_sizes(decoders: dict[str, ImageDecoder]) -> None:
    picture = Image.fromarray(tiny_vision.picture(np.random.default_rng(9), 96, 64))
    files = {}
    for kind in ("PNG", "BMP"):
        file = io.BytesIO()
        picture.save(file, kind)
        files[kind] = decoders["qwen3_vl"].decode(file.getvalue()).digests
    assert files["PNG"] == files["BMP"]
    turned = io.BytesIO()
    picture.transpose(Image.Transpose.ROTATE_90).save(turned, "PNG")
    assert decoders["qwen3_vl"].decode(turned.getvalue()).digests != files["PNG"]


def test_sizes_hold_their_limits() -> None:
    rng, settings = np.random.default_rng(6), tiny_vision.settings_of("qwen2_5_vl")
    for _ in range(500):
        height, width = (int(n) for n in rng.integers(1, 3000, 2))
        if max(height, width) / min(height, width) > 200:
            continue
        rows, columns = native_size(height, width, settings)
        assert rows % 28 == columns % 28 == 0
        assert rows * columns <= max(settings.max_pixels, 28 * max(rows, columns))


def test_reply_holds_all_parts() -> None:
    settings = tiny_vision.settings_of("idefics3")
    reply, parts = cut_parts(Image.new("RGB", (100, 30)), settings)
    assert reply["bytes"] == sum(map(len, parts))
    assert len(parts) == reply["plan"]["rows"] * reply["plan"]["columns"] + 1
