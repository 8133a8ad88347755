#!/usr/bin/env python3
"""One GPU with state on the host or a drive: training beside its roof and its peers, and the copies under it.

* `bench/offload.py train`: a Llama of 1 or 7 billion parameters; --largest: the largest that trains
* `bench/offload.py cells`: one model in all places, with 1 and 2 micro-batches, with and without clipping
* `bench/offload.py copies`: pinned memory to and from the GPU, alone and while the CPU's Adam runs
"""

from __future__ import annotations

import sys

from harness.program import run_case

CASES = {"train": "offloaded.train:main", "cells": "offloaded.cells:main", "copies": "offloaded.copies:main"}

if __name__ == "__main__":
    sys.exit(run_case(__doc__, CASES))
