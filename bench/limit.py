#!/usr/bin/env python3
"""A limit on memory (`ZeroOptimizer(memory=)`): that it is kept at any depth, and that no bit depends on it.

* `bench/limit.py depth`: peaks of models of one width, deeper and deeper, within one limit; what is refused below it
* `bench/limit.py bits`: losses, weights and state with a limit beside those without
* `bench/limit.py save`: seconds, peaks and bytes of steps, save, load and export within one limit, and their bits
* `bench/limit.py atomic`: cost of `Offload(atomic=True)` in seconds of a step, by the place of the updates
* `bench/limit.py bound`: seconds of a step beside its bound, compute or the drive, with fio between the steps
* `bench/limit.py background`: seconds for which training stands still for a save, in the foreground and the background

All is on the drive: stage 3, weights, gradients and AdamW's state.
"""

from __future__ import annotations

import sys

from harness.program import run_case

CASES = {
    "depth": "limited.depth:main",
    "bits": "limited.bits:main",
    "save": "limited.save:main",
    "atomic": "limited.atomic:main",
    "bound": "limited.bound:main",
    "background": "limited.background:main",
}

if __name__ == "__main__":
    sys.exit(run_case(__doc__, CASES))
