"""The name ``deepspeed`` for ``zcomm.compat.deepspeed``: modules, find_spec and metadata, in child processes too.

The folder ``zcomm/compat/site`` holds a package ``deepspeed`` and its metadata. On ``sys.path`` it makes
``import deepspeed`` import zcomm's; on PYTHONPATH it does so in every process that the program starts. No file of
another distribution is written. Four ways add it.
``python -m zcomm.compat.deepspeed`` and ``zcomm run`` do; ``install()`` does in a notebook.
PYTHONPATH does, by hand: ``python -m zcomm.compat.deepspeed --path`` prints the folder.
The distribution zcomm-deepspeed appends it: an installed deepspeed is found before it.

Invariant: ``deepspeed.X`` and ``zcomm.compat.deepspeed.X`` are one module object.
Thread rule: as the import system.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_NAME = "deepspeed"
_OWN = "zcomm.compat.deepspeed"


def folder() -> str:
    """Return the folder that makes ``import deepspeed`` find zcomm if it is on ``sys.path`` or PYTHONPATH."""
    return str(Path(__file__).resolve().parents[1] / "site")


def install() -> None:
    """Make ``import deepspeed`` find zcomm in this process, and in processes that it starts.

    Call it before anything imports deepspeed, or looks for it.
    Raises: RuntimeError if this process has imported another deepspeed.
    """
    other = sys.modules.get(_NAME)
    if other is not None and other is not sys.modules.get(_OWN):
        raise RuntimeError(
            f"deepspeed of {getattr(other, '__file__', '?')} is imported already: call "
            "zcomm.compat.deepspeed.install() before anything imports deepspeed"
        )
    place = folder()
    sys.path[:] = [place, *(path for path in sys.path if path != place)]  # zcomm-deepspeed has it at the end
    os.environ["PYTHONPATH"] = with_folder(os.environ.get("PYTHONPATH", ""))
    importlib.invalidate_caches()


def with_folder(paths: str) -> str:
    """Return PYTHONPATH ``paths`` with ``folder()`` in front."""
    rest = [path for path in paths.split(os.pathsep) if path and path != folder()]
    return os.pathsep.join([folder(), *rest])


def installed() -> str | None:
    """Return the place of an installed deepspeed that is not zcomm's, or None. It is not imported."""
    for path in sys.path:
        if path and os.path.realpath(path) != folder():
            spec = importlib.machinery.PathFinder.find_spec(_NAME, [path])
            if spec is not None and spec.origin is not None:
                return spec.origin
    return None


def serve() -> None:
    """Put ``zcomm.compat.deepspeed`` in place of the module ``deepspeed``, with its contents."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    sys.modules[_NAME] = importlib.import_module(_OWN)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of ``deepspeed.X``: the module ``zcomm.compat.deepspeed.X``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(_NAME + ".") or sys.modules.get(_NAME) is not sys.modules.get(_OWN):
            return None
        own = _OWN + fullname.removeprefix(_NAME)
        spec = importlib.util.find_spec(own)
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, _Loader(own), origin=spec.origin, is_package=is_package)


class _Loader(importlib.abc.Loader):
    """Loader that returns the module of another name unchanged."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of ``module``, which the import system has overwritten with this name's."""
        module.__spec__ = self._spec
