"""Lanes of a step on a GPU: computing, the bus down and up, host memory and the drive; their bytes, seconds and bound.

[Note: lanes] All lanes work concurrently, so the longest lane is the least time of a step. The update of the bucket
that completes last follows it: both together are the bound. An update needs the sum of its bucket, and perhaps the norm
of all sums. So it runs concurrently with a part of the computing only, the *window*. The policy of updates decides it
(schedule/scheduler.py):
- "step", without a norm first: ``step()`` begins once the host slots hold the last gradients (HOST_SLOTS_NBYTES). The
  window is their computing. It is all of backward for one rank: the gradients of its last micro-step have places of
  their own ([Note: single pass], [Note: last pass]). In stage 3 one rank has this window, if memory has its weights.
- "step" otherwise: none.
- "forward": forward of one micro-step. For one rank the window of "step" precedes it.
- "backward": backward, in a step of one micro-step. If weights are whole on a GPU, the next forward follows ([Note:
  update from slots]), as with "forward".
A step takes max(lanes, early x (1 - window) + late) + the last bucket. Late is the longest lane of the update, early
the longest of the rest, which is mostly computing.
Each byte on the bus or of the drive also counts in host memory. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zcomm.planning.estimate import drive_nbytes
from zcomm.planning.step_time import swap_seconds
from zcomm.zero.gradients.pinned import HOST_SLOTS_NBYTES
from zcomm.zero.memory.usage import Memory
from zcomm.zero.options import Offload

LANES = ("compute", "down", "up", "memory bus", "drive")
FORWARD = 1 / 3  # of a micro-step's computing, if it is not traced and nothing is recomputed
CALIBRATE = "zcomm doctor --calibrate"
REMEDIES = {
    "compute": f"give --tokens or --model with the inputs of a micro-batch, and run {CALIBRATE} (or give --gpu-name)",
    "down": f"run {CALIBRATE} on the machine with the GPU",
    "up": f"run {CALIBRATE} on the machine with the GPU",
    "memory bus": f"run {CALIBRATE}",
    "drive": f"run {CALIBRATE} --dir DIR for the drive of DIR",
}
Seconds = Mapping[str, float | None]  # by lane
Pass = tuple[float, float]  # of the lanes down and memory bus, for the gradients of a micro-step


@dataclass(frozen=True)
class Rates:
    """Rates per second, None if unknown: flops of one GPU in training, the others in bytes.

    down_bps, up_bps: of the bus of one GPU, from and to it. host_bps: of host memory, reads and writes together.
    drive_bps: read, written. Raises: ValueError for a rate that is not above 0.
    """

    flops: float | None = None
    down_bps: float | None = None
    up_bps: float | None = None
    host_bps: float | None = None
    drive_bps: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        read, written = self.drive_bps or (None, None)
        named = {"flops": self.flops, "down_bps": self.down_bps, "up_bps": self.up_bps, "host_bps": self.host_bps}
        for name, rate in {**named, "drive_bps (read)": read, "drive_bps (written)": written}.items():
            if rate is not None and not 0 < rate < float("inf"):
                raise ValueError(f"Rates: {name}={rate!r} must be above 0: measure it again by {CALIBRATE}")


@dataclass(frozen=True)
class LaneBytes:
    """Bytes that a step moves. down, up: over the bus of one GPU, by all its ranks. host: read and written in host
    memory, read and written: of the drive, all by all ranks of the host."""

    down: float = 0
    up: float = 0
    host: float = 0
    read: float = 0
    written: float = 0

    def seconds(self, rates: Rates) -> dict[str, float | None]:
        """Return the seconds by lane, without computing. A lane without bytes takes none."""
        return {
            "down": _over(self.down, rates.down_bps),
            "up": _over(self.up, rates.up_bps),
            "memory bus": _over(self.host, rates.host_bps),
            "drive": swap_seconds(1, self.read, self.written, rates.drive_bps),
        }


@dataclass(frozen=True)
class Job:
    """A job of ranks with GPUs on one host.

    memory: of a rank, for the drive. item, state_nbytes: bytes of a weight or gradient, and of a parameter's state.
    update: the policy, as of Offload, not "auto". needs_norm: updates need the norm, to clip or to skip a step.
    gpu_ranks: ranks on one GPU. sharers: ranks that share a copy of the weights on the host. by_host: gradients pass
    through host memory. Raises: ValueError for updates in backward that need more than one backward pass.
    """

    numel: int
    stage: int
    where: Offload
    memory: Memory
    item: int
    state_nbytes: int
    update: str = "step"
    needs_norm: bool = False
    accumulation: int = 1
    world_size: int = 1
    gpu_ranks: int = 1
    sharers: int = 1
    by_host: bool = True

    def __post_init__(self) -> None:
        if self.update == "backward" and (self.needs_norm or self.accumulation > 1):
            raise ValueError(
                "update='backward' needs one micro-step, and neither clipping nor fp16: give update='forward'"
            )

    @property
    def single_pass(self) -> bool:
        """See ``is_single_pass``."""
        return is_single_pass(self.where, self.world_size, self.accumulation)

    @property
    def used_up(self) -> bool:
        """True if updates use gradients up in host slots ([Note: update from slots])."""
        return is_used_up(self.where, self.update)

    @property
    def adds_last(self) -> bool:
        """True if the update adds the last micro-step's gradients ([Note: last pass])."""
        several = self.world_size == 1 and self.accumulation > 1 and self.where.optimizer is not None
        return several and self.update == "step" and not self.needs_norm and self.where.gradients in (None, "cpu")


