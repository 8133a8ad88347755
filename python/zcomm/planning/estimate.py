"""Bytes of one rank by tier and purpose, and of swap per step, for one case of stage, tier, world and precision.

From a model (on any device, also meta) the layout is computed as in ZeroOptimizer (zero/memory/plan.py), so the numbers
equal ``opt.memory()``. A count of parameters without shapes gives ZeRO's formula (memory.py), without slots.
Pure arithmetic: no ranks, no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from zcomm.planning.gathers import gathered_nbytes
from zcomm.planning.kept_gradients import buckets_of
from zcomm.planning.live_memory import LiveMemory
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.memory.plan import Settings, plan_memory
from zcomm.zero.memory.usage import Memory, memory_formula
from zcomm.zero.options import Offload, Units, as_offload, as_precision, check_stage, shares_weights

ARRAYS = {"adamw": 2, "adam": 2, "adamw-8bit": 2, "lion": 1, "adagrad": 1, "sgd": 0, "sgd-momentum": 1}


@dataclass(frozen=True)
class Estimate:
    """Bytes that one case needs.

    memory: of one rank. swap_read_nbytes, swap_written_nbytes: of one rank and optimizer step (reads: at most).
    swap_param_nbytes: the part of these that moves concurrently with computing. count: elements of all buckets.
    update_nbytes: read and written by the optimizer's pass. tensors: trained parameters, if there is a model.
    update: when updates run, see ``moment_of_updates``. published_nbytes: weights that ranks gather after it.
    activations_nbytes: on the device, at their peak. offloaded: of activations in other tiers.
    """

    stage: int
    offload: str | Offload | None
    world_size: int
    memory: Memory
    swap_read_nbytes: int = 0
    swap_written_nbytes: int = 0
    activations_nbytes: int = 0
    exact: bool = True
    swap_param_nbytes: tuple[int, int] = (0, 0)
    count: int = 0
    bucket_nbytes: int = 0
    update_nbytes: int = 0
    tensors: int = 0
    update: str = "step"
    published_nbytes: int = 0
    offloaded: Mapping[str, int] = field(default_factory=dict)

    def tier(self, name: str) -> int:
        """Return the bytes of a tier, with its activations."""
        activations = self.activations_nbytes if name == "device" else self.offloaded.get(name, 0)
        return sum(self.memory[name].values()) + activations

    @property
    def host_nbytes(self) -> int:
        """Bytes that a rank needs in RAM if the device is the CPU."""
        return self.tier("device") + self.tier("cpu")


def estimate(
    model: nn.Module | int,
    stage: int,
    offload: str | Offload | None = None,
    world_size: int = 1,
    precision: str = "fp32",
    optimizer: str = "adamw",
    *,
    bucket_mb: float = 25.0,
    prefetch: int = 1,
    accumulation: int = 1,
    activations_nbytes: int = 0,
    communication_dtype: str | None = None,
    units: Units | None = None,
    inputs: Any = None,
    live: LiveMemory | None = None,
    shared: bool = True,
    hops: bool = False,
    groups: int = 1,
) -> Estimate:
    """Estimate the needs of a ``ZeroOptimizer`` with these options on CPU ranks, of one host if ``shared``.

    model: a module (on any device, also meta), or the number of trained parameters. inputs: of a micro-batch, as the
    function of ``zcomm plan --model`` returns them, on the model's device. If parameters are on a drive, the model is
    traced with them to count gathers. None: one gather of each unit for forward and one for backward is assumed.
    hops: sums go on to copies of the shards ([Note: groups]); world_size is of a shard group then. groups: of these,
    that divide the optimizer state of a shard ([Note: hpZ]).
    live: of a micro-batch of this model, instead of ``activations_nbytes``.
    Raises: ValueError for an unknown stage, offload, precision or optimizer; with ``inputs`` the model's errors.
    """
    check_stage(stage)
    where, kind = as_offload(offload, stage), as_precision(precision, communication_dtype=communication_dtype)
    if optimizer not in ARRAYS:
        raise ValueError(f"optimizer={optimizer!r}; known here: {', '.join(ARRAYS)}")
    arrays = tuple(str(k) for k in range(ARRAYS[optimizer]))
    form = TileForm(arrays, kind.dtype, torch.uint8 if optimizer.endswith("-8bit") else torch.float32)
    gathered: int | None = None
    trained: int | None = None
    held: Mapping[str, Mapping[str, int]] = {}
    if isinstance(model, int):
        size = form.state_dtype.itemsize
        formula = partial(memory_formula, state_arrays=len(arrays), array_nbytes=size)
        memory = formula(model, world_size, stage, precision, where)
        divided = formula(model, groups * world_size, stage, precision, where)
        for tier in memory:
            memory[tier]["optimizer"] = divided[tier]["optimizer"]
        count, exact = model, False
    else:
        settings = Settings(
            stage,
            where,
            world_size,
            kind,
            form,
            bucket_mb,
            prefetch,
            units or Units(),
            shared,
            hops=hops,
            groups=groups,
        )
        found = plan_memory(model, settings)
        memory, count, exact = found.memory, found.count, True
        gathered, trained, held = 2 * accumulation * found.gathered_nbytes, found.trained_nbytes, found.held
        if live is not None:
            activations_nbytes = live.peak_nbytes(buckets_of(model, settings))
    by_unit = bool(memory["nvme"]["parameters"]) and (trained != 0 or memory["nvme"]["optimizer"] > 0)
    update = moment_of_updates(where, by_unit) if stage == 3 else "step"
    if not isinstance(model, int) and inputs is not None and gathered:
        known = gathered_nbytes(model, settings, inputs, update, accumulation)
        gathered = gathered if known is None else known
    drive = drive_nbytes(memory, update, accumulation, gathered, trained, held.get(update))
    return Estimate(
        stage=stage,
        offload=offload,
        world_size=world_size,
        memory=memory,
        swap_read_nbytes=drive.read,
        swap_written_nbytes=drive.written,
        activations_nbytes=activations_nbytes,
        exact=exact,
        swap_param_nbytes=drive.beside,
        count=count,
        tensors=0 if isinstance(model, int) else sum(param.requires_grad for param in model.parameters()),
        bucket_nbytes=count * kind.communication_dtype.itemsize,
        update=update,
        update_nbytes=_update_nbytes(-(-count // world_size), form),
        published_nbytes=count * kind.param_nbytes if world_size > 1 and not shares_weights(stage, shared) else 0,
        offloaded={} if live is None else live.offloaded,
    )


def moment_of_updates(where: Offload, by_unit: bool) -> str:
    """Return the assumed moment of updates: "step", "forward" or "backward".

    by_unit: trained weights are on a drive. Optimizers for which "auto" is "step" are not considered.
    """
    if where.step_behind_forward:
        return "forward"
    if where.update != "auto":
        return where.update
    return "forward" if by_unit else "step"


@dataclass(frozen=True)
class DriveBytes:
    """Bytes of one rank and optimizer step. The last field has bytes read and written concurrently with computing."""

    read: int
    written: int
    beside: tuple[int, int]


def drive_nbytes(
    memory: Memory,
    update: str,
    accumulation: int = 1,
    gathered: int | None = None,
    trained: int | None = None,
    held: Mapping[str, int] | None = None,
) -> DriveBytes:
    """Return the bytes that move between RAM and the drive. memory: of a rank. update: as of Offload, not "auto".

    gathered: bytes of parameters that gathers read in a step; None: each parameter on the drive, for forward and
    backward of each micro-step. trained: bytes of parameters on the drive that an update changes; None: all of them.
    held: by purpose, bytes that an update finds in windows; None: zero.
    """
    state, params, sums = (memory["nvme"][purpose] for purpose in ("optimizer", "parameters", "gradients"))
    gathers = 2 * accumulation * params if gathered is None else gathered
    changed, held = params if trained is None else trained, held or {}
    # Gathers and sums move concurrently with computing. The update's reads follow, unless it runs in the next forward.
    # Updates in backward move no sums, except in the first two steps.
    behind = 0 if update == "forward" else changed - held.get("parameters", 0)
    moved = 0 if update == "backward" else sums
    beside = gathers + moved * (accumulation - 1), moved * accumulation
    return DriveBytes(
        read=state - held.get("optimizer", 0) + behind + moved - min(moved, held.get("gradients", 0)) + beside[0],
        written=state + changed + beside[1],
        beside=(behind + beside[0], changed + beside[1]),
    )


def _update_nbytes(count: int, form: TileForm) -> int:
    """Return the bytes of two passes over the data of ``count`` elements.

    The norm's pass (of a step that clips) reads gradients; the update's reads gradients, weights and state, which are
    written back.
    """
    return count * (4 + 4 + 2 * form.dtype.itemsize) + 2 * form.nbytes(count)
