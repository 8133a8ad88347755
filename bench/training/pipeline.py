"""A step of a pipeline of two stages: zcomm's schedules next to DeepSpeed's PipelineEngine over Gloo.

  bench/zero.py pipeline                                  (16 layers of 512, 2 ranks, 8 micro-batches of 16 samples)
  bench/zero.py pipeline --variants zcomm-1f1b --rounds 7

Each variant trains the same layers on the same samples in fp32 with Adam, ZeRO stage 1 and no clipping. Each runs in
processes of its own, in turn, one thread per rank. "one" is the whole model on one rank, by torch; two ranks without
a bubble would take half of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import launch
from harness.peers import Absent, default_group
from harness.program import add_run_arguments, make_parser
from harness.record import JsonLines, command_line, machine

DEFAULT = "one,zcomm-1f1b,zcomm-gpipe,deepspeed"
LEARNING_RATE = 1e-4
Step = Callable[[], float]


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/zero.py pipeline", __doc__)
    add = parser.add_argument
    add("-np", dest="world_size", type=int, default=2, help="ranks, as many as stages (2)")
    add("--variants", default=DEFAULT, help=f"by commas ({DEFAULT})")
    add("--variant", help=argparse.SUPPRESS)
    add("--rounds", type=int, default=9, help="timed steps in a process (9)")
    add("--warmup", type=int, default=3, help="steps before (3)")
    add("--turns", type=int, default=3, help="processes of each variant, in turn (3)")
    add("--width", type=int, default=512, help="of a layer (512)")
    add("--layers", type=int, default=16, help="layers (16)")
    add("--microbatches", type=int, default=8, help="micro-batches of a step (8)")
    add("--samples", type=int, default=16, help="samples of a micro-batch (16)")
    add_run_arguments(parser, 1800.0)
    return parser.parse_args(words)


def layers_of(arguments: argparse.Namespace) -> list[Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = arguments.width
    return [layer for _ in range(arguments.layers) for layer in (nn.Linear(width, width), nn.GELU())]


def batches(arguments: argparse.Namespace) -> list[tuple[Any, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = arguments.microbatches, arguments.samples, arguments.width
    values = torch.randn(shape, generator=generator)
    return [(each, each.flip(1)) for each in values]


def _one(_rest: str, arguments: argparse.Namespace) -> Step:
    import torch
    from torch import nn

    model, samples = nn.Sequential(*layers_of(arguments)), batches(arguments)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        total = 0.0
        for x, y in samples:
            loss = nn.functional.mse_loss(model(x), y) / len(samples)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _zcomm(schedule: str, arguments: argparse.Namespace) -> Step:
    from torch import nn

    import zcomm

    mesh = zcomm.ProcessMesh(zcomm.init(), pipe=arguments.world_size)
    pipe = zcomm.parallel.pipeline(
        nn.Sequential(*layers_of(arguments)), mesh, arguments.microbatches, schedule, loss=nn.functional.mse_loss
    )
    optimizer = zcomm.ZeroOptimizer(pipe.module, "adam", lr=LEARNING_RATE, stage=1, mesh=mesh)
    inputs, targets = map(list, zip(*batches(arguments), strict=True))

    def step() -> float:
        loss = pipe.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def _deepspeed(_rest: str, arguments: argparse.Namespace) -> Step:
    try:
        import deepspeed
        from deepspeed.pipe import PipelineModule
    except ImportError:
        raise Absent("deepspeed is not installed") from None
    if "zcomm" in getattr(deepspeed, "__file__", ""):
        raise Absent("deepspeed is zcomm's here")
    from torch import nn

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = PipelineModule(layers_of(arguments), num_stages=arguments.world_size, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": arguments.samples,
        "gradient_accumulation_steps": arguments.microbatches,
        "optimizer": {"type": "Adam", "params": {"lr": LEARNING_RATE, "torch_adam": True, "adam_w_mode": False}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    samples = batches(arguments)
    return lambda: float(engine.train_batch(iter(samples)))


_MAKERS: dict[str, Callable[[str, argparse.Namespace], Step]] = {"one": _one, "zcomm": _zcomm, "deepspeed": _deepspeed}


def run_rank(arguments: argparse.Namespace) -> int:
    """Time one variant on this rank; rank 0 writes the record."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, arguments.world_size = launch.place()
    default_group(rank, arguments.world_size)
    kind, _, rest = arguments.variant.partition("-")
    try:
        step = _MAKERS[kind](rest, arguments)
    except Absent as absent:
        if rank == 0:
            print(f"# {arguments.variant}: skipped, {absent}")
        return 0
    seconds, loss = [], 0.0
    for number in range(arguments.warmup + arguments.rounds):
        dist.barrier()
        start = time.perf_counter()
        loss = step()
        if number >= arguments.warmup:
            seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        record = {"step_ms": 1e3 * statistics.median(slowest.tolist()), "loss": loss}
        Path(os.environ["PIPELINE_RECORD"]).write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    if arguments.variant:
        if launch.is_rank():
            launch.leave(run_rank(arguments))
        return launch.start_ranks(arguments.world_size, arguments.timeout)
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        for _ in range(arguments.turns):
            for name in arguments.variants.split(","):
                path.unlink(missing_ok=True)
                more = ["-np", "1"] if name == "one" else []
                command = [sys.executable, *sys.argv, "--variant", name, *more]
                done = subprocess.run(command, env=os.environ | {"PIPELINE_RECORD": str(path)}, check=False)
                if done.returncode:
                    return done.returncode
                if path.exists():
                    found.setdefault(name, []).append(json.loads(path.read_text()))
    times = {name: statistics.median(run["step_ms"] for run in runs) for name, runs in found.items()}
    losses = {name: runs[-1]["loss"] for name, runs in found.items()}
    print(
        f"# {arguments.world_size} stages, {arguments.layers} layers of {arguments.width}, {arguments.microbatches} "
        f"micro-batches of {arguments.samples}; medians of {arguments.turns} processes"
    )
    print(f"# {'variant':<14} {'step (ms)':>10} {'of DeepSpeed':>13} {'loss':>10}")
    for name, milliseconds in times.items():
        share = f"{milliseconds / times['deepspeed']:.2f}x" if "deepspeed" in times else "-"
        print(f"  {name:<14} {milliseconds:>10.1f} {share:>13} {losses[name]:>10.6f}")
    lines = JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    lines.write({"kind": "pipeline_step", "step_ms": times, "loss": losses})
    return 0
