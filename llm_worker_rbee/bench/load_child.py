"""Program that starts the worker once, timed from the inside, in a fresh process: run by `bench load`.

Arguments: the monotonic time at which the process was started, and a JSON object (model, options, prompt). It prints
one JSON object: the seconds of each phase, bytes of memory. It is run by its path, because as a module of the package
it would import NumPy before the clock of the import starts.
"""

import json
import os
import sys
import time

ENTERED = time.monotonic()

from llm_worker_rbee.llm import LLM  # noqa: E402

IMPORTED = time.monotonic()

from llm_worker_rbee.bench import processes  # noqa: E402

BATCH_SIZES = (1, 3, 7, 16, 30, 64)  # as many CUDA graphs as a server would capture
PROMPT_LENGTHS = (5, 40, 130, 300)


def main() -> None:
    """Load, generate one token, print; whatever libraries print goes to standard error."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    started, given = float(sys.argv[1]), json.loads(sys.argv[2])
    after_import = processes.resident_memory()
    llm = LLM(given["model"], **given["options"])
    loaded, after_load = time.monotonic(), processes.resident_memory()
    llm.generate(given["prompt"], max_tokens=1, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    ended = time.monotonic()
    phases = {"interpreter": ENTERED - started, "import": IMPORTED - ENTERED, **llm.phases}
    phases |= {"first_token": ended - loaded, "total": ended - started}
    sizes = {"import": after_import, "load": after_load, "peak": processes.peak_memory()}
    if llm.model.ops.has_device_memory:
        sizes |= device_memory(llm)
        decode_many_sizes(llm)
        sizes |= {f"{name}_after_batches": size for name, size in device_memory(llm).items()}
    print(json.dumps({"seconds": phases, "bytes": sizes}), file=reply, flush=True)


def device_memory(llm: LLM) -> dict[str, int]:
    """Return bytes on the GPU; `device_spare` is what the process took beside weights and KV cache, by the driver."""
    ops = llm.model.ops
    weights, kv_cache, peak = ops.weight_bytes(llm.checkpoint), llm.capacity.bytes, ops.peak_memory()
    sizes = {"weights": weights, "kv_cache": kv_cache, "graphs": llm.graph_bytes, **peak}
    sizes["spare"] = peak["process"] - weights - kv_cache
    return {f"device_{name}": size for name, size in sizes.items()}


def decode_many_sizes(llm: LLM) -> None:
    """Run each batch size twice, so that its graph is captured; prompts are prefilled beside running requests."""
    for batch in BATCH_SIZES:
        for _ in range(2):
            lengths = [PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)] for i in range(batch)]
            prompts = [[3 + (i + j) % 1000 for j in range(length)] for i, length in enumerate(lengths)]
            streams = [
                llm.stream(prompt, max_tokens=4 + i % 13, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
                for i, prompt in enumerate(prompts)
            ]
            for stream in streams:
                stream.completion()


if __name__ == "__main__":
    main()
