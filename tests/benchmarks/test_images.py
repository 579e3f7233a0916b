"""`benchmarks.images` on a tiny model that sees, and pairs of random weights of small shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

from benchmarks import images
from llm_worker_bench import synthetic_vision
from llm_worker_bench.results import Run
from llm_worker_bench.synthetic_shapes import SHAPES, Shape
from llm_worker_rbee import LLM
from llm_worker_rbee.errors import InvalidRequestError
from tests.helpers import vision_chat

SMALL = {"width": 64, "d_ff": 96, "layers": 2}


def test_times_are_measured_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, saved = vision_chat.save_chat_model("qwen2_5_vl", tmp_path / "model"), tmp_path / "run.json.gz"
    words = [str(model), "--size", "100x60", "--requests", "3", "-r", "2", "--device", "cpu", "--save", str(saved)]
    assert images.main(words) == 0
    run = Run.load(saved)
    assert [result.name for result in run.results] == ["decode", "first_token", "again", "text", "prompt", "images"]
    assert "benchmarks.images" in run.command
    assert "images/s" in capsys.readouterr().out


def test_wrong_words_end_in_a_line(tmp_path: Path) -> None:
    for words in ([], ["a.gguf", "--synthetic", "x:F16"], ["--synthetic", "smollm2-135m:F16"], ["a", "--size", "9"]):
        with pytest.raises(SystemExit, match="error: "):
            images.main(words)


@pytest.mark.parametrize(("name", "kind"), [("qwen2.5-vl-7b", "BF16"), ("smolvlm-256m", "Q8_0")])
def test_synthetic_pair_answers(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, tower = SHAPES[name], synthetic_vision.TOWERS[name]
    small = Shape(2, 128, 1, 1, 64, 700, 4096, architecture=shape.architecture, keys=shape.keys)
    keys = {**tower.keys, "vision.attention.head_count": 2, "vision.preproc_image_size": 1024}
    monkeypatch.setitem(SHAPES, name, small)
    monkeypatch.setitem(synthetic_vision.TOWERS, name, tower._replace(**SMALL, keys=keys))
    model, projector = synthetic_vision.write_pair(f"{name}:{kind}", tmp_path)
    llm = LLM(model, mmproj=projector, device="cpu")
    parts = [{"type": "image", "image": vision_chat.picture_file(1)}, {"type": "text", "text": "What?"}]
    assert len(llm.chat([{"role": "user", "content": parts}], max_tokens=2, ignore_eos=True).tokens) == 2
    with pytest.raises(InvalidRequestError, match="has no tower"):
        synthetic_vision.write_pair("smollm2-135m:F16", tmp_path)
