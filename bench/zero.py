#!/usr/bin/env python3
"""A training step of a GPT by ZeRO stage and tier, beside no communication, DDP, FSDP2 and DeepSpeed.

bench/zero.py step       the time of a step, by stage, tier and peer
bench/zero.py ddp        what communication adds to DistributedDataParallel over "zcomm" and over Gloo
bench/zero.py overlap    how much of the communication backward hides
bench/zero.py profile    what an open zcomm.profile() costs
"""

from __future__ import annotations

import sys

from harness import cases

CASES = {"step": "training.step", "ddp": "training.ddp", "overlap": "training.overlap", "profile": "training.profile"}

if __name__ == "__main__":
    sys.exit(cases.run(__doc__, CASES))
