"""Layers with a state under Triton's interpreter: the convolution, the gated delta rule and gates against the
reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend  # noqa: E402
from llm_worker_rbee.backends.cuda.kernels.attention_prefill import query_tiles  # noqa: E402
from llm_worker_rbee.backends.cuda.kernels.gated_delta import CHUNK, SHORT_REQUEST, launch_delta_chunks, launch_gate  # noqa: E402  # noqa: E402
from llm_worker_rbee.backends.cuda.packed_weight import Activations  # noqa: E402
from llm_worker_rbee.backends.ops import GatedDeltaParams, GatedDeltaWeights, StateLayer  # noqa: E402
from llm_worker_rbee.backends.reference import ReferenceBackend  # noqa: E402
from llm_worker_rbee.config import MAX_DRAFT_TOKENS  # noqa: E402
from llm_worker_rbee.engine.model_runner import SingleSequence  # noqa: E402
from llm_worker_rbee.models import load_model, read_model_config  # noqa: E402
from llm_worker_rbee.weights import open_checkpoint  # noqa: E402
from tests.backends.test_gated_delta import SMALL, last_of_each, make_batch, make_case, random_states  # noqa: E402
from tests.helpers import model_runs, model_zoo  # noqa: E402
from tests.helpers.random_tensors import relative_error  # noqa: E402

cuda, reference = CudaBackend(), ReferenceBackend()
# Tokens and slots of requests: one that begins, one in its slot, one in another, one that stores nothing; drafts.
STEPS = {
    "prompts": ([5, 2, 9, 1], [-1, 1, 5, 3], last_of_each([5, 2, 9, 1], [0, 1, 2, -1])),
    "decode": ([1, 1, 1], [2, -1, 4], [2, 0, 5]),
    "drafts": ([4, 1], [3, 1], [3, 0, 4, 2, 1]),
}


def upload(values: Any) -> Any:
    return torch.tensor(values, device=cuda.torch_device)


def upload_states(state: StateLayer) -> StateLayer:
    return StateLayer(*map(upload, state))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("gated", [False, True])
def test_convolution_equals_reference(step: str, gated: bool, rng: np.random.Generator) -> None:
    lengths, state_in, state_out = STEPS[step]
    channels, batch = 40, make_batch(lengths, state_in, state_out)
    x = rng.standard_normal((sum(lengths), 3 * channels if gated else 64)).astype(np.float32)
    weight = rng.standard_normal((channels, 4)).astype(np.float32)
    state = StateLayer(rng.standard_normal((6, 3, channels)).astype(np.float32))
    there, activation = upload_states(state), "" if gated else "silu"
    found = cuda.causal_conv(upload(x), upload(weight), there, batch, activation, gated)
    expected = reference.causal_conv(x, weight, state, batch, activation, gated)
    np.testing.assert_allclose(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(there.conv.cpu(), state.conv)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("params", [SMALL, SMALL._replace(is_tiled=True), GatedDeltaParams(1, 3, 24, 80, 1e-5)])
def test_gated_delta_equals_reference(step: str, params: GatedDeltaParams) -> None:
    lengths, state_in, state_out = STEPS[step]
    case, state, batch = (
        make_case(params, sum(lengths)),
        random_states(params),
        make_batch(lengths, state_in, state_out),
    )
    arrays, there = [upload(x) for x in case[:3]], upload_states(state)
    found = cuda.gated_delta(*arrays, params, GatedDeltaWeights(*map(upload, case.weights)), there, batch)
    np.testing.assert_allclose(found.cpu(), reference.gated_delta(*case, state, batch), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(there.matrix.cpu(), state.matrix, rtol=1e-4, atol=1e-5)


def test_sigmoid_gate_equals_reference(rng: np.random.Generator) -> None:
    x, gate = (4 * rng.standard_normal((3, 96)).astype(np.float32) for _ in range(2))
    found = cuda.sigmoid_gate(upload(x), upload(gate))
    np.testing.assert_allclose(found.cpu(), reference.sigmoid_gate(x, gate), rtol=1e-5, atol=1e-6)


def test_drafts_are_never_chunks() -> None:
    """A chunk stores its last state alone."""
    assert SHORT_REQUEST > MAX_DRAFT_TOKENS + 1


@pytest.mark.parametrize("params", [SMALL, GatedDeltaParams(1, 2, 16, 64, 1e-6, True)])
def test_chunks_equal_reference(params: GatedDeltaParams) -> None:
    """Prompts of whole and broken chunks that begin or go on, beside short requests; a state decays slowly or fast."""
    lengths, state_in = [1, 70, 3, 128], [4, -1, 3, 5]
    batch = make_batch(lengths, state_in, last_of_each(lengths, [4, 0, 3, 1]))
    case, state = make_case(params, sum(lengths)), random_states(params)
    there, tiles = upload_states(state), query_tiles(batch.query_start, CHUNK, 1)
    arrays = [upload(x) for x in case[:3]]
    chunks = [upload(x.astype(np.int32)) for x in (*tiles, np.array([len(tiles[0])]))]
    weights = GatedDeltaWeights(*map(upload, case.weights))
    mixed = launch_delta_chunks(arrays[0], arrays[2], params, weights, there, cuda._state_inputs(batch), tuple(chunks))
    found = torch.empty_like(mixed)
    launch_gate(mixed, arrays[1], Activations(found), weights.norm, params.eps)
    wanted = reference.gated_delta(*case, state, batch)
    assert relative_error(found.cpu().numpy(), wanted) < 5e-3  # tensor cores round to TF32
    assert relative_error(there.matrix.cpu().numpy(), state.matrix) < 5e-3


def test_fused_model_equals_reference(tmp_path: Path) -> None:
    """Prompts, decoding by GEMV, and drafts, on quantized weights."""
    variant = model_zoo.ZOO["lfm2"]
    path = model_zoo.save_quantized(variant, model_zoo.make_hf(variant), tmp_path / "m.gguf", "Q8_0")
    made = open_checkpoint(path)
    model = load_model(made, cuda, read_model_config(made))
    assert model.fused is not None
    ids, runner, at = model_zoo.prompt_ids(variant)[:9], SingleSequence(model, 9), 0
    found = []
    for size in (4, 1, 1, 3):
        logits = model.forward(runner.batch(ids[at : at + size], at, all_logits=True), runner.cache)
        found.append(model_runs.to_numpy(logits))
        at += size
    expected = model_runs.compute_logits(model_runs.load(path), ids)
    assert np.abs(np.concatenate(found) - expected).max() < 0.03 * np.abs(expected).max()
