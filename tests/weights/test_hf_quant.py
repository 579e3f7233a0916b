"""Quantized safetensors: every format against its own formula, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llm_worker_rbee.weights import open_checkpoint

from ..helpers.model_zoo import ZOO, make_hf
from ..helpers.quantized_hf import FORMATS, save_quantized_hf


@pytest.mark.parametrize("name", FORMATS)
def test_open_hf_reads_the_values_of_each_format(tmp_path: Path, name: str) -> None:
    model = make_hf(ZOO["llama"])
    checkpoint = open_checkpoint(save_quantized_hf(model, tmp_path, name))
    names = {"attn_q": "self_attn.q_proj", "ffn_down": "mlp.down_proj"}
    for ours, theirs in names.items():
        tensor, wanted = (
            checkpoint.tensors[f"blk.1.{ours}.weight"],
            model.state_dict()[f"model.layers.1.{theirs}.weight"],
        )
        assert tensor.kind.name == FORMATS[name].type
        assert tensor.shape == tuple(wanted.shape)
        np.testing.assert_allclose(tensor.dequantize(), wanted.numpy(), rtol=3e-7)
