"""Complete several prompts in one batch: `python examples/batch.py [MODEL]`. Without MODEL the built-in one is used."""

import sys

from llm_worker_rbee import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "The opposite of cold is"]

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
completions = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0))
for prompt, completion in zip(PROMPTS, completions, strict=True):
    print(f"{prompt!r} -> {completion.text!r} ({len(completion.tokens)} tokens, {completion.finish_reason})")
