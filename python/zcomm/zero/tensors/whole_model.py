"""The block of ``opt.gathered()``: each rank has whole weights, and runs the model by itself.

In stage 3 by units, and if copies of hpZ are encoded, each parameter is a copy of this rank's own. Otherwise it is
whole already. Parameters that the store does not have, such as frozen ones of stages 0 to 2, are whole, too. So no call
of the model inside communicates. No parameter requires a gradient there. Changes that would be lost, steps, and
backward passes of earlier forwards are errors inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from zcomm.zero.agree import all_values
from zcomm.zero.params.coded_copies import CodedCopies
from zcomm.zero.parts import Parts
from zcomm.zero.tensors.forgotten import ForgottenChanges
from zcomm.zero.units.store import UnitStore, free_nbytes

CALL = "opt.gathered()"
own_values: dict[int, torch.Tensor] = {}  # by id() of whole parameters with a copy for a block, for changes to keep


@contextmanager
def gathered(parts: Parts, room: float, edits: str) -> Iterator[nn.Module]:
    """See ZeroOptimizer.gathered. room: bytes of host memory that this process may take."""
    if edits not in ("refuse", "forget"):
        raise ValueError(f"gathered(edits={edits!r}): use 'refuse' or 'forget'")
    store, reducer = parts.store, parts.reducer
    store.clear_interrupted()
    sharded = isinstance(store, UnitStore)
    if torch._C._current_graph_task_id() >= 0 or (isinstance(store, UnitStore) and store.life.running):
        raise RuntimeError(f"{CALL} inside of a forward or backward pass of the model: enter it between passes")
    parts.updates.drain(CALL)
    parts.join()
    numbers = range(len(parts.names))
    copied = numbers if sharded or edits == "forget" or isinstance(store, CodedCopies) else ()
    others = [(name, p) for name, p in parts.model.named_parameters() if id(p) not in parts.index_of]
    lent = [p for _, p in others if edits == "forget" and id(p) not in own_values]
    _check_room(parts, copied, lent, room)
    watch = ForgottenChanges(always=True)
    with ExitStack() as ends:
        with _writable():
            for index in copied:
                store.hold(index)
                ends.callback(_release, parts, index)
            for param in lent:
                _lend(param, ends)
        for name, param in others:
            _without_gradient(param, ends)
            if edits == "refuse" and id(param) not in own_values:
                watch.watch_whole(parts, name, param)
        for index in numbers:
            _without_gradient(parts.store.parameter(index), ends)
            if edits == "refuse":
                watch.watch(parts, index)
        parts.comm.barrier(name=f"whole weights of {CALL}")
        before, reducer.refuses = reducer.refuses, CALL
        try:
            yield parts.model
        finally:
            reducer.refuses = before
        with _writable(), parts.comm.no_deadline():
            _refuse_changes(all_values(parts.comm, watch.first(), f"end of {CALL}"), parts.names if copied else ())


@contextmanager
def _writable() -> Iterator[None]:
    """Make copies that are ordinary tensors, also inside of ``torch.inference_mode``."""
    with torch.no_grad(), torch.inference_mode(False):
        yield


def _without_gradient(param: nn.Parameter, ends: ExitStack) -> None:
    """Let forwards of the block build no graph of ``param``: after the block its backward would find no copy."""
    if param.requires_grad:
        param.requires_grad_(False)
        ends.callback(param.requires_grad_, True)


def _lend(param: nn.Parameter, ends: ExitStack) -> None:
    """Give a whole parameter a copy for the block."""
    own_values[id(param)] = own = param.data
    param.data = own.clone()

    def end() -> None:
        del own_values[id(param)]
        param.data = own

    ends.callback(end)


def _release(parts: Parts, index: int) -> None:
    with _writable():
        parts.store.release(index)


def _refuse_changes(names: list[str], copied: Sequence[str]) -> None:
    """Raise RuntimeError, on all ranks, if a rank has changed a parameter. names: of each rank; "": none. copied: the
    parameters with copies."""
    for rank, name in enumerate(names):
        if name:
            now = "the weights are those of before" if name in copied else "the change stays"
            raise RuntimeError(
                f"{name} was changed inside of {CALL} on rank {rank} ({now}): change weights outside of the block; or "
                "open them inside of it by zcomm.zero.GatheredParameters(params, modifier_rank=0), which keeps "
                "changes; or pass edits='forget'"
            )


def _check_room(parts: Parts, numbers: Sequence[int], lent: Sequence[torch.Tensor], room: float) -> None:
    """Raise MemoryError, on all ranks, if a rank has no memory for copies of the parameters. Collective."""
    need = sum(
        parts.geometry.places[index].shape.numel() * parts.state.form.dtype.itemsize
        for index in numbers
        if not parts.store.hold_count(index)
    )
    need += sum(param.nbytes for param in lent)
    free: float = free_nbytes(parts.device)
    if parts.device.type == "cpu":
        free = min(free // parts.comm.local_world_size, max(0, room))
    for rank, (wanted, there) in enumerate(all_values(parts.comm, [need, int(free)], f"memory of {CALL}")):
        if wanted > there:
            raise MemoryError(
                f"{CALL}: whole weights take {wanted:,} bytes on rank {rank}, which may use {there:,} (free memory of "
                f"the host, divided by its ranks, and memory=). Without the block generate() gathers a unit at a time, "
                "in step on all ranks (synced_gpus=True)"
            )
