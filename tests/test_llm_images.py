"""Images in the offline API and on the command line: the forms of a picture, projectors that do not fit, sessions."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from llm_worker_rbee import LLM
from llm_worker_rbee.errors import InvalidRequestError, ModelFileError, ModelNotFoundError
from llm_worker_rbee.models.convert import convert, merge_adapters
from llm_worker_rbee.models.convert.mmproj import convert_projector
from llm_worker_rbee.server import offload
from llm_worker_rbee.server.settings import ServerSettings
from llm_worker_rbee.tokenizer.chat import events
from llm_worker_rbee.weights import open_checkpoint, read_adapter
from llm_worker_rbee.weights.vision_names import open_projector
from tests.cli.conftest import environment
from tests.helpers import lora_zoo, vision_chat

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "idefics3", "smolvlm")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
PICTURE = vision_chat.picture_file(3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = (*FAMILIES,)
    return {name: vision_chat.save_chat_model(name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> LLM:
    return LLM(folders["qwen3_vl"], kv_type="float32", device="cpu")


def ask(llm: LLM, content: Any, **fields: Any) -> list[int]:
    return llm.chat([{"role": "user", "content": content, **fields}], **GREEDY).tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    llm = LLM(folders[name], kv_type="float32", device="cpu")
    second = vision_chat.picture_file(4, 60, 90)
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "or "}, {"type": "image", "image": second},
             {"type": "text", "text": "?"}]  # fmt: skip
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    done = llm.chat(messages, **GREEDY)
    assert done.tokens == vision_chat.reference_answer(name, done.prompt_tokens, [PICTURE, second], 6)
    again = llm.chat(
        [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}], **GREEDY
    )
    assert again.tokens == vision_chat.reference_answer(name, again.prompt_tokens, [PICTURE, second], 6)
    plain = llm.chat([{"role": "user", "content": "Hello"}], **GREEDY)
    assert plain.tokens == vision_chat.reference_answer(name, plain.prompt_tokens, [], 6)


def test_forms_of_a_picture(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    expected = ask(llm, [{"type": "image", "image": PICTURE}, {"type": "text", "text": "What?"}])
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), bytearray(PICTURE), vision_chat.data_url(PICTURE)):
        assert ask(llm, [{"type": "image", "image": source}, {"type": "text", "text": "What?"}]) == expected
        assert ask(llm, "What?", images=[source]) == expected
    with Image.open(tmp_path / "a.png") as opened:
        assert ask(llm, "What?", images=[opened]) == expected
        assert ask(llm, [{"type": "image_url", "image_url": {"url": vision_chat.data_url(PICTURE)}}, {"text": "What?"}])
        assert ask(llm, "What?", images=[opened.convert("CMYK")])


def test_wrong_pictures_are_refused_by_their_places(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    cases = {
        "nowhere.png": r"messages\[0\]\.images\[0\]: cannot read 'nowhere.png': No such file",
        str(tmp_path / "text.png"): "text.png: the image cannot be used: it is none of PNG",
        "a\0b": "cannot read", str(tmp_path): "Is a directory",
    }  # fmt: skip
    for source, message in cases.items():
        with pytest.raises(InvalidRequestError, match=message):
            ask(llm, "What?", images=[source])
    with pytest.raises(InvalidRequestError, match="must be a path, bytes or a picture of Pillow, not int"):
        ask(llm, [{"type": "image", "image": 5}])
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content\[0\] must be"):
        ask(llm, [{"type": "audio", "audio": b""}])


def test_names_of_tokens_and_marks_in_texts_stand_for_no_image(llm: LLM) -> None:
    expected = llm.prepare_chat([{"role": "user", "content": "a", "images": [PICTURE]}])
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = llm.prepare_chat([{"role": "user", "content": text, "images": [PICTURE]}])
    token = llm.tokenizer.verbatim_ids["<|image_pad|>"]
    assert prompt.ids.count(token) == expected.ids.count(token)
    assert [part.start for part in prompt.images] == [part.start for part in expected.images]


def test_decoding_time_of_a_request_is_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MAX_DECODING_S", 1e-6)
    encoder = offload.PromptEncoder(llm, offload.OffloadPool(), ServerSettings(model_ref="tiny"))
    pictures = [events.Image(PICTURE, place="first"), events.Image(PICTURE, place="second")]
    with pytest.raises(InvalidRequestError, match=r"^second: the images before it took 1e-06 s"):
        asyncio.run(encoder._decode_images(pictures))


def test_projector_of_the_hub_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequestError, match="`llm-worker-rbee pull hf:a/b` fetches a model with its projector"):
        LLM(folders["qwen3_vl"], device="cpu", mmproj="hf:a/b")


def test_template_without_images_gets_them_as_text(folders: dict[str, Path], llm: LLM) -> None:
    plain = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    other = LLM(folders["qwen3_vl"], kv_type="float32", device="cpu", chat_template=plain)
    messages = [{"role": "user", "content": [{"type": "text", "text": "x "}, {"type": "image", "image": PICTURE}]}]
    assert other.prepare_chat(messages).ids == llm.prepare_chat(messages).ids


def test_projectors_that_do_not_fit_are_refused_with_both_names(folders: dict[str, Path], tmp_path: Path) -> None:
    convert_projector(open_projector(folders["gemma3"]), tmp_path / "mmproj-gemma.gguf", "F32")
    convert(open_checkpoint(folders["qwen3_vl"]), tmp_path / "model.gguf", "F32")
    with pytest.raises(ModelFileError, match=r"mmproj-gemma.gguf \(gemma3\) and the model model.gguf \(qwen3vl\)"):
        LLM(tmp_path / "model.gguf", mmproj=tmp_path / "mmproj-gemma.gguf", device="cpu")
    with pytest.raises(ModelFileError, match="holds the architecture 'qwen3vl': a projector file"):
        LLM(tmp_path / "model.gguf", mmproj=tmp_path / "model.gguf", device="cpu")
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(tmp_path / "model.gguf", mmproj="./nowhere.gguf", device="cpu")
    beside = LLM(tmp_path / "model.gguf", device="cpu")  # one beside it that does not fit is not used
    assert beside.vision is None
    with pytest.raises(InvalidRequestError, match="takes no images"):
        ask(beside, "What?", images=[PICTURE])
    convert_projector(open_projector(folders["qwen3_vl"]), tmp_path / "mmproj-F32.gguf", "F32")
    assert LLM(tmp_path / "model.gguf", device="cpu").vision is not None
    assert LLM(tmp_path / "model.gguf", device="cpu", mmproj="none").vision is None


def test_large_images_are_made_smaller_and_planned(folders: dict[str, Path]) -> None:
    llm = LLM(folders["qwen2_5_vl"], device="cpu", max_image_tokens=12)
    large = vision_chat.picture_file(1, 500, 700)
    (part,) = llm.prepare_chat([{"role": "user", "content": "", "images": [large]}]).images
    assert part.rows * part.columns <= 12
    with pytest.raises(InvalidRequestError, match="max_image_tokens is 0"):
        LLM(folders["qwen2_5_vl"], max_image_tokens=0)


def test_drafts_from_earlier_tokens_give_the_same_answer(folders: dict[str, Path], llm: LLM) -> None:
    other = LLM(folders["qwen3_vl"], kv_type="float32", device="cpu", speculative="ngram")
    messages = [{"role": "user", "content": "abcabcabc", "images": [PICTURE]}]
    options = {**GREEDY, "max_tokens": 40}
    assert other.chat(messages, **options).tokens == llm.chat(messages, **options).tokens


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_answer_with_an_adapter_is_that_of_the_merged_model(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    adapter = lora_zoo.write_random_peft(folders[name], tmp_path / "adapter", rank=8, seed=1, size=4)
    merged = merge_adapters(open_checkpoint(folders[name]), [(read_adapter(adapter), 1.0)])
    convert(merged, tmp_path / "model.gguf", "F32")
    convert_projector(open_projector(folders[name]), tmp_path / "mmproj-F32.gguf", "F32")
    options: dict[str, Any] = {"kv_type": "float32", "device": "cpu"}
    expected = ask(LLM(tmp_path / "model.gguf", **options), "What?", images=[PICTURE])
    llm = LLM(folders[name], loras={"a": adapter}, **options)
    messages = [{"role": "user", "content": "What?", "images": [PICTURE]}]
    assert llm.chat(messages, lora="a", **GREEDY).tokens == expected


def test_blocks_on_disk_belong_to_the_projector(folders: dict[str, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_type": "float32", "device": "cpu", "kv_dir": tmp_path / "kv"}
    messages = [{"role": "user", "content": "What is it?", "images": [PICTURE]}]

    def run(**more: Any) -> tuple[list[int], int]:
        code = (
            "import json, sys; from llm_worker_rbee import LLM; llm = LLM(**json.loads(sys.argv[1]));"
            "done = llm.chat(json.loads(sys.argv[2]), temperature=0, max_tokens=6, ignore_eos=True);"
            "print(json.dumps([done.tokens, done.cached_tokens]))"
        )
        arguments = {"model": str(folders["qwen3_vl"]), **{k: str(v) for k, v in options.items()}, **more}
        sent = [{**messages[0], "images": [str(tmp_path / "a.png")]}]
        line = [sys.executable, "-c", code, json.dumps(arguments), json.dumps(sent)]
        done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=120)
        assert done.returncode == 0, done.stderr
        tokens, cached = json.loads(done.stdout)
        return tokens, cached

    (tmp_path / "a.png").write_bytes(PICTURE)
    first, second = run(), run()
    assert first[0] == second[0]
    assert first[1] == 0
    assert second[1] > 0, "the blocks with the picture are read from disk"
    (tmp_path / "a.png").write_bytes(vision_chat.picture_file(8))
    assert run()[1] < 16, "another picture"


def test_command_line_shows_pictures(folders: dict[str, Path], tmp_path: Path, llm: LLM) -> None:
    (tmp_path / "photo.png").write_bytes(PICTURE)
    command = [sys.executable, "-m", "llm_worker_rbee"]
    model = ["-m", str(folders["qwen3_vl"]), "--kv-type", "float32", "--device", "cpu", "-t", "0"]
    env = environment() | {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        line = [*command, *arguments]
        return subprocess.run(line, input=text, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)

    done = run(
        "run", "What?", "--image", "photo.png", "--image", "photo.png", *model, "-n", "6", "--json", "--ignore-eos"
    )
    assert done.returncode == 0, done.stderr
    expected = llm.chat([{"role": "user", "content": "What?", "images": [PICTURE] * 2}], **GREEDY)
    assert json.loads(done.stdout)["tokens"] == expected.tokens
    assert run("run", "What?", "--image", "absent.png", *model).returncode == 1
    assert run("run", "What?", "--image", "photo.png", "--raw", *model).returncode == 2
    talk = ["chat", *model, "-n", "6", "--session", "seen"]
    done = run(*talk, text="/image absent.png\n")
    assert "cannot read" in done.stderr
    done = run(*talk, text="/image photo.png\nWhat?\nWhy?\n")
    assert done.returncode == 0, done.stderr
    saved = json.loads(next((tmp_path / "data").rglob("seen.json")).read_text())["messages"]
    assert [message.get("images") for message in saved] == [[str(tmp_path / "photo.png")], None, None, None]
    assert run(*talk, text="And?\n").returncode == 0
