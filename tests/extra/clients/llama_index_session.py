"""A session with LlamaIndex, in an environment of its own: a chat, a stream, a turn with a tool, a model of the answer,
embeddings. Prints what it got as JSON."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def main(url: str) -> None:
    model = OpenAILike(
        model="tiny", api_base=f"{url}/v1", api_key="none", context_window=200_000, is_chat_model=True,
        is_function_calling_model=True, max_retries=0,
    )  # fmt: skip
    asked = ChatMessage(role="user", content="What is the weather in Paris?")
    whole = model.chat([asked]).message.content
    streamed = "".join(part.delta or "" for part in model.stream_chat([asked]))
    tool = FunctionTool.from_defaults(get_weather)
    first = model.chat_with_tools([tool], chat_history=[asked])
    (call,) = model.get_tool_calls_from_response(first)
    result = ChatMessage(
        role="tool", content=str(tool(**call.tool_kwargs)), additional_kwargs={"tool_call_id": call.tool_id}
    )
    second = model.chat_with_tools([tool], chat_history=[asked, first.message, result])
    person = model.as_structured_llm(Person).complete("Who was Ada?").raw
    embedder = OpenAILikeEmbedding(model_name="tiny-embedder", api_base=f"{url}/v1", api_key="none")
    got = {
        "whole": whole, "streamed": streamed, "call": [call.tool_name, call.tool_kwargs],
        "second": second.message.content, "person": person.model_dump(),
        "rows": embedder.get_text_embedding_batch(["hello", "world"]), "row": embedder.get_query_embedding("hello"),
    }  # fmt: skip
    print(json.dumps(got))


main(sys.argv[1])
