"""Which type llama.cpp gives each tensor: facts, read from files that its own quantizer wrote.

Made with `llama_model_quantize` of llama-cpp-python 0.3.36 (llama.cpp of 2026-08-22), default parameters, from float32
files of random weights of the shapes below. A line: token_embd, output (- where tied), then for attn_q, attn_k, attn_v,
attn_output, ffn_gate, ffn_up, ffn_down the types over the layers, runs as TYPExN.
"""

from tests.helpers.synthetic import Shape

SHAPES = {
    "plain": Shape(20, 256, 4, 4, 512, 300, 64),
    "shared": Shape(16, 256, 8, 2, 512, 300, 64, tied=True),  # four query heads on a KV head
    "odd": Shape(9, 96, 3, 1, 256, 300, 64),  # rows that no block of 256 fits
    "odder": Shape(4, 80, 4, 4, 128, 300, 64),  # rows that no block of 32 fits
}
TYPES: dict[str, dict[str, str]] = {
    "plain": {
        "F32": "F32 F32 F32 F32 F32 F32 F32 F32 F32",
        "F16": "F16 F16 F16 F16 F16 F16 F16 F16 F16",
        "BF16": "BF16 BF16 BF16 BF16 BF16 BF16 BF16 BF16 BF16",
        "Q4_0": "Q4_0 Q6_K Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0",
        "Q4_1": "Q4_1 Q6_K Q4_1 Q4_1 Q4_1 Q4_1 Q4_1 Q4_1 Q4_1",
        "Q5_0": "Q5_0 Q6_K Q5_0 Q5_0 Q5_0 Q5_0 Q5_0 Q5_0 Q5_0",
        "Q5_1": "Q5_1 Q6_K Q5_1 Q5_1 Q5_1 Q5_1 Q5_1 Q5_1 Q5_1",
        "Q8_0": "Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0",
        "Q2_K": "Q2_K Q6_K Q2_K Q2_K Q3_K Q3_K Q2_K Q2_K Q3_K",
        "Q3_K_S": "Q3_K Q6_K Q3_K Q3_K Q3_K Q3_K Q3_K Q3_K Q3_K",
        "Q3_K_M": "Q3_K Q6_K Q3_K Q3_K Q5_Kx2,Q4_Kx18 Q4_K Q3_K Q3_K Q5_Kx1,Q4_Kx19",
        "Q3_K_L": "Q3_K Q6_K Q3_K Q3_K Q5_K Q5_K Q3_K Q3_K Q5_K",
        "Q4_K_S": "Q4_K Q6_K Q4_K Q4_K Q5_Kx4,Q4_Kx16 Q4_K Q4_K Q4_K Q5_Kx2,Q4_Kx18",
        "Q4_K_M": (
            "Q4_K Q6_K Q4_K Q4_K Q6_Kx2,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx4 "
            "Q4_K Q4_K Q4_K Q6_Kx2,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx4"
        ),
        "Q5_K_S": "Q5_K Q6_K Q5_K Q5_K Q5_K Q5_K Q5_K Q5_K Q5_K",
        "Q5_K_M": (
            "Q5_K Q6_K Q5_K Q5_K Q6_Kx2,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx4 "
            "Q5_K Q5_K Q5_K Q6_Kx2,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx4"
        ),
        "Q6_K": "Q6_K Q6_K Q6_K Q6_K Q6_K Q6_K Q6_K Q6_K Q6_K",
        "IQ4_NL": "IQ4_NL Q6_K IQ4_NL IQ4_NL IQ4_NL IQ4_NL IQ4_NL IQ4_NL Q5_Kx2,IQ4_NLx18",
        "IQ4_XS": "IQ4_XS Q6_K IQ4_XS IQ4_XS IQ4_XS IQ4_XS IQ4_XS IQ4_XS Q5_Kx2,IQ4_XSx18",
    },
    "shared": {
        "F32": "F32 - F32 F32 F32 F32 F32 F32 F32",
        "F16": "F16 - F16 F16 F16 F16 F16 F16 F16",
        "BF16": "BF16 - BF16 BF16 BF16 BF16 BF16 BF16 BF16",
        "Q4_0": "Q6_K - Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0",
        "Q4_1": "Q6_K - Q4_1 Q4_1 Q4_1 Q4_1 Q4_1 Q4_1 Q4_1",
        "Q5_0": "Q6_K - Q5_0 Q5_0 Q5_0 Q5_0 Q5_0 Q5_0 Q5_0",
        "Q5_1": "Q6_K - Q5_1 Q5_1 Q5_1 Q5_1 Q5_1 Q5_1 Q5_1",
        "Q8_0": "Q8_0 - Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0",
        "Q2_K": "Q6_K - Q2_K Q2_K Q4_K Q3_K Q2_K Q2_K Q3_K",
        "Q3_K_S": "Q6_K - Q3_K Q3_K Q3_K Q3_K Q3_K Q3_K Q3_K",
        "Q3_K_M": "Q6_K - Q3_K Q3_K Q5_Kx2,Q4_Kx14 Q4_K Q3_K Q3_K Q5_Kx1,Q4_Kx15",
        "Q3_K_L": "Q6_K - Q3_K Q3_K Q5_K Q5_K Q3_K Q3_K Q5_K",
        "Q4_K_S": "Q6_K - Q4_K Q4_K Q5_Kx4,Q4_Kx12 Q4_K Q4_K Q4_K Q5_Kx2,Q4_Kx14",
        "Q4_K_M": (
            "Q6_K - Q4_K Q4_K Q6_Kx2,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx3 "
            "Q4_K Q4_K Q4_K Q6_Kx2,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx3"
        ),
        "Q5_K_S": "Q6_K - Q5_K Q5_K Q5_K Q5_K Q5_K Q5_K Q5_K",
        "Q5_K_M": (
            "Q6_K - Q5_K Q5_K Q6_Kx2,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx3 "
            "Q5_K Q5_K Q5_K Q6_Kx2,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx3"
        ),
        "Q6_K": "Q6_K - Q6_K Q6_K Q6_K Q6_K Q6_K Q6_K Q6_K",
        "IQ4_NL": "Q6_K - IQ4_NL IQ4_NL Q5_K IQ4_NL IQ4_NL IQ4_NL Q5_Kx2,IQ4_NLx14",
        "IQ4_XS": "Q6_K - IQ4_XS IQ4_XS Q5_K IQ4_XS IQ4_XS IQ4_XS Q5_Kx2,IQ4_XSx14",
    },
    "odd": {
        "F32": "F32 F32 F32 F32 F32 F32 F32 F32 F32",
        "F16": "F16 F16 F16 F16 F16 F16 F16 F16 F16",
        "BF16": "BF16 BF16 BF16 BF16 BF16 BF16 BF16 BF16 BF16",
        "Q4_0": "Q4_0 Q8_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0",
        "Q4_1": "Q4_1 Q8_0 Q4_1 Q4_1 Q4_1 Q4_1 Q4_1 Q4_1 Q4_1",
        "Q5_0": "Q5_0 Q8_0 Q5_0 Q5_0 Q5_0 Q5_0 Q5_0 Q5_0 Q5_0",
        "Q5_1": "Q5_1 Q8_0 Q5_1 Q5_1 Q5_1 Q5_1 Q5_1 Q5_1 Q5_1",
        "Q8_0": "Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0",
        "Q2_K": "Q4_0 Q8_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q3_K",
        "Q3_K_S": "Q4_0 Q8_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q4_0 Q3_K",
        "Q3_K_M": "Q4_0 Q8_0 Q4_0 Q4_0 Q5_1x2,Q5_0x7 Q5_0 Q4_0 Q4_0 Q4_K",
        "Q3_K_L": "Q4_0 Q8_0 Q4_0 Q4_0 Q5_1 Q5_1 Q4_0 Q4_0 Q5_K",
        "Q4_K_S": "Q5_0 Q8_0 Q5_0 Q5_0 Q5_1x4,Q5_0x5 Q5_0 Q5_0 Q5_0 Q5_Kx1,Q4_Kx8",
        "Q4_K_M": (
            "Q5_0 Q8_0 Q5_0 Q5_0 Q8_0x1,Q5_0x2,Q8_0x1,Q5_0x2,Q8_0x3 Q5_0 Q5_0 Q5_0 Q6_Kx1,Q4_Kx2,Q6_Kx1,Q4_Kx2,Q6_Kx3"
        ),
        "Q5_K_S": "Q5_1 Q8_0 Q5_1 Q5_1 Q5_1 Q5_1 Q5_1 Q5_1 Q5_K",
        "Q5_K_M": (
            "Q5_1 Q8_0 Q5_1 Q5_1 Q8_0x1,Q5_1x2,Q8_0x1,Q5_1x2,Q8_0x3 Q5_1 Q5_1 Q5_1 Q6_Kx1,Q5_Kx2,Q6_Kx1,Q5_Kx2,Q6_Kx3"
        ),
        "Q6_K": "Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q6_K",
        "IQ4_NL": "IQ4_NL Q8_0 IQ4_NL IQ4_NL IQ4_NL IQ4_NL IQ4_NL IQ4_NL Q5_Kx1,IQ4_NLx8",
        "IQ4_XS": "IQ4_NL Q8_0 IQ4_NL IQ4_NL IQ4_NL IQ4_NL IQ4_NL IQ4_NL Q5_Kx1,IQ4_XSx8",
    },
    "odder": {
        "F32": "F32 F32 F32 F32 F32 F32 F32 F32 F32",
        "F16": "F16 F16 F16 F16 F16 F16 F16 F16 F16",
        "BF16": "BF16 BF16 BF16 BF16 BF16 BF16 BF16 BF16 BF16",
        "Q4_0": "F16 F16 F16 F16 F16 F16 F16 F16 Q4_0",
        "Q4_1": "F16 F16 F16 F16 F16 F16 F16 F16 Q4_1",
        "Q5_0": "F16 F16 F16 F16 F16 F16 F16 F16 Q5_0",
        "Q5_1": "F16 F16 F16 F16 F16 F16 F16 F16 Q5_1",
        "Q8_0": "F16 F16 F16 F16 F16 F16 F16 F16 Q8_0",
        "Q2_K": "F16 F16 F16 F16 F16 F16 F16 F16 Q4_0",
        "Q3_K_S": "F16 F16 F16 F16 F16 F16 F16 F16 Q4_0",
        "Q3_K_M": "F16 F16 F16 F16 F16 F16 F16 F16 Q5_0",
        "Q3_K_L": "F16 F16 F16 F16 F16 F16 F16 F16 Q5_1",
        "Q4_K_S": "F16 F16 F16 F16 F16 F16 F16 F16 Q5_0",
        "Q4_K_M": "F16 F16 F16 F16 F16 F16 F16 F16 Q5_0x2,Q8_0x2",
        "Q5_K_S": "F16 F16 F16 F16 F16 F16 F16 F16 Q5_1",
        "Q5_K_M": "F16 F16 F16 F16 F16 F16 F16 F16 Q5_1x2,Q8_0x2",
        "Q6_K": "F16 F16 F16 F16 F16 F16 F16 F16 Q8_0",
        "IQ4_NL": "F16 F16 F16 F16 F16 F16 F16 F16 IQ4_NL",
        "IQ4_XS": "F16 F16 F16 F16 F16 F16 F16 F16 IQ4_NL",
    },
}
