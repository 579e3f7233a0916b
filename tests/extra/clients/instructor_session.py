"""A session with `instructor`, in an environment of its own: a model of the answer by tool call, by JSON schema, in
parts, and asked again where it was invalid. Prints what it got as JSON."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel, field_validator


class Person(BaseModel):
    name: str
    age: int

    @field_validator("age")
    @classmethod
    def age_is_possible(cls, age: int) -> int:
        if age > 150:
            raise ValueError("nobody is that old")
        return age


def main(url: str) -> None:
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "response_model": Person, "messages": [{"role": "user", "content": "Who was Ada?"}]}
    tools = instructor.from_openai(plain)
    schema = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    got = {
        "tools": tools.create(**asked).model_dump(),
        "schema": schema.create(**asked).model_dump(),
        "parts": [part.model_dump() for part in tools.create_partial(**asked)][-1],
        "again": tools.create(**asked, max_retries=2).model_dump(),
    }
    print(json.dumps(got))


main(sys.argv[1])
