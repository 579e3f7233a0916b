"""Records of bodies: what a parser keeps, packs and refuses."""

from __future__ import annotations

import json

import pytest

from llm_worker_rbee.errors import ContextLengthError, InvalidRequestError
from llm_worker_rbee.sampling_params import MAX_COUNT
from llm_worker_rbee.server.bodies import PackedIds
from llm_worker_rbee.server.dialects.jobs import parse_job
from llm_worker_rbee.server.dialects.openai import parse_chat
from llm_worker_rbee.server.dialects.openai_completions import parse_completion
from llm_worker_rbee.server.schema import ModelLimits, ParseOptions

LIMITS = ParseOptions(ModelLimits(max_context=8, vocab_size=100))


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 99], [MAX_COUNT]])
def test_packed_ids_give_what_was_packed(ids: list[int]) -> None:
    packed = PackedIds.pack(ids)
    assert (packed.view().tolist(), len(packed), packed.max()) == (ids, len(ids), max(ids, default=0))


def test_packed_ids_past_64_bits_stay_past_any_vocabulary() -> None:
    assert PackedIds.pack([1, 10**30]).view().tolist() == [1, MAX_COUNT]


def test_parse_completion_packs_ids_and_keeps_what_is_used() -> None:
    request = parse_completion(b'{"prompt": [[1, 2.0], [3]], "metadata": {"a": 1}, "user": "u"}', LIMITS)
    assert request.values.keys() == {"echo", "includes_usage", "has_continuous_usage"}
    assert [isinstance(ids, PackedIds) and ids.view().tolist() for ids in request.prompts] == [[1, 2], [3]]


def test_parse_completion_checks_limits_of_model() -> None:
    """While the model is loading they are not known."""
    too_long = json.dumps({"prompt": [1] * 9}).encode()
    with pytest.raises(ContextLengthError, match="9 tokens, the context 8"):
        parse_completion(too_long, LIMITS)
    assert len(parse_completion(too_long, ParseOptions()).prompts) == 1
    with pytest.raises(InvalidRequestError, match="token 100, past the vocabulary of 100") as caught:
        parse_completion(b'{"prompt": "x", "logit_bias": {"100": 1}}', LIMITS)
    assert caught.value.field == "logit_bias"


def test_parse_chat_encodes_messages_for_templates() -> None:
    parts = [{"type": "text", "text": "a\n"}, {"text": "é"}]
    body = {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": parts, "name": "n"}]}
    (conversation,) = parse_chat(json.dumps(body).encode(), LIMITS).prompts
    assert not isinstance(conversation, (str, PackedIds))
    assert json.loads(conversation.messages) == [
        {"role": "system", "content": "x"}, {"role": "user", "content": "a\né", "name": "n"}
    ]  # fmt: skip
    assert b"\n" not in conversation.messages


def test_parse_options_list_unknown_fields_or_refuse_them() -> None:
    body = b'{"prompt": "x", "zap": 1}'
    assert parse_completion(body, ParseOptions(ignores_unknown=True)).ignored == ["zap"]
    with pytest.raises(InvalidRequestError, match="zap"):
        parse_completion(body, ParseOptions())


def test_parse_job_of_stream_requires_id() -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    assert parse_job(body, ParseOptions()).prompts == ["x"]
    with pytest.raises(InvalidRequestError, match="job_id is required"):
        parse_job(body, ParseOptions(is_stream=True))
