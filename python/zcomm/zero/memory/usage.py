"""ZeRO's memory formula, generalised to the bytes that zcomm keeps per parameter.

With p bytes of parameter, g of gradient accumulator and s of optimizer state, P parameters and N ranks, a rank holds:
- stages 0 to 2: p P + (g + s) P/N
- stage 3: (p + g + s) P/N
F frozen parameters add p F, in stage 3 p F/N.
p, g: fp32 4, 4; bf16 and fp16 2, 4 (fp32 accumulator). s = 4 per fp32 array of the optimizer, plus the master. Arrays:
Adam 2; Lion, Adagrad and SGD with momentum 1; plain SGD 0. Master: bf16 2 (the remainder of the split), fp16 4. CPU
ranks of a host that share parameters (stages 1 to 3) hold p P/N each: the one copy, counted once.
Source: ZeRO (arXiv:1910.02054) section 5; the split master is described in include/zcomm/optim_shard.hpp.
"""

from __future__ import annotations

import logging

from torch import nn

from zcomm.optim.fused import STATE_BLOCK
from zcomm.zero.format_names import format_names
from zcomm.zero.onebit.replicas import Replicas
from zcomm.zero.options import DTypeLike, Offload, Precision, as_offload, as_precision, check_stage, shares_weights
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.registry import whole_frozen

PURPOSES = ("parameters", "gradients", "optimizer", "slots")


class Memory(dict[str, dict[str, int]]):
    """Bytes by tier and purpose. A dict; ``str`` shows it as a table."""

    def __str__(self) -> str:
        purposes = list(dict.fromkeys(purpose for row in self.values() for purpose in row))
        lines = [["", *self]]
        lines += [[purpose, *(in_words(row.get(purpose, 0)) for row in self.values())] for purpose in purposes]
        lines += [["total", *(in_words(sum(row.values())) for row in self.values())]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if not number else cell.rjust(width) for number, (cell, width) in enumerate(row)
            )
            for row in (zip(line, widths, strict=True) for line in lines)
        )


