#!/usr/bin/env python3
"""CPUAdam: a step beside the memory's stream and its peers, and what small optimizer state changes.

bench/adam.py step       a step of 1M to 200M parameters, fp32, bf16 and small states
bench/adam.py curves     loss curves with fp32, bf16 and 8-bit state, beside what another seed changes
"""

from __future__ import annotations

import sys

from harness import cases

CASES = {"step": "optim.step", "curves": "optim.curves"}

if __name__ == "__main__":
    sys.exit(cases.run(__doc__, CASES))
