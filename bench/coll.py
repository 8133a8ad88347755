#!/usr/bin/env python3
"""Collectives beside the memory (or raw sockets, or the device's copy), Gloo, MPI, NCCL and DeepSpeed.

* `bench/coll.py suite`: everything that the collectives must reach, with a verdict for each goal
* `bench/coll.py sweep`: one operation by size, with nccl-tests' flags (bench/allreduce_bw is the same)
* `bench/coll.py one-gpu`: ranks that share one GPU
* `bench/coll.py link`: two hosts that a cable of known rate joins
* `bench/coll.py codec`: the same, with codecs
"""

from __future__ import annotations

import sys

from harness.program import run_case

CASES = {
    "suite": "collective.suite:main",
    "sweep": "collective.sweep:main",
    "one-gpu": "collective.one_gpu:main",
    "link": "collective.link:main",
    "codec": "collective.codec:main",
}

if __name__ == "__main__":
    sys.exit(run_case(__doc__, CASES))
