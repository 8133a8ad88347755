"""Check of commit subjects: "area: imperative that names the thing changed", at most 72 columns.

The last commits that are younger than FROM are checked. In a shallow clone these are the commits that it has, and an
export without .git has none.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

FROM = 1795824000  # 2026-11-28 00:00 UTC: older subjects follow other rules
LAST = 200  # commits
WIDTH = 72
SHAPE = re.compile(r"[\w./-]+(?:, [\w./-]+)*: (?P<verb>[\w-]+) (?:.*[^.])")
MADE_BY_GIT = re.compile(r'(?:Merge|Revert "|fixup!|squash!)')
# Words that open no imperative: articles, forms of verbs. Some verbs end like these forms.
NO_VERB = re.compile(r"(?:an?|the|no|one|some|each|all|only|when|if|for|in|on|\d\w*)$|.*(?:s|ed|ing)$")
VERBS = re.compile(r"(?:.*ss|focus|bias|need|feed|seed|shed|speed|embed|exceed|proceed|bring|string)$")


def fault_of(subject: str) -> str | None:
    """Return a text that tells the fault of a subject, or None."""
    if MADE_BY_GIT.match(subject):
        return None
    if len(subject) > WIDTH:
        return f"{len(subject)} columns, at most {WIDTH}"
    shape = SHAPE.fullmatch(subject)
    if shape is None:
        return 'not "area: imperative", without a full stop'
    verb = shape["verb"]
    if verb != verb.lower() or (NO_VERB.match(verb) and not VERBS.match(verb)):
        return f'"{verb}" is no imperative'
    return None


def subjects_of(root: Path) -> Iterator[tuple[str, str]]:
    """Yield abbreviated hash and subject of the commits to check; none outside of a checkout of this project."""
    git = ["git", "-C", str(root)]
    top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    if top.returncode or Path(top.stdout.strip()).resolve() != root.resolve():
        return
    log = subprocess.run([*git, "log", f"-{LAST}", "--format=%h %ct %s"], capture_output=True, text=True)
    for line in log.stdout.splitlines():
        name, time, subject = (line + " ").split(" ", 2)
        if int(time) >= FROM:
            yield name, subject.strip()


def check(root: Path) -> Iterator[str]:
    """Yield a line for each subject with a fault."""
    try:
        for name, subject in subjects_of(root):
            fault = fault_of(subject)
            if fault:
                yield f"commit {name}: {fault}: {subject}"
    except FileNotFoundError:  # no git
        return