def is_single_pass(where: Offload, world_size: int, accumulation: int) -> bool:
    """Return True if the host's update reads gradients as they came, and not fp32 sums ([Note: single pass])."""
    alone = world_size == 1 and accumulation == 1
    return alone and where.optimizer is not None and where.gradients in (None, "cpu")


def is_used_up(where: Offload, update: str) -> bool:
    """Return True if no sums and no gradients stay in host memory ([Note: update from slots])."""
    return update == "backward" and where.params is None and where.gradients in (None, "cpu")


def step_bytes(job: Job) -> tuple[LaneBytes, LaneBytes]:
    """Return the bytes of a step, and those of them that its update moves.

    Gradients go down in each micro-step, weights up in each step. Weights that are on the host go up for forward and
    backward of each micro-step. If ranks reduce on the host and update on the GPU, a rank's part of sums and weights
    goes up, too, and of weights down.
    """
    if not job.by_host:
        return LaneBytes(), LaneBytes()
    item, world, micro_steps, numel = job.item, job.world_size, job.accumulation, job.numel
    steps_on_host, gathers = job.where.optimizer is not None, 2 * micro_steps if job.where.params is not None else 0
    share = 0.0 if steps_on_host else 1 / world
    late_down, late_up = share * item, share * (4 + item) + (0 if gathers else item)
    sent = 4 if job.where.gradients == "device" else micro_steps * item  # see gradient_bytes
    down, up = sent + late_down, gathers * item + late_up
    params, sums = job.memory["nvme"]["parameters"], job.memory["nvme"]["gradients"]
    stored = 0 if job.update == "backward" else sums  # updates in backward use sums up
    drive = drive_nbytes(job.memory, job.update, micro_steps)
    read, written = world * drive.read, world * drive.written
    late_read = read - world * (gathers * params + stored * (micro_steps - 1))
    late_written = written - world * stored * micro_steps
    late_host = _update_nbytes(job) + world * (late_down + late_up)
    host = _sums_nbytes(job) + _update_nbytes(job) + _copied_nbytes(job, gathers) + world * (down + up)
    on_gpu, on_drive = job.gpu_ranks * numel, read + written
    return (
        LaneBytes(on_gpu * down, on_gpu * up, numel * host + on_drive, read, written),
        LaneBytes(
            on_gpu * late_down, on_gpu * late_up, numel * late_host + late_read + late_written, late_read, late_written
        ),
    )


def gradient_bytes(job: Job) -> tuple[Pass, Pass]:
    """Return the bytes of gradients of a micro-step: of each but the last, and of the last. They are bytes down, and of
    host memory (these and sums). Sums on the GPU come down in the last one. See [Note: last pass], too."""
    if not job.by_host:
        return (0.0, 0.0), (0.0, 0.0)

    def of_pass(down: float, sums: float) -> Pass:
        return job.gpu_ranks * job.numel * down, job.numel * (job.world_size * down + sums)

    if job.where.gradients == "device":
        return of_pass(0, 0), of_pass(4, 0)
    each = _sums_nbytes(job) / (job.accumulation - job.adds_last)
    return of_pass(job.item, each), of_pass(job.item, 0 if job.adds_last else each)


