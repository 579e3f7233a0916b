"""Compile kernels for a Hopper GPU without one: `python -m tests.helpers.cuda_kernels NAME...` prints facts as JSON.

It runs in a child process, because the tests' process runs kernels under the interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from llm_worker_bench.backends import cuda_parts as op_parts
from llm_worker_rbee.backends.cuda.kernels import (
    attention_prefill,
    causal_conv,
    elementwise,
    encoder,
    gated_delta,
    gemm,
    gemm_hopper,
    gemv,
    rope,
    sampling,
)
from llm_worker_rbee.backends.cuda.kernels.attention_decode import decode_attention, decode_attention_gqa
from llm_worker_rbee.backends.cuda.kernels.compact_kinds import CODEBOOKS, COMPACT_KINDS
from llm_worker_rbee.backends.cuda.linear import E4M3_TILES, hopper_tile
from llm_worker_rbee.backends.cuda.packed_weight import HIGH_WORDS, LOW_WORDS, PAIRED_SCALES

F, H, B16, F8, I4, I2, I8, D = "*fp32", "*fp16", "*bf16", "*fp8e4nv", "*i32", "*i16", "*i8", "*fp64"
PARAMETERS_BY_TYPE = {
    F: "x_scales x_sums squares out residual norm out_scales out_sums out_squares factors qkv cos sin partial "
    "stats logits parts k v weight total gates a dt_bias matrices gate u scores q_norm k_norm bias q_scale sinks "
    "part_factors part_bias stream",
    I4: "x_codes low high block_tables positions counters ids slot_mapping query_start context_len tile_request "
    "tile_first num_tiles ints chosen top_ids pending wanted mask_index masks state_in state_out "
    "num_requests token_request",
    H: "scales x",
    B16: "w k_cache v_cache q_out q",
    "fp32": "eps post_eps unit scale qk_scale",
}
DELTA_HEADS = {"K_HEADS": 16, "V_HEADS": 32, "K_DIM": 128, "V_DIM": 128, "IS_TILED": True}
TYPES = {name: kind for kind, names in PARAMETERS_BY_TYPE.items() for name in names.split()}
COMPACT = ("q2_k", "q3_k", "tq1_0", "iq4_xs", "iq2_s", "iq3_s", "iq1_m")  # one for each way of making codes
COMPACT_GEMM = ("q3_k", "iq4_xs", "iq2_s")  # compiling takes seconds
Case = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]  # kernel, types that differ, options, constants


def plane_types(kind: str) -> dict[str, str]:
    """Return the dtypes of a kind's planes."""
    if kind not in COMPACT_KINDS:
        return {"scales": I4 if kind in PAIRED_SCALES else H, "high": I2}
    layout = COMPACT_KINDS[kind]
    types = {"scales": I4 if layout.has_pairs else H, "high": I2}
    if layout.small:
        types["small"] = I8 if layout.small == 8 else I2
    if layout.codes in CODEBOOKS:
        types["table"] = I4 if layout.codes == "rows of 4" else "*i64"
    return types