def in_words(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def empty_memory() -> Memory:
    return Memory({tier: dict.fromkeys(PURPOSES, 0) for tier in ("device", "cpu", "nvme")})


def memory_of(parts: Parts) -> Memory:
    """Return the memory that the parts of an optimizer hold. With a model on the CPU tier "device" is host memory."""
    memory = empty_memory()
    for tier, nbytes in parts.store.nbytes_by_tier.items():
        memory[tier]["parameters"] += nbytes
    memory["device"]["parameters"] += sum(param.nbytes for _, param in whole_frozen(parts))
    memory["device"]["parameters"] += integer_nbytes(parts.model)
    for tier, purpose, nbytes in parts.reducer.nbytes:
        if purpose == "errors":
            count_also(memory, "errors", tier, nbytes)
        else:
            memory[tier][purpose] += nbytes
    for tier, nbytes in parts.state.nbytes_by_tier.items():
        memory[tier]["optimizer"] += nbytes
    state_nbytes, error_nbytes = parts.replicas.nbytes
    memory["device"]["optimizer"] += state_nbytes
    if isinstance(parts.replicas, Replicas):
        count_also(memory, "errors", "device", error_nbytes)
    if parts.store.base_nbytes:
        count_also(memory, "bases", "device", parts.store.base_nbytes)
    versions = parts.updates.version_nbytes()
    if versions is not None:
        count_versions(memory, *versions)
    memory["device"]["slots"] += parts.store.slot_nbytes + parts.state.slot_nbytes
    memory["cpu"]["slots"] += parts.state.window_nbytes + parts.store.window_nbytes
    return memory


def count_also(memory: Memory, purpose: str, tier: str, nbytes: int) -> None:
    """Add bytes of a purpose that only optimizers with codecs have: "errors" of encoding, or "bases" of weights."""
    for each in memory.values():
        each.setdefault(purpose, 0)
    memory[tier][purpose] += nbytes


def count_versions(memory: Memory, drive_nbytes: int, resident_nbytes: int) -> None:
    """Add the second versions of ``Offload(atomic=True)``."""
    for tier in memory:
        memory[tier]["versions"] = 0
    memory["nvme"]["versions"], memory["cpu"]["versions"] = drive_nbytes, resident_nbytes


def stats_of(parts: Parts, train: TrainState) -> dict[str, float]:
    """See ZeroOptimizer.stats."""
    swap = parts.swap.stats()
    return {
        "comm_s": parts.reducer.accumulators.waited_s + train.waited_s,
        "swap_s": parts.state.waited_s + parts.store.waited_s + parts.reducer.accumulators.swap_waited_s,
        "step_s": train.step_s,
        "edits_s": parts.rebinder.looked_s,
        "swap_read_nbytes": swap["read_nbytes"],
        "swap_written_nbytes": swap["written_nbytes"],
        "swap_read_s": swap["read_s"],
        "swap_write_s": swap["write_s"],
    }


def memory_formula(
    numel: int,
    world_size: int,
    stage: int,
    precision: DTypeLike | Precision = "fp32",
    offload: str | Offload | None = None,
    share_parameters: bool = True,
    state_arrays: int = 2,
    array_nbytes: int = 4,
    frozen: int = 0,
) -> Memory:
    """Compute the bytes of one rank by tier and purpose for ``numel`` parameters; padding and slots come on top.

    share_parameters: the ranks share one host's copy, as CPU ranks do by default. state_arrays: arrays that the
    optimizer keeps per parameter; array_nbytes: 4, 2 with state_dtype=torch.bfloat16, 1 with "8bit" (and its scales).
    frozen: parameters that are not trained.
    Raises: ValueError for an unknown stage, precision or offload, and for one that goes parameter by parameter.
    """
    check_stage(stage)
    where = as_offload(offload, stage)
    bytes_of = as_precision(precision)
    if callable(where.optimizer) or callable(where.params):
        raise ValueError("the formula has no parameters to ask where they are; zcomm plan --model lays out a model")
    shard = -(-numel // world_size)
    params = shard if stage == 3 or shares_weights(stage, share_parameters) else numel
    params += -(-frozen // world_size) if stage == 3 else frozen
    memory = empty_memory()
    memory[where.params or "device"]["parameters"] = params * bytes_of.param_nbytes
    memory["nvme" if where.gradients == "nvme" else "device"]["gradients"] = shard * bytes_of.grad_nbytes
    state_nbytes = shard * (array_nbytes * state_arrays + bytes_of.master_nbytes)
    if array_nbytes == 1:
        state_nbytes += 4 * state_arrays * -(-shard // STATE_BLOCK)
    offloaded = round(state_nbytes * where.fraction)
    memory[where.optimizer or "device"]["optimizer"] += offloaded
    memory[where.rest]["optimizer"] += state_nbytes - offloaded
    if where.atomic:
        trained = {where.params or "device": shard * bytes_of.param_nbytes}
        drive = trained.get("nvme", 0) + memory["nvme"]["optimizer"]
        everything = sum(trained.values()) + state_nbytes
        count_versions(memory, drive, everything - drive)
    return memory


# --- integer parameters (quantised weights): nothing shards or swaps them ------------------------------------------


def integers_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the integer parameters by name. They stay whole on each rank."""
    return {name: param for name, param in model.named_parameters() if not param.is_floating_point()}


def integer_nbytes(model: nn.Module) -> int:
    """Add up the bytes of the integer parameters."""
    return sum(param.nbytes for param in integers_of(model).values())


def warn_of_integers(model: nn.Module, stage: int, rank: int) -> None:
    """Log a warning on rank 0 if stage 3 leaves integer parameters whole."""
    names = list(integers_of(model))
    if names and stage == 3 and rank == 0:
        logging.getLogger("zcomm").warning(
            "stage 3: %s, of integers, stay whole on each rank (%.1f MiB); only floating-point weights are sharded",
            format_names(names),
            integer_nbytes(model) / 2**20,
        )
