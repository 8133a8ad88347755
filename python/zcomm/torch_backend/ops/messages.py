"""send and recv of a process group. They return at once; torch waits for the work if its call blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import increment_version

from zcomm import _core
from zcomm.comm.work import CoreWork
from zcomm.torch_backend.issue import Issue
from zcomm.torch_backend.staging import Staging, refuse_sharded_gradients, spans, wire
from zcomm.torch_backend.work import Pending

_ANY = -1


class Messages(Issue):
    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> Pending:
        staging = Staging("send")
        refuse_sharded_gradients("send", tensors)
        dense = [staging.reads(tensor) for tensor in tensors]
        dtype, width, element = self._wire("send", dense)
        core_work = self._core.send(spans(dense, width), dtype, dst, tag, "", True, element)
        return self._message(core_work, tensors, None, dense, None)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> Pending:
        staging = Staging("recv")
        refuse_sharded_gradients("recv", tensors)
        dense = [staging.writes(tensor) for tensor in tensors]
        return self._receive(dense, src, tag, tensors, staging.finish if staging.is_used else None)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Pending:
        return self.recv(tensors, _ANY, tag)

    def _receive(
        self,
        dense: list[torch.Tensor],
        src: int,
        tag: int,
        tensors: Sequence[torch.Tensor],
        finish: Callable[[], None] | None,
    ) -> Pending:
        """Receive a message into ``dense``, which ``finish`` brings to ``tensors``."""
        source = _core.Source()
        dtype, width, element = self._wire("recv", dense)
        core_work = self._core.recv(spans(dense, width), dtype, src, tag, "", True, source, element)
        return self._message(core_work, tensors, finish, dense, source)

    def _message(
        self,
        core_work: _core.Work | None,
        tensors: Sequence[torch.Tensor],
        finish: Callable[[], None] | None,
        dense: list[torch.Tensor],
        source: _core.Source | None,
    ) -> Pending:
        assert core_work is not None
        make, keep = self._work_for(tensors), (dense, source)
        handle = self._handle(core_work)
        if source is not None:
            increment_version(tensors)
        work = make(handle, list(tensors), self._messages, self._flight, finish, keep, source)
        if self._timeout_s != self._deadline_s:
            work.limit(self._timeout_s, lambda: self._give_up("recv" if source else "send", self._timeout_s))
        self._flight.add(work, copies=finish is not None)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _handle(self, core_work: _core.Work) -> CoreWork:
        """Return the handle by which a Pending waits for a message."""
        return core_work

    @staticmethod
    def _wire(what: str, tensors: Sequence[torch.Tensor]) -> tuple[_core.DType, int, str]:
        kinds = {tensor.dtype for tensor in tensors}
        if len(kinds) != 1:
            raise ValueError(f"{what}: one message has one dtype, not {', '.join(map(str, kinds)) or 'none'}")
        return wire(tensors[0].dtype)
