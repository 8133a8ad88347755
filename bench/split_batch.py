#!/usr/bin/env python3
"""Tokens per second of `split_batch(parts=M)` next to M micro-steps of the same batch, with all weights on the drive.

  bench/split_batch.py --dir /mnt/nvme             (1.1 billion parameters, 2 GiB, M = 8: 40 GB of the drive)
  bench/split_batch.py --dir /mnt/nvme --size 3M --width 256 --limit none --parts 4 --contexts 16,64

The demo's decoder, deeper and not wider; stage 3, bf16, AdamW. Weights and state are on the drive, within `memory=`,
which decides the place of the sums of gradients. A part, and a micro-batch, is one sequence; --contexts has its tokens.
Few tokens make reading the longer work.

* micro-steps: grad_accum=M. Activations are kept, so backward computes nothing again.
* split_batch: the M sequences as one batch, in M parts.
* backward: the same with `Offload(update="backward")`, which needs one backward pass. It stores no sums.

Each variant is a process of its own, and begins with the same weights. They take turns: a round is a step of each, with
the same batch, in an order that is drawn, while the others wait. Figures are medians of rounds. A step ends when all
that it has written is on the drive.

tokens/s: of the M sequences. x: median of the rounds' ratios with micro-steps over this, and its range. "read",
"written": GB of a step. roof: tokens/s if each phase took the larger of computing and the drive's time for its bytes.
The drive is measured before each round, with a swap file of its own. "of": tokens/s over the roof. peak: VmHWM of the
steps, in MiB.

#wrong counts three things, compared with the first variant. Losses may differ by a thousandth. The weights' distance
may be a quarter of the way that they have gone. No peak may be above the limit. The bits differ, because sums over
parts are bf16, and sums over micro-steps are fp32.
"""

from __future__ import annotations

import sys

from limited.split import main

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", sys.argv[1:]))
