"""Compiles kernels for a Hopper GPU without one: `python -m tests.backends.cuda.compiling NAME...` tells what came out.

A process of its own, because the tests' own runs the kernels under the interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llm_worker_rbee.backends.cuda import attention_prefill, elementwise, fp8, gemm, gemv, sampling_kernels
from llm_worker_rbee.backends.cuda.attention_decode import decode_attention, decode_grouped

F, H, B16, F8, I4, I2, I8, D = "*fp32", "*fp16", "*bf16", "*fp8e4nv", "*i32", "*i16", "*i8", "*fp64"
OF_TYPE = {
    F: "xd xs squares out stream norm out_d out_s out_squares factors qkv cos sin partial extremes logits parts k v "
    "residual weight total q_norm k_norm bias",
    I4: "xq low high tables positions counters ids slots query_start context_len tile_request tile_first whole chosen "
    "top_ids",
    H: "scales x",
    B16: "w k_cache v_cache q_out q",
    "fp32": "eps unit scale",
}
TYPES = {name: kind for kind, names in OF_TYPE.items() for name in names.split()}
Case = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]  # kernel, types that differ, options, constants


def products() -> dict[str, Case]:
    base = {"PARTS": 128, "SIZE": 128, "PDL": True, "BYTES": True}
    cases: dict[str, Case] = {}
    pairs = ("q4m", "q5m", "q6", "q8d", "q4mm")
    for kind in ("q4", "q4m", "q5", "q5m", "q6", "q8", "q8d", "q4mm"):
        scales = {"scales": I4 if kind in pairs else H, "high": I2 if kind in ("q5", "q5m", "q6") else I4}
        one = {"blocks": 128, "B": 1, "KIND": kind, "ROWS": 8, "WARPS": 8, "AHEAD": 1, "EPILOGUE": 0, **base}
        cases[f"matvec {kind}"] = (gemv.matvec, scales, {"num_warps": 8}, one)
        many = {"blocks": 128, "KIND": kind, "BN": 128, "BM": 64}
        stages = 2 if kind in ("q5", "q5m") else 3
        cases[f"matmul {kind}"] = (gemm.matmul, scales, {"num_warps": 8, "num_stages": stages}, many)
        whole = {"KIND": kind, "ROWS": 8, "KB": 16}
        cases[f"dequantize {kind}"] = (gemm.dequantize, {"out": B16, **scales}, {}, whole)
        cases[f"embed {kind}"] = (
            elementwise.embed, {"out": I8, **scales}, {"num_warps": 1},
            {"width": 4096, "KIND": kind, "BYTES": True, "PDL": True},
        )  # fmt: skip
    residual = {"blocks": 128, "B": 1, "KIND": "q4m", "ROWS": 32, "WARPS": 8, "AHEAD": 4, "EPILOGUE": 1, **base}
    gates = {"blocks": 18, "B": 1, "KIND": "q8", "ROWS": 64, "WARPS": 4, "AHEAD": 2, "EPILOGUE": 2, **base}
    four = {"blocks": 128, "B": 4, "KIND": "q5m", "ROWS": 8, "WARPS": 4, "AHEAD": 2, "EPILOGUE": 0, **base, "PARTS": 0}
    plain = {"columns": 4096, "B": 1, "ROWS": 16, "WARPS": 4, "WIDE": 256, "AHEAD": 4, "EPILOGUE": 0, "PARTS": 128,
             "SIZE": 128, "PDL": True}  # fmt: skip
    cases["matvec residual"] = (gemv.matvec, {"out": I8, "scales": I4}, {"num_warps": 8}, residual)
    cases["matvec gates"] = (gemv.matvec, {"out": I8}, {"num_warps": 4, "maxnreg": 168}, gates)
    cases["matvec of four"] = (gemv.matvec, {"scales": I4}, {"num_warps": 4}, four)
    cases["matvec of numbers"] = (gemv.matvec_numbers, {"x": B16}, {"num_warps": 4}, plain)
    eight = {"x": B16, "w": F8, "scales": F}
    for name, tokens, epilogue in (("qkv", 1, 0), ("gate_up", 1, 2), ("down", 4, 1)):
        tile = dict(zip(("ROWS", "WARPS", "WIDE", "AHEAD"), fp8.TILES[tokens][name], strict=True))
        how = {**plain, **tile, "B": tokens, "EPILOGUE": epilogue}
        types = {**eight, "out": B16 if epilogue else F}
        cases[f"matvec of e4m3, {name}"] = (gemv.matvec_numbers, types, {"num_warps": tile["WARPS"]}, how)
    cases["round_rows"] = (gemv.round_rows, {"x": B16, "out": F8, "scales": F}, {}, {"SIZE": 4096})
    return cases


def others() -> dict[str, Case]:
    heads = {"HEADS": 32, "KV_HEADS": 8, "P": 16}
    shape = {"P": 16, "HALF": 64, "SPLITS": 16, "LEAST": 1, "PARTS": 1}
    plain = {"WINDOW": 0, "CAP": 0.0, "BYTES": True, "PDL": True}
    decode = {**shape, "HEADS": 32, "KV_HEADS": 32, "ROWS": 8, "STREAMS": 2, "STAGES": 0}
    grouped = {**shape, **heads, "SOME": 4, "T": tl.bfloat16}
    read = {**heads, "DIM": 128, "QUERIES": 64, "KEYS": 64, "WINDOW": 0, "CAP": 0.0}
    caches8 = {"k_cache": F8, "v_cache": F8}
    none = {"bias": None, "q_norm": None, "k_norm": None}
    return {
        "decode": (
            decode_attention, {"out": I8, "width": I4}, {"num_warps": 1},
            {**decode, **none, **plain},
        ),
        "decode staged": (
            decode_attention, {"out": B16, "width": I4}, {"num_warps": 1},
            {**decode, **none, **plain, "BYTES": False, "STAGES": 3},
        ),
        "decode float8, all": (
            decode_attention, {"out": B16, "width": I4, **caches8}, {"num_warps": 1},
            {**decode, "STREAMS": 4, "ROWS": 4, "WINDOW": 4096, "CAP": 50.0, "BYTES": False, "PDL": False},
        ),
        "decode grouped": (
            decode_grouped, {"out": I8, "width": I4}, {"num_warps": 4},
            {**grouped, **none, **plain, "TILE": 64, "STAGES": 3},
        ),
        "decode grouped float8, all": (
            decode_grouped, {"out": B16, "width": I4, **caches8}, {"num_warps": 1},
            {**grouped, "TILE": 16, "STAGES": 0, "WINDOW": 4096, "CAP": 50.0, "BYTES": False, "PDL": False},
        ),
        "prefill": (
            attention_prefill.prefill_attention, {"out": B16, "width": I4}, {"num_warps": 4, "num_stages": 2}, read,
        ),
        "prefill of 96, float8, window, cap": (
            attention_prefill.prefill_attention, caches8, {"num_warps": 4, "num_stages": 2},
            {**read, "DIM": 96, "SIZE": 128, "WINDOW": 512, "CAP": 50.0},
        ),
        "prefill of 256": (
            attention_prefill.prefill_attention, {}, {"num_warps": 4, "num_stages": 2},
            {**read, "DIM": 256, "SIZE": 256},
        ),
        "rope_store": (attention_prefill.rope_store, {}, {"num_warps": 4}, {**heads, "HALF": 64, "EACH": 8}),
        "rope_store, all": (
            attention_prefill.rope_store, {"bias": F, "q_norm": F, "k_norm": F}, {"num_warps": 1},
            {**heads, "HALF": 64, "PARTS": 2},
        ),
        "rotate_store": (
            elementwise.rotate_store, {"q": F}, {"num_warps": 1},
            {**heads, "DIM": 96, "SIZE": 128, "HALF": 24, "LARGEST": 0.0},
        ),
        "rotate_store float8": (
            elementwise.rotate_store, {"q": F, **caches8}, {"num_warps": 1},
            {**heads, "DIM": 128, "SIZE": 128, "HALF": 64, "LARGEST": 448.0},
        ),
        "norm_rows": (elementwise.norm_rows, {"x": F}, {"num_warps": 8}, {"width": 576, "SIZE": 1024, "ADD": True}),
        "gate_rows": (elementwise.gate_rows, {"x": F}, {}, {"SIZE": 1024, "GELU": True}),
        "to_bytes": (elementwise.to_bytes, {"x": F, "out": I8}, {"num_warps": 2}, {"KB": 8, "FINE": True}),
        "matmul of numbers": (
            gemm.matmul_numbers, {"x": B16}, {"num_warps": 8, "num_stages": 3},
            {"BN": 128, "BM": 64, "BK": 64, "SCALED": False},
        ),
        "matmul of numbers, e4m3": (
            gemm.matmul_numbers, {"x": B16, "w": F8, "scales": F}, {"num_warps": 8, "num_stages": 3},
            {"BN": 128, "BM": 64, "BK": 64, "SCALED": True},
        ),
        "spread": (gemm.spread, {"out": H}, {}, {"KB": 16, "TOKENS": 8}),
        "embed numbers": (
            elementwise.embed, {"low": B16, "out": B16}, {"num_warps": 1},
            {"width": 576, "KIND": "numbers", "BYTES": False, "PDL": True},
        ),
        "add_norm": (
            elementwise.add_norm, {"out": H}, {"num_warps": 8},
            {"width": 4096, "SIZE": 128, "SPLIT": 4, "SPREAD": True},
        ),
        "add_norm e4m3": (
            elementwise.add_norm, {"out": F8, "parts": B16}, {"num_warps": 8},
            {"width": 4096, "SIZE": 128, "SPLIT": 1, "SPREAD": False},
        ),
        "gated": (
            elementwise.gated, {"out": H}, {"num_warps": 16},
            {"width": 11008, "SIZE": 512, "SPLIT": 2, "SPREAD": True},
        ),
        "greedy": (sampling_kernels.greedy, {"out": I4}, {"num_warps": 16}, {"BLOCK": 4096}),
        "score": (sampling_kernels.score, {"k": "i32"}, {"num_warps": 16}, {"BLOCK": 4096}),
        "choose": (
            sampling_kernels.choose, {"real": D, "biases": D, "scratch": D, "some": D, "out": I4}, {"num_warps": 32},
            {"BLOCK": 4096, "SOME": 256},
        ),
    }  # fmt: skip


CASES = {**products(), **others()}


def compiled(
    kernel: Any, types: dict[str, Any], options: dict[str, Any], constants: dict[str, Any], capability: int = 90
) -> Any:
    """For compute capability 9.0, with every pointer and number a multiple of 16, as those of a model are."""
    signature, values, attributes = {}, {}, {}
    constants = {**constants, **{name: None for name, kind in types.items() if kind is None}}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants or parameter.is_constexpr or (parameter.default is None and name not in types):
            signature[name] = "constexpr"
            values[(i,)] = constants.get(name, parameter.default)
            continue
        signature[name] = types.get(name) or TYPES.get(name, "i32")
        if not signature[name].startswith("fp"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def shared_on_small() -> dict[str, int]:
    """Shared memory of the tiles that GPUs with less of it take, by kernel: compute capability 8.9."""
    from llm_worker_rbee.backends.cuda.linear import SMALL

    found = {}
    for kind in ("q4", "q5m", "q6", "q8d", "q4mm"):
        kernel, types, _, constants = CASES[f"matmul {kind}"]
        constants = {**constants, "BN": SMALL.rows, "BM": SMALL.tokens}
        options = {"num_warps": SMALL.warps, "num_stages": SMALL.stages}
        found[f"matmul {kind}"] = compiled(kernel, types, options, constants, 89).metadata.shared
    kernel, types, _, constants = CASES["prefill"]
    for dim, keys, kind in ((128, 64, B16), (256, 32, B16), (128, 32, F), (256, 16, F)):
        given = {**types, **dict.fromkeys(("q", "k_cache", "v_cache"), kind)}
        sizes = {**constants, "DIM": dim, "SIZE": dim, "KEYS": keys}
        options = {"num_warps": 4, "num_stages": 2 if keys == 64 else 1}
        found[f"prefill {dim} {kind}"] = compiled(kernel, given, options, sizes, 89).metadata.shared
    return found


def main(names: list[str]) -> None:
    """For each kernel the words of its PTX that the tests look for; for none the shared memory of small tiles."""
    if names == ["small tiles"]:
        print(json.dumps(shared_on_small()))
        return
    words = (
        "dp4a",
        ".v4.b32",
        "wgmma.mma_async",
        "mma.sync",
        "st.shared",
        "cp.async.cg",
        "griddepcontrol.wait",
        "f16x2.e4m3x2",
        "e4m3x2.f32",
    )
    found = {}
    for name in names:
        ptx = compiled(*CASES[name]).asm["ptx"]
        found[name] = [word for word in words if word in ptx] + [f"{ptx.count('st.shared')} st.shared"]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
