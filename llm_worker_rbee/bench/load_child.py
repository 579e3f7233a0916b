"""One start of the worker, timed from the inside: run as a program by `bench load`, in a fresh process each time.

Arguments: the monotonic clock at which the process was started, and a JSON object (model, options, prompt). It prints
one JSON object: seconds of each phase, bytes of memory. It is run by its path, not as a part of the package: that would
import the rooms around it, and NumPy, before the clock of the import starts.
"""

import json
import sys
import time

ENTERED = time.monotonic()

from llm_worker_rbee.llm import LLM  # noqa: E402

IMPORTED = time.monotonic()

from llm_worker_rbee.bench import process_stats  # noqa: E402


def main() -> None:
    """Load, make one token, tell."""
    started, given = float(sys.argv[1]), json.loads(sys.argv[2])
    after_import = process_stats.used()
    llm = LLM(given["model"], **given["options"])
    loaded, after_load = time.monotonic(), process_stats.used()
    llm.generate(given["prompt"], max_tokens=1, temperature=0.0, ignore_eos=True)
    ended = time.monotonic()
    phases = {"interpreter": ENTERED - started, "import": IMPORTED - ENTERED, **llm.phases}
    phases |= {"first_token": ended - loaded, "total": ended - started}
    sizes = {"import": after_import, "load": after_load, "peak": process_stats.peak()}
    print(json.dumps({"seconds": phases, "bytes": sizes}))


if __name__ == "__main__":
    main()
