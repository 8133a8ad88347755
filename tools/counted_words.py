"""Rules of language with a budget: each folder has a count of breaches, which may only fall.

Rules (CONTRIBUTING.md, "Language"), in the order of RULES:
* The first word opens a question. As a noun it hides the name of a thing.
* The second word is for places. A condition has "if", "when" or "unless".
* The words and the phrase of ARCHAIC have plain twins: next to, only, during, again, also.

Prose is a page without its code, a comment, a docstring, and a string with a space in it. Strings of the product that
are no docstrings (errors, logs, help) are counted apart, as "messages".
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

COUNTS = Path("tools/language_counts.json")  # {"messages" or "text": {folder: {rule: count}}}
ARCHAIC = r"(?<![-\w])(?:[b]eside|[a]lone|[a]mid|[a]new|[l]ikewise)\b|\b[s]o (?:is|are|was|were|do|does|did|has|have)\b"
RULES = {
    "what": re.compile(r"\b[w]hat\b(?!\()", re.I),
    "where": re.compile(r"\b[w]here\b", re.I),
    "archaic": re.compile(ARCHAIC, re.I),
}
ANY = re.compile("|".join(rule.pattern for rule in RULES.values()), re.I)
# Of a place: after a noun of a place or a verb that tells one, in a cell of a table, before a verb of places.
PLACES = (
    r"(?:places?|folders?|directory|directories|files?|paths?|pages?|lines?|address(?:es)?|offsets?|positions?|drives?|"
    r"machines?|hosts?|nodes?|rows?|columns?|points?|sections?|(?:ask|choose|decide|find|found|know|list|name|"
    r"print|record|report|said|say|see|show|tell|told)s?|of|from|to|is|and|matters?)"
)
AFTER_PLACE = re.compile(rf"(?:\b{PLACES}(?: \w+)?,? |\|[\w ]*:? ?)$", re.I)
TO_A_PLACE = re.compile(
    r"[*:`]* (?:to\b|[^.|;\n]{0,50}\b(?:lies?|lives?|listens?|meets?|stands?|(?:is|are) (?:kept|stored))\b)"
)
QUESTION = re.compile(r"[^.?!|]{0,200}\?")
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')

Breach = tuple[str, str, int, str]  # kind of prose, rule, line, the line's text


class _Lines:
    """Offsets of a text's lines. ast counts bytes of UTF-8, so columns are converted."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def offset(self, line: int, byte: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:byte].decode(errors="ignore"))

    def number(self, offset: int) -> int:
        return bisect_right(self.starts, offset)


def _strings(text: str, lines: _Lines) -> list[tuple[int, int, bool]]:
    """Return begin, end and "is a docstring" of each string of a Python source, in order."""
    tree = ast.parse(text)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            begin = lines.offset(node.lineno, node.col_offset)
            end = lines.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
            found.add((begin, end, id(node) in docstrings))
    return sorted(found)


def _kind_in_python(text: str, at: int, strings: list[tuple[int, int, bool]]) -> str | None:
    """Return "text", "messages", or None for code. A word in braces of an f-string is code."""
    for begin, end, docstring in strings:
        if begin <= at < end:
            if docstring:
                return "text"
            before = text[begin:at]
            if before.count("{") > before.count("}"):
                return None
            return "messages" if re.search(r"\s", text[begin:end]) else None
    return "text" if "#" in text[text.rfind("\n", 0, at) + 1 : at] else None


def _kind_in_cpp(line: str, column: int) -> str | None:
    for quoted in QUOTED.finditer(line):
        if quoted.start() < column < quoted.end():
            comment = line.find("//")
            if 0 <= comment < quoted.start():
                return "text"
            return "messages" if " " in quoted.group() else None
    return "text" if "//" in line[:column] else None


