"""The PTX that dequantizes a word, run by a small emulator: every kind gives the values of its planes.

The interpreter takes the plain twin, and a machine without a GPU runs no PTX, so its text is checked here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import device, linear, packed_weight  # noqa: E402
from llm_worker_rbee.backends.cuda.kernels import compact_kinds, elementwise, gemm, intrinsics  # noqa: E402
from llm_worker_rbee.weights.quants import codebooks  # noqa: E402
from tests.helpers.random_planes import random_planes  # noqa: E402

Words = NDArray[np.uint32]
DEVICE = device.open_device(0)
KINDS = tuple(kind for kind in gemm.SCALE_LAYOUT if not kind.startswith("bytes"))


def halves(words: Words) -> NDArray[np.float64]:
    """Return the two float16 of each word."""
    return np.ascontiguousarray(words).view(np.float16).reshape(*words.shape, 2).astype(np.float64)


def quantize_e4m3(pairs: NDArray[np.float64]) -> Words:
    """Round two numbers, each once, and put them in a word."""
    return np.ascontiguousarray(pairs.astype(np.float16)).view(np.uint32)[..., 0]


def prmt(a: Words, b: Words, selector: Words) -> Words:
    """Pick four of eight bytes; a selector whose top bit is set, which replicates a sign, is not expected."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    picks = [selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15) for i in range(4)]
    assert max(int(pick.max()) for pick in picks) < 8
    found = [(both >> pick * np.uint64(8) & np.uint64(255)) << np.uint64(8 * i) for i, pick in enumerate(picks)]
    return np.bitwise_or.reduce(found).astype(np.uint32)


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    found = np.zeros_like(a)
    for case in range(8):
        if int(table.flat[0]) >> case & 1:
            parts = [x if case >> (2 - i) & 1 else ~x for i, x in enumerate((a, b, c))]
            found |= parts[0] & parts[1] & parts[2]
    return found


OPS: dict[str, Callable[..., Words]] = {
    "shl.b32": lambda a, n: a << n, "shr.u32": lambda a, n: a >> n, "or.b32": lambda a, b: a | b,
    "and.b32": lambda a, b: a & b,
    "prmt.b32": prmt, "lop3.b32": lop3, "mov.b32": lambda a: a, "mov.b16": lambda a: a,
    "add.rn.f16x2": lambda a, b: quantize_e4m3(halves(a) + halves(b)),
    "mul.rn.f16x2": lambda a, b: quantize_e4m3(halves(a) * halves(b)),
    "fma.rn.f16x2": lambda a, b, c: quantize_e4m3(halves(a) * halves(b) + halves(c)),
}  # fmt: skip


def run(text: str, given: dict[str, Words]) -> dict[str, Words]:
    """Run PTX and return all registers; those of half words have an empty upper half."""
    registers = dict(given)
    shape = next(iter(given.values())).shape

    def value(name: str) -> Words:
        pair = re.fullmatch(r"\{(\S+),\s*(\S+)\}", name)
        if pair:
            return value(pair[1]) | value(pair[2]) << np.uint32(16)
        return registers[name] if name in registers else np.full(shape, int(name, 0), np.uint32)

    for line in re.split(r"[;\n]", text.strip()[1:-1]):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.strip().split(maxsplit=1)
        to, *operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        found = OPS[name](*map(value, operands))
        if to.startswith("{"):
            low, high = re.findall(r"[^{},\s]+", to)
            registers[low], registers[high] = found & np.uint32(0xFFFF), found >> np.uint32(16)
        else:
            registers[to] = found
    return registers


def as_words(plane: Any) -> Words:
    """Return int32, int16 or float16 of a plane as register contents."""
    array = np.ascontiguousarray(plane.numpy())
    return array.view(np.uint32 if array.itemsize == 4 else np.uint16).astype(np.uint32)


