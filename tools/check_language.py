#!/usr/bin/env python3
"""Check of the language of docstrings, comments, messages and pages; `make lint` runs it.

Rules (CONTRIBUTING.md, "Language"):
* Words for people (WORDS) never stand for code. On pages two of them may follow a word for readers (PEOPLE).
* Code logs, raises or returns; the phrases of SPEECH are forbidden.
* A docstring opens with a verb or a noun phrase, never with a word of OPENINGS.
* A sentence of a docstring has at most 25 words. An item of a list, a row of a table and a line of usage are sentences.
* Three rules have a budget (counted_words.py): counts by folder in tools/language_counts.json may only fall.
* Subjects of commits are imperatives of at most 72 columns (commit_subjects.py).

Usage: tools/check_language.py [--update | --list FOLDER] [ROOT]. Exit status 1 and a line `file:line: text` for each
finding, else 0. --update lowers the counts of the budget; --list prints the breaches below FOLDER.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import commit_subjects
import counted_words

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PLACES = ("python", "src", "include", "docs", "bench", "tests", "tools", "examples", *PAGES)
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
        if is_python(path, text):
            for line, docstring in docstrings_of(text):
                if OPENINGS.match(docstring):
                    yield path, line, f"a docstring opens with: {docstring.splitlines()[0]}"
                for found in long_sentences(docstring):
                    yield path, line, found


def is_python(path: Path, text: str) -> bool:
    """Return whether the file is a Python source."""
    return path.suffix == ".py" or (not path.suffix and "python" in text.partition("\n")[0])


def breaches(root: Path) -> Iterator[tuple[Path, counted_words.Breach]]:
    """Yield the breaches of the rules with a budget, with paths below the root."""
    for path in files_of(root):
        text = path.read_text(encoding="utf-8")
        for breach in counted_words.breaches_of(path.relative_to(root), text, is_python(path, text)):
            yield path.relative_to(root), breach


def check_budget(root: Path, update: bool) -> int:
    """Compare the counts with the budget and print the differences; return the exit status."""
    counts = counted_words.count(breaches(root))
    above, below = counted_words.compare(counts, counted_words.read(root))
    for kind, folder, rule, now, most in above:
        print(f'{folder}: {now} breaches of rule "{rule}" in {kind}, at most {most}: --list {folder} shows them')
    if above:
        return 1
    if below and update:
        counted_words.write(root, counts)
    elif below:
        print("counts of breaches fell: `tools/check_language.py --update` lowers the budget")
    return 0


def main(root: Path, update: bool = False) -> int:
    """Print the findings; return the exit status."""
    found = list(check(root))
    for path, line, text in found:
        print(f"{path.relative_to(root)}:{line}: {text}")
    subjects = list(commit_subjects.check(root))
    print(*subjects, sep="\n", end="\n" if subjects else "")
    over = check_budget(root, update) if (root / counted_words.COUNTS).exists() else 0
    return 1 if found or subjects or over else 0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Check the language of docstrings, comments, messages and pages.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--update", action="store_true", help="lower the counts of the budget")
    parser.add_argument("--list", metavar="FOLDER", help="print the breaches below FOLDER of the rules with a budget")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    root = options.root.resolve()
    if options.list is not None:
        for path, (kind, rule, line, text) in breaches(root):
            if path.is_relative_to(options.list):
                print(f"{path}:{line}: {kind}, {rule}: {text}")
        sys.exit(0)
    sys.exit(main(root, options.update))
