"""GatheredParameters: whole parameters for a while, to look at, to change, or to run the model with.

Inside of the context each parameter is a whole copy of this rank's own, in every stage and tier. What one rank changes
then reaches the others, the shards and the masters; elements that it left alone keep their exact masters.
Source: DeepSpeed's zero.GatheredParameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.comm.job import init
from zcomm.zero.agree import from_root
from zcomm.zero.materialize import deferred
from zcomm.zero.materialize.part import Part, RootValue
from zcomm.zero.materialize.recipe import Deferred
from zcomm.zero.materialize.replay import pages
from zcomm.zero.parts import Parts
from zcomm.zero.placement import broadcast
from zcomm.zero.registry import owner_of
from zcomm.zero.tensors import pieces

_FUTURES = ("real", "file", "kept")
_made_real: set[int] = set()  # by id(): parameters of zero.Init that an open context has made real


def is_made_real(param: torch.Tensor) -> bool:
    """Return True for a parameter of ``zero.Init`` that is real because it is open here, and no ZeroOptimizer's."""
    return id(param) in _made_real


class GatheredParameters:
    """``with zcomm.zero.GatheredParameters(params, modifier_rank=None): ...`` opens parameters. Collective.

    params: a parameter, several, or a module; None, as the bias of a module has, is skipped. modifier_rank: None: what is changed inside is forgotten at the end; a
    rank: what that rank changed inside, in place or by ``param.data = ``, becomes all ranks' weights and masters (what
    others changed is forgotten). All ranks enter and leave, with the same parameters, outside of forward and backward.
    While all parameters of a unit are open, its forward needs no gather: ranks may run the model differently often
    (``generate()``).

    Parameters of ``zero.Init`` that no ZeroOptimizer has yet become real inside. With ``modifier_rank`` each rank keeps
    its part of the values until ZeroOptimizer is built; a rank that is alone keeps the real parameter. With rank 0,
    what was copied whole from a mapped file stays there, and what was not looked at waits on.
    Frozen parameters that are whole on each rank (not in stage 3) stay as they are. With ``modifier_rank`` they are
    made equal, too. Parameters that nothing shards are left alone, and so are tensors that are not parameters
    (``state_dict().values()``). Contexts may be nested. fwd_module: DeepSpeed's; has no effect here. enabled: False
    does nothing.

    Raises: ValueError for a modifier_rank out of range, and for a changed shape; PeerLost, TimeoutError,
    CollectiveMismatch; OSError from swap files. Memory: a copy of each parameter. If the block raises, nothing is kept.
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

    def __enter__(self) -> GatheredParameters:
        self._open, self._frozen, self._waiting = [], [], []
        settled: list[Parts] = []
        for param in self._params:
            owner = owner_of(param)
            if owner is None:
                if param.is_meta and isinstance(param, nn.Parameter):
                    self._open_waiting(param)
                continue
            train, parts, index = owner
            if all(parts is not other for other in settled):
                settled.append(parts)
                parts.settle(train.poison, "GatheredParameters()")
            parts.attachment.restore()
            self._check_rank(parts.comm.world_size)
            if index is None:
                self._frozen.append((parts, param))
            else:
                self._open.append((parts, index))
        held = []
        try:
            for parts, index in self._open:
                parts.store.hold(index)
                held.append((parts, index))
        except BaseException:
            for parts, index in held:
                parts.store.release(index)
            raise
        for parts in self._owners():
            parts.comm.barrier(name="parameters are open")
        return self

    def close(self, keep: bool) -> None:
        """End what ``__enter__`` began, where no ``with`` does. keep: the modifier_rank's changes are kept."""
        self._modifier = self._modifier if keep else None
        self.__exit__(None, None, None)

    def _check_rank(self, world_size: int) -> None:
        if self._modifier is not None and not 0 <= self._modifier < world_size:
            raise ValueError(f"modifier_rank={self._modifier} is not a valid rank; expected one in [0, {world_size})")

    def _open_waiting(self, param: Any) -> None:
        name = f"a parameter of shape {tuple(param.shape)}"
        kept = deferred.check(param, name)

        def make_real() -> None:
            value = deferred.value_of(param, name, init() if deferred.future(param).part is not None else None)
            deferred.materialize(param, value)

        self._waiting.append((param, kept, param.dtype))
        _made_real.add(id(param))
        if self._modifier == 0 and kept.part is None and isinstance(param, deferred.Waiting):
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
            finally:
                for parts, index in self._open:
                    parts.store.release(index)
                if kind is not None or self._modifier is None:
                    for param, kept, dtype in self._waiting:
                        _wait_again(param, kept, dtype)
                _made_real.difference_update(id(param) for param, _, _ in self._waiting)
                self._open, self._frozen, self._waiting = [], [], []

    def _spread(self, root: int) -> None:
        """Write rank ``root``'s values into every rank's shards. Collective."""
        for parts in self._owners():
            parts.check_pending("a change inside of GatheredParameters()")  # on all ranks, also without a part of it
            from_root(parts.comm, root, "a change inside of GatheredParameters()", partial(self._check_shapes, parts))
            parts.store.synchronize()
            parts.comm.barrier(name="old weights are unused")
        for parts, index in self._open:
            dtype = parts.state.form.dtype
            value = torch.empty(parts.geometry.places[index].shape, dtype=dtype)
            if parts.comm.rank == root:
                value.copy_(_data(parts, index))
            parts.comm.broadcast(value, root=root, name=f"changed {parts.names[index]}")
            act = partial(pieces.change, parts, index, value.reshape(-1))
            pieces.together(parts, act, f"changing {parts.names[index]}")
            if _data(parts, index).shape == value.shape:
                _data(parts, index).copy_(value)  # for a context around this one
            else:
                parts.store.parameter(index).data = value.to(_data(parts, index).device)
        for parts, param in self._frozen:
            broadcast(parts.comm, param.data, root, "a changed frozen parameter")
        for parts in self._owners():
            parts.store.publish()
        if self._waiting:
            self._keep_root(root)

    def _check_shapes(self, parts: Parts) -> None:
        for index in (index for other, index in self._open if other is parts):
            shape, now = parts.geometry.places[index].shape, _data(parts, index).shape
            if now != shape:
                raise ValueError(
                    f"GatheredParameters: {parts.names[index]} has shape {tuple(now)} now, not {tuple(shape)}"
                )

    def _keep_root(self, root: int) -> None:
        """Give every rank its part of ``root``'s values."""
        comm = init()
        self._check_rank(comm.world_size)
        for param, _, _ in self._waiting:
            deferred.close(param)
        found = torch.tensor([_FUTURES.index(self._future(*each)) for each in self._waiting], dtype=torch.uint8)
        comm.broadcast(found, root=root, name="where values are")
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
        """Return where this rank has the value: "real" memory, a "file", or nowhere but where it was ("kept")."""
        if not isinstance(param, deferred.Waiting):
            return "real"
        return "kept" if deferred.future(param) is kept else "file"

    @staticmethod
    def _keep_real(comm: Communicator, param: nn.Parameter, root: int) -> None:
        if isinstance(param, deferred.Waiting):  # another rank's value is received
            memory = torch.empty(0, dtype=param.dtype).set_(pages(param.nbytes))
            deferred.materialize(param, memory.view(param.shape))
        param.data = param.data.resolve_conj().resolve_neg().contiguous()
        broadcast(comm, param.data, root, "a changed parameter")
        if comm.world_size > 1 and param.is_cpu:
            deferred.wait_for_part(param, Part(param.data, comm.rank, comm.world_size))


def _wait_again(param: nn.Parameter, kept: Deferred, dtype: torch.dtype) -> None:
    if isinstance(param, deferred.Waiting):
        deferred.close(param)
        deferred.set_future(param, kept)
    else:
        deferred.wait_again(param, kept, dtype)


def _data(parts: Parts, index: int) -> torch.Tensor:
    return parts.store.parameter(index).data
