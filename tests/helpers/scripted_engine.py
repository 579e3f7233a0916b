"""A real server whose model plays given texts: scheduler, prefix cache, templates, parsers and grammars are the real
ones, only the forward pass is not. The context has 200,000 tokens.

    with ScriptedServer(folder) as server:
        server.play("<think>\\nEasy.\\n</think>\\n\\nHello!", call("get_weather", city="Paris"))
        ...  # the first request is answered with the first text, the next one with the second
        server.prompts  # what the model was asked, with control tokens

The vocabulary is bytes and the markers of a chat style: by default those of Hermes and Qwen3, with a template that has
tools and reasoning, which it keeps in the history; `HARMONY` are those of gpt-oss.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llm_worker_rbee import LLM
from llm_worker_rbee.engine.request import Request, SamplerOutput, ScheduledTokens
from llm_worker_rbee.sampling_params import TokenLogprob
from llm_worker_rbee.tokenizer import Tokenizer
from llm_worker_rbee.weights.gguf_writer import Typed
from tests.helpers import tiny_models
from tests.helpers.server import Server

CONTEXT = 200_000
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # text for the tokenizer, as in Qwen's files
END = "<|im_end|>"
TEMPLATE = """
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {%- if tools %}
        {{- 'These functions may be called:\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' + (tool | tojson) }}
        {%- endfor %}
        {{- '\\n</tools>\\n\\nA call is written as\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


class ChatStyle(NamedTuple):
    """The tokens and the template of a chat model."""

    template: str
    control: Sequence[str]
    end: str  # one of them
    markers: Sequence[str] = ()  # text for the tokenizer


HERMES = ChatStyle(TEMPLATE, CONTROL, END, MARKERS)
HARMONY = ChatStyle(
    (Path(__file__).parents[1] / "tokenizer" / "templates" / "harmony.jinja").read_text(encoding="utf-8"),
    ["<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"], "<|return|>",
)  # fmt: skip


def call(tool: str, **arguments: Any) -> str:
    """Return a call as the model writes it."""
    written = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def think(reasoning: str, then: str = "") -> str:
    """Return reasoning as the model writes it, and what follows."""
    return f"<think>\n{reasoning}\n</think>\n\n{then}"


def write_chat_model(path: Path, style: ChatStyle = HERMES) -> Path:
    """Write the model; its weights are never used."""
    text = [*tiny_models.byte_chars(), *tiny_models.MERGED]
    kinds = [1] * len(text) + [3] * len(style.control) + [4] * len(style.markers)
    metadata = tiny_models.tokenizer_metadata(
        tokens=[*text, *style.control, *style.markers], token_type=Typed("int32", kinds),
        eos_token_id=len(text) + style.control.index(style.end),
    )  # fmt: skip
    metadata["tokenizer.chat_template"] = style.template
    return tiny_models.write_scripted(path, {}, metadata, vocab=len(kinds), context=CONTEXT)


Reply = str | Callable[[str], str]  # a text, or a function of the prompt that returns one


class ScriptedModel:
    """For `Engine.replace_model`: the n-th request gets the n-th reply, then the end; more requests fail."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.prompts: list[str] = []  # in the order of the replies
        self.cached_parts: list[float] = []  # of these prompts, from the prefix cache
        self.replies: Sequence[Reply] | Callable[[str], str] = ()  # a function replies to all
        self._tokens: dict[Request, list[int]] = {}

    def __call__(self, scheduled: Sequence[ScheduledTokens]) -> SamplerOutput:
        sampled = SamplerOutput([])
        for request, _, stop, logits_from in scheduled:
            if request.num_unscored_tokens:
                assert request.prompt_logprobs is not None
                request.prompt_logprobs += map(_certain, request.prompt[logits_from + 1 : stop + 1])
            if stop >= len(request.ids):
                if request not in self._tokens:
                    self._tokens[request] = self._reply_to(request)
                count = len(request.ids) - request.num_prompt_tokens
                tokens = self._tokens[request][count : count + 1 + len(request.drafts)]
                tokens += [max(request.eos_ids)] * (1 + len(request.drafts) - len(tokens))
                sampled.tokens += tokens
                if request.params.logprobs is not None:
                    sampled.logprobs[request] = list(map(_certain, tokens))
        return sampled

    def _reply_to(self, request: Request) -> list[int]:
        prompt = self._tokenizer.decode(request.prompt, skip_special=False)
        self.prompts.append(prompt)
        self.cached_parts.append(request.num_cached_tokens / request.num_prompt_tokens)
        reply = self.replies if callable(self.replies) else self.replies[len(self.prompts) - 1]
        text = reply(prompt) if callable(reply) else reply
        return self._tokenizer.encode(text, add_special=False, parse_special=True)


def _certain(token: int) -> TokenLogprob:
    return TokenLogprob(token, 0.0, ((token, 0.0),))


class ScriptedServer(Server):
    """A server of such a model; one for many tests: each begins with `play`."""

    def __init__(self, folder: Path, style: ChatStyle = HERMES, **settings: Any) -> None:
        path = write_chat_model(folder / "scripted.gguf", style)
        self._models: list[ScriptedModel] = []

        def load() -> LLM:
            llm = LLM(path, backend="reference", kv_memory=256 << 20)
            assert llm.max_context == CONTEXT
            self._models.append(ScriptedModel(llm.tokenizer))
            llm.engine.replace_model(self._models[0])
            return llm

        super().__init__(load, **settings)

    @property
    def prompts(self) -> list[str]:
        """The prompts since `play`, with control tokens."""
        return self._models[0].prompts

    @property
    def cached_parts(self) -> list[float]:
        """How much of each prompt was found in the prefix cache, 0 to 1."""
        return self._models[0].cached_parts

    def play(self, *replies: Reply) -> None:
        """Answer the next requests with these, in their order."""
        self._play(replies)

    def play_all(self, reply: Callable[[str], str]) -> None:
        """Answer every request with what the function returns for its prompt."""
        self._play(reply)

    def _play(self, replies: Sequence[Reply] | Callable[[str], str]) -> None:
        self.require_idle()
        self._models[0].prompts.clear()
        self._models[0].cached_parts.clear()
        self._models[0].replies = replies

    def require_alive(self) -> None:
        self.play("yes")
        reply = self.post("/v1/completions", {"prompt": "alive?"})
        assert (reply.status_code, reply.json()["choices"][0]["text"]) == (200, "yes")
