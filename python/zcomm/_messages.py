"""Messages between two ranks: send and recv, beside the collectives and in no order with them."""

from __future__ import annotations

from typing import Literal, overload

from zcomm import _core
from zcomm._calls import Buckets, Calls, listed
from zcomm._tensors import core_dtype, spans
from zcomm._work import Work


class RecvWork(Work):
    """A receive in flight; ``source`` is the sender's rank once it is done."""

    __slots__ = ("_source",)

    def __init__(self, core: _core.Work, keep_alive: object, source: _core.Source) -> None:
        super().__init__(core, (keep_alive, source))
        self._source = source

    @property
    def source(self) -> int:
        return self._source.rank


class Messages(Calls):
    def send(self, buckets: Buckets, dst: int, tag: int = 0, async_op: bool = False, *, name: str = "") -> Work | None:
        """Send a tensor, or a list as one message, to rank ``dst``.

        Messages of one pair and tag (>= 0) match in call order. Both sides give the same dtype and total count.
        A small message leaves before the other side asks for it; a large one waits for its recv.
        Returns: a Work if ``async_op``. Raises: ValueError, CollectiveMismatch, PeerLost, TimeoutError.
        """
        tensors = listed(buckets)
        dtype = core_dtype(self._buffers("send", tensors))
        return self._end(self._core.send(spans(tensors), dtype, dst, tag, name, async_op), tensors)

    @overload
    def recv(
        self,
        buckets: Buckets,
        src: int | None = ...,
        tag: int = ...,
        async_op: Literal[False] = ...,
        *,
        name: str = ...,
    ) -> int: ...
    @overload
    def recv(
        self, buckets: Buckets, src: int | None = ..., tag: int = ..., *, async_op: Literal[True], name: str = ...
    ) -> RecvWork: ...
    @overload
    def recv(
        self, buckets: Buckets, src: int | None = ..., tag: int = ..., async_op: bool = ..., *, name: str = ...
    ) -> int | RecvWork: ...

    def recv(
        self, buckets: Buckets, src: int | None = None, tag: int = 0, async_op: bool = False, *, name: str = ""
    ) -> int | RecvWork:
        """Receive a message into a tensor or a list of them.

        src: the sender; None for whichever rank comes first with this tag.
        Returns: the sender's rank, or a Work with ``.source`` if ``async_op``. Raises: as send.
        """
        tensors = listed(buckets)
        dtype = core_dtype(self._buffers("recv", tensors))
        if src is not None and not 0 <= src < self.world_size:
            raise ValueError(f"recv: src={src} is not a rank of a world of size {self.world_size}")
        source = _core.Source()
        work = self._core.recv(spans(tensors), dtype, -1 if src is None else src, tag, name, async_op, source)
        return source.rank if work is None else RecvWork(work, tensors, source)
