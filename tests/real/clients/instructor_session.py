"""A session with `instructor`, in an environment of its own: models of answers in one of its modes. Prints, for each,
the answer's text as the server gave it and the model as JSON, or an error."""

import json
import sys
from typing import Any

import anthropic
import instructor
import openai
from answer_models import PROMPTS


def raw_text(reply: Any) -> str:
    """Return the document in a reply of either SDK."""
    if hasattr(reply, "choices"):
        message = reply.choices[0].message
        return message.tool_calls[0].function.arguments if message.tool_calls else message.content
    return "".join(block.text for block in reply.content if block.type == "text")


def main(url: str, name: str) -> None:
    mode, more = instructor.Mode[name], {"extra_body": {"temperature": 0}, "max_tokens": 400, "max_retries": 0}
    if name.startswith("ANTHROPIC"):
        client = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0), mode=mode)
    else:
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    answers = {}
    for model, prompt in PROMPTS.items():
        messages = [{"role": "user", "content": prompt}]
        try:
            result, reply = client.create_with_completion(
                model="coder", response_model=model, messages=messages, **more
            )
            answers[model.__name__] = {"text": raw_text(reply), "model": result.model_dump(mode="json")}
        except Exception as error:
            answers[model.__name__] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answers))


main(*sys.argv[1:])