def _without_code(page: str) -> str:
    """Return the page with blanks for code, except comments in blocks."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found.group())

    def comments(found: re.Match[str]) -> str:
        return re.sub(r"^[^#\n]+", blank, found.group(), flags=re.M)

    page = re.sub(r"^```.*?^```", comments, page, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`|\]\([^)\s]*\)", blank, page)


def _is_place(prose: str, begin: int, end: int) -> bool:
    """Return whether this word of the second rule is of a place."""
    before = re.sub(r"[\s#/*]+", " ", prose[max(0, begin - 60) : begin])
    return bool(AFTER_PLACE.search(before) or TO_A_PLACE.match(prose, end))


def breaches_of(path: Path, text: str, python: bool) -> Iterator[Breach]:
    """Yield the breaches of a file."""
    if not ANY.search(text):
        return
    page = path.suffix == ".md"
    lines = _Lines(text)
    strings = _strings(text, lines) if python else []
    prose = _without_code(text) if page else text
    for rule, pattern in RULES.items():
        for found in pattern.finditer(prose):
            at = found.start()
            number = lines.number(at)
            line = lines.lines[number - 1]
            kind: str | None = "text"
            if python:
                kind = _kind_in_python(text, at, strings)
            elif path.suffix in (".sh", ""):
                kind = "text" if "#" in line[: at - lines.starts[number - 1]] else None
            elif not page:
                kind = _kind_in_cpp(line, at - lines.starts[number - 1])
            if kind is None or (rule != "archaic" and QUESTION.match(prose, found.end())):
                continue
            if rule == "where" and _is_place(prose, at, found.end()):
                continue
            yield kind, rule, number, line.strip()


def folder_of(path: Path) -> str:
    """Return the folder that a count belongs to: python/zcomm/zero, src/coll, tests/cpp, docs, README.md."""
    folder = path.parts[:-1][: {"python": 3, "src": 2, "tests": 2}.get(path.parts[0], 1)]
    return "/".join(folder) or path.name


def count(found: Iterable[tuple[Path, Breach]]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the counts of breaches as in the file. Strings of tests and tools are no messages of the product."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for path, (kind, rule, _, _) in found:
        product = path.parts[0] in ("python", "src", "include")
        counts[kind if product else "text", folder_of(path), rule] += 1
    result: dict[str, dict[str, dict[str, int]]] = {"messages": {}, "text": {}}
    for (kind, folder, rule), number in sorted(counts.items()):
        result[kind].setdefault(folder, {})[rule] = number
    return result


def compare(
    counts: dict[str, dict[str, dict[str, int]]], budget: dict[str, dict[str, dict[str, int]]]
) -> tuple[list[tuple[str, str, str, int, int]], bool]:
    """Return the counts over budget (kind, folder, rule, count, budget), and whether any is below."""
    keys = {
        (kind, folder, rule)
        for table in (counts, budget)
        for kind in ("messages", "text")
        for folder, rules in table.get(kind, {}).items()
        for rule in rules
    }
    above, below = [], False
    for kind, folder, rule in sorted(keys):
        now = counts.get(kind, {}).get(folder, {}).get(rule, 0)
        most = budget.get(kind, {}).get(folder, {}).get(rule, 0)
        if now > most:
            above.append((kind, folder, rule, now, most))
        below = below or now < most
    return above, below


def read(root: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Return the budget of a checkout."""
    return json.loads((root / COUNTS).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def write(root: Path, counts: dict[str, dict[str, dict[str, int]]]) -> None:
    """Write the budget: a line for each folder, so that changes of two folders merge."""
    kinds = []
    for kind, folders in counts.items():
        rows = ",\n".join(f"    {json.dumps(folder)}: {json.dumps(rules)}" for folder, rules in folders.items())
        kinds.append(f'  "{kind}": {{\n{rows}\n  }}' if rows else f'  "{kind}": {{}}')
    (root / COUNTS).write_text("{\n" + ",\n".join(kinds) + "\n}\n", encoding="utf-8")
