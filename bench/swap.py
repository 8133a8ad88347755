#!/usr/bin/env python3
"""A drive: SwapFile beside the best fio and DeepSpeed's aio, and the optimizer step with its state there.

* `bench/swap.py bandwidth --dir DIR`: write, read, half and half, batches of tensors
* `bench/swap.py step --dir DIR`: AdamW with three quarters of its state on the drive
"""

from __future__ import annotations

import sys

from harness.program import run_case

CASES = {"bandwidth": "drive.bandwidth:main", "step": "drive.step:main"}

if __name__ == "__main__":
    sys.exit(run_case(__doc__, CASES))
