#!/usr/bin/env python3
"""CPUAdam: a step beside the memory's stream and its peers, and what small optimizer state changes.

* `bench/adam.py step`: a step of 1M to 200M parameters, fp32, bf16 and small states
* `bench/adam.py curves`: loss curves with fp32, bf16 and 8-bit state, beside what another seed changes
"""

from __future__ import annotations

import sys

from harness.program import run_case

CASES = {"step": "optim.step:main", "curves": "optim.curves:main"}

if __name__ == "__main__":
    sys.exit(run_case(__doc__, CASES))
