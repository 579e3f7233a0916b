"""Several synthetic models in one run, each in a process of its own: a crash of one does not spoil the others.

On a GPU their kernels are compiled first, all models at once on a few layers, so that no timing includes compiling.
Results are named MODEL/NAME. As a program it is such a process: MODEL and the plan as JSON; it prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from .. import synthetic
from ..child_process import ChildFailedError, ChildProcess, package_environment
from ..results import Recorder, Result, replace_non_finite
from . import Progress, run
from .throughput import Plan

COMPILED_LAYERS = 4  # some mixes give the first and the last layers other types than the middle ones
TIMEOUT_S = 1800


def run_isolated(recorder: Recorder, progress: Progress, models: Sequence[synthetic.Spec], plan: Plan) -> None:
    """Measure each model in its process; a model that fails is named in `details`, and the others go on."""
    if plan.device.startswith("cuda") or plan.backend == "cuda":
        progress("compiling the kernels of all models", 0, len(models) + 1)
        small = [replace(model, layers=min(COMPILED_LAYERS, model.layers)) for model in models]
        with ThreadPoolExecutor(len(models)) as pool:
            list(pool.map(lambda model: _measure(model, replace(plan, repetitions=1)), small))
    recorder.model = {"name": ", ".join(map(str, models)), "bytes": sum(m.nbytes for m in models), "synthetic": True}
    for number, model in enumerate(models, 1):
        progress(str(model), number, len(models) + 1)
        output = _measure(model, plan)
        if "error" in output:
            recorder.details.setdefault("failed", {})[str(model)] = output["error"]
            continue
        recorder.details.setdefault("models", {})[str(model)] = {"model": output["model"], **output["details"]}
        for value in output["results"]:
            found = Result.from_json(value, str(model))
            recorder.add_result(replace(found, name=f"{model}/{found.name}"))


def _measure(model: synthetic.Spec, plan: Plan) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, str(model), json.dumps(asdict(plan))]
    child = ChildProcess(str(model), command, package_environment(), TIMEOUT_S)
    try:
        return child.start("results")
    except ChildFailedError as error:
        return {"error": str(error)}
    finally:
        child.close()


def main() -> None:
    """Measure one model and print the results; whatever libraries print goes to standard error."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    recorder, plan = Recorder("e2e"), Plan(**json.loads(sys.argv[2]))
    run(recorder, lambda *_: None, synthetic.parse(sys.argv[1]), plan)
    results = [result.as_json() for result in recorder.results()]
    output = {"results": results, "model": recorder.model, "details": recorder.details}
    print(json.dumps(replace_non_finite(output)), file=reply, flush=True)


if __name__ == "__main__":
    main()
