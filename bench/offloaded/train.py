"""Offloaded training of a Llama on one GPU, beside the same without offload, FSDP2 and DeepSpeed.

  bench/offload.py train --model 1b                                        (all that fit together, in turn)
  bench/offload.py train --model 7b --variants zcomm-cpu --rounds 3        (beside compute, and none if it fits)
  bench/offload.py train --model 1b --variants zcomm-nvme,deepspeed-nvme --nvme-path /mnt/nvme
  bench/offload.py train --largest --nvme-path /mnt/nvme                   (the largest model that trains)

Variants: zcomm-cpu, zcomm-cpu-behind (the step behind the next forward; give --inner 4), zcomm-nvme, fsdp2,
deepspeed-cpu, deepspeed-nvme. Models of 3b and more have one at a time in processes of their own. Smaller ones take
turns in each round. *compute* is forward and backward alone, *none* the step without offload. Roof of a step: the
longest of compute, the copies, and the CPU's AdamW, each alone at its measured rate. share: roof / step. practicality:
none / step. overlap, MFU, hiding rule: offloaded/figures.py. #wrong: 1 if the last loss leaves that of the
first variant by more than 2 %.

Host memory is looked at before it is taken. A model for which there is too little loses layers (the bench prints it,
"layers" and "params" have it). A peer that needs more than there is left is a row with the reason. Rows are written
after every round.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness import launch
from harness.device import (
    PLAYED,
    SKIPPED,
    Rows,
    absent,
    available_nbytes,
    device_name,
    device_nbytes,
    device_or_absent,
    release,
    synchronize,
)
from harness.goal import goal
from harness.program import make_parser
from harness.record import ROOT
from offloaded.fits import fitting_layers, lacking, search

DEFAULT = "zcomm-cpu,fsdp2,deepspeed-cpu"
TOLERANCE = 0.02
PROGRAM = (sys.executable, str(ROOT / "bench/offload.py"), "train")
_APART = ("3b", "7b")
_ALONE_S = 20.0  # of *compute* and *none*: after so long no step follows
_PAST = 1.5  # times the hiding rule's tokens, if the bench chooses the accumulation


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/offload.py train", __doc__)
    add = parser.add_argument
    add("--model", choices=("tiny", "1b", "3b", "7b"), default="1b")
    add("--layers", type=int, help="as many instead of the model's")
    add("--variants", default=DEFAULT, help=f"by commas ({DEFAULT})")
    add("--stage", type=int, choices=(1, 2, 3), default=2, help="of zcomm (2)")
    add("--fraction", type=float, default=1.0, help="of the state that zcomm-nvme has on the drive (1)")
    add("--nvme-path", metavar="DIR")
    add("--batch", type=int, help="sequences of a micro-batch (1b: 16, larger: 8, tiny: 2)")
    add("--context", type=int, help="tokens of a sequence (2048; tiny: 32)")
    add("--accum", type=int, help="micro-batches of a step (as many as are past the hiding rule, at most 8)")
    add("--rounds", type=int, default=7, help="of all variants in turn (7)")
    add("--inner", type=int, default=1, help="steps of a round (1)")
    add("--seconds", type=float, default=1e9, help="start no round after so long")
    add("--largest", action="store_true", help="search the largest model that trains two steps")
    add("--host-gib", type=float, help="host memory to count on (what is there)")
    add("--attempt", action="store_true", help=argparse.SUPPRESS)
    add("--json", metavar="FILE", help="append rows as JSON lines")
    parser.set_defaults(clip=None, in_blocks=False)
    arguments = parser.parse_args(words)
    small = arguments.model == "tiny"
    arguments.batch = arguments.batch or {"tiny": 2, "1b": 16}.get(arguments.model, 8)
    arguments.context = arguments.context or (32 if small else 2048)
    arguments.names = [name for name in arguments.variants.split(",") if name]
    if arguments.largest or any(name.endswith("nvme") for name in arguments.names):
        if not arguments.nvme_path:
            parser.error("--nvme-path is needed: a directory on the drive")
        Path(arguments.nvme_path).mkdir(parents=True, exist_ok=True)
    return arguments


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    device = device_or_absent()
    if arguments.largest:
        return search(arguments, device_nbytes(device), PROGRAM)
    if arguments.model in _APART and len(arguments.names) > 1:
        return each_apart(arguments, words)
    return measure(arguments, device)


def each_apart(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    """Run every variant in a separate process. A peer that fails is a row."""
    worst = 0
    for name in arguments.names:
        words = [word for word in given if word != arguments.variants]
        words = [word for word in words if word != "--variants"]
        code = subprocess.run([*PROGRAM, *words, "--variants", name], check=False).returncode
        if code not in (0, SKIPPED) and name.startswith("zcomm"):
            worst = 1
        elif code not in (0, SKIPPED):
            why = f"killed by signal {-code} (out of host memory?)" if code < 0 else f"ended with {code}"
            Rows(arguments.json, "Peers that did not run").add(peer=name, model=arguments.model, why=why)
    return worst


class Found(NamedTuple):
    """Seconds and losses of a variant's rounds."""

    taken: list[float]
    losses: list[float]


