"""One decision per claim: accept, modify or reject what it proposes, with the reason, the risk and today's state.

The decision follows from the verdict over all backends that were measured. A change stays only if its gain is outside
the noise, as the Rust worker's teams had it: nothing that was refuted or is within noise is accepted. What was
confirmed is rejected only where the product does not need it, and the reason says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Name = Literal["accept", "modify", "reject"]
NOT_NEEDED = "does not need"  # the only reason to reject what is confirmed


class Decision(NamedTuple):
    """The decision on a claim, and its reason."""

    name: Name
    reason: str
    risk: str
    today: str


class Choice(NamedTuple):
    """The decisions on a claim: (decision, reason) by verdict, where the usual one is not enough."""

    risk: str
    today: str
    by_verdict: Mapping[str, tuple[Name, str]] = {}


USUAL: Mapping[str, tuple[Name, str]] = {
    "confirmed": ("accept", "it holds on every backend that was measured"),
    "refuted": ("reject", "it does not hold on any backend that was measured"),
    "within noise": ("reject", "no difference is outside the noise, and such a change is not worth making"),
    "mixed": ("modify", "it holds in some cases only: see the verdicts of the backends"),
    "not judged": ("modify", "it does not say what is counted: the counts stand in its place"),
}
ONE_DEFINITION = "the modules remain the one definition, and each backend makes its integrated step from them"
CHOICES: Mapping[str, Choice] = {
    "1": Choice(
        "a step made from modules must compute what they compute: tests compare both, on the CPU bit by bit",
        "layers/ are modules; a backend with kernels records their calls once and runs the whole step as one program "
        "or CUDA graph",
        {
            "confirmed": ("accept", f"the integrated block is faster; {ONE_DEFINITION}"),
            "mixed": ("modify", f"it gains in some cases only: the reference stays op by op; {ONE_DEFINITION}"),
        },
    ),
    "2": Choice(
        "a library's change of behaviour reaches users: ids, streams and files are compared with references in tests",
        "the parts are packages of this program (weights, tokenizer, models, server) on few libraries",
        {
            "confirmed": ("accept", "each part does its job on a real file"),
            "refuted": ("modify", "parts that fail are mended before they count as covered"),
        },
    ),
    "3": Choice(
        "none: three objects are easier to test alone, and the paged KV cache is shared by requests, which tables are "
        "not",
        "separate: the KV cache is paged and owned by the engine, RoPE frequencies belong to the layers, masks do not "
        "exist",
        {
            "confirmed": (
                "reject",
                "faster for one sequence, but blocks are shared between requests: the product " + NOT_NEEDED,
            ),
            "mixed": ("reject", "one object is not faster everywhere, and blocks are shared between requests"),
        },
    ),
    "3a": Choice(
        "a kernel's loop bound must be right for chunked prompts and windows: tests compare it with the masked "
        "reference",
        "the kernels are causal by the bound of a loop and hold no mask; the materialised mask lives in the reference",
        {
            "confirmed": (
                "reject",
                "a cached mask saves time where a mask is added, but the product " + NOT_NEEDED + " it",
            ),
            "mixed": ("reject", "it can pay only where a mask is added, and the kernels add none"),
            "refuted": ("reject", "attention without a mask is faster than with a cached one"),
        },
    ),
    "4": Choice(
        "the figure depends on model and machine: it is measured anew on each, never quoted",
        "decode and prefill run as the integrated step of the backend's kernels",
        {
            "confirmed": ("accept", "integration gives at least 2 times on every backend that was measured"),
            "refuted": (
                "modify",
                "integration alone does not give 2 times in decode and in prefill on any backend; the table of ops and "
                "architecture says what comes from which, and the product takes both",
            ),
            "mixed": (
                "modify",
                "the factor belongs to some backends and phases; the table of ops and architecture says what comes "
                "from which, and the product takes both",
            ),
        },
    ),
    "5": Choice(
        "angles must be those of the reference at long contexts: tests compare them there",
        "the CPU makes the angles once in a step for all layers, the GPU reads a table; both rotate and write the "
        "cache in one pass",
        {
            "confirmed": ("accept", "the kernels are used as they are"),
            "mixed": ("modify", "the kernel is used where it is, plain NumPy stays the definition and is not tuned"),
            "refuted": ("reject", "the rotation is not that much faster: it stays as it is, since it costs little"),
        },
    ),
    "6": Choice(
        "none: nothing depends on it",
        "no step of the product adds a mask",
        {
            "confirmed": ("reject", "the whole pass gains on the old way, but the product " + NOT_NEEDED + " it"),
            "mixed": ("reject", "the whole pass gains at some lengths only, and no step of the product adds a mask"),
        },
    ),
    "7": Choice(
        "none: nothing depends on it",
        "no step of the product adds a mask",
        {
            "confirmed": ("reject", "their expectation was right, about a part that the product " + NOT_NEEDED),
            "refuted": ("reject", "it holds for short prompts at best, where a mask costs least"),
        },
    ),
    "8": Choice(
        "none: nothing depends on it",
        "no step of the product adds a mask",
        {"confirmed": ("reject", "the gain grows, of a part that the product " + NOT_NEEDED)},
    ),
    "9": Choice(
        "kernels are more code than a library call: each has a reference twin and a test that both agree",
        "QKV is multiplied from quantized weights by SIMD or tensor-core kernels, RoPE and attention have kernels",
        {
            "refuted": ("reject", "at most steps each part is over 10% faster on the kernels: it could be optimised"),
            "mixed": ("modify", "parts that are faster on the kernels were worth optimising, the others are left"),
            "confirmed": ("accept", "the kernels bring no more than 10% here"),
        },
    ),
    "10": Choice(
        "a step in one call is harder to profile: `profile` times its tasks one by one",
        "a step of the product is one call into compiled code, or the replay of a graph",
        {
            "confirmed": ("accept", "calls take at most 5% of a step"),
            "refuted": ("reject", "calls take over 5% of a step, so the product makes one call in a step"),
            "mixed": (
                "modify",
                "where calls take over 5% of a step of fast kernels, a step is made one call; what is left of its own "
                "host time overlaps with the device's",
            ),
        },
    ),
    "11": Choice(
        "paging costs an index in each access: the kernels' attention reads blocks directly",
        "the KV cache is paged and preallocated; RoPE tables are separate",
        {
            "confirmed": ("accept", "no other way is faster"),
            "mixed": (
                "modify",
                "RoPE tables stay alone; keys and values are allocated once and never copied to grow. Pages cost NumPy "
                "a gather that the kernels do not make, and let requests share prefixes and memory",
            ),
            "refuted": ("reject", "the other ways are faster"),
        },
    ),
    "12": Choice(
        "counting lines rewards long lines: folders have budgets, and reviews read the code",
        "lines, imports and the number of modules are bounded by tests",
    ),
    "13": Choice(
        "none: no masks are cached",
        "the kernels hold no mask",
        {
            "confirmed": ("reject", "they cost less than the KV cache, but the product " + NOT_NEEDED + " it"),
            "refuted": ("reject", "they would take more memory than the KV cache"),
        },
    ),
}


def decide(claim: str, verdict: str) -> Decision:
    """Return the decision on a claim with this verdict."""
    choice = CHOICES[claim]
    name, reason = choice.by_verdict.get(verdict) or USUAL[verdict]
    return Decision(name, reason, choice.risk, choice.today)
