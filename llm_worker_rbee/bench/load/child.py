"""One start of the worker, timed from the inside: run as a program by load.py, in a fresh process each time.

Arguments: the monotonic clock at which the process was started, and a JSON object (model, device, backend, prompt). It
prints one JSON object: seconds of each phase, bytes of memory. What stands before the import is all it needs itself.
"""

import json
import sys
import time

ENTERED = time.monotonic()

from ...llm import LLM  # noqa: E402
from .. import memory  # noqa: E402

IMPORTED = time.monotonic()


def main() -> None:
    """Load, make one token, tell."""
    started, given = float(sys.argv[1]), json.loads(sys.argv[2])
    after_import = memory.used()
    llm = LLM(given["model"], device=given["device"], backend=given["backend"])
    loaded, after_load = time.monotonic(), memory.used()
    llm.generate(given["prompt"], max_tokens=1, temperature=0.0, ignore_eos=True)
    ended = time.monotonic()
    phases = {"interpreter": ENTERED - started, "import": IMPORTED - ENTERED, **llm.phases}
    phases |= {"first_token": ended - loaded, "total": ended - started}
    sizes = {"import": after_import, "load": after_load, "peak": memory.peak()}
    print(json.dumps({"seconds": phases, "bytes": sizes}))


if __name__ == "__main__":
    main()
