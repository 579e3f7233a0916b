"""What stands for an image in a prompt, against the processors of transformers."""

from __future__ import annotations

import pytest
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from llm_worker_rbee.errors import ChatTemplateError
from llm_worker_rbee.images.prompt import ImageSpan, expand_prompt, find_spans
from llm_worker_rbee.images.sizes import count_tokens, plan_parts
from llm_worker_rbee.models.vision_config import BY_HF
from tests.helpers import tiny_vision


@pytest.mark.parametrize(("height", "width"), [(40, 40), (30, 100), (100, 100), (90, 300)])
def test_tiles_are_written_as_transformers_does(height: int, width: int) -> None:
    settings, style = tiny_vision.settings_of("smolvlm"), BY_HF["smolvlm"].prompt
    plan = plan_parts(height, width, settings)
    image = get_image_prompt_string(plan.rows, plan.columns, 4, "<fake_token_around_image>", "<image>", "<global-img>")
    expected = f"User:{image}What is it?<end_of_utterance>"
    assert expand_prompt("User:<image>What is it?<end_of_utterance>", style, [plan], settings) == expected
    assert expected.count("<image>") == count_tokens(plan, settings)


def test_single_parts_are_written_in_their_places() -> None:
    settings, style = tiny_vision.settings_of("gemma3"), BY_HF["gemma3"].prompt
    plan = plan_parts(40, 50, settings)
    image = "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
    prompt = expand_prompt("a<start_of_image>b<start_of_image>c", style, [plan, plan], settings)
    assert prompt == f"a{image}b{image}c"
    settings, style = tiny_vision.settings_of("qwen3_vl"), BY_HF["qwen3_vl"].prompt
    plan = plan_parts(96, 64, settings)
    text = "<|vision_start|><|image_pad|><|vision_end|>hi"
    assert expand_prompt(text, style, [plan], settings) == f"<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>hi"


@pytest.mark.parametrize(("name", "merge"), [("llava", 1), ("mistral3", 2)])
def test_rows_of_pixtral_end_as_in_transformers(name: str, merge: int) -> None:
    settings, style = tiny_vision.settings_of(name), BY_HF[name].prompt
    plan = plan_parts(70, 110, settings)
    (height, width), unit = plan.sizes[0], 8 * merge
    rows = ["[IMG]" * (width // unit)] * (height // unit)
    prompt = expand_prompt("a[IMG]b", style, [plan], settings)
    assert prompt == f"a{'[IMG_BREAK]'.join(rows)}[IMG_END]b"
    ids = [{"[IMG]": 9, "[IMG_BREAK]": 8}.get(word, 1) for word in prompt.replace("[", " [").replace("]", "] ").split()]
    (span,) = find_spans(ids, 9, [settings.tokens(height, width)])
    assert (span.start, span.gap, span.stop) == (1, 1, len(ids) - 2)
    assert [ids[span.start + place] for place in span.offsets()] == [9] * ids.count(9)


def test_template_without_images_is_an_error() -> None:
    settings, style = tiny_vision.settings_of("qwen3_vl"), BY_HF["qwen3_vl"].prompt
    with pytest.raises(ChatTemplateError, match="wrote 0 of 1 images"):
        expand_prompt("hi", style, [plan_parts(64, 64, settings)], settings)


def test_spans_are_found_by_their_token() -> None:
    ids = [1, 9, 9, 9, 9, 9, 9, 2, 9, 9, 3]
    assert find_spans(ids, 9, [(2, 3), (1, 2)]) == [ImageSpan(1, 2, 3), ImageSpan(8, 1, 2)]
    with pytest.raises(ChatTemplateError, match="not adjacent"):
        find_spans(ids, 9, [(7, 1), (1, 1)])
    with pytest.raises(ChatTemplateError, match="without an image"):
        find_spans(ids, 9, [(2, 3)])
    with pytest.raises(ChatTemplateError, match="not adjacent"):
        find_spans(ids, 9, [(2, 3), (1, 3)])
    assert find_spans([1, 2, 3], 9, []) == []
    with pytest.raises(ChatTemplateError, match="without an image"):
        find_spans(ids, 9, [])
    assert find_spans([9, 9, 1, 9, 9], 9, [(2, 2)]) == [ImageSpan(0, 2, 2, gap=1)]
    with pytest.raises(ChatTemplateError, match="not adjacent"):
        find_spans([9, 1, 9, 9, 9], 9, [(2, 2)])