class Alone(NamedTuple):
    """Measurements before the rounds: the host's rates, seconds of *compute* and *none*."""

    host: Any
    compute: float | None
    none: float | None


def measure(arguments: argparse.Namespace, device: Any) -> int:
    """Measure roofs, then the variants in turn."""
    import zcomm
    from offloaded import figures, variants

    fit(arguments)
    zcomm.init()
    chosen, arguments.accum = arguments.accum, arguments.accum or 1
    job = variants.make_job(arguments, device)
    numel = job.config.numel()
    if not any(name.startswith("zcomm") for name in arguments.names) and all_lack(arguments, numel):
        zcomm.shutdown()
        return 0
    host = figures.measure_host(device, numel)
    compute = None if arguments.attempt else alone(job, "compute", arguments)
    if chosen is None and compute is not None and not PLAYED:
        arguments.accum = accumulation(numel, job.tokens_per_step, compute, host)
        compute *= arguments.accum
    shape = f"{arguments.accum} x {arguments.batch} x {arguments.context} tokens a step"
    layers = f" with {arguments.layers} layers" if arguments.layers else ""
    print(f"# {arguments.model}{layers}: {numel / 1e9:.2f}e9 parameters on {device_name(device)}, {shape}", flush=True)
    none = None
    if 16 * numel + (8 << 30) < device_nbytes(device) and not arguments.attempt:
        none = alone(job, "none", arguments)
    rows, before = Rows(arguments.json, "Offloaded training on one GPU"), Alone(host, compute, none)
    found = in_turn(job, arguments, lambda so_far: rows.keep(columns_of(job, arguments, before, so_far)))
    rows.show(columns_of(job, arguments, before, found))
    zcomm.shutdown()
    return 1 if rows.wrong or any(name.startswith("zcomm") and name not in found for name in arguments.names) else 0


def all_lack(arguments: argparse.Namespace, numel: int) -> bool:
    """Return True if host memory suffices for none of the variants; they are rows then, and nothing is measured."""
    there = host_nbytes(arguments)
    why = {name: lacking(name, numel, arguments.fraction, there) for name in arguments.names}
    if not all(why.values()):
        return False
    rows = Rows(arguments.json, "Peers that did not run")
    for name, lacks in why.items():
        rows.add(peer=name, model=arguments.model, why=lacks)
    return True


def accumulation(numel: int, tokens: int, compute: float, host: Any) -> int:
    """Return the micro-batches of a step, at most 8: _PAST times the tokens of the hiding rule.

    tokens, compute: of one.
    """
    from offloaded.figures import hiding

    for accum in range(1, 8):
        needed = hiding(numel, accum * tokens, accum * compute, host, accum) or 0.0
        if accum * tokens >= _PAST * needed:
            return accum
    return 8


def fit(arguments: argparse.Namespace) -> None:
    """Reduce the layers if host memory does not suffice; end the program if it suffices for none.

    Given layers are not reduced: then the row of a variant that does not fit has the reason.
    """
    from zcomm.demo.llama import PRESETS

    config = PRESETS[arguments.model]
    first = next((name for name in arguments.names if name.startswith("zcomm")), "zcomm-cpu")  # peers have its model
    if arguments.layers:
        return

    def numel_of(layers: int) -> int:
        return int(replace(config, num_hidden_layers=layers).numel())

    there = host_nbytes(arguments)
    layers = fitting_layers(config.num_hidden_layers, numel_of, first, arguments.fraction, there)
    if not layers:
        absent(f"{first} of one layer {lacking(first, numel_of(1), arguments.fraction, there)}")
    if layers < config.num_hidden_layers:
        why = lacking(first, config.numel(), arguments.fraction, there)
        print(f"# {layers} layers instead of {config.num_hidden_layers}: {first} {why}", flush=True)
        arguments.layers = layers


def host_nbytes(arguments: argparse.Namespace) -> int:
    return int(arguments.host_gib * 2**30) if arguments.host_gib else available_nbytes()


