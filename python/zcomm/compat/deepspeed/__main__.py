"""``python -m zcomm.compat.deepspeed script.py ARGS``: run a program with zcomm as its ``deepspeed``.

For programs that are not to be touched: ``zcomm run -n 2 -m zcomm.compat.deepspeed train.py --deepspeed``. Processes
that the program starts find zcomm, too. An installed deepspeed stays as it is, and is not used.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from zcomm.compat.deepspeed.alias import folder, install


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zcomm.compat.deepspeed", description=__doc__, allow_abbrev=False)
    parser.add_argument("--path", action="store_true", help="print the folder that does the same on PYTHONPATH")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument(
        "--local-rank",
        action="store_true",
        help="give the program --local_rank=N first, as DeepSpeed's launcher does; N is LOCAL_RANK",
    )
    parser.add_argument("program", nargs="?", help="script, or module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args()
    if given.path:
        print(folder())
        return
    if given.program is None:
        parser.error("give a script to run, or --path")
    first = [f"--local_rank={os.environ.get('LOCAL_RANK', '0')}"] if given.local_rank else []
    sys.argv = [given.program, *first, *given.args]
    sys.path[0] = "" if given.module else str(Path(given.program).resolve().parent)  # was this module's place
    install()
    if given.module:
        runpy.run_module(given.program, run_name="__main__", alter_sys=True)
        return
    runpy.run_path(given.program, run_name="__main__")


if __name__ == "__main__":
    main()
