"""Edits of weights in forward, which may depend on a rank's batch: ranks compare the edited weights.

[Note: edits in forward] An edit counts once, for the rank that keeps the elements, because every rank makes the same
edit. But ``F.embedding(max_norm=)`` only rescales the rows of this rank's batch. So the version counters are compared
around the model's forward. If some rank's have moved, all ranks compare checksums of the edited parameters before the
step, and raise if these differ. Units have a check of their own, and one rank needs none.
Cost: two reads of a counter per parameter and forward (0.1 us each).
Thread rule: as ZeroOptimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zcomm import _core
from zcomm.zero.format_names import format_names
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.module_hook import Hook


class ForwardEdits:
    """The parameters that forwards have edited since the last ``check``. params: none: nothing is watched."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str], comms: MeshComms) -> None:
        self._params, self._names, self._comms = params, names, comms
        self._before: list[int] = []
        self._edited: set[int] = set()

    def hook(self, model: nn.Module) -> list[Any]:
        """Watch the forwards of ``model``. Returns: the hooks' handles."""
        if not self._params:
            return []
        begin, end = Hook(lambda module, args: self.begin()), Hook(lambda module, args, output: self.end())
        return [model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)]

    def begin(self) -> None:
        """Note the version counters: a forward begins."""
        self._before = [param._version for param in self._params]

    def end(self) -> None:
        """Note which parameters the forward has edited."""
        pairs = enumerate(zip(self._params, self._before, strict=False))
        self._edited.update(number for number, (param, before) in pairs if param._version != before)
        self._before = []

    @property
    def some(self) -> bool:
        """True if forwards have edited parameters on this rank."""
        return bool(self._edited)

    def check(self) -> None:
        """Compare the parameters that any rank has edited. Collective.

        Raises: RuntimeError on all ranks, naming those that differ.
        """
        if not self._params:
            return
        edited = torch.zeros(len(self._params), dtype=torch.uint8)
        edited[list(self._edited)] = 1
        self._edited.clear()
        data = self._comms.data
        data.all_reduce(edited, op="max", name="parameters that forward has edited")
        numbers = edited.nonzero().flatten().tolist()
        differ = []
        if numbers:
            of = [self._comms.of_param(self._params[number]) for number in numbers]
            for comms in filter(None, (self._comms, self._comms.experts)):
                mine = [number for number, each in zip(numbers, of, strict=True) if each is comms]
                if not mine:
                    continue
                own = torch.tensor([_checksum(self._params[number]) for number in mine])
                every = comms.data.all_gather(own, name="checksums of parameters that forward has edited")
                assert isinstance(every, torch.Tensor)
                same = (every.view(comms.data.world_size, -1) == own).all(0).tolist()
                differ += [self._names[number] for number, equal in zip(mine, same, strict=True) if not equal]
        told = self._comms.told(differ, "edited parameters of ranks with other tensors")
        if differ := next(filter(None, told), []):
            raise RuntimeError(
                f"step(): forward has edited weights in another way on each rank (in place, or as by "
                f"F.embedding(max_norm=)): {format_names(differ)}; edit them between passes, in the same way on all "
                "ranks"
            )


def _checksum(param: torch.Tensor) -> int:
    here = param.detach().to("cpu").contiguous()
    return _core.crc32c(here.data_ptr(), here.nbytes)
