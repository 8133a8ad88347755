#!/usr/bin/env python3
"""A training step of a GPT by ZeRO stage and tier, beside no communication, DDP, FSDP2 and DeepSpeed.

* `bench/zero.py step`: the time of a step, by stage, tier and peer
* `bench/zero.py ddp`: what communication adds to DistributedDataParallel over "zcomm" and over Gloo
* `bench/zero.py overlap`: how much of the communication backward hides
* `bench/zero.py hosts`: stage 3 and HSDP on two hosts with a slow link, next to FSDP2's HSDP over Gloo
* `bench/zero.py profile`: what an open zcomm.profile() costs
* `bench/zero.py pipeline`: a step of a pipeline of two stages, next to DeepSpeed's over Gloo
* `bench/zero.py curves`: loss curves with encoded collectives and 1-bit Adam, next to exact ones
* `bench/zero.py page`: what the page of a rank costs, by which `zcomm top` sees it
"""

from __future__ import annotations

import sys

from harness.program import run_case

CASES = {
    "step": "training.step:main",
    "ddp": "training.step:ddp",
    "overlap": "training.overlap:main",
    "hosts": "training.hosts:main",
    "profile": "training.profile:main",
    "page": "training.page:main",
    "curves": "training.curves:main",
    "pipeline": "training.pipeline:main",
}

if __name__ == "__main__":
    sys.exit(run_case(__doc__, CASES))