@pytest.mark.parametrize("kind", KINDS)
def test_word_ptx_matches_dequantized_values(kind: str) -> None:
    torch.manual_seed(6)
    part = random_planes(kind, 32, 32 * 16, "cpu")
    wanted = packed_weight.dequantize(part).numpy().reshape(32, 16, 32)
    for i in range(4):
        bytes_after = dict.fromkeys(("q8", "e4m3"), lambda i=i: part.low[:, 4 + i])
        more = {**bytes_after, "q6": lambda i=i: part.high[:, i],
                "q5": lambda i=i: part.high[:, i // 2], "q5m": lambda i=i: part.high[:, i // 2]}  # fmt: skip
        with_it = more.get(kind, lambda i=i: part.low[:, i])()
        text = gemm.word_ptx(kind, i % 2 if kind in ("q5", "q5m") else 0)
        given = {"$8": as_words(part.low[:, i]), "$9": as_words(with_it), "$10": as_words(part.scales)}
        check_columns(run(text, given), 4 * i, wanted, kind)


def check_columns(found: dict[str, Words], first: int, wanted: NDArray[np.float32], name: str) -> None:
    """Compare the eight results of a word, whose columns begin at `first`, with those of its blocks."""
    for odd, last, r in np.ndindex(2, 2, 2):
        column = 16 * last + first + odd + 2 * r
        got = found[f"${4 * odd + 2 * last + r}"].astype(np.uint16).view(np.float16).astype(np.float32)
        np.testing.assert_allclose(got, wanted[..., column], rtol=1.0e-3, atol=1e-6, err_msg=f"{name} {column}")


@pytest.mark.parametrize("kind", ["bytes", "bytes and minima"])
def test_bytes_ptx_matches_codes_times_scales(kind: str, rng: np.random.Generator) -> None:
    """Signed codes of compact kinds; scales and minima of 16 columns each."""
    codes = rng.integers(-128, 128, (9, 32), dtype=np.int8)
    scales, minima = (rng.uniform(-1, 1, (9, 2)).astype(np.float16) for _ in range(2))
    wanted = codes * scales.astype(np.float32).repeat(16, 1)
    if kind == "bytes and minima":
        wanted += minima.astype(np.float32).repeat(16, 1)
    words, pairs = codes.view(np.uint32), [np.ascontiguousarray(x).view(np.uint32)[:, 0] for x in (scales, minima)]
    for i in range(4):
        given = {"$8": words[:, i], "$9": words[:, 4 + i], "$10": pairs[0], "$11": pairs[1]}
        check_columns(run(gemm.word_ptx(kind, 0), given), 4 * i, wanted, kind)


@pytest.mark.parametrize("values", [codebooks.IQ4_VALUES, codebooks.FP4_VALUES])
def test_nibble_lookup_ptx_matches_table(values: tuple[int, ...], rng: np.random.Generator) -> None:
    words = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    table = [np.full(words.shape, word & 0xFFFFFFFF, np.uint32) for word in compact_kinds.table_words(values)]
    given = {"$2": words, **{f"${3 + i}": word for i, word in enumerate(table)}}
    found = run(intrinsics.NIBBLE_LOOKUP_PTX.value, given)
    nibbles = words.view(np.uint8).reshape(-1, 4)
    for name, codes in (("$0", nibbles & 15), ("$1", nibbles >> 4)):
        np.testing.assert_array_equal(found[name].view(np.int8).reshape(-1, 4), np.array(values)[codes])


@pytest.mark.gpu
@pytest.mark.skipif(not device.has_wgmma(DEVICE), reason="needs a GPU of capability 9.0")
@pytest.mark.parametrize("kind", KINDS)
def test_hopper_kernel_matches_its_twin(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, blocks and tokens that fill no tile, in one split and in several: bit for bit where the splits are equally
    long. A token's result has the same bits in every tile."""
    torch.manual_seed(7)
    for rows, columns in ((200, 1408), (576, 2880), (64, 512), (3000, 4096)):
        w = packed_weight.PackedWeight(tuple(random_planes(kind, n, columns, DEVICE) for n in (rows, 72)))
        x, multiply = torch.randn(300, columns, device=DEVICE), linear.BatchedLinear(DEVICE, batch_invariant=True)
        alone = multiply(x[:1], w)
        splits = linear.invariant_splits(max(w.parts, key=lambda part: part.rows), DEVICE)
        tolerance = 1e-5 if -(-columns // linear.GROUP_COLUMNS) % splits else 0.0
        for tokens in (5, 16, 33, 64, 100, 300):
            found = multiply(x[:tokens], w)
            assert torch.equal(found[0], alone[0]), tokens
            with monkeypatch.context() as patch:
                patch.setattr(linear, "has_wgmma", lambda device: False)
                patch.setattr(linear, "invariant_splits", lambda *_, splits=splits: splits)
                wanted = multiply(x[:tokens], w)
            assert (found - wanted).norm() <= tolerance * wanted.norm(), (rows, columns, tokens)


def random_matrix(kind: str, rows: int, columns: int) -> packed_weight.PackedWeight:
    return packed_weight.PackedWeight((random_planes(kind, rows, columns, DEVICE),))


@pytest.mark.gpu
@pytest.mark.skipif(not device.has_wgmma(DEVICE), reason="needs a GPU of capability 9.0")
@pytest.mark.parametrize("kind", ["q4", "q4m", "q5m", "q6", "q8", "mxfp4"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_product_with_gates_matches_product_and_activation(
    kind: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of rows that fill no tile and no group of blocks; what a group lacks is zeros, and a token's result has the
    same bits in every tile."""
    torch.manual_seed(7)
    monkeypatch.setattr(linear, "invariant_splits", lambda *_: 1)
    multiply = linear.BatchedLinear(DEVICE, batch_invariant=True)
    for width in (608, 1024, 32):
        ones = multiply.convert(torch.ones(1, width, device=DEVICE), random_matrix("q4", 64, width))
        w, following = random_matrix(kind, 2 * width, 1408), random_matrix(kind, 64, width)
        rows, unit, first = torch.randn(300, 1408, device=DEVICE), 1.0, None
        for tokens in (1, 5, 8, 16, 33, 64, 100, 300):
            x = multiply.convert(rows[:tokens], w)
            found, wanted = (multiply.empty_activations(following, tokens) for _ in range(2))
            elementwise.launch_gated(multiply.multiply(x, w), wanted, activation)
            assert wanted.factors is not None
            theirs = wanted.values.view(4, tokens, -1).float() * wanted.factors[:, None]
            if first is None:
                unit = 2.0 ** (math.ceil(math.log2(float(theirs.abs().max()))) - 10)
            found.values.fill_(float("nan"))
            assert multiply.multiply_gated(x, w, activation, found._replace(unit=unit))
            ours = found.values.view(4, tokens, -1)
            assert (ours.float() * unit - theirs).norm() <= 1e-3 * theirs.norm(), (width, tokens)
            assert not ours[(ones.values.view(4, 1, -1) == 0).expand_as(ours)].any()
            first = ours[:, 0] if first is None else first
            assert torch.equal(ours[:, 0], first), (width, tokens)