def product_cases() -> dict[str, Case]:
    base = {"NORM_PARTS": 128, "NORM_SIZE": 128, "PDL": True, "INT8": True}
    cases: dict[str, Case] = {}
    for kind in ("q4", "q4m", "q5", "q5m", "q6", "q8", "e4m3", *COMPACT):
        scales = plane_types(kind)
        one = {"blocks": 128, "B": 1, "KIND": kind, "ROWS": 8, "WARPS": 8, "PREFETCH": 1, "EPILOGUE": 0, **base}
        cases[f"gemv {kind}"] = (gemv.gemv_packed, scales, {"num_warps": 8}, one)
        if kind in COMPACT and kind not in COMPACT_GEMM:
            continue
        many = {"blocks": 128, "KIND": kind, "BN": 128, "BM": 64}
        stages = 2 if kind in ("q5", "q5m", *COMPACT_KINDS) else 3
        cases[f"gemm {kind}"] = (gemm.gemm_packed, scales, {"num_warps": 8, "num_stages": stages}, many)
        whole = {"KIND": kind, "ROWS": 8, "TILE_BLOCKS": 16}
        cases[f"dequantize {kind}"] = (gemm.dequantize, {"out": B16, **scales}, {}, whole)
        cases[f"embed {kind}"] = (
            elementwise.embed_rows, {"out": I8, **scales}, {"num_warps": 1},
            {"width": 4096, "KIND": kind, "INT8": True, "PDL": True},
        )  # fmt: skip
    residual = {"blocks": 128, "B": 1, "KIND": "q4m", "ROWS": 32, "WARPS": 8, "PREFETCH": 4, "EPILOGUE": 1, **base}
    gates = {"blocks": 18, "B": 1, "KIND": "q8", "ROWS": 64, "WARPS": 4, "PREFETCH": 2, "EPILOGUE": 2, **base}
    four = {
        "blocks": 128,
        "B": 4,
        "KIND": "q5m",
        "ROWS": 8,
        "WARPS": 4,
        "PREFETCH": 2,
        "EPILOGUE": 0,
        **base,
        "NORM_PARTS": 0,
    }
    plain = {"columns": 4096, "B": 1, "ROWS": 16, "WARPS": 4, "TILE_K": 256, "PREFETCH": 4, "EPILOGUE": 0,
             "NORM_PARTS": 128, "NORM_SIZE": 128, "PDL": True}  # fmt: skip
    cases["gemv residual"] = (gemv.gemv_packed, {"out": I8, "scales": I4}, {"num_warps": 8}, residual)
    cases["gemv gated"] = (gemv.gemv_packed, {"out": I8}, {"num_warps": 4, "maxnreg": 168}, gates)
    slots = {
        **gates,
        "blocks": 90,
        "KIND": "mxfp4",
        "WARPS": 8,
        "PREFETCH": 1,
        "STRIDE": 5760,
        "ACTIVATION": "swiglu_oai",
    }
    cases["gemv experts"] = (gemv.gemv_packed, {"out": I8, "experts": I4, "bias": F}, {"num_warps": 8}, slots)
    tiles = {"blocks": 90, "KIND": "mxfp4", "BN": 128, "BM": 64, "SLOTS": 4}
    lists = {"tile_experts": I4, "tile_slots": I4, "bias": F}
    cases["gemm experts"] = (gemm.gemm_packed, lists, {"num_warps": 8, "num_stages": 3}, tiles)
    cases["gemv 4 tokens"] = (gemv.gemv_packed, {"scales": I4}, {"num_warps": 4}, four)
    cases["gemv dense"] = (gemv.gemv_dense, {"x": B16}, {"num_warps": 4}, plain)
    eight = {"x": B16, "w": F8, "scales": F}
    for name, tokens, epilogue in (("qkv", 1, 0), ("gate_up", 1, 2), ("down", 4, 1)):
        tile = dict(zip(("ROWS", "WARPS", "TILE_K", "PREFETCH"), E4M3_TILES[tokens][name], strict=True))
        how = {**plain, **tile, "B": tokens, "EPILOGUE": epilogue}
        types = {**eight, "out": B16 if epilogue else F}
        cases[f"gemv e4m3 {name}"] = (gemv.gemv_dense, types, {"num_warps": tile["WARPS"]}, how)
    return cases


def box_type(dtype: str, *box: int) -> str:
    """Return the type of a descriptor of boxes, as `gemm_hopper.describe_boxes` makes them."""
    bits = {"fp16": 16, "i16": 16, "i32": 32}[dtype]
    return f"tensordesc<{dtype}{list(box)},{gl.NVMMASharedLayout(min(128, box[-1] * bits // 8), bits, len(box))!r}>"


