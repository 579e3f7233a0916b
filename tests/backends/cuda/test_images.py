"""Vision towers and prompts with images on the CUDA backend: fused and op by op against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from llm_worker_rbee.backends.cuda import CudaBackend  # noqa: E402
from llm_worker_rbee.backends.cuda.forward import CudaForward  # noqa: E402
from llm_worker_rbee.backends.cuda.pooling import PoolingForward  # noqa: E402
from llm_worker_rbee.backends.ops import AttentionParams, Backend, StepLimits  # noqa: E402
from llm_worker_rbee.backends.reference import ReferenceBackend  # noqa: E402
from llm_worker_rbee.engine.encoder import ImageEncoder  # noqa: E402
from llm_worker_rbee.engine.model_runner import SingleSequence, forward  # noqa: E402
from llm_worker_rbee.images.prompt import NO_IMAGES, PromptImages, step_arrays  # noqa: E402
from llm_worker_rbee.models import load_model, read_model_config  # noqa: E402
from llm_worker_rbee.models.convert.mmproj import convert_projector  # noqa: E402
from llm_worker_rbee.models.kv_cache import KVCache  # noqa: E402
from llm_worker_rbee.models.vision import VisionTower, load_vision_tower  # noqa: E402
from llm_worker_rbee.weights import open_checkpoint  # noqa: E402
from llm_worker_rbee.weights.vision_names import open_projector  # noqa: E402
from tests.helpers import tiny_vision  # noqa: E402
from tests.helpers.layer_inputs import BlockTables, normal  # noqa: E402
from tests.helpers.random_tensors import relative_error  # noqa: E402

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "idefics3", "mistral3", "gemma4", "gemma4_e")
TOKENS = ((1, 3), (2, 2))  # rows and columns of parts of sizes of their own
DEFAULT, INVARIANT = CudaBackend(), CudaBackend(deterministic=True)
ON_GPU = DEFAULT.torch_device.type == "cuda"
TOLERANCE = 0.02 if ON_GPU else 1e-3  # of the deviation
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a random model, saved once."""
    root = tmp_path_factory.mktemp("vision")
    return lambda name: root / name if (root / name).exists() else tiny_vision.save_model(name, root / name)


def parts_of(settings: Any) -> list[Any]:
    """Return small parts: the interpreter takes milliseconds for a patch."""
    rng, unit = np.random.default_rng(7), settings.patch * settings.merge
    sizes = [(settings.size,) * 2] if settings.size else [(rows * unit, columns * unit) for rows, columns in TOKENS]
    return [tiny_vision.picture(rng, *size) for size in sizes]


def tower_of(path: Path, ops: Backend) -> VisionTower:
    return load_vision_tower(open_projector(path), ops, "float32")


def deviation(actual: Any, expected: Any) -> float:
    return float(np.abs(np.asarray(actual) - expected).max() / expected.std())


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_images_are_those_of_the_reference(name: str, folder: Callable[[str], Path]) -> None:
    tower, reference = (tower_of(folder(name), ops) for ops in (DEFAULT, ReferenceBackend()))
    assert isinstance(tower.fused, PoolingForward)
    parts = parts_of(tower.config.images)
    expected = np.concatenate(reference.encode(parts))
    assert deviation(np.concatenate(tower.encode(parts)), expected) < TOLERANCE
    if name in ("mistral3", "gemma4_e"):  # op by op
        assert deviation(np.concatenate(replace(tower, fused=None).encode(parts)), expected) < TOLERANCE


