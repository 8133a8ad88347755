#!/usr/bin/env python3
"""Collectives beside the memory (or raw sockets, or the device's copy), Gloo, MPI, NCCL and DeepSpeed.

bench/coll.py suite      everything that the collectives must reach, with a verdict for each goal
bench/coll.py sweep      one operation by size, with nccl-tests' flags (bench/allreduce_bw is the same)
bench/coll.py one-gpu    ranks that share one GPU
"""

from __future__ import annotations

import sys

from harness import cases

CASES = {"suite": "collective.suite", "sweep": "collective.sweep", "one-gpu": "collective.one_gpu"}

if __name__ == "__main__":
    sys.exit(cases.run(__doc__, CASES))
