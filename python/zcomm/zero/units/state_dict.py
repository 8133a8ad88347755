"""``model.state_dict()`` of sharded weights: whole tensors, or DTensors if whole ones would not fit.

[Note: bounded] Whole tensors need the model's bytes on each rank. They are returned if the copies of all ranks of a
host fit into half of its memory (90 % for a world of one). Otherwise each weight is a DTensor of its true shape,
sharded over dimension 0: 1/N of the model on each rank. torch.distributed.checkpoint saves and loads DTensors. If they
do not fit either, or if no process group has the same ranks, the call raises. The rule is the same for each call and on
each rank.
The call is collective and gathers the units one by one. It never returns a tensor without values.
Thread rule: as UnitManager.
Source: FSDP's full and sharded state dicts.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.zero.module_hook import Hook
from zcomm.zero.sharded import param as stand_in

CALL = "state_dict()"
_ROOM = {True: 0.5, False: 0.9}  # part of a host's memory; True: for several ranks


class Form(Enum):
    """The form of sharded weights in a state dict."""

    WHOLE = "whole tensors"
    DTENSOR = "DTensors"
    ERROR = "neither fits"


def form_of(nbytes: int, world_size: int, hosts: Sequence[tuple[int, int]]) -> Form:
    """Choose the form for weights of ``nbytes``. hosts: for each rank, bytes of its host and number of ranks on it."""

    def fit(each: int) -> bool:
        return all(each * ranks <= host * _ROOM[world_size > 1] for host, ranks in hosts)

    if fit(nbytes):
        return Form.WHOLE
    return Form.DTENSOR if world_size > 1 and fit(-(-nbytes // world_size)) else Form.ERROR


class StateDictHooks:
    """Hooks of the modules that have parameters; ``handles`` remove them."""

    def __init__(self, model: nn.Module, form: Form, comm: Communicator) -> None:
        self._form, self._comm = form, comm
        self._mesh: Any = None
        self._call: weakref.ref[Any] | None = None  # the dict that is being filled
        # By id() of a weight and stamp of its value.
        self._made: weakref.WeakValueDictionary[tuple[int, object], torch.Tensor] = weakref.WeakValueDictionary()
        stateful = [module for module in model.modules() if module._parameters]
        self.handles: list[Any] = [module._register_state_dict_hook(Hook(self._fill)) for module in stateful]
        self.handles.append(model._register_state_dict_hook(Hook(self._fill_renamed)))

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace stand-ins by values. Tied weights share one value, so that loading in place works."""
        self._replace(state, [f"{prefix}{name}" for name in module._parameters])

    def _fill_renamed(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace the rest at the end, because hooks of the program may have renamed a weight before ``_fill``."""
        self._replace(state, list(state))

    def _replace(self, state: dict[str, Any], names: Sequence[str]) -> None:
        if self._call is None or self._call() is not state:
            self._call = weakref.ref(state) if isinstance(state, OrderedDict) else None
            self._made.clear()
        for name in names:
            value = state.get(name)
            if isinstance(value, stand_in.ShardedData):
                key = (id(stand_in.original(value)), stand_in.stamp_of(value))
                made = self._made.get(key)
                state[name] = self._made[key] = self._value(value) if made is None else made

    def _value(self, value: stand_in.ShardedData) -> torch.Tensor:
        if self._form is Form.WHOLE:
            return stand_in.whole_value(value, CALL)
        if self._form is Form.ERROR:
            raise RuntimeError(
                f"{value._zcomm_called()}: state_dict() of the whole model does not fit into a host's memory ("
                f"{_ROOM[self._comm.world_size > 1]:.0%} of it): opt.save() and `zcomm ckpt export` go by pieces"
            )
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = self._made_mesh(value)
        whole = stand_in.copied_value(value, CALL)
        if whole.dim() == 0:
            return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        size = -(-whole.shape[0] // self._comm.world_size)  # as Shard(0) cuts
        begin = min(self._comm.rank * size, whole.shape[0])
        mine = whole[begin : begin + size].clone()
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    def _made_mesh(self, value: stand_in.ShardedData) -> Any:
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        if self._mesh is None:
            mine = (self._comm.rank, self._comm.world_size)
            if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != mine:
                raise RuntimeError(
                    f"{value._zcomm_called()}: state_dict() of the whole model on each rank does not fit into half of "
                    "this host's memory, and DTensors need torch.distributed with the same ranks: call "
                    'init_process_group("zcomm") first, or use opt.save() and `zcomm ckpt export`'
                )
            self._mesh = DeviceMesh("cpu", list(range(self._comm.world_size)))
        return self._mesh