def run(model: Any, images: PromptImages, ids: list[int], steps: list[int]) -> Any:
    """Return the logits of all tokens, computed in steps that end at these tokens."""
    sequence, logits, start = SingleSequence(model, len(ids)), [], 0
    for stop in (*steps, len(ids)):
        batch = sequence.batch(ids[start:stop], start, all_logits=True)
        flags = {"has_axes": model.has_axes, "sees_both_ways": model.sees_both_ways}
        fields = step_arrays([(images, start, stop)], **flags, ids=batch.ids if model.pads_images else None)
        logits.append(forward(model, replace(batch, **fields), sequence.cache))
        start = stop
    return np.concatenate(logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_prompt_with_an_image(name: str, folder: Callable[[str], Path]) -> None:
    """In one step, and then token by token, with positions that are no places in the cache."""
    reference, checkpoint = ReferenceBackend(), open_checkpoint(folder(name))
    tower, config = tower_of(folder(name), reference), read_model_config(checkpoint)
    parts = parts_of(tower.config.images)
    ids, spans = tiny_vision.image_prompt(
        np.random.default_rng(3), tower.config.images, parts, int(bool(tower.config.family.prompt.row_end))
    )
    images = PromptImages(spans, parts, [b""] * len(parts))
    images.rows = list(tower.encode(parts))
    models = [load_model(checkpoint, ops, config, None, image_parts=tower.row_width // config.d_model)
              for ops in (reference, DEFAULT, INVARIANT)]  # fmt: skip
    steps = [len(ids) - 2, len(ids) - 1]
    expected = run(models[0], images, ids, steps)
    for model in models[1:]:
        assert isinstance(model.fused_images, PoolingForward)
        assert deviation(run(model, images, ids, steps), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_text_has_the_bits_of_a_model_without_images(name: str, folder: Callable[[str], Path]) -> None:
    checkpoint, ids = open_checkpoint(folder(name)), list(range(1, 20))
    config, results = read_model_config(checkpoint), []
    for parts in (0, 3 if name == "qwen3_vl" else 1):
        model = load_model(checkpoint, DEFAULT, config, image_parts=parts)
        assert isinstance(model.fused, CudaForward)
        results.append(run(model, NO_IMAGES, ids, [17, 18]))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(("window", "causal"), [(0, False), (0, True), (6, True)])
def test_attention_in_spans(window: int, causal: bool, rng: np.random.Generator) -> None:
    """Ranges of keys shorter and longer than a tile, behind keys of an earlier step."""
    counts, past = [70, 9], [0 if not causal else 5, 0]
    pages = BlockTables([n + p for n, p in zip(counts, past, strict=True)], rng)
    params = AttentionParams(0.3, window, causal=causal, spans=True)
    batch = pages.batch([(r, p, n + p) for r, (n, p) in enumerate(zip(counts, past, strict=True))])
    ends = np.concatenate([np.minimum(np.arange(n) // 20 * 20 + 20, n) + p for n, p in zip(counts, past, strict=True)])
    starts = np.concatenate([np.arange(n) // 20 * 20 for n in counts])
    batch = replace(batch, spans=np.stack((starts, ends), axis=1))
    heads, kv_heads, dim = 2, 1, 16
    before = normal(rng, 2, past[0] + past[1], kv_heads, dim)
    q, k, v = (normal(rng, sum(counts), n, dim) for n in (heads, kv_heads, kv_heads))
    results = []
    for ops in (ReferenceBackend(), DEFAULT, INVARIANT):
        bring: Any = np.asarray if isinstance(ops, ReferenceBackend) else DEFAULT.prepare_vector
        kv, still = ops.empty_kv(pages.n_blocks, pages.block_size, kv_heads, dim, kind="float32"), tiny_vision.STILL
        if past[0]:
            earlier = pages.batch([(0, 0, past[0])])
            queries = bring(np.zeros((past[0], heads, dim), np.float32))
            k_before, v_before = map(bring, before)
            ops.rope_store(queries, k_before, v_before, earlier.positions, still, kv, earlier.slot_mapping)
        turned = ops.rope_store(bring(q), bring(k), bring(v), batch.positions, still, kv, batch.slot_mapping)
        results.append(ops.to_host(ops.attention(turned, kv, batch, params)))
    assert relative_error(results[1], results[0]) < 2e-5
    assert relative_error(results[2], results[0]) < 2e-5


def test_single_ops_match_reference(rng: np.random.Generator) -> None:
    reference, x = ReferenceBackend(), normal(rng, 12, 10)
    on_device, index = torch.tensor(x, device=DEFAULT.torch_device), np.array([2, 0])
    for op in ("merge", "pool"):
        found = getattr(DEFAULT, op)(on_device, index, 4)
        assert relative_error(found, getattr(reference, op)(x, index, 4)) < 1e-6
    low, high = np.full(10, -0.5, np.float32), np.full(10, 0.25, np.float32)
    np.testing.assert_array_equal(
        DEFAULT.to_host(DEFAULT.clamp(on_device, *map(DEFAULT.prepare_vector, (low, high)))),
        reference.clamp(x, low, high),
    )
    table, places = normal(rng, 3, 4, 10), np.array([[0, 0], [1.5, 2.25], [2, 3]], np.float32)
    found = DEFAULT.interpolate(DEFAULT.prepare_vector(table), places)
    assert relative_error(found, reference.interpolate(table, places)) < 1e-6
    images, rows = normal(rng, 3, 20), np.where(np.arange(12) % 4 == 1, np.arange(12) // 4, -1)
    for adds in (False, True):
        found = DEFAULT.place_images(on_device, images, rows, 1, adds)
        np.testing.assert_array_equal(DEFAULT.to_host(found), reference.place_images(x, images, rows, 1, adds))


def test_warm_up_launches_what_images_need(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_vl")
    tower, checkpoint = tower_of(path, DEFAULT), open_checkpoint(path)
    model = load_model(checkpoint, DEFAULT, read_model_config(checkpoint), image_parts=3)
    cache, limits = KVCache(DEFAULT, model.config, 4, 16, "float32"), StepLimits(1, 2 if not ON_GPU else 64, 1, 64)
    encoder = ImageEncoder(tower, 1 if not ON_GPU else 64)
    warm = encoder.warm_up(model, cache, limits, lambda *report: None)
    assert (warm.kernels > 0) == ON_GPU  # the interpreter compiles nothing


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_towers_on_a_gpu(name: str, kind: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    convert_projector(open_projector(folder(name)), path, kind)
    towers = [load_vision_tower(open_projector(path), ops) for ops in (ReferenceBackend(), DEFAULT, INVARIANT)]
    parts = parts_of(towers[0].config.images)
    expected = np.concatenate(towers[0].encode(parts))
    for tower in towers[1:]:
        assert deviation(np.concatenate(tower.encode(parts)), expected) < 0.1
    alone = [towers[2].encode([part])[0] for part in parts]
    for rows, together in zip(alone, towers[2].encode(parts), strict=True):
        np.testing.assert_array_equal(rows, together)
