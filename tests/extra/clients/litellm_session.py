"""A session with LiteLLM, in an environment of its own, in three dialects: a chat, a stream, a call of a tool, a model
of the answer, an error. Prints what it got as JSON."""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it fetches prices when it is imported
import litellm
from pydantic import BaseModel

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Person(BaseModel):
    name: str
    age: int


def main(url: str) -> None:
    given: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    asked = {"model": "openai/tiny", "messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
    whole = litellm.completion(**asked, **given)
    parts = litellm.completion(**asked, **given, stream=True)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    tooled = litellm.completion(**asked, **given, tools=[WEATHER])
    (call,) = tooled.choices[0].message.tool_calls
    person = litellm.completion(**asked, **given, response_format=Person).choices[0].message.content
    other = {**given, "api_base": url}
    ollama = litellm.completion(**{**asked, "model": "ollama_chat/tiny"}, **other)
    anthropic = litellm.completion(**{**asked, "model": "anthropic/tiny"}, **other, max_tokens=50)
    try:
        litellm.completion(**{**asked, "model": "openai/other"}, **given)
        error = ""
    except litellm.exceptions.NotFoundError as raised:
        error = str(raised)
    got = {
        "whole": whole.choices[0].message.content, "tokens": whole.usage.completion_tokens, "streamed": streamed,
        "call": [call.function.name, json.loads(call.function.arguments)],
        "finish_reason": tooled.choices[0].finish_reason, "person": json.loads(person),
        "ollama": ollama.choices[0].message.content, "anthropic": anthropic.choices[0].message.content, "error": error,
    }  # fmt: skip
    print(json.dumps(got))


main(sys.argv[1])
