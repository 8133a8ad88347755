"""Appends zcomm's folder of the name ``deepspeed`` to ``sys.path``; zcomm_deepspeed.pth imports this at each start.

zcomm itself is not imported: a start costs a search for it. The place of zcomm may come to ``sys.path`` after this, as
that of the system's packages does in a virtual environment. Then the folder is appended when deepspeed is looked for.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys


def _folder() -> str | None:
    """Return the folder, or None where zcomm is not found."""
    spec = importlib.util.find_spec("zcomm")
    for place in (spec.submodule_search_locations or ()) if spec else ():  # an editable zcomm has several
        folder = os.path.join(place, "compat", "site")
        if os.path.isdir(folder):
            return folder
    return None


class _Late:
    """Finder of last resort: it is asked where no other one knows deepspeed."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        folder = cls._append() if fullname == "deepspeed" else None
        return None if folder is None else importlib.machinery.PathFinder.find_spec(fullname, [folder])

    @classmethod
    def find_distributions(cls, context):
        from importlib.metadata import DistributionFinder, MetadataPathFinder

        folder = cls._append() if context.name == "deepspeed" and context.path is sys.path else None
        if folder is None:
            return ()
        return MetadataPathFinder.find_distributions(DistributionFinder.Context(name=context.name, path=[folder]))

    @staticmethod
    def _append() -> str | None:
        """Append the folder and return it; None where it is there already, or zcomm is not found."""
        folder = _folder()
        if folder is None or folder in sys.path:
            return None
        sys.path.append(folder)
        return folder


def deepspeed() -> None:
    """Run the command of the deepspeed that ``import deepspeed`` finds: an installed one, or zcomm's."""
    runner = importlib.import_module("deepspeed.launcher.runner")
    (getattr(runner, "command", None) or runner.main)()


def command() -> None:
    """Run zcomm's command of the name that the program was started by: ds_report, dsr, ds_bench, ds_io, ..."""
    name = os.path.basename(sys.argv[0])
    commands = importlib.import_module("zcomm.compat.deepspeed.commands")
    commands.run("report" if name == "dsr" else name.removeprefix("ds_"))


if _folder() is None:
    sys.meta_path.append(_Late)
else:
    _Late._append()
