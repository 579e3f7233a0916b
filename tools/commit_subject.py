"""Check the subject of a commit: at most 72 characters, in the imperative, without a full stop.

    python tools/commit_subject.py .git/COMMIT_EDITMSG      exit 1 with the reason if it does not hold

The pre-commit hook runs it (`pre-commit install --hook-type commit-msg`), and a test checks all commits since.
"""

from __future__ import annotations

import sys
from pathlib import Path

MAX_CHARACTERS = 72
VERB_LIST = """
accept add align allow annotate answer apply ask assert avoid bound build cache call change check choose clean close
collect compare compile complete compute convert copy correct count cut declare decode delete describe detect do
document draw drop encode end exclude explain extend extract fetch fill find finish fit fix fold follow free fuse
generate give group guard handle hash hide hold ignore import include increase infer inline join keep launch leave let
limit link list load log look lower make map mark match measure mend merge mix move multiply name normalize note open
order pack page parse pass pick pin place plan play point prefer prefetch prefill prepare print profile prove publish put
quantize quote raise read record redraw reduce refuse register release remove rename render repack repair repeat
replace report require requantize reserve reset resolve restart restore return reuse revert rewrite rotate round route
run sample save say scale schedule score select send separate serve set share shorten show simplify size skip sort
speed split start state stop store stream sum support swap take tell test time tokenize trace translate trim try tune
turn undo unify unpack update upgrade use validate verify wait walk warm warn widen wrap write
"""
VERBS = frozenset(VERB_LIST.split())


def find_fault(subject: str) -> str | None:
    """Return what is wrong with a subject, or None."""
    first = subject.split(" ")[0]
    if len(subject) > MAX_CHARACTERS:
        return f"it has {len(subject)} characters: at most {MAX_CHARACTERS}"
    if not first[:1].isupper() or first.lower() not in VERBS:
        return f"it begins with {first!r}: begin with a verb in the imperative (tools/commit_subject.py lists them)"
    return "it ends in a full stop" if subject.endswith(".") else None


def main() -> None:
    """Check the message in the file that is named."""
    subject = Path(sys.argv[1]).read_text(encoding="utf-8").partition("\n")[0]
    fault = None if subject.startswith(("Merge ", "fixup! ", "squash! ")) else find_fault(subject)
    if fault is not None:
        sys.exit(f"commit subject {subject!r}: {fault}")


if __name__ == "__main__":
    main()
