"""Quantization mixes against llama.cpp's choice of types."""

from __future__ import annotations

from llm_worker_rbee.weights.quant_mix import MIXES, Place, matrix_type


def test_matrix_type_fused_matrix_equals_llama_cpp() -> None:
    """Expected types are from files that llama.cpp's quantizer (2026-08) wrote of a phi3 (9 layers, width 256)."""
    types = {
        mix: [matrix_type(MIXES[mix], "attn_qkv", 256, Place(i, 9, 2), tied=False) for i in range(9)]
        for mix in ("Q4_0", "Q4_K_S", "Q4_K_M", "Q5_K_M")
    }
    more = [True, False, False, True, False, False, True, True, True]
    assert types == {
        "Q4_0": ["Q4_0"] * 9,
        "Q4_K_S": ["Q5_K"] * 4 + ["Q4_K"] * 5,
        "Q4_K_M": ["Q6_K" if bits else "Q4_K" for bits in more],
        "Q5_K_M": ["Q6_K" if bits else "Q5_K" for bits in more],
    }
