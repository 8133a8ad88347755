"""mkdocs hook: every public name of the API pages has a docstring; each that has none is a warning, which fails.

Public names: those in a module's `__all__`, or in `MODULES` for a module without it. Also every method and property of
a class that is not private, including methods inherited from zcomm's classes. Nothing is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
MODULES: dict[str, tuple[str, ...]] = {
    "zcomm": (),
    "zcomm.zero": (),
    "zcomm.optim": (),
    "zcomm.offload": ("SwapFile", "PinnedArena", "pinned_empty", "finished"),
    "zcomm.torch_backend": (),
    "zcomm.engine": (),
}
ELSEWHERE = ("zcomm.torch_backend.ProcessGroup",)  # torch.distributed.ProcessGroup documents its methods

_log = logging.getLogger("mkdocs.hooks.missing_docstrings")


def on_pre_build(config: Any) -> None:
    """Warn of each public name without a docstring."""
    for name in missing():
        _log.warning("%s has no docstring", name)


def missing() -> Iterator[str]:
    """Yield public names that have no docstring."""
    package = griffe.load("zcomm", search_paths=[ROOT / "python"], allow_inspection=False, resolve_aliases=True)
    seen: set[str] = set()
    for name, members in MODULES.items():
        module = package if name == "zcomm" else package[name.removeprefix("zcomm.")]
        for member in members or module.exports or ():
            if not str(member).startswith("__"):
                yield from _missing(f"{name}.{member}", module.members.get(str(member)), seen)


def _missing(name: str, found: Any, seen: set[str]) -> Iterator[str]:
    if found is None:
        yield f"{name}, which is exported and not defined,"
        return
    obj = found.final_target if found.is_alias else found
    if obj.path in seen or (obj.is_attribute and "property" not in obj.labels):
        return
    seen.add(obj.path)
    if not obj.has_docstring:
        yield name
    if obj.is_class and name not in ELSEWHERE:
        for member in {**obj.inherited_members, **obj.members}.values():
            if not member.name.startswith("_") and member.path.startswith("zcomm"):
                yield from _missing(f"{name}.{member.name}", member, seen)


if __name__ == "__main__":
    print("\n".join(missing()))
