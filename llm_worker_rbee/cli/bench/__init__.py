"""`llm-worker-rbee bench ...`: the measuring commands, one file each."""

from .accuracy import accuracy
from .compare import compare
from .e2e import e2e
from .experiments import experiments
from .load import load
from .micro import micro
from .peers import peers
from .report import report
from .serving import serving

COMMANDS = {
    "Measure": (micro, e2e, load, serving),
    "Judge": (accuracy, peers, experiments),
    "Compare and show": (compare, report),
}
