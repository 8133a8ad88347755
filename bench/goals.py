"""Goals of the benches, as data: `harness/goal.py` reads them, and each program compares its figures with them.

at_least, at_most, below: the side on which a figure holds; the other side is never judged, so that faster is never
wrong. tolerance: by how much a figure may miss its goal and still hold, in the figure's own unit (0). unit: printed
after the number.
"""

from __future__ import annotations

GOALS: dict[str, dict[str, float | str]] = {
    # bench/coll.py: share of the concurrent memcpy, of the roof, factors over peers
    "coll.all_reduce.symmetric": {"at_least": 0.90},
    "coll.all_reduce.private": {"at_least": 0.80},
    "coll.all_reduce.over.gloo": {"at_least": 10, "unit": "x"},
    "coll.all_reduce.over.openmpi": {"at_least": 1.5, "unit": "x"},
    "coll.all_reduce.bf16": {"at_least": 0.85},
    # The sum is rounded once to fp32 and once to bf16: a tie in between may cost 2^-17 of an ulp.
    "coll.all_reduce.bf16.ulp": {"at_most": 0.5, "tolerance": 2**-16},
    "coll.scattered": {"at_least": 0.85},  # reduce_scatter, all_gather
    "coll.scattered.over.gloo": {"at_least": 8, "unit": "x"},
    "coll.latency.of.openmpi": {"at_most": 1},
    "coll.latency.of.line": {"at_most": 3},  # round trips of a cache line
    "coll.latency.python": {"at_most": 3, "unit": " us"},  # over the C++ call
    "coll.latency.torch.over.gloo": {"at_least": 5, "unit": "x"},
    "coll.oversubscribed": {"at_least": 0.70},
    "coll.oversubscribed.over.openmpi": {"at_least": 1, "unit": "x"},
    "coll.oversubscribed.over.gloo": {"at_least": 20, "unit": "x"},
    "coll.oversubscribed.of.futex": {"at_most": 2},  # futex switches x ranks
    "coll.tcp": {"at_least": 0.90},  # of raw sockets
    "coll.tcp.over.gloo": {"at_least": 2.5, "unit": "x"},
    "coll.guard": {"below": 50, "unit": " ns"},
    "coll.one_gpu": {"at_least": 0.85},  # of the device copy
    # bench/zero.py
    "zero.step": {"at_most": 1.00, "unit": "x"},  # of no communication: stages 1 to 3 in RAM
    "zero.ddp": {"at_most": 0.25},  # time added by communication, over "zcomm" / over Gloo
    "zero.overlap": {"at_least": 0.95},
    "zero.page": {"below": 0.1, "unit": " %"},  # of a step: the page that zcomm top reads
    # bench/swap.py
    "swap.fio": {"at_least": 0.97},
    "swap.fio.batch": {"at_least": 0.90},
    "swap.over.deepspeed": {"at_least": 1.05},
    "swap.checksum": {"below": 2, "unit": " %"},
    "swap.step": {"at_least": 0.92},
    # bench/adam.py
    "adam.small.of.torch": {"at_most": 1.2},  # up to 1M parameters
    "adam.stream": {"at_least": 0.93},
    "adam.over.torch": {"at_least": 1.0},
    "adam.over.deepspeed": {"at_least": 1.15},
    "adam.bf16": {"at_least": 1.6},  # over the peer's cast + step + cast
    "adam.bf16_state": {"at_least": 1.35},  # over fp32 state
    "adam.8bit_state": {"at_least": 1.6},
    # bench/largest: parameters, at equal memory
    "largest.over.peer": {"at_least": 4, "unit": "x"},
    # bench/limit.py: of VmHWM
    "limit.kept": {"at_most": 1.0},  # of the limit, in any phase
    "limit.grown": {"at_most": 1.02},  # of step 2
    "limit.spread": {"at_most": 0.05},  # over depths of one width and context
    "limit.bound": {"at_most": 1.1, "unit": "x"},  # seconds of a step over the sum of its phases' bounds
    "limit.planned": {"at_most": 0.01},  # measured bytes of the drive against the plan
    "split_batch.over.micro_steps": {"at_least": 2, "unit": "x"},  # bench/split_batch.py: tokens per second, M = 8
    # bench/offload.py
    "offload.share": {"at_least": 0.90},
    "offload.cell": {"at_least": 0.95},  # of everything on the GPU: one micro-batch, weights on the GPU
    "offload.cell.clip": {"at_least": 0.90},
    "offload.cell.7b.limit": {"at_least": 0.85},  # within a limit on the GPU's memory
    "offload.copy.one_way": {"at_least": 0.98},  # of cudaMemcpyAsync
    "offload.copy.both": {"at_least": 0.95},
    "offload.copy.while_adam": {"at_least": 0.85},
}
