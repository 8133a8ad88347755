"""Modules that are made from the rows of table.py, names that modules with a file have by rows, and refusals.

A package's ``__path__`` ends with an entry of this module's own (``path_entry``). Python's path finder asks ``_Rows``
about it after the package's folder, so that files come first; pkgutil lists the made modules by it.
A refused name can be imported and derived from. Its use raises NotImplementedError with the reason.
Invariant: a name of a row is looked up at its home at each use, so that both always have one value.
Thread rule: as the import system.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

from zcomm.compat.deepspeed import table

OWN = "zcomm.compat.deepspeed"
_ENTRY = f"rows of {OWN}:"  # the beginning of a path entry; the package, below OWN, follows


def path_entry(package: str) -> str:
    """Return the entry for the ``__path__`` of ``package`` by which its made modules are found."""
    return _ENTRY + _below(package)


def names_of(module: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``module``: the names of its rows, its own modules, and refused names.

    Raises: AttributeError for another name.
    """
    return functools.partial(_look_up, module)


def _below(module: str) -> str:
    return module.removeprefix(OWN).removeprefix(".")


def _look_up(module: str, name: str) -> Any:
    row = _below(module)
    by_name, whole = _homes(row)
    if name in by_name:
        home, old = by_name[name]
        return getattr(importlib.import_module(home), old)
    if name == "__all__" and row in {*table.NAMES, *table.CONSTANTS}:
        every = [getattr(importlib.import_module(home), "__all__", ()) for home in whole]
        return sorted({*by_name, *table.CONSTANTS.get(row, ())}.union(*every))
    if whole and not name.startswith("__"):
        (home,) = whole
        return getattr(importlib.import_module(home), name)
    if not name.startswith("_"):
        reason = reason_of(row, name)
        if reason is not None:
            return refusal(f"deepspeed.{row}: {name}" if row else f"deepspeed.{name}", reason)
        is_package = hasattr(sys.modules[module], "__path__")
        if is_package and importlib.util.find_spec(f"{module}.{name}") is not None:
            return importlib.import_module(f"{module}.{name}")
    raise AttributeError(f"{module} has no {name!r}; docs/compat.md lists its names")


@functools.cache
def _homes(row: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the home of each name, with its name at home, and the homes that export all their names to the row."""
    by_name: dict[str, tuple[str, str]] = {}
    whole = []
    for home, names in table.NAMES.get(row, {}).items():
        place = OWN + home if home.startswith(".") else home
        for each in names.split():
            new, _, old = each.partition("=")
            if each == "*":
                whole.append(place)
            else:
                by_name[new] = (place, old or new)
    return by_name, whole


# --- modules without a file -------------------------------------------------------------------------------------------


@functools.cache
def made() -> frozenset[str]:
    """Return the modules (below deepspeed) that rows name, and the packages around them."""
    found: set[str] = set()
    for row in (*table.NAMES, *table.CONSTANTS, *table.REFUSED):
        parts = row.split(".")
        found.update(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return frozenset(found - {""})


class _Rows(importlib.abc.PathEntryFinder, importlib.abc.Loader):
    """Finder and loader of the made modules of one package. Raises: ImportError for a path entry of another kind."""

    def __init__(self, entry: str) -> None:
        if not entry.startswith(_ENTRY):
            raise ImportError(f"{entry!r} is no entry for rows", path=entry)
        self._package = entry.removeprefix(_ENTRY)

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{OWN}.") or _below(fullname) not in made():
            return None
        has_modules = any(module.startswith(f"{_below(fullname)}.") for module in made())
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=table.__file__, is_package=has_modules)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(path_entry(fullname))
        return spec

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """Yield the modules of the package, and whether each is a package, as ``pkgutil.iter_modules`` asks for it."""
        own = f"{self._package}." if self._package else ""
        for module in sorted(made()):
            name = module.removeprefix(own)
            if module.startswith(own) and "." not in name:
                yield prefix + name, any(other.startswith(f"{module}.") for other in made())

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        row = _below(module.__name__)
        by_name, whole = _homes(row)
        homes = sorted({home for home, _ in by_name.values()} | set(whole))
        module.__doc__ = f"``deepspeed.{row}``: " + (f"names of {', '.join(homes)}." if homes else "see table.py.")
        look_up = names_of(module.__name__)
        vars(module).update(table.CONSTANTS.get(row, {}), __getattr__=look_up)
        vars(module)["__dir__"] = lambda: sorted({*vars(module), *by_name, *getattr(module, "__all__", ())})


sys.path_hooks.append(_Rows)


# --- refusals ---------------------------------------------------------------------------------------------------------


def reason_of(module: str, name: str) -> str | None:
    """Return why ``name`` of ``module`` (below deepspeed) is refused; None: it is not."""
    names, reason = table.REFUSED.get(module, ("", ""))
    if name in names.split():
        return reason
    for more, home in table.REFUSED_AGAIN.get(module, ()):
        if name in more.split():
            return table.REFUSED[home][1]
    return None


_made: dict[str, type] = {}


class _Refusing(type):
    """A class that raises when it is called or when it is asked for an attribute. isinstance() answers False."""

    zcomm_reason: str

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _raise(cls)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        _raise(cls)


def _raise(cls: Any) -> NoReturn:
    raise NotImplementedError(f"{cls.zcomm_name} is not available: {cls.zcomm_reason}")


def refusal(full_name: str, reason: str) -> type:
    """Return the class that raises NotImplementedError with ``full_name`` and ``reason`` when it is used.

    Programs may derive from it, and ask isinstance(): nothing is an instance.
    """
    if full_name not in _made:
        short = full_name.rpartition(" ")[2].rpartition(".")[2]
        _made[full_name] = _Refusing(
            short, (), {"zcomm_name": full_name, "zcomm_reason": reason, "__doc__": f"Refused: {reason}."}
        )
    return _made[full_name]


def refusing_function(full_name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotImplementedError with ``full_name`` and ``reason``."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{full_name}() is not available: {reason}")

    refuse.__name__ = refuse.__qualname__ = full_name.rpartition(".")[2]
    vars(refuse)["zcomm_reason"] = reason
    return refuse