def hopper_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for kind, tokens, activation in (
        *(("q4m", tokens, activation) for tokens in (8, 16, 32, 64, 128) for activation in ("", "silu")),
        *((kind, tokens, "") for kind in ("q5m", "q6", "q8") for tokens in (16, 128)),
        ("q6", 128, "gelu"),
        ("q8", 64, "gelu_tanh"),
    ):
        tile = hopper_tile(tokens, kind)
        words, high = 4 if tile.tokens <= gemm_hopper.SMALL_TILE_TOKENS else 1, HIGH_WORDS.get(kind, 0)
        box = (2, tile.rows // 2, 16) if activation else (1, tile.rows, 16)
        types = {
            "x_desc": box_type("fp16", words, 2, tile.tokens, 64),
            "low_desc": box_type("i32", LOW_WORDS.get(kind, 4) // 4, words, *box),
            "high_desc": box_type("i16", max(1, words * high // 4), *box) if high else None,
            "scales_desc": box_type("i32" if kind in PAIRED_SCALES else "fp16", *box),
            "out": H if activation else F,
            "out_factor": "fp32",
        }
        constants = {"BLOCKS": 128, "KIND": kind, "BN": tile.rows, "BM": tile.tokens, "STAGES": tile.stages}
        starts = {"ACTIVATION": activation, "STARTS_NEXT": "late" if activation else "early"}
        name = f"gemm hopper {kind} {tokens} {activation}".strip()
        cases[name] = (gemm_hopper.gemm_hopper, types, {"num_warps": tile.warps}, {**constants, **starts})
    kernel, types, options, constants = cases["gemm hopper q4m 64"]
    lists = {"tile_experts": I4, "slots": I4, "bias": F}
    of_experts = {**constants, "SLOTS": 4, "STARTS_NEXT": ""}
    cases["gemm hopper experts"] = (kernel, {**types, **lists}, options, of_experts)
    return cases


def other_cases() -> dict[str, Case]:
    heads = {"HEADS": 32, "KV_HEADS": 8, "P": 16}
    shape = {"P": 16, "DIM": 128, "HALF": 64, "SPLITS": 16, "MIN_TILES": 1, "PARTS": 1}
    plain = {"WINDOW": 0, "CAP": 0.0, "FORM": 1, "PDL": True}
    decode = {**shape, "HEADS": 32, "KV_HEADS": 32, "RUN_KEYS": 8, "RUNS": 2, "STAGES": 0}
    grouped = {**shape, **heads, "GROUP_PAD": 4, "DOT_TYPE": tl.bfloat16}
    read = {**heads, "DIM": 128, "TILE_QUERIES": 64, "TILE_KEYS": 64, "WINDOW": 0, "CAP": 0.0}
    caches8 = {"k_cache": F8, "v_cache": F8}
    none = {"bias": None, "q_norm": None, "k_norm": None, "q_scale": None, "sinks": None}
    return {
        "decode": (
            decode_attention, {"out": I8, "table_width": I4}, {"num_warps": 1},
            {**decode, **none, **plain},
        ),
        "decode staged": (
            decode_attention, {"out": B16, "table_width": I4}, {"num_warps": 1},
            {**decode, **none, **plain, "FORM": 0, "STAGES": 3},
        ),
        "decode float8 all": (
            decode_attention, {"out": B16, "table_width": I4, **caches8}, {"num_warps": 1},
            {**decode, "RUNS": 4, "RUN_KEYS": 4, "WINDOW": 4096, "CAP": 50.0, "FORM": 0, "PDL": False},
        ),
        "decode dim 96": (
            decode_attention, {"out": I8, "table_width": I4}, {"num_warps": 1},
            {**decode, **none, **plain, "DIM": 96, "HALF": 48},
        ),
        "decode dim 80 part": (
            decode_attention, {"out": B16, "table_width": I4}, {"num_warps": 2},
            {**decode, **plain, "DIM": 80, "HALF": 10, "FORM": 0},
        ),
        "decode gqa": (
            decode_attention_gqa, {"out": I8, "table_width": I4}, {"num_warps": 4},
            {**grouped, **none, **plain, "TILE": 64, "STAGES": 3},
        ),
        "decode gqa float8 all": (
            decode_attention_gqa, {"out": B16, "table_width": I4, "sinks": F, **caches8}, {"num_warps": 1},
            {**grouped, "TILE": 16, "STAGES": 0, "WINDOW": 4096, "CAP": 50.0, "FORM": 0, "PDL": False},
        ),
        "decode gqa dim 96": (
            decode_attention_gqa, {"out": I8, "table_width": I4}, {"num_warps": 1},
            {**grouped, **none, **plain, "DIM": 96, "HALF": 48, "TILE": 32, "STAGES": 3},
        ),
        "decode gqa part": (
            decode_attention_gqa, {"out": I8, "table_width": I4, **caches8}, {"num_warps": 1},
            {**grouped, **none, **plain, "HALF": 48, "TILE": 16, "STAGES": 0},
        ),
        "decode gqa shared": (
            decode_attention_gqa, {"out": I8, "table_width": I4}, {"num_warps": 4},
            {**grouped, **none, **plain, "DIM": 256, "HALF": 128, "TILE": 16, "STAGES": 0, "SHARED": True},
        ),
        "prefill": (
            attention_prefill.prefill_attention, {"out": B16, "table_width": I4, "sinks": F},
            {"num_warps": 4, "num_stages": 2},
            read,
        ),
        "prefill dim 96 float8 window cap": (
            attention_prefill.prefill_attention, {"table_width": I4, **caches8}, {"num_warps": 4, "num_stages": 2},
            {**read, "DIM": 96, "WINDOW": 512, "CAP": 50.0},
        ),
        "prefill both directions": (
            attention_prefill.prefill_attention, {"out": H, "table_width": I4, **dict.fromkeys(("q", *caches8), H)},
            {"num_warps": 4, "num_stages": 2},
            {**read, "HEADS": 16, "KV_HEADS": 16, "DIM": 64, "CAUSAL": False},
        ),
        "prefill window to both sides": (
            attention_prefill.prefill_attention, {"table_width": I4}, {"num_warps": 4, "num_stages": 2},
            {**read, "DIM": 64, "WINDOW": 128, "CAUSAL": False},
        ),
        "prefill spans": (
            attention_prefill.prefill_attention, {"out": B16, "table_width": I4, "spans": I4},
            {"num_warps": 4, "num_stages": 2},
            {**read, "WINDOW": 512},
        ),
        "prefill spans both directions": (
            attention_prefill.prefill_attention, {"table_width": I4, "spans": I4}, {"num_warps": 4, "num_stages": 2},
            {**read, "HEADS": 16, "KV_HEADS": 16, "DIM": 80, "CAUSAL": False},
        ),
        "decode turns": (
            decode_attention, {"out": I8, "table_width": I4, "rope_positions": I4}, {"num_warps": 1},
            {**decode, **none, **plain},
        ),
        "decode gqa turns": (
            decode_attention_gqa, {"out": I8, "table_width": I4, "rope_positions": I4}, {"num_warps": 4},
            {**grouped, **none, **plain, "TILE": 64, "STAGES": 3},
        ),
        "prefill dim 256": (
            attention_prefill.prefill_attention, {"table_width": I4}, {"num_warps": 4, "num_stages": 2},
            {**read, "DIM": 256},
        ),
        "score_tile": (
            op_parts.score_tile, {"q": F, "k": F}, {"num_warps": 4},
            {"HEADS": 32, "DIM": 128, "TILE_QUERIES": 64, "TILE_KEYS": 64},
        ),
        "rope_store_qkv": (
            rope.rope_store_qkv, {}, {"num_warps": 4},
            {**heads, "DIM": 128, "HALF": 64, "HEADS_PER_PROGRAM": 8},
        ),
        "rope_store_qkv dim 96 part": (
            rope.rope_store_qkv, {"bias": F}, {"num_warps": 4},
            {**heads, "DIM": 96, "HALF": 24, "HEADS_PER_PROGRAM": 8},
        ),
        "rope_store_qkv all": (
            rope.rope_store_qkv, {"bias": F, "q_norm": F, "k_norm": F}, {"num_warps": 1},
            {**heads, "DIM": 128, "HALF": 64, "PARTS": 2, "EXACT": True},
        ),
        "rms_norm_rows": (
            elementwise.rms_norm_rows, {"x": F}, {"num_warps": 1}, {"width": 96, "SIZE": 128, "EXACT": True},
        ),
        "gemm dense": (
            gemm.gemm_dense, {"x": B16}, {"num_warps": 8, "num_stages": 3},
            {"BN": 128, "BM": 64, "BK": 64, "SCALED": False},
        ),
        "gemm dense e4m3": (
            gemm.gemm_dense, {"x": B16, "w": F8, "scales": F}, {"num_warps": 8, "num_stages": 3},
            {"BN": 128, "BM": 64, "BK": 64, "SCALED": True},
        ),
        "convert_rows": (
            elementwise.convert_rows, {"x": F, "out": H}, {"num_warps": 8},
            {"width": 4096, "SIZE": 128, "INTERLEAVED": True},
        ),
        "convert_rows e4m3": (
            elementwise.convert_rows, {"x": B16, "out": F8}, {"num_warps": 8},
            {"width": 4096, "SIZE": 128, "INTERLEAVED": False},
        ),
        "embed dense": (
            elementwise.embed_rows, {"low": B16, "out": B16}, {"num_warps": 1},
            {"width": 576, "KIND": "dense", "INT8": False, "PDL": True},
        ),
        "add_rms_norm_rows": (
            elementwise.add_rms_norm_rows, {"out": H, "post": F, "index": I4, "bias": F}, {"num_warps": 8},
            {"width": 4096, "SIZE": 128, "SPLITS": 4, "INTERLEAVED": True, "EXACT": True},
        ),
        "add_rms_norm_rows e4m3": (
            elementwise.add_rms_norm_rows, {"out": F8, "parts": B16}, {"num_warps": 8},
            {"width": 4096, "SIZE": 128, "SPLITS": 1, "INTERLEAVED": False},
        ),
        "add_rms_norm_rows experts": (
            elementwise.add_rms_norm_rows,
            {"out": I8, "norm": None, "post": F, "weights": F, "shared": F, "sum_norm": F, "shared_norm": F},
            {"num_warps": 8},
            {"width": 2816, "SIZE": 128, "SPLITS": 1, "INTERLEAVED": False, "K": 8, "PDL": True},
        ),
        "add_norm_rows": (
            encoder.add_norm_rows, {"out": H, "total": None, "rows": F, "post": None}, {"num_warps": 4},
            {"width": 1024, "SIZE": 32, "SPLITS": 1, "INTERLEAVED": False, "CENTERED": True},
        ),
        "add_norm_rows all": (
            encoder.add_norm_rows, {"out": H, "rows": None, "post": F, "stream_scale": "fp32"},
            {"num_warps": 8},
            {"width": 768, "SIZE": 32, "SPLITS": 4, "INTERLEAVED": True, "CENTERED": True, "EXACT": True},
        ),
        "activate_rows": (
            encoder.activate_rows, {"out": H, "rows": None}, {"num_warps": 8},
            {"width": 4096, "SIZE": 128, "SPLITS": 1, "INTERLEAVED": False, "ACTIVATION": "gelu", "GATED": False},
        ),
        "mean_of_rows": (
            encoder.mean_of_rows, {"x": F}, {"num_warps": 4}, {"ROWS": 16, "COLUMNS": 128},
        ),
        "swiglu_rows": (
            elementwise.swiglu_rows, {"out": H}, {"num_warps": 16},
            {"width": 11008, "SIZE": 512, "SPLITS": 2, "INTERLEAVED": True},
        ),
        "swiglu_rows inputs": (
            elementwise.swiglu_rows, {"out": I8, "inputs": F}, {"num_warps": 1},
            {"width": 256, "SIZE": 16, "SPLITS": 1, "INTERLEAVED": False, "ACTIVATION": "gelu_tanh", "PDL": True},
        ),
        "conv_tokens": (
            causal_conv.conv_tokens, {"x": F, "state": F}, {"num_warps": 4},
            {"CHANNELS": 8192, "KERNEL": 4, "SILU": True, "GATED": False, "BLOCK": 256, "WRITES": True, "PDL": True},
        ),
        "conv_states": (
            causal_conv.conv_states, {"x": B16, "state": F}, {"num_warps": 4},
            {"CHANNELS": 2048, "KERNEL": 3, "GATED": True, "BLOCK": 256, "RUN": 128, "TAIL": 2},
        ),
        "delta_tokens": (
            gated_delta.delta_tokens, {}, {"num_warps": gated_delta.DELTA_WARPS},
            {**DELTA_HEADS, "K_SIZE": 128, "COLUMNS": gated_delta.COLUMNS, "PDL": True},
        ),
        "prepare_chunks": (
            gated_delta.prepare_chunks, {"w": F}, {"num_warps": 8, "num_stages": 1},
            {**DELTA_HEADS, "CHUNK": 64, "SHORT": 32},
        ),
        "delta_chunks": (
            gated_delta.delta_chunks, {"w": F}, {"num_warps": 4, "num_stages": 1},
            {**DELTA_HEADS, "CHUNK": 64, "COLUMNS": gated_delta.CHUNK_COLUMNS, "SHORT": 32},
        ),
        "gate_rows": (
            gated_delta.gate_rows, {"x": F, "out": H, "norm": F}, {"num_warps": 8},
            {"width": 4096, "SIZE": 128, "INTERLEAVED": True, "DIM": 128},
        ),
        "fill_pending_ids": (elementwise.fill_pending_ids, {}, {"num_warps": 2}, {"BLOCK": 256}),
        "argmax_rows": (sampling.argmax_rows, {"out": I4}, {"num_warps": 16}, {"BLOCK": 4096}),
        "logprob_rows": (sampling.logprob_rows, {"k": "i32"}, {"num_warps": 16}, {"BLOCK": 4096}),
        "sample_rows": (
            sampling.sample_rows, {"floats": D, "biases": D, "scratch": D, "candidate_scratch": D, "out": I4},
            {"num_warps": 32},
            {"BLOCK": 4096, "LIST_TILE": 256},
        ),
    }  # fmt: skip


CASES = {**product_cases(), **hopper_cases(), **other_cases()}


def compile_case(
    kernel: Any, types: dict[str, Any], options: dict[str, Any], constants: dict[str, Any], capability: int = 90
) -> Any:
    """Compile a kernel with every pointer and every integer of a model a multiple of 16; others are not specialized."""
    signature, values, attributes = {}, {}, {}
    constants = {**constants, **{name: None for name, kind in types.items() if kind is None}}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants or parameter.is_constexpr or (parameter.default is None and name not in types):
            signature[name] = "constexpr"
            values[(i,)] = constants.get(name, parameter.default)
            continue
        signature[name] = types.get(name) or TYPES.get(name, "i32")
        if not signature[name].startswith(("fp", "tensordesc")) and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    make_source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = make_source(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(compiled: Any) -> int:
    """Return the local memory of a thread: spilled registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", done.stdout))


def is_serialized(compiled: Any) -> bool:
    """Return whether ptxas makes each wgmma wait for the one before (C7510 to C7515), which is no error."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return re.search(r"C751\d", done.stderr) is not None


def shared_memory_of_small_tiles() -> dict[str, int]:
    """Return the shared memory of the tiles for GPUs with less of it, by kernel, for compute capability 8.9."""
    from llm_worker_rbee.backends.cuda.linear import SMALL_SHARED_COMPACT_TILE, SMALL_SHARED_TILE

    found = {}
    for kind in ("q4", "q5m", "q6", "q8", "q3_k", "iq2_s"):
        kernel, types, _, constants = CASES[f"gemm {kind}"]
        tile = SMALL_SHARED_COMPACT_TILE if kind in COMPACT_KINDS else SMALL_SHARED_TILE
        constants = {**constants, "BN": tile.rows, "BM": tile.tokens}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        found[f"gemm {kind}"] = compile_case(kernel, types, options, constants, 89).metadata.shared
    kernel, types, _, constants = CASES["prefill"]
    for dim, keys, kind in ((128, 64, B16), (256, 32, B16), (128, 32, F), (256, 16, F)):
        given = {**types, **dict.fromkeys(("q", "k_cache", "v_cache"), kind)}
        sizes = {**constants, "DIM": dim, "TILE_KEYS": keys}
        options = {"num_warps": 4, "num_stages": 2 if keys == 64 else 1}
        found[f"prefill {dim} {kind}"] = compile_case(kernel, given, options, sizes, 89).metadata.shared
    return found


def main(names: list[str]) -> None:
    """Print which instructions the PTX of each kernel has, or the shared memory of small tiles."""
    if names == ["small tiles"]:
        print(json.dumps(shared_memory_of_small_tiles()))
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
        compiled = compile_case(*CASES[name])
        ptx = compiled.asm["ptx"]
        found[name] = [word for word in words if word in ptx] + [f"{ptx.count('st.shared')} st.shared"]
        found[name].append(f"{stack_bytes(compiled)} bytes of stack")
        if name.startswith("gemm hopper"):
            found[name].append("serialized" if is_serialized(compiled) else "not serialized")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
