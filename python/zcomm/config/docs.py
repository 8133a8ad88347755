"""The documentation's tables of keys, written from the schema so that the two cannot drift apart.

One table per status: config.md has the keys that are honoured, config-compat.md those without effect and those refused.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcomm.config.keys import Key, Status, key_of
from zcomm.config.parse import section_type
from zcomm.config.schema import Config

PAGES = {
    "config.md": (Status.HONOURED,),
    "config-compat.md": (Status.NO_EFFECT, Status.REFUSED),
}
END = "<!-- end of the table -->"
_NAMES = {Status.HONOURED: "honoured", Status.NO_EFFECT: "without effect", Status.REFUSED: "refused"}
_HEADS = {
    Status.HONOURED: "| key | values | default | meaning |",
    Status.NO_EFFECT: "| key | values | default | asks for | why it has no effect |",
    Status.REFUSED: "| key | values | default | asks for | why it is refused, and what to do |",
}


@dataclass(frozen=True)
class Row:
    """One key of the tables; every cell is the text that is shown."""

    path: str
    values: str
    default: str
    status: Status
    meaning: str
    reason: str

    def line(self) -> str:
        """Return the row in Markdown."""
        cells = [f"`{self.path}`", self.values, self.default, self.meaning]
        if self.status is not Status.HONOURED:
            cells.append(self.reason)
        return f"| {' | '.join(cells)} |"


def rows(schema: type = Config, prefix: str = "") -> list[Row]:
    """Return one row per key in the schema's order; sections give their keys, not a row of their own."""
    found: list[Row] = []
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        nested = section_type(hints[field.name])
        path = prefix + field.name
        if nested is not None:
            found += rows(nested, path + ".")
        else:
            found.append(_row(path, field, hints[field.name]))
    return found


def begin(status: Status) -> str:
    """Return the line that a page has before its table of ``status``."""
    return f"<!-- keys, {_NAMES[status]}: written by `python -m zcomm.config --write docs` -->"


def markdown_table(status: Status) -> str:
    """Return the table of the keys of ``status``, between its two markers."""
    head = _HEADS[status]
    lines = [begin(status), head, "|" + "---|" * (head.count("|") - 1)]
    lines += [row.line() for row in rows() if row.status is status]
    return "\n".join([*lines, END])


def write_tables(folder: Path) -> None:
    """Replace the tables between their markers in the pages of ``folder``. Raises: ValueError for a missing marker."""
    for name, statuses in PAGES.items():
        page = folder / name
        text = page.read_text(encoding="utf-8")
        for status in statuses:
            text = _replaced(text, status, page)
        page.write_text(text, encoding="utf-8")


def _replaced(text: str, status: Status, page: Path) -> str:
    before, found, rest = text.partition(begin(status))
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{page}: the lines {begin(status)!r} and {END!r} must be there")
    return before + markdown_table(status) + after


def _row(path: str, field: dataclasses.Field[Any], annotation: Any) -> Row:
    described = key_of(field)
    required = field.default is dataclasses.MISSING
    default = described.shown_default or ("(needed)" if required else f"`{json.dumps(field.default)}`")
    meaning = described.meaning
    if described.auto:
        meaning += f'. `"auto"`: {described.auto}'
    return Row(path, _values(described, annotation), default, described.status, meaning, described.reason)


def _values(described: Key, annotation: Any) -> str:
    if described.choices:
        return ", ".join(str(choice) for choice in described.choices)
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    plain = next(part for part in parts if part is not types.NoneType)
    if tuple[str, ...] in parts:
        return "string, or list of strings"
    if dict[str, Any] in parts:
        return 'section; `"enabled": false` is silent'
    names = {bool: "true, false", int: "whole number", float: "number", str: "string", Any: "any"}
    kind = names.get(plain, "two numbers")
    if described.check is not None and plain in (int, float):
        kind += f" {described.check.words}"
    return kind
