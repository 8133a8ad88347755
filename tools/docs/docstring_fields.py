"""griffe extension: docstrings in this project's form, as Markdown.

A line `name: text` about a parameter becomes an item of a list; `Raises:`, `Shapes:`, `Source:` and their like begin
new paragraphs. All other text is unchanged.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_FIELD = re.compile(r"(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*): (.*)")
_SECTION = re.compile(r"([A-Z][a-z]+(?: [a-z]+)?)((?:, [a-z][^:]*)?): (.*)")
_SECTIONS = set("Raises Shapes Memory Source Cost Returns Async Invariant Invariants".split()) | {"Thread rule"}


class DocstringFields(griffe.Extension):
    """Extension that rewrites the docstrings of a package when it has been loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite all of ``pkg``."""
        _walk(pkg)


def _walk(obj: griffe.Object) -> None:
    if obj.docstring is not None:
        obj.docstring.value = as_markdown(obj.docstring.value, _names(obj))
    for member in obj.members.values():
        if not member.is_alias:
            _walk(member)


def _names(obj: griffe.Object) -> set[str]:
    """Return the parameters and attributes that lines of the docstring may be about."""
    names: set[str] = set()
    if obj.is_class:
        names |= set(obj.members)
        if "__init__" in obj.members and not obj.members["__init__"].is_alias:
            names |= {parameter.name for parameter in obj.members["__init__"].parameters}
    elif obj.is_function:
        names |= {parameter.name for parameter in obj.parameters}
    return names


def as_markdown(text: str, names: set[str]) -> str:
    """Return the docstring as Markdown. names: of parameters and attributes."""
    lines: list[str] = []
    listed = False  # the last line is of an item
    for line in text.splitlines():
        field, section = _FIELD.fullmatch(line), _SECTION.fullmatch(line)
        if field and all(name.lstrip("*") in names for name in field[1].split(", ")):
            if lines and lines[-1] and not listed:
                lines.append("")
            about = ", ".join(f"`{name}`" for name in field[1].split(", "))
            lines.append(f"* {about}: {field[2]}")
            listed = True
        elif section and section[1] in _SECTIONS:
            if lines and lines[-1]:
                lines.append("")
            lines.append(f"**{section[1]}**{section[2]}: {section[3]}")
            listed = False
        elif not line.strip():
            lines.append("")
            listed = False
        else:
            lines.append("  " + line if listed else line)
    return "\n".join(lines)
