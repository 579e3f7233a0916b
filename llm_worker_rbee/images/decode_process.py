"""Decodes images in children of its own: a program that decoder.py starts, the only one that imports Pillow.

Bytes of a client reach native decoders here, so each image gets a child, which is forked with the libraries imported.
The system limits its time and memory; the number of pixels is checked before a pixel is decoded. A child that dies is
reported with its status.

Standard input: a line of JSON, {"bytes", "max_pixels", "cpu_s", "settings"}, then so many bytes. Standard output: a
line of JSON, {"error"} or {"width", "height", "bytes", "plan", "cpu_s"} of an image after its rotation, then the parts
of the plan one after the other, RGB row by row.
"""

from __future__ import annotations

import io
import json
import os
import resource
import select
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import WorkerError
from .sizes import ImageSettings, plan_parts

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MODES = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")  # of more bits than 8, which `convert` would cut off
MAX_WAIT_S = 60
BYTES_PER_PIXEL, SPARE_BYTES = 24, 256 << 20  # of a child: the picture in several modes; parts and decoders
STATUS_MEMORY = 3
READ_BYTES = 1 << 20


class ImageError(Exception):
    """What is wrong with an image, for its sender."""


def open_image(data: bytes, max_pixels: int) -> Image.Image:
    """Return the first frame as RGB, upright, transparent parts white; raise `ImageError` with what is wrong."""
    Image.MAX_IMAGE_PIXELS = None  # the check below is ours
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError(f"it is none of {', '.join(FORMATS)}, or its header is damaged") from None
    width, height = image.size
    if not width or not height:
        raise ImageError(f"it has {width} x {height} pixels")
    if width * height > max_pixels:
        raise ImageError(f"it has {width} x {height} pixels, and at most {max_pixels} are decoded")
    limit_memory(width * height)
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode in MODES:
        raise ImageError(f"its pixels have more than 8 bits ({image.mode}): convert it to 8 bits a channel")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def cut_parts(image: Image.Image, settings: ImageSettings) -> tuple[dict[str, Any], list[bytes]]:
    """Return the reply and the pixels of each part."""
    width, height = image.size
    plan = plan_parts(height, width, settings)
    for rows, columns in plan.resizes:
        image = image.resize((columns, rows), Image.Resampling(settings.resample))
    tile, parts = plan.tile, list[bytes]()
    for row in range(plan.rows):
        for column in range(plan.columns):
            box = column * tile, row * tile, (column + 1) * tile, (row + 1) * tile
            parts.append(image.crop(box).tobytes())
    if plan.rows:
        image = image.resize((tile, tile), Image.Resampling(settings.resample))
    parts.append(image.tobytes())
    reply = {"width": width, "height": height, "bytes": sum(map(len, parts)), "plan": plan._asdict()}
    return reply, parts


def decode(request: dict[str, Any], data: bytes) -> list[bytes]:
    """Return a reply and its bytes; what Pillow raises for a damaged file becomes an error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reply, parts = cut_parts(open_image(data, request["max_pixels"]), ImageSettings(*request["settings"]))
    except MemoryError:
        raise
    except (ImageError, WorkerError) as error:
        reply, parts = {"error": str(error)}, []
    except Exception as error:  # decoders raise whatever a damaged file leads to
        reply, parts = {"error": f"it is damaged or cut off ({str(error)[:200] or type(error).__name__})"}, []
    return [json.dumps({**reply, "cpu_s": time.process_time()}).encode() + b"\n", *parts]


def limit_memory(pixels: int) -> None:
    """Limit the memory of this process to what an image of so many pixels needs beside what it has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        own = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (own + SPARE_BYTES + BYTES_PER_PIXEL * pixels, hard))


def limit_child(cpu_s: int) -> None:
    """Limit the time and memory of this process, and what it can reach; root alone may still start others."""
    os.closerange(0, 2)  # the pipes of the program
    with suppress(OSError):  # where memory is short, this process ends before the engine does
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    limit_memory(0)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def run_child(request: dict[str, Any], data: bytes, pipe: int) -> None:
    """Decode in this process, a child, and end it."""
    status = 1
    try:
        limit_child(request["cpu_s"])
        for part in decode(request, data):
            view = memoryview(part)
            while view:
                view = view[os.write(pipe, view) :]
        status = 0
    except MemoryError:
        status = STATUS_MEMORY
    finally:
        os._exit(status)


def run_request(request: dict[str, Any], data: bytes) -> bytes:
    """Return the reply of a child, or what became of it."""
    source, pipe = os.pipe()
    child = os.fork()
    if not child:
        os.close(source)
        run_child(request, data, pipe)
    os.close(pipe)
    deadline, reply = time.monotonic() + MAX_WAIT_S, bytearray()
    try:
        while select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (piece := os.read(source, READ_BYTES)):
                break
            reply += piece
        else:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(source)
    _, status = os.waitpid(child, 0)
    if not status:
        return bytes(reply)
    code = os.waitstatus_to_exitcode(status)
    reasons = {
        STATUS_MEMORY: "decoding it takes too much memory",
        -signal.SIGXCPU: "decoding it takes too long",
        -signal.SIGKILL: "decoding it takes too long",
    }
    return json.dumps({"error": reasons.get(code, f"the decoder ended with status {code}")}).encode() + b"\n"


def main() -> None:
    """Answer requests until the input ends."""
    with suppress(OSError):
        os.nice(5)
    Image.preinit()
    Image.init()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while line := source.readline():
        request = json.loads(line)
        reply = run_request(request, source.read(request["bytes"]))
        sink.write(reply)
        sink.flush()
