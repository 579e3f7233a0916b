"""A session with LlamaIndex over Ollama's routes, in an environment of its own: models of answers. Prints, for each,
the answer's text as the server gave it and the model as JSON, or an error."""

import json
import sys

from answer_models import PROMPTS
from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama


def main(url: str) -> None:
    model = Ollama(
        model="coder", base_url=url, request_timeout=300, temperature=0,
        context_window=4096, additional_kwargs={"num_predict": 400},
    )  # fmt: skip
    answers = {}
    for kind, prompt in PROMPTS.items():
        try:
            reply = model.as_structured_llm(kind).chat([ChatMessage(role="user", content=prompt)])
            answers[kind.__name__] = {"text": reply.message.content, "model": reply.raw.model_dump(mode="json")}
        except Exception as error:
            answers[kind.__name__] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answers))


main(*sys.argv[1:])
