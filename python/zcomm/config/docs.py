"""The documentation's tables of keys, written from the schema so that the two cannot drift apart.

One table per status: config.md has the honoured keys, config-compat.md the keys without effect and the refused keys.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

from zcomm.config.foreign import FOREIGN
from zcomm.config.keys import REQUIRED, Key, Status
from zcomm.config.parse import fields_of, named_type, section_type
from zcomm.config.schema import Config
from zcomm.config.words import OTHER_WORDS

PAGES = {
    "config.md": (Status.HONOURED,),
    "config-compat.md": (Status.NO_EFFECT, Status.REFUSED),
}
END = "<!-- end of the table -->"
_NAMES = {Status.HONOURED: "honoured", Status.NO_EFFECT: "without effect", Status.REFUSED: "refused"}
_HEADS = {
    Status.HONOURED: "| key | values | default | meaning |",
    Status.NO_EFFECT: "| key | values | default | asks for | why it has no effect |",
    Status.REFUSED: "| key | values | default | asks for | reason of the refusal, and remedy |",
}


def rows(schema: type = Config, prefix: str = "") -> dict[str, Key]:
    """Return all keys by dotted path, the schema's first; a section's keys have rows, the section has none."""
    found: dict[str, Key] = {}
    for name, key in fields_of(schema).items():
        nested, named = section_type(key.kind), named_type(key.kind)
        if named is not None:
            found |= rows(named, f"{prefix}{name}.*.")
        else:
            found |= {prefix + name: key} if nested is None else rows(nested, f"{prefix}{name}.")
    return found if prefix else found | FOREIGN | OTHER_WORDS


def begin(status: Status) -> str:
    """Return the line that a page has before its table of ``status``."""
    return f"<!-- keys, {_NAMES[status]}: written by `python -m zcomm.config --write docs` -->"


def markdown_table(status: Status) -> str:
    """Return the table of the keys of ``status``, between its two markers."""
    head = _HEADS[status]
    lines = [begin(status), head, "|" + "---|" * (head.count("|") - 1)]
    lines += [_line(path, key) for path, key in rows().items() if key.status is status]
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


def _line(path: str, key: Key) -> str:
    default = key.shown or ("(needed)" if key.default is REQUIRED else f"`{json.dumps(key.default)}`")
    meaning = f'{key.meaning}. `"auto"`: {key.auto}' if key.auto else key.meaning
    reason = [] if key.status is Status.HONOURED else [f"{key.reason} (quiet)" if key.quiet else key.reason]
    return f"| {' | '.join([f'`{path}`', _values(key), default, meaning, *reason])} |"


def _values(key: Key) -> str:
    if key.choices:
        return ", ".join(str(choice) for choice in key.choices)
    if key.kind == (str, tuple[str, ...]):
        return "string, or list of strings"
    if key.kind == tuple[int, ...]:
        return "list of whole numbers"
    if typing.get_origin(key.kind) is dict:
        if len(key.switches) > 1:
            return f"section; silent unless one of {', '.join(f'`{path}`' for path, _ in key.switches)} is true"
        off = [f'`"{path}": {json.dumps(type(absent)())}` is silent' for path, absent in key.switches]
        return "; ".join(["section", *off])
    names = {bool: "true, false", int: "whole number", float: "number", str: "string", Any: "any"}
    words = f" {key.check.words}" if key.check is not None and key.kind in (int, float) else ""
    return names.get(key.kind, "two numbers") + words
