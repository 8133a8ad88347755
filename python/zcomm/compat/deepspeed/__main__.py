"""``python -m zcomm.compat.deepspeed script.py ARGS``: run a script with zcomm as its ``deepspeed``.

For scripts that are not to be touched at all: ``zcomm run -n 2 -m zcomm.compat.deepspeed train.py --deepspeed``.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

_OWN = (
    *("", ".accelerator", ".checkpointing", ".comm", ".moe", ".moe.layer", ".moe.utils"),
    *(".ops", ".ops.adagrad", ".ops.adam", ".ops.lion", ".utils"),
)
_SERVED = {name: f"zcomm.compat.deepspeed{name}" for name in _OWN} | {".zero": "zcomm.zero"}


def install() -> None:
    """Make ``import deepspeed``, and what is served of its modules, find these."""
    for name, module in _SERVED.items():
        sys.modules[f"deepspeed{name}"] = importlib.import_module(module)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m zcomm.compat.deepspeed script.py [args ...]")
    del sys.argv[0]
    install()
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
