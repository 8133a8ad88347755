"""The model's whole tensors, one at a time: for full_state_dict(), and for export(), which hands them to the program.

Collective. Memory: one tensor and its unit; the receiver keeps tensors or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from zcomm.zero.agree import ErrorHolder, agree
from zcomm.zero.checkpoint.extra_state import is_extra
from zcomm.zero.checkpoint.whole_names import Rest, Row, names_of_all, of_all_ranks, rows_of
from zcomm.zero.parts import Parts
from zcomm.zero.tensors import shard_io


def full_state_dict(parts: Parts) -> dict[str, torch.Tensor]:
    """See ZeroOptimizer.full_state_dict. It has the order of the model's own, and the entries of modules and hooks."""
    whole = WholeTensors(parts, "full_state_dict()")
    found = {name: tensor for names, tensor in whole for name in names}
    others = whole.others
    return {name: (others | found)[name] for name in whole.order if name in found or name in others} | found


def export(
    parts: Parts,
    callback: Callable[[str, torch.Tensor], object],
    dtype: torch.dtype | None,
    root: int | None,
    tied: bool,
) -> None:
    """See ZeroOptimizer.export."""
    reducer, kept = parts.reducer, ErrorHolder()
    before, reducer.refuses = reducer.refuses, "opt.export()"
    try:
        with parts.comm.no_deadline():
            for names, tensor in WholeTensors(parts, "export()"):
                if dtype is not None and tensor.is_floating_point():
                    tensor = tensor.to(dtype)
                given = names if tied else names[:1]
                for name in given:
                    with kept.errors():
                        if kept.error is None and root in (None, parts.comm.rank):  # the program may change a tensor
                            callback(name, tensor if name == given[-1] else tensor.clone())
                agree(parts.comm, kept.error, f"export() of {names[0]}", name=f"export() of {names[0]}")
    finally:
        reducer.refuses = before


class WholeTensors:
    """Iterates once over all names of a tensor in the model's state dict, and its whole value, on the CPU. Collective.

    order: the model's own names. others: its entries that are no tensors. Raises: NotImplementedError for ``call``.
    """

    def __init__(self, parts: Parts, call: str) -> None:
        if parts.comms.experts is not None:
            parts.check_one_model(call)
        self._parts, self._rows, rest = parts, rows_of(parts), Rest(parts)
        self.order = order = parts.model.state_dict(keep_vars=True)
        self.others: dict[str, Any] = {n: v for n, v in order.items() if is_extra(n) or not isinstance(v, torch.Tensor)}
        self._rest, self._names = rest.every, names_of_all(parts, {**rest.names, "others": dict.fromkeys(self.others)})
        for name, held in self._names["others"].items() if not parts.comms.is_one_model else ():
            if held.ranks < parts.comm.world_size:
                raise NotImplementedError(f"{call}: {name} of rank {held.first} is no tensor: use save()")
        self._renamed = set(rest.tensors.aliases.values()).difference(order)  # by pruning, parametrizations

    def __iter__(self) -> Iterator[tuple[list[str], torch.Tensor]]:
        for row in self._rows:
            yield self._names_of(row.name), _whole(self._parts, row)
        for name, tensor in of_all_ranks(self._parts, self._rest, self._names["rest"]):
            yield self._names_of(name), tensor.to("cpu", copy=True)

    def _names_of(self, name: str) -> list[str]:
        own = [] if name in self._renamed else [name]
        return own + [alias for alias, held in self._names["aliases"].items() if held.value == name]


def _whole(parts: Parts, row: Row) -> torch.Tensor:
    """Return a whole weight on the CPU, in the dtype of training. Collective."""
    if row.common and row.here is not None:
        return parts.store.full(row.here).cpu()

    def own() -> torch.Tensor:
        whole = torch.zeros(row.shape, dtype=parts.state.form.dtype)
        if row.index is not None:
            row.cut.place(whole, shard_io.own_weight(parts, row.index))
        return whole

    whole = shard_io.together(parts, own, f"reading {row.name}")
    parts.comm.all_reduce(whole.view(-1).view(torch.uint8), name=f"parts of {row.name}")
    return whole
