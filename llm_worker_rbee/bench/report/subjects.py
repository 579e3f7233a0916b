"""Runs that belong together: of one kind, one model, one machine, oldest first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ..differences import model_name
from ..results import Run

TITLES = {
    "micro": "Micro-benchmarks", "e2e": "End to end", "load": "Loading a model", "serving": "Serving",
    "peers": "Beside its peers", "accuracy": "Accuracy", "profile": "Where the time goes", "experiments": "Experiments",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Given:
    """A run, and the file it came from."""

    name: str
    run: Run


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured several times, oldest first."""

    title: str
    given: tuple[Given, ...]

    @property
    def latest(self) -> Run:
        """The one that is shown in full."""
        return self.given[-1].run


def subjects(given: Sequence[Given]) -> list[Subject]:
    """Runs by kind, model and machine, kinds in the order in which they are documented."""
    groups: dict[tuple[str, str, str], list[Given]] = {}
    for one in sorted(given, key=lambda one: moment(one.run)):
        run = one.run
        model = str((run.model or {}).get("sha256") or model_name(run))
        groups.setdefault((run.kind, model, str(run.machine.get("fingerprint"))), []).append(one)
    kinds = list(TITLES)
    ordered = sorted(groups.items(), key=lambda item: kinds.index(item[0][0]) if item[0][0] in kinds else len(kinds))
    return [
        Subject(_title(parts[-1].run, [key for key in groups if key[0] == kind]), tuple(parts))
        for (kind, *_), parts in ordered
    ]


def _title(run: Run, alike: Sequence[tuple[str, str, str]]) -> str:
    """The kind, and what tells it apart from others of its kind."""
    title = TITLES.get(run.kind, run.kind)
    several_models, several_machines = (len({key[i] for key in alike}) > 1 for i in (1, 2))
    parts = [
        model_name(run) if several_models else "",
        str(run.machine.get("cpu") or "") if several_machines else "",
    ]
    return ": ".join(filter(None, [title, ", ".join(filter(None, parts))]))


def moment(run: Run) -> tuple[float, str]:
    """When the measured code was written: the commit's date, or else when the run took place."""
    for text in ((run.commit or {}).get("date"), run.created):
        try:
            found = datetime.fromisoformat(str(text))
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp(), run.created
        except ValueError:
            continue
    return math.inf, run.created