def columns_of(job: Any, arguments: argparse.Namespace, before: Alone, found: dict[str, Found]) -> list[dict[str, Any]]:
    """Return a row of each variant."""
    import torch

    from offloaded import figures

    numel, (host, compute, none) = job.config.numel(), before
    first = next((losses[-1] for _, losses in found.values()), None)
    rows = []
    for name, (taken, losses) in found.items():
        step = statistics.median(taken)
        added = figures.offloaded_s(host, numel, 2, 0.0, arguments.accum)
        times = figures.Times(step, compute, none)
        rate = job.tokens_per_step / step
        used = figures.mfu(job.config.flops_per_token(arguments.context), rate, peak_of(job.device))
        needed = figures.hiding(numel, job.tokens_per_step, compute, host, arguments.accum)
        columns: dict[str, Any] = {"model": arguments.model, "layers": job.config.num_hidden_layers, "params": numel}
        columns |= {"variant": name, "s/step": step}
        columns |= {"compute s": compute, "none s": none, "roof s": max(compute or 0.0, added)}
        columns |= {"share": columns["roof s"] / step, "practicality": None if none is None else none / step}
        columns |= {"overlap": figures.overlap(times, added), "MFU": used, "tokens/s": rate}
        columns |= {"tokens/step": job.tokens_per_step, "hiding rule": needed, "rounds": len(taken)}
        columns |= {"step GB/s": host.step_bps / 1e9, "copy GB/s": host.copy_bps and host.copy_bps / 1e9}
        if len(found) == 1:  # otherwise it is not known which variant they are of
            there = 0 if PLAYED else torch.cuda.max_memory_allocated(job.device)
            here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            columns |= {"GPU GiB": there / 2**30, "host GiB": here / 2**20}
        columns["loss"] = losses[-1]
        if name.startswith("zcomm"):
            columns["goal"] = goal("offload.share").bound
        off = first is None or not abs(losses[-1] - first) <= TOLERANCE * first
        rows.append({**columns, "#wrong": int(off)})
    return rows


def peak_of(device: Any) -> float | None:
    from zcomm.machine.gpu_specs import peak_flops

    return peak_flops(device_name(device))


def alone(job: Any, name: str, arguments: argparse.Namespace) -> Any:
    """Measure the seconds of a step of a variant, and free it; None if it cannot run."""
    from offloaded.variants import make_variant

    try:
        variant, taken = make_variant(name, job), []
        begin = time.monotonic()
        for number in range(4):
            taken.append(timed(variant, number, arguments.inner)[0])
            if number and time.monotonic() - begin > _ALONE_S:
                break
        variant.close()
    except (RuntimeError, NotImplementedError, ValueError) as error:  # torch's out-of-memory is a RuntimeError
        print(f"# {name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        if name == "compute":
            raise
        return None
    finally:
        variant = None  # type: ignore[assignment]
        release()
    return statistics.median(taken[1:])


def timed(variant: Any, number: int, inner: int) -> tuple[float, float]:
    """Return the seconds of one of ``inner`` steps in a row, and the loss of the last."""
    synchronize()
    begin = time.perf_counter()
    for step in range(inner):
        loss = variant.step(number * inner + step)
    variant.settle()
    synchronize()
    return (time.perf_counter() - begin) / inner, float(loss)


def in_turn(
    job: Any, arguments: argparse.Namespace, after_round: Callable[[dict[str, Found]], None]
) -> dict[str, Found]:
    """Time the variants in turn; return the rounds by variant.

    A variant that is absent, does not fit the host or fails is a row with the reason."""
    from harness.peers import Absent
    from offloaded.variants import make_variant

    variants: dict[str, Any] = {}
    rows = Rows(arguments.json, "Peers that did not run")

    def gone(name: str, error: Exception) -> None:
        variants.pop(name, None)
        release()
        why = str(error) if isinstance(error, Absent) else f"{type(error).__name__}: {error}"
        rows.add(peer=name, model=arguments.model, why=why.splitlines()[0][:300])

    for name in arguments.names:
        try:
            if why := lacking(name, job.config.numel(), arguments.fraction, host_nbytes(arguments)):
                raise Absent(why)
            begin = time.monotonic()
            variants[name] = make_variant(name, job)
            print(f"# {name}: built in {time.monotonic() - begin:.1f} s", flush=True)
            for number in range(1 if arguments.attempt else 2):
                variants[name].step(number)
            variants[name].settle()
            synchronize()
            print(f"# {name}: warm after {time.monotonic() - begin:.1f} s", flush=True)
        except Exception as error:
            if name.startswith("zcomm"):
                raise
            gone(name, error)
    found: dict[str, Found] = {}
    begin = time.monotonic()
    for number in range(2, 2 + arguments.rounds):
        if found and time.monotonic() - begin > arguments.seconds:
            print(f"# stopped after {number - 2} rounds: --seconds {arguments.seconds:g}")
            break
        for name, variant in variants.items():
            seconds, loss = timed(variant, number, arguments.inner)
            mine = found.setdefault(name, Found([], []))
            mine.taken.append(seconds)
            mine.losses.append(loss)
        after_round(found)
    for variant in variants.values():
        variant.close()
    return found
