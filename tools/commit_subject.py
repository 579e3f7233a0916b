"""Check the subject of a commit: at most 72 characters, in the imperative, without a full stop.

    python tools/commit_subject.py .git/COMMIT_EDITMSG      exit 1 with the reason if it does not hold

The pre-commit hook runs it (`pre-commit install --hook-type commit-msg`), and a test checks all commits since.
"""

from __future__ import annotations

import sys
from pathlib import Path

MAX_CHARACTERS = 72
VERB_LIST = """
accept adapt add adopt align allow annotate answer apply ask assert attach avoid ban bind bound break bring build
cache call cap change check choose clean close collect compare compile complete compute convert copy correct count cut
decide declare decode delete deny describe detach detect do document draw drop emit encode end enter evict exclude
explain
export expose extend extract fetch fill find finish fit fix fold follow free fuse generate give group guard hand
handle hash hide hold ignore import include increase index infer inline install join journal keep kill launch leave
let limit link list load lock log look lower make map mark match measure mend merge mix move multiply name normalize
note number offer offload open order own pack page parse pass persist pick pin place plan play point prefer prefetch
prefill prepare print profile project prove publish pull put quantize queue quote raise reach read rebuild record
redraw reduce refuse register reject release remove rename render repack repair repeat replace report requantize
require reserve reset resolve restart restore resume retry return reuse revert rework rewrite rotate round route run
sample save say scale scan schedule score seed select send separate serve set share shift ship shorten show sign
simplify size skip sleep sort speed spell split spread start state stop store stream stress strip sum support swap
sync take tell test time tokenize trace translate treat trigger trim trust try tune turn type undo unify unload unpack
update upgrade use validate verify wait wake walk warm warn widen wire wrap write
"""
VERBS = frozenset(VERB_LIST.split())


def find_fault(subject: str) -> str | None:
    """Return the fault of a subject, or None."""
    first = subject.split(" ")[0].removesuffix(",")
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
