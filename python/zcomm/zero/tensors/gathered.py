"""GatheredParameters: temporarily whole parameters, to read, to change, or to run the model with.

Inside the context each parameter is a whole copy of this rank's own, in every stage and tier. At the end one rank's
changes reach the other ranks, the shards and the masters; unchanged elements keep their exact masters.
Source: DeepSpeed's zero.GatheredParameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.comm.job import init, of_several
from zcomm.zero.agree import broadcast, from_root
from zcomm.zero.layout.local_param import as_local
from zcomm.zero.materialize import deferred
from zcomm.zero.materialize.of_rank_0 import Part, RootValue, share_recipes
from zcomm.zero.materialize.recipe import Deferred
from zcomm.zero.materialize.replay import empty_pages
from zcomm.zero.parts import Parts
from zcomm.zero.registry import owner_of
from zcomm.zero.tensors import shard_io
from zcomm.zero.tensors.forgotten import ForgottenChanges
from zcomm.zero.tensors.whole_model import own_values

_FUTURES = ("real", "file", "kept")
_opened_here: set[int] = set()  # id() of parameters of zero.Init in an open context, without a ZeroOptimizer


def is_made_real(param: torch.Tensor) -> bool:
    """Return True for a parameter of ``zero.Init`` without a ZeroOptimizer that is real only because it is open."""
    return id(param) in _opened_here and not deferred.is_marked_real(param)


class GatheredParameters:
    """``with zcomm.zero.GatheredParameters(params, modifier_rank=None): ...`` opens parameters. Collective.

    params: a parameter, several, or a module. None among them, as a module without bias has it, is skipped.
    modifier_rank: None: changes inside are forgotten at the end; the first such change is logged. A rank: that rank's
    changes inside, in place or by ``param.data = ``, become all ranks' weights and masters (changes of other ranks are
    forgotten). All ranks enter and leave, with the same parameters, outside forward and backward.
    While all parameters of a unit are open, its forward needs no gather, so ranks may run the model a different number
    of times (``generate()``).

    Parameters of ``zero.Init`` without a ZeroOptimizer become real inside. They have rank 0's values, also if random
    seeds differ between ranks. Small parameters, which have memory already, are set to these values, too.
    With ``modifier_rank`` each rank keeps its part of the values until ZeroOptimizer is built; in a world of one the
    parameter remains real. With rank 0, a parameter copied whole from a mapped file is read from there later, and an
    unused parameter keeps waiting.
    Frozen parameters that are whole on each rank (not in stage 3) are unchanged. With ``modifier_rank`` they are made
    equal, too. Unsharded parameters, and tensors that are not parameters (``state_dict().values()``), are unchanged.
    Contexts may be nested. fwd_module: DeepSpeed's; has no effect. enabled: False does nothing.

    Raises: ValueError for a modifier_rank out of range, and for a changed shape; PeerLost, TimeoutError,
    CollectiveMismatch; OSError from swap files. Memory: a copy of each parameter. If the block raises, its changes are
    forgotten.
    """

    def __init__(
        self,
        params: torch.Tensor | nn.Module | Iterable[torch.Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = params.parameters() if isinstance(params, nn.Module) else params
        every = [given] if given is None or isinstance(given, torch.Tensor) else list(given)
        once = {id(param): param for param in every if param is not None}
        self._params = list(once.values()) if enabled else []
        self._modifier = modifier_rank
        self._open: list[tuple[Parts, int]] = []
        self._frozen: list[tuple[Parts, torch.Tensor]] = []
        self._waiting: list[tuple[nn.Parameter, Deferred, torch.dtype]] = []
        self._real: list[torch.Tensor] = []
        self._watch: ForgottenChanges | None = None

    def __enter__(self) -> GatheredParameters:
        self._open, self._frozen, self._waiting, self._real = [], [], [], []
        settled: list[Parts] = []
        unowned = []
        for param in self._params:
            owner = owner_of(param)
            if owner is None:
                unowned.append(param)
                continue
            _, parts, index = owner
            if all(parts is not other for other in settled):
                settled.append(parts)
                parts.updates.drain("GatheredParameters()")
            parts.rebinder.restore()
            self._check_rank(parts.comms.data.world_size)
            if index is None:
                self._frozen.append((parts, param))
            else:
                self._open.append((parts, index))
        held = []
        try:
            self._open_unowned(unowned)
            for parts, index in self._open:
                parts.store.hold(index)
                held.append((parts, index))
        except BaseException:
            self._open = held
            self._leave(keep=False)
            raise
        self._watch = self._begin_watch() if self._modifier is None else None
        for parts in self._owners():
            parts.comm.barrier(name="parameters are open")
        return self

    def close(self, keep: bool) -> None:
        """Leave the context, for callers without ``with``. keep: the modifier_rank's changes are kept."""
        self._modifier = self._modifier if keep else None
        self.__exit__(None, None, None)

    def _begin_watch(self) -> ForgottenChanges:
        watch = ForgottenChanges()
        for parts, index in self._open:
            watch.watch(parts, index)
        for param, _, _ in self._waiting:
            watch.watch_made(param)
        return watch

    def _check_rank(self, world_size: int) -> None:
        if self._modifier is not None and not 0 <= self._modifier < world_size:
            raise ValueError(f"modifier_rank={self._modifier} is not a valid rank; expected one in [0, {world_size})")

    def _open_unowned(self, params: Sequence[torch.Tensor]) -> None:
        """Open parameters of zero.Init among ``params`` with rank 0's values, which ZeroOptimizer would use."""
        waiting = [param for param in params if param.is_meta and isinstance(param, nn.Parameter)]
        self._real = [p for p in params if deferred.is_marked_real(p) and id(p) not in _opened_here]
        for param in waiting:
            deferred.check(param, _called(param))
        of_ranks = [param for param in waiting if _is_without_part(param)]
        comm = of_several() if of_ranks or self._real else None
        differ = set() if comm is None else _share(comm, [*of_ranks, *self._real])
        for param in waiting:
            self._open_waiting(param, comm if id(param) in differ else None)
        _opened_here.update(map(id, self._real))

    def _open_waiting(self, param: nn.Parameter, comm: Communicator | None) -> None:
        """Make ``param`` real. comm: its ranks have different values and receive rank 0's; None: equal values."""
        name, kept = _called(param), deferred.future(param)

        def value() -> torch.Tensor:
            return deferred.value_of(param, name, init() if deferred.future(param).part is not None else None)

        def make_real() -> None:
            deferred.materialize(param, value())

        self._waiting.append((param, kept, param.dtype))
        _opened_here.add(id(param))
        if comm is not None:
            found = from_root(comm, 0, f"making {name}", value)
            found = new_memory(param) if found is None else found.contiguous()
            broadcast(comm, found, 0, "a value before ZeroOptimizer")
            deferred.materialize(param, found)
        elif self._modifier == 0 and kept.part is None and isinstance(param, deferred.Waiting):
            deferred.open_late(param, make_real)  # a value from a mapped file needs no memory
        else:
            make_real()

    def _owners(self) -> Iterator[Parts]:
        seen: set[int] = set()
        for parts in (*(p for p, _ in self._open), *(p for p, _ in self._frozen)):
            if id(parts) not in seen:
                seen.add(id(parts))
                yield parts

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with torch.no_grad():
            try:
                if kind is None and self._modifier is not None:
                    self._spread(self._modifier)
                elif kind is None and self._watch is not None:
                    self._watch.report()
            finally:
                self._leave(keep=kind is None and self._modifier is not None)

    def _leave(self, keep: bool) -> None:
        """Close the parameters that ``__enter__`` has opened. keep: keep the values of ``_spread``."""
        for parts, index in self._open:
            parts.store.release(index)
        for param, kept, dtype in () if keep else self._waiting:
            _wait_again(param, kept, dtype)
        _opened_here.difference_update(id(param) for param in (*(each[0] for each in self._waiting), *self._real))
        self._open, self._frozen, self._waiting, self._real = [], [], [], []

    def _spread(self, root: int) -> None:
        """Write rank ``root``'s values into every rank's shards. Collective."""
        for parts in self._owners():
            parts.updates.check("a change inside of GatheredParameters()")  # on all ranks, also ranks without a part
            from_root(
                parts.comms.data, root, "a change inside of GatheredParameters()", partial(self._check_shapes, parts)
            )
            parts.store.synchronize()
            parts.comm.barrier(name="old weights are unused")
        for parts, index in self._open:
            dtype = parts.state.form.dtype
            value = torch.empty(parts.geometry.places[index].shape, dtype=dtype)
            data, own_root = parts.data_of(index), parts.root_of(index, root)
            if data.rank == own_root:
                value.copy_(_data(parts, index))
            data.broadcast(value, root=own_root, name=f"changed {parts.names[index]}")
            act = partial(shard_io.change, parts, index, value.reshape(-1))
            shard_io.together(parts, act, f"changing {parts.names[index]}")
            if _data(parts, index).shape == value.shape:
                _data(parts, index).copy_(value)  # for a context around this one
            else:
                parts.store.parameter(index).data = value.to(_data(parts, index).device)
        for parts, param in self._frozen:
            broadcast(parts.comms.data, as_local(param).data, root, "a changed frozen parameter")
            if id(param) in own_values:
                own_values[id(param)].copy_(param.data)
        for parts in self._owners():
            parts.store.publish()
        if self._waiting:
            self._keep_root(root)
        comm = of_several() if self._real else None
        if comm is not None:
            self._check_rank(comm.world_size)
            for param in self._real:
                broadcast_data(comm, param, root, "a changed value before ZeroOptimizer")

    def _check_shapes(self, parts: Parts) -> None:
        for index in (index for other, index in self._open if other is parts):
            shape, now = parts.geometry.places[index].shape, _data(parts, index).shape
            if now != shape:
                raise ValueError(
                    f"GatheredParameters: {parts.names[index]} has shape {tuple(now)} now, not {tuple(shape)}"
                )

    def _keep_root(self, root: int) -> None:
        """Store on every rank its part of ``root``'s values."""
        comm = init()
        self._check_rank(comm.world_size)
        for param, _, _ in self._waiting:
            deferred.close(param)
        found = torch.tensor([_FUTURES.index(self._future(*each)) for each in self._waiting], dtype=torch.uint8)
        comm.broadcast(found, root=root, name="owners of values")
        for (param, kept, dtype), code in zip(self._waiting, found.tolist(), strict=True):
            if _FUTURES[code] == "real":
                self._keep_real(comm, param, root)
            elif _FUTURES[code] == "file":
                read = deferred.future(param).read if comm.rank == root else None
                if comm.rank != root:
                    _wait_again(param, kept, dtype)
                deferred.wait_for_part(param, RootValue(param, read, root, comm.world_size))
            else:
                _wait_again(param, kept, dtype)

    @staticmethod
    def _future(param: nn.Parameter, kept: Deferred, dtype: torch.dtype) -> str:
        """Return the source of this rank's value: "real" memory, a "file", or the unchanged future value ("kept")."""
        if not isinstance(param, deferred.Waiting):
            return "real"
        return "kept" if deferred.future(param) is kept else "file"

    @staticmethod
    def _keep_real(comm: Communicator, param: nn.Parameter, root: int) -> None:
        if isinstance(param, deferred.Waiting):  # another rank's value is received
            deferred.materialize(param, new_memory(param))
        broadcast_data(comm, param, root, "a changed parameter")
        if comm.world_size > 1 and param.is_cpu:
            deferred.wait_for_part(param, Part(param.data, comm.rank, comm.world_size))
        else:
            deferred.mark_real(param)


