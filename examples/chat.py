"""Stream two turns of a conversation: `python examples/chat.py [MODEL]`. Without MODEL the built-in one is used."""

import sys

from llm_worker_rbee import LLM

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
messages = [{"role": "system", "content": "Answer in one short sentence."}]
for question in ("What is the capital of France?", "And of Italy?"):
    messages.append({"role": "user", "content": question})
    print(f"> {question}")
    stream = llm.stream_chat(messages, max_tokens=24, temperature=0)
    for chunk in stream:
        print(chunk.text, end="", flush=True)
    print()
    messages.append({"role": "assistant", "content": stream.completion().text})
