#!/usr/bin/env python3
"""Check of the language of docstrings, comments, messages and pages; `make lint` runs it.

Rules (CONTRIBUTING.md, "Language"):
* Words for people (WORDS) never stand for code. On pages two of them may follow a word for readers (PEOPLE).
* Code logs, raises or returns; the phrases of SPEECH are forbidden.
* A docstring opens with a verb or a noun phrase, never with a word of OPENINGS.
* A sentence of a docstring has at most 25 words. LONG_SENTENCES is the number of longer ones today; it only falls.

Usage: tools/check_language.py [ROOT]. Exit status 1 and a line `file:line: text` for each finding, else 0.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PLACES = ("python", "src", "include", "docs", "bench", "tests", "tools", "examples", "README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".cu", ".cuh", ".md", ".sh"}
SKIPPED = {"__pycache__", "build"}
# Letters in brackets: the patterns do not match their own source.
PEOPLE = r"(?:readers?|users?|people|persons?|maintainers?|contributors?) wh[o](?:se)?\b"
WORDS = re.compile(r"\b(?:wh[o]|wh[o]m|wh[o]se|wh[o]ever|n[o]body|(?:some|any|every)(?:[b]ody|[o]ne))\b", re.I)
SPEECH = re.compile(r"\b(?:is|are|was|were) s[a]id\b|\bs(?:ay|ays|aid) s[o]\b", re.I)
OPENINGS = re.compile(r"(?:What|Where|Of|As|That|It|Wh[o]|Which|Whether|This)\b", re.I)
NAMES = r"\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*:"  # of parameters, before what they are
SENTENCE = re.compile(rf"(?<=[.!?])\s+|\n\s*\n|\n(?=\s*(?:[*|-] |{NAMES}))")
LONGEST = 25
LONG_SENTENCES = 175

Finding = tuple[Path, int, str]


def files_of(root: Path) -> Iterator[Path]:
    """Yield the files to check: sources, pages, and programs without a suffix that begin with `#!`."""
    for place in PLACES:
        found = [root / place] if (root / place).is_file() else sorted((root / place).rglob("*"))
        for path in found:
            if not path.is_file() or SKIPPED & set(path.relative_to(root).parts):
                continue
            if path.suffix in SUFFIXES or (not path.suffix and path.read_bytes()[:2] == b"#!"):
                yield path


def wrong_words(path: Path, text: str) -> Iterator[Finding]:
    """Yield each line with a word or phrase that is forbidden."""
    for number, line in enumerate(text.splitlines(), 1):
        rest = re.sub(PEOPLE, "", line, flags=re.I) if path.suffix == ".md" else line
        for found in (*WORDS.finditer(rest), *SPEECH.finditer(rest)):
            yield path, number, f'"{found.group()}" in: {line.strip()}'


def docstrings_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring of a Python source."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring


def check(root: Path) -> tuple[list[Finding], list[Finding]]:
    """Return findings (words and openings), and sentences of docstrings that are too long."""
    wrong: list[Finding] = []
    long: list[Finding] = []
    for path in files_of(root):
        text = path.read_text(encoding="utf-8")
        wrong += wrong_words(path, text)
        if path.suffix == ".py" or (not path.suffix and "python" in text.partition("\n")[0]):
            for line, docstring in docstrings_of(text):
                if OPENINGS.match(docstring):
                    wrong.append((path, line, f"a docstring opens with: {docstring.splitlines()[0]}"))
                counts = [len(re.findall(r"\S*\w\S*", sentence)) for sentence in SENTENCE.split(docstring)]
                long += [(path, line, f"{n} words in a sentence of this docstring") for n in counts if n > LONGEST]
    return wrong, long


def main(root: Path, allowed: int = LONG_SENTENCES) -> int:
    """Print the findings; return the exit status."""
    wrong, long = check(root)
    for path, line, text in (*wrong, *(long if len(long) > allowed else ())):
        print(f"{path.relative_to(root)}:{line}: {text}")
    if len(long) != allowed:
        print(f"{len(long)} docstring sentences of more than {LONGEST} words; tools/check_language.py allows {allowed}")
    return 1 if wrong or len(long) > allowed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()))