def share_first_values(params: Iterable[torch.Tensor]) -> None:
    """Make rank 0's values of ``params``, parameters of ``zero.Init``, the values of all ranks. Collective.

    Values that only rank 0 can compute remain there until GatheredParameters or ZeroOptimizer sends them.
    """
    unowned = [param for param in {id(param): param for param in params}.values() if owner_of(param) is None]
    mine = [param for param in unowned if _is_without_part(param) or deferred.is_marked_real(param)]
    comm = of_several() if mine else None
    if comm is not None:
        _share(comm, mine)


def _share(comm: Communicator, params: Sequence[torch.Tensor]) -> set[int]:
    """Do as ``share_first_values``. Return the id() of parameters without memory that rank 0 has to send."""
    differ = [params[position] for position in share_recipes(comm, params)]
    for param in differ:
        if not param.is_meta:
            broadcast_data(comm, param, 0, "a value before ZeroOptimizer")
    return {id(param) for param in differ if param.is_meta}


def _is_without_part(param: torch.Tensor) -> bool:
    return isinstance(param, deferred.Waiting) and deferred.future(param).part is None


def broadcast_data(comm: Communicator, param: torch.Tensor, root: int, name: str) -> None:
    """Set ``param`` on all ranks to the value of rank ``root``. Collective."""
    param.data = param.data.resolve_conj().resolve_neg().contiguous()
    broadcast(comm, param.data, root, name)


def new_memory(param: torch.Tensor) -> torch.Tensor:
    """Return zeros of the shape and dtype of ``param`` in separate pages."""
    return empty_pages(param.numel(), param.dtype).view(param.shape)


def _called(param: torch.Tensor) -> str:
    return f"a parameter of shape {tuple(param.shape)}"


def _wait_again(param: nn.Parameter, kept: Deferred, dtype: torch.dtype) -> None:
    if isinstance(param, deferred.Waiting):
        deferred.close(param)
        deferred.set_future(param, kept)
    else:
        deferred.wait_again(param, kept, dtype)


def _data(parts: Parts, index: int) -> torch.Tensor:
    return parts.store.parameter(index).data