def _sums_nbytes(job: Job) -> float:
    """Return the bytes per parameter by which the host adds up gradients, out of slots into fp32 sums.

    The first micro-step only writes the sums. Private copies of the weights (stage 0) are gathered: each rank reads and
    writes the other ranks' parts.
    """
    if job.single_pass or job.where.gradients == "device":
        return 0
    gathered = 2 * job.item * (job.world_size // job.sharers - 1)
    return (job.accumulation - job.adds_last) * (job.item * job.world_size + 8) - 4 + gathered


def _update_nbytes(job: Job) -> float:
    """Return the bytes per parameter of the host's pass over state, weight and gradient.

    The norm reads the gradient once more. The GPU computes the squares of one micro-step of one rank, and of its own
    sums. An update that adds the last micro-step's gradients computes them itself.
    """
    if job.where.optimizer is None:
        return 0
    normed = (job.world_size > 1 or job.accumulation > 1) and job.where.gradients != "device" and not job.adds_last
    gradient = job.item if job.single_pass else 4 + job.item * job.adds_last
    return 2 * job.state_nbytes + 2 * job.item + gradient + 4 * normed


def _copied_nbytes(job: Job, gathers: int) -> float:
    """Return the bytes per parameter of copies of weights inside host memory.

    Gathers that update weights of several ranks, or from a drive, fill a host slot and keep a copy of the new weights.
    """
    whole = job.world_size == 1 and job.where.params == "cpu"
    if job.update != "forward" or not gathers or whole:
        return 0
    return 2 * job.item * (1 + (gathers if job.where.params == "cpu" else 0))


def ready_share(job: Job) -> float:
    """Return the share of the last backward pass during which updates of [Note: lanes] run."""
    if job.update == "backward":
        return 1.0
    if job.needs_norm or job.where.gradients == "nvme" or not job.by_host:
        return 0.0
    whole = job.world_size == 1 and job.where.params != "nvme"  # this rank has all weights in memory
    if not whole and (job.stage == 3 or job.update == "forward"):
        return 0.0
    if job.single_pass or job.adds_last or job.where.gradients == "device":
        return 1.0
    return min(1.0, HOST_SLOTS_NBYTES / (job.numel * job.item))


def window(update: str, accumulation: int, forward: float, ready: float) -> float:
    """Return the share of a step's computing during which updates run. forward: its share of a micro-step. ready: as
    ``ready_share``."""
    return ((forward if update == "forward" else 0.0) + ready * (1 - forward)) / accumulation


def bound(lanes: Mapping[str, float], last_s: float) -> float:
    """Return the least seconds of a step. last_s: of the bucket that completes last."""
    return max(lanes.values()) + last_s


def scheduled(lanes: Mapping[str, float], late: Mapping[str, float], hidden: float, last_s: float) -> float:
    """Return the seconds of a step with updates that run during a share ``hidden`` of its other work."""
    early = max(seconds - late.get(lane, 0.0) for lane, seconds in lanes.items())
    return max(bound(lanes, last_s), early * (1 - hidden) + max(late.values()) + last_s)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step.

    window_s: of computing, see [Note: lanes]. last_s: of the bucket that completes last. limit: the longest lane.
    bound_s: the least of any policy; step_s: with the policy's window.
    """

    window_s: float
    last_s: float
    limit: str
    bound_s: float
    step_s: float


@dataclass(frozen=True)
class GpuStep:
    """A step on a GPU by lane. whole, late: bytes of the step, and of its update. lanes, late_s: their seconds.

    forward, ready: as of ``window``. last_share: the part of the parameters that the last bucket has. earlier, last:
    seconds of the gradients of a micro-step, see ``gradient_bytes``.
    """

    update: str
    accumulation: int
    whole: LaneBytes
    late: LaneBytes
    lanes: Seconds
    late_s: Seconds
    forward: float = FORWARD
    ready: float = 0.0
    last_share: float = 0.0
    earlier: Pass = (0.0, 0.0)
    last: Pass = (0.0, 0.0)

    @property
    def missing(self) -> str:
        """The lanes without known seconds, each with its remedy; "" if all are known."""
        return "; ".join(f"{lane}: {REMEDIES[lane]}" for lane, seconds in self.lanes.items() if seconds is None)

    def known(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return ``lanes`` and ``late_s``. Raises: ValueError naming the lanes without a rate, and the remedy."""
        if self.missing:
            raise ValueError(f"the seconds of a step are not known. {self.missing}")
        whole, late = ({lane: value or 0.0 for lane, value in each.items()} for each in (self.lanes, self.late_s))
        return whole, late

    def times(self) -> StepTimes:
        """Return the seconds of the step. The last bucket comes down, is updated, and its weights go up. Raises: as
        ``known``."""
        lanes, late = self.known()
        hidden = window(self.update, self.accumulation, self.forward, self.ready)
        last = self.last_share * (lanes["down"] / self.accumulation + sum(late.values())) if any(late.values()) else 0.0
        limit = max(lanes, key=lambda lane: lanes[lane])
        times = bound(lanes, last), scheduled(lanes, late, hidden, last)
        return StepTimes(hidden * lanes["compute"], last, limit, *times)


def gpu_step(job: Job, rates: Rates, flops: float | None, forward: float = FORWARD, last_count: int = 0) -> GpuStep:
    """Return the step of a job. flops: that one GPU computes; None: unknown. forward: see GpuStep. last_count:
    parameters of the bucket that completes last."""
    whole, late = step_bytes(job)
    lanes = {"compute": None if flops is None else _over(flops, rates.flops), **whole.seconds(rates)}
    earlier, last = (
        (_over(down, rates.down_bps) or 0.0, _over(host, rates.host_bps) or 0.0) for down, host in gradient_bytes(job)
    )
    return GpuStep(
        "forward" if job.used_up else job.update,
        job.accumulation,
        whole,
        late,
        lanes,
        late.seconds(rates),
        forward,
        ready_share(job),
        min(1.0, last_count / job.numel),
        earlier,
        last,
    )


def _over(amount: float, rate: float | None) -> float | None:
    if not amount:
        return 0.0
    return None if rate is None else amount / rate
