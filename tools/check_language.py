#!/usr/bin/env python3
"""Check of the language of docstrings, comments, messages and pages; `make lint` runs it.

Rules (CONTRIBUTING.md, "Language"):
* Words for people (WORDS) never stand for code. On pages two of them may follow a word for readers (PEOPLE).
* Code logs, raises or returns; the phrases of SPEECH are forbidden.
* A docstring opens with a verb or a noun phrase, never with a word of OPENINGS.
* A sentence of a docstring has at most 25 words. An item of a list, a row of a table and a line of usage are sentences.

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
COMMAND = r" +(?:python3?|mpirun|zcomm run|bench/\S+) "  # a line of usage
ROW = r"[^\n]*\S {2,}\S"  # of a table: cells lie two spaces apart
SENTENCE = re.compile(rf"(?<=[.!?])\s+|\n\s*\n|\n(?=\s*(?:[*|-] |{NAMES})|{COMMAND}|{ROW})")
HEADING = re.compile(r"^\[Note: [^\]]*\](?= [A-Z])", re.M)
LONGEST = 25

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


def long_sentences(docstring: str) -> Iterator[str]:
    """Yield a text for each sentence of more than LONGEST words."""
    for sentence in SENTENCE.split(HEADING.sub("", docstring)):
        words = re.findall(r"\S*\w\S*", sentence)
        if len(words) > LONGEST:
            yield f"{len(words)} words in a sentence, at most {LONGEST}: {' '.join(words[:6])} ..."


def check(root: Path) -> Iterator[Finding]:
    """Yield findings: words, openings of docstrings, and sentences of docstrings that are too long."""
    for path in files_of(root):
        text = path.read_text(encoding="utf-8")
        yield from wrong_words(path, text)
        if path.suffix == ".py" or (not path.suffix and "python" in text.partition("\n")[0]):
            for line, docstring in docstrings_of(text):
                if OPENINGS.match(docstring):
                    yield path, line, f"a docstring opens with: {docstring.splitlines()[0]}"
                for found in long_sentences(docstring):
                    yield path, line, found


def main(root: Path) -> int:
    """Print the findings; return the exit status."""
    found = list(check(root))
    for path, line, text in found:
        print(f"{path.relative_to(root)}:{line}: {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()))
