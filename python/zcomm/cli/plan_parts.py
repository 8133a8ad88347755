"""A batch in parts in `zcomm plan`: `--parts`, the number of parts that fits, and its speed next to micro-steps."""

from __future__ import annotations

import argparse
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from zcomm.cli import plan_gpu
from zcomm.cli.plan_table import OFFLOADS, UNKNOWN, Case, print_table, recommended, seconds, without_unknown
from zcomm.cli.sizes import shown
from zcomm.launch.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from zcomm.planning import Estimate, LiveMemory, Work
    from zcomm.planning.gpu_tiers import GpuHost
    from zcomm.planning.parts import Batches
    from zcomm.zero import Offload

_T = TypeVar("_T")
Copies = tuple[int, int]  # of shards, and groups that divide the state of a shard
_SAME = 0.99  # more parts that leave so much of the activations are not tried


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--parts",
        type=int,
        metavar="M",
        help="zcomm.split_batch(blocks, parts=M) divides the batch of a forward (default: undivided; a number is "
        "recommended if that does not fit, or if --accum lets micro-steps read offloaded weights again)",
    )
    parser.add_argument(
        "--offload-activations",
        choices=("cpu", "nvme"),
        help="tier of activations with zcomm.offload_activations (default: the device)",
    )


@dataclass(frozen=True)
class Way:
    """A way to run the batch of a step. samples: of a forward. parts: of it; 0: undivided. micro_steps: forwards."""

    samples: int
    parts: int
    micro_steps: int

    def __str__(self) -> str:
        words = [f"split_batch(parts={self.parts})"] * (self.parts > 0)
        words += [f"grad_accum={self.micro_steps}"] * (self.micro_steps > 1 or not words)
        return ", ".join(words)


@dataclass(frozen=True)
class Outcome:
    """A way in one case. columns: of the table. lacks: memories that are too small."""

    columns: Mapping[str, str]
    lacks: Sequence[str]
    step_s: float | None


