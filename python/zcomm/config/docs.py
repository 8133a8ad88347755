"""The documentation's table of keys, written from the schema so that the two cannot drift apart."""

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

BEGIN = "<!-- table of keys: written by `python -m zcomm.config --write docs/config.md` -->"
END = "<!-- end of the table -->"


@dataclass(frozen=True)
class Row:
    """One key of the table; every cell is the text that is shown."""

    path: str
    values: str
    default: str
    status: str
    meaning: str


def rows(schema: type = Config, prefix: str = "") -> list[Row]:
    """One row per key in the schema's order; sections give their keys, not a row of their own."""
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


def markdown_table() -> str:
    """The table of all keys, between its two markers."""
    lines = [BEGIN, "| key | values | default | status | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{row.path}` | {row.values} | {row.default} | {row.status} | {row.meaning} |" for row in rows()]
    return "\n".join([*lines, END])


def write_table(page: Path) -> None:
    """Replace the table between the markers of ``page``. Raises: ValueError where the markers are missing."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: the lines {BEGIN!r} and {END!r} must be there")
    page.write_text(before + markdown_table() + after, encoding="utf-8")


def _row(path: str, field: dataclasses.Field[Any], annotation: Any) -> Row:
    described = key_of(field)
    required = field.default is dataclasses.MISSING
    default = described.shown_default or ("(needed)" if required else f"`{json.dumps(field.default)}`")
    meaning = described.meaning
    if described.reason:
        word = "No effect" if described.status is Status.NO_EFFECT else "Refused"
        meaning += f". {word}: {described.reason}"
    if described.auto:
        meaning += f'. `"auto"`: {described.auto}'
    return Row(path, _values(described, annotation), default, described.status.value, meaning)


def _values(described: Key, annotation: Any) -> str:
    if described.choices:
        return ", ".join(str(choice) for choice in described.choices)
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    plain = next(part for part in parts if part is not types.NoneType)
    if tuple[str, ...] in parts:
        return "string, or list of strings"
    if dict[str, Any] in parts:
        return 'section; `"enabled": false` is silent'
    names = {bool: "true, false", int: "whole number", float: "number", str: "string"}
    kind = names.get(plain, "two numbers")
    if described.check is not None and plain in (int, float):
        kind += f" {described.check.words}"
    return kind
