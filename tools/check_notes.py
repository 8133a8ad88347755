#!/usr/bin/env python3
"""Check of the notes that comments and docstrings cite by name; `make lint` runs it.

A note begins a line or a sentence with its name in brackets, and its text follows: "[Note: bucket life] A hook gives".
Elsewhere, and before "in", "of", "and" or "(", the name cites the note. Each name is defined once, and each name that
is cited is defined.

Usage: tools/check_notes.py [ROOT]. Exit status 1 and a line `file:line: text` for each finding, else 0.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from check_language import files_of

LEADER = re.compile(r'^[ \t]*(?:///?<?|#|\*|""")?[ \t]*', re.M)  # of a line in a comment or docstring
NOTE = re.compile(r"(?P<begins>^|\. )?\[Note:\s+(?P<name>[^\]`{]+)\](?P<text>\s*$|\s+(?!(?:in|of|and)\b|\())?", re.M)
SKIPPED = {"check_language.py", "check_notes.py", "test_check_language.py", "test_check_notes.py"}  # have examples


def notes_of(text: str) -> Iterator[tuple[str, int, bool]]:
    """Yield name, line, and whether the line defines it, of each note in a text."""
    text = "\n".join(LEADER.sub("", line) for line in text.splitlines())
    for found in NOTE.finditer(text):
        defined = found["begins"] is not None and found["text"] is not None
        yield " ".join(found["name"].split()), text.count("\n", 0, found.start()) + 1, defined


def findings(root: Path) -> list[str]:
    """Return a line for each name that is defined twice, or cited and not defined."""
    defined: dict[str, list[str]] = defaultdict(list)
    cited: list[tuple[str, str]] = []
    for path in files_of(root):
        if path.name in SKIPPED:
            continue
        for name, line, defines in notes_of(path.read_text(encoding="utf-8")):
            place = f"{path.relative_to(root)}:{line}"
            if defines:
                defined[name].append(place)
            else:
                cited.append((place, name))
    twice = [
        f"{place}: [Note: {name}] is defined in {first} already"
        for name, (first, *more) in defined.items()
        for place in more
    ]
    lost = [f"{place}: [Note: {name}] is defined nowhere" for place, name in cited if name not in defined]
    return sorted(twice + lost)


def main() -> int:
    found = findings(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
    print("\n".join(found) if found else "notes: each name is defined once")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
