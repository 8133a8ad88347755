"""Names of a package that load on first use: DeepSpeed's packages import all that is in them, these import nothing.

Thread rule: as the import system.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from zcomm.compat.deepspeed import refused

OWN = "zcomm.compat.deepspeed"


def names_of(package: str, homes: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package``: names of other modules, its own modules, and what is refused.

    homes: module ("zcomm.x", or below ``zcomm.compat.deepspeed`` where it begins with a dot): its names, with spaces
    between. "new=old" gives a name another one here.
    """
    found: dict[str, tuple[str, str]] = {}
    for home, names in (homes or {}).items():
        for each in names.split():
            new, _, old = each.partition("=")
            found[new] = (OWN + home if home.startswith(".") else home, old or new)

    def getattribute(name: str) -> Any:
        if name in found:
            home, old = found[name]
            return getattr(importlib.import_module(home), old)
        if not name.startswith("_"):
            refusal = refused.name_of(package, name)
            if refusal is not None:
                return refusal
            is_package = hasattr(sys.modules[package], "__path__")
            if is_package and importlib.util.find_spec(f"{package}.{name}") is not None:
                return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"{package} has no {name!r}; docs/compat.md lists its names")

    return getattribute
