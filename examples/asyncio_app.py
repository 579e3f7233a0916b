"""Use a model inside an asyncio program: `python examples/asyncio_app.py [MODEL]`.

`LLM` blocks while it computes, so each generation runs in a thread. Threads share one engine, which computes them in
one batch; the event loop stays free, as the dots show.
"""

import asyncio
import sys

from llm_worker_rbee import LLM

SYSTEM = "Answer in one short sentence."
QUESTIONS = ("What is the capital of France?", "What is two plus two?", "Name a colour.")


async def ask(llm: LLM, question: str) -> str:
    """Return the answer to one question without blocking the event loop."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    completion = await asyncio.to_thread(llm.chat, messages, max_tokens=16, temperature=0)
    return completion.text


async def tick() -> None:
    """Print a dot while the answers are computed."""
    while True:
        print(".", end="", flush=True)
        await asyncio.sleep(0.05)


async def main() -> None:
    """Answer all questions at once."""
    llm = await asyncio.to_thread(LLM, sys.argv[1] if len(sys.argv) > 1 else None)
    ticking = asyncio.create_task(tick())
    answers = await asyncio.gather(*(ask(llm, question) for question in QUESTIONS))
    ticking.cancel()
    print()
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} -> {answer}")


asyncio.run(main())