class Planned:
    """The model of the command. batches: None without inputs. placed: the offload of a case. last_count: see
    plan_gpu.Model. Raises: UserError for options that do not belong together."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module | int,
        inputs: Any,
        placed: Callable[[str, int], str | Offload],
        last_count: int,
    ) -> None:
        from zcomm.planning.parts import Batches

        self.args, self.model, self._placed, self._last_count = args, model, placed, last_count
        self.batches: Batches | None = None
        if inputs is not None and not isinstance(model, int):
            self.batches = Batches(model, inputs, args.offload_activations)
        elif args.offload_activations is not None:
            raise UserError("--offload-activations needs --model with the inputs of a micro-batch")
        elif args.parts is not None and not isinstance(model, int):
            raise UserError(f"--parts {args.parts} needs a --model that returns the inputs of a micro-batch, too")
        if args.parts is not None and args.parts < 1:
            raise UserError(f"--parts {args.parts} is not above 0")
        samples = self.batches.samples if self.batches is not None else 0
        own = self.batches.own if self.batches is not None else 0
        self._estimates: dict[tuple[Any, ...], Estimate] = {}
        self._gathered: dict[tuple[Way, int], int | None] = {}
        self.way = Way(samples, own if args.parts is None else args.parts, args.accum)

    @property
    def count(self) -> int:
        """The number of trained parameters."""
        model = self.model
        return model if isinstance(model, int) else sum(p.numel() for p in model.parameters() if p.requires_grad)

    def live(self, way: Way) -> LiveMemory | None:
        """Return the memory of a forward and backward; None if it is unknown, or given by hand."""
        if self.batches is None or self.args.activations is not None:
            return None
        return self._traced(way, self.batches.live)

    def work(self, way: Way) -> Work | None:
        return None if self.batches is None else self._traced(way, self.batches.work)

    def _traced(self, way: Way, trace: Callable[[int, int], _T]) -> _T:
        try:
            return trace(way.samples, way.parts)
        except (ValueError, TypeError, RuntimeError) as error:
            if not way.parts:
                raise
            raise UserError(f"{way}: {error}") from error

    def activations(self, way: Way) -> int | None:
        """Return the bytes of activations on the device at their peak; None if they are unknown."""
        live = self.live(way)
        given: int | None = self.args.activations
        return given if live is None else live.peak_nbytes()

    def estimate(
        self,
        way: Way,
        world: int,
        stage: int,
        offload: str,
        traffic: bool = True,
        shared: bool = True,
        copies: Copies = (1, 1),
    ) -> Estimate:
        """Estimate a case. traffic: False: its bytes of the drive do not count. shared: ranks of one host, on CPUs.
        copies: of their shards, and the groups with copies that divide the state of one.

        Raises: UserError.
        """
        key = (way, world, stage, offload, traffic, shared, copies)
        if key not in self._estimates:
            self._estimates[key] = self._estimate(*key)
        return self._estimates[key]

    def _estimate(
        self, way: Way, world: int, stage: int, offload: str, traffic: bool, shared: bool, copies: Copies
    ) -> Estimate:
        from zcomm.planning import estimate
        from zcomm.zero.options import Units

        args, live = self.args, self.live(way)
        inputs = self.batches.inputs(way.samples) if traffic and self.batches is not None else None
        try:
            with contextlib.nullcontext() if self.batches is None else self.batches.divided(way.parts):
                return estimate(
                    self.model,
                    stage,
                    self._placed(offload, stage),
                    world,
                    args.precision,
                    args.optimizer,
                    bucket_mb=args.bucket_mb,
                    accumulation=way.micro_steps,
                    activations_nbytes=args.activations or 0,
                    units=Units(max_bytes=args.unit_bytes, rows=args.rows),
                    inputs=inputs,
                    live=live,
                    shared=shared,
                    hops=copies[0] > 1,
                    groups=copies[1],
                )
        except ValueError as error:
            if args.unit_bytes is None:
                raise
            raise UserError(f"--unit-bytes {args.unit_bytes}: {error}") from error

    def gathered(self, way: Way, ranks: int) -> int | None:
        """Return the weights that ``ranks`` ranks gather in a step of stage 3; None without inputs of the model."""
        from zcomm.planning import gathered_count
        from zcomm.zero.options import Units

        args = self.args
        if self.batches is None or isinstance(self.model, int):
            return None
        key = (way, ranks)
        if key not in self._gathered:
            with self.batches.divided(way.parts):
                self._gathered[key] = gathered_count(
                    self.model,
                    self.batches.inputs(way.samples),
                    ranks,
                    args.precision,
                    bucket_mb=args.bucket_mb,
                    accumulation=way.micro_steps,
                    units=Units(max_bytes=args.unit_bytes, rows=args.rows),
                )
        return self._gathered[key]

    def on_gpu(self, way: Way, timed: bool = True) -> plan_gpu.Model:
        """Return the model as a plan for GPUs takes it. timed: with its work."""
        live, work = self.live(way), self.work(way) if timed else None
        offloaded = {} if live is None else live.offloaded
        return plan_gpu.Model(
            self.count, self.activations(way), work, self._last_count, offloaded, in_parts=way.parts > 0
        )

    def per_s(self, way: Way, world: int, step_s: float | None) -> str:
        """Return the tokens, or else the samples, of all ranks per second."""
        sample = 1 if self.batches is None else self.batches.tokens or 1
        count = self.args.tokens or world * way.samples * way.micro_steps * sample
        return UNKNOWN if step_s is None or not count else f"{count / step_s:.3g}"

    @property
    def counted(self) -> str:
        return "tokens" if self.args.tokens or (self.batches is not None and self.batches.tokens) else "samples"


# --- a way in a case ------------------------------------------------------------------------------------------------


class Machine(ABC):
    """The ranks on which ways are compared. room: available bytes, by name."""

    def __init__(self, planned: Planned, room: Mapping[str, int]) -> None:
        self.planned, self.room = planned, room

    @abstractmethod
    def outcome(self, way: Way, world: int, case: Case, timed: bool = True) -> Outcome:
        """Return the outcome of a way. timed: False: only ``lacks`` counts. Raises: UserError."""


class Host(Machine):
    """CPU ranks. drive: measured rates."""

    def __init__(self, planned: Planned, room: Mapping[str, int], drive: tuple[float, float] | None) -> None:
        super().__init__(planned, room)
        self._drive = drive

    def outcome(self, way: Way, world: int, case: Case, timed: bool = True) -> Outcome:
        from zcomm.machine import speeds
        from zcomm.planning import step_time

        planned = self.planned
        found = planned.estimate(way, world, case.stage, case.offload, traffic=timed)
        needs = {"memory": found.host_nbytes * world, "drive": found.tier("nvme") * world}
        lacks = [name for name, nbytes in needs.items() if nbytes > self.room[name]]
        known = speeds.load(world) if timed else None
        work = planned.work(way) if timed else None
        precision, time = planned.args.precision, None
        if known is not None:
            time = step_time(found, known, work, precision, way.micro_steps, self._drive)
        reads = found.swap_read_nbytes
        columns = {
            "memory": shown(needs["memory"]),
            "drive": shown(needs["drive"]) if needs["drive"] else UNKNOWN,
            "reads per step": shown(reads) if reads else UNKNOWN,
            "compute": seconds(time.compute_s if time else None),
            "swap": seconds(time.swap_s if time and time.swap_s else None),
        }
        return Outcome(columns, lacks, time.step_s if time else None)


class Gpus(Machine):
    """Ranks on the GPUs of ``host``."""

    def __init__(self, planned: Planned, room: Mapping[str, int], host: GpuHost) -> None:
        super().__init__(planned, room)
        self._host = host

    def outcome(self, way: Way, world: int, case: Case, timed: bool = True) -> Outcome:
        model = self.planned.on_gpu(way, timed)
        place = (world, case.stage, case.offload)
        found = plan_gpu.case_of(self.planned.args, model, self._host, *place, way.micro_steps)
        times = None if found.step.missing else found.step.times()
        columns = {
            "GPU": shown(found.gpu_nbytes),
            "host": shown(found.host_nbytes),
            "drive": shown(found.drive_nbytes) if found.drive_nbytes else UNKNOWN,
            **plan_gpu.lane_columns(found.step),
            "limit": times.limit if times else UNKNOWN,
        }
        return Outcome(columns, found.lacks, times.step_s if times else None)


# --- the table ------------------------------------------------------------------------------------------------------


def show(machine: Machine, cases: Mapping[int, Sequence[Case]]) -> None:
    """Print ways to run a step's batch, if ``--parts`` asks for them or they may help.

    They are of the recommended case for the first number of ranks. Raises: UserError.
    """
    planned = machine.planned
    args, batches = planned.args, planned.batches
    (world, of_world), *_ = cases.items()
    base = recommended(of_world)
    if args.parts is not None:
        _print_ways(machine, world, base, planned.way, [args.parts])
        return
    reads_again = args.accum > 1 and base.stage == 3 and base.offload != "none"
    if batches is None or args.activations is not None or (base.fits and not reads_again):
        return
    samples = batches.samples * args.accum
    if batches.blocks and samples > 1:
        try:
            _advise(machine, batches, world, of_world, samples)
        except UserError as error:
            print(f"\na batch in parts is not planned: {error}")


def _advise(machine: Machine, batches: Batches, world: int, cases: Sequence[Case], samples: int) -> None:
    """Print the least parts of ``samples`` that fit, next to fewer ones, and the call for them."""
    from zcomm.planning.parts import divisors, list_names

    least_offload = sorted(cases, key=lambda case: OFFLOADS.index(case.offload))
    fits: Case | None = None
    tried: list[int] = []
    peaks: list[int] = []
    for parts in [0, *divisors(samples)]:
        way = Way(samples, parts, 1)
        tried.append(parts)
        peaks.append(machine.planned.activations(way) or 0)
        fits = next((each for each in least_offload if not machine.outcome(way, world, each, timed=False).lacks), None)
        if fits is not None or (parts > 1 and peaks[-1] > _SAME * peaks[-2]):
            break
    case = fits or recommended(cases)
    _print_ways(machine, world, case, Way(samples, 0, 1), [parts for parts in tried if parts][-2:] or [1])
    room = " and ".join(f"{shown(nbytes)} of {name}" for name, nbytes in machine.room.items())
    call = f"zcomm.split_batch({list_names(batches.blocks)}, parts="
    if fits is not None:
        how = f"with {call}{tried[-1]})" if tried[-1] else "undivided"
        print(f"{samples} samples fit {room} {how}, in one forward")
        return
    print(f"{samples} samples do not fit {room} in any parts; more of them save nothing outside of the blocks: for")
    print("the head and the loss there is zcomm.linear_cross_entropy, for inputs of blocks --offload-activations")
    for fewer in divisors(samples)[-2::-1]:
        with contextlib.suppress(UserError):  # their number may be that of another dimension
            if not machine.outcome(Way(fewer, fewer, 1), world, case, timed=False).lacks:
                print(f"{fewer} samples fit with {call}{fewer}), so a step is grad_accum={samples // fewer}")
                return


def _print_ways(machine: Machine, world: int, case: Case, step: Way, numbers: Sequence[int]) -> None:
    """Print for each number of parts the micro-steps of as many samples, and the parts."""
    planned, rows = machine.planned, []
    for parts in numbers:
        split = Way(step.samples, parts, step.micro_steps)
        for way in (Way(step.samples // parts, 0, parts * step.micro_steps), split):
            found, activations = machine.outcome(way, world, case), planned.activations(way)
            rows.append(
                {
                    "a step as": str(way),
                    "activations": UNKNOWN if activations is None else shown(activations),
                    **found.columns,
                    "step": seconds(found.step_s),
                    f"{planned.counted}/s": planned.per_s(way, world, found.step_s),
                    "fits": f"no: {', '.join(found.lacks)}" if found.lacks else "yes",
                }
            )
    samples = step.samples * step.micro_steps
    batch, ranks = f"{samples} samples" if samples else "a batch", f"{world} rank{'s' if world > 1 else ''}"
    print(f"\n{batch} of a step on {ranks}, stage {case.stage}, offload {case.offload}: in micro-steps, and in parts")
    print_table(without_unknown(rows))
    print("parts read offloaded weights once for forward and once for backward, and compute forward twice")
