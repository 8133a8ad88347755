"""Messages between pipeline stages: tensors behind a header that names step, stage, micro-batch and direction.

torch's pipelining sends tensors of shapes fixed in advance, without tags. Here each message has a tag of its own, and a
header with shapes. So micro-batches may have different shapes, and a tensor of another micro-batch is never taken for
the expected one.
Sends never block: a schedule that is correct for buffered sends cannot deadlock. Their tensors are kept until they have
left, and must not change until then (checked by their version counters).
Thread rule: the thread that runs the schedule.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zcomm.comm.communicator import Communicator
from zcomm.comm.work import Work

FORWARD, BACKWARD = 0, 1
_WORDS = ("activations", "gradients")
_FIELDS = 256  # of a header, int64
_ABSENT = -1
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True)
class Tag:
    """Identity of a message. stage: that receives it."""

    stage: int
    microbatch: int
    direction: int

    def __str__(self) -> str:
        return f"{_WORDS[self.direction]} of micro-batch {self.microbatch} for stage {self.stage}"


@dataclass
class _Sent:
    """A message in flight. versions: of its tensors at the send."""

    works: list[Work]
    tensors: list[torch.Tensor]
    versions: list[int]
    tag: Tag


class StageMessages:
    """Messages of one rank of a pipeline. comm: of the pipeline's ranks, for it only.

    waited_s: seconds of receives in this step. place: the current pass, for errors.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.place = ""
        self._pending: deque[_Sent] = deque()
        self._step = 0
        self.waited_s = 0.0

    def begin(self, step: int) -> None:
        """Begin a step; ``finish`` has ended the last one."""
        self._step, self.waited_s = step, 0.0

    def send(self, tensors: Sequence[torch.Tensor | None], needs: Sequence[bool], peer: int, tag: Tag) -> None:
        """Send tensors to rank ``peer``. needs: whether the receiver's copy needs a gradient. None: no tensor.

        Raises: ValueError for values that are no tensors, and for more dimensions than a header holds.
        """
        self._retire()
        fields = [self._step, tag.stage, tag.microbatch, tag.direction, len(tensors)]
        payload: list[torch.Tensor] = []
        for tensor, need in zip(tensors, needs, strict=True):
            if tensor is None:
                fields += [_ABSENT, 0, 0]
                continue
            if tensor.dtype not in _DTYPES:
                raise ValueError(f"{tag}: a tensor of {tensor.dtype} cannot be sent")
            fields += [_DTYPES.index(tensor.dtype), int(need), tensor.dim(), *tensor.shape]
            if tensor.numel():
                payload.append(tensor.detach().contiguous())
        if len(fields) > _FIELDS:
            raise ValueError(f"{tag}: {len(tensors)} tensors need {len(fields)} fields of a header of {_FIELDS}")
        header = torch.zeros(_FIELDS, dtype=torch.int64)
        header[: len(fields)] = torch.tensor(fields)
        number, octets = self._number(tag), [each.view(-1).view(torch.uint8) for each in payload]
        works = [self._comm.send(header, peer, number, async_op=True, name=f"header of {tag}")]
        if octets:
            works.append(self._comm.send(octets, peer, number, async_op=True, name=str(tag)))
        sent = [work for work in works if work is not None]
        self._pending.append(_Sent(sent, payload, [each._version for each in payload], tag))

    def recv(self, peer: int, tag: Tag) -> list[tuple[torch.Tensor | None, bool]]:
        """Receive the tensors of ``tag`` from rank ``peer``, each with whether it needs a gradient.

        Raises: RuntimeError for a message of another step, stage or micro-batch; as Communicator.recv.
        """
        start = time.perf_counter()
        self._retire()
        header, number = torch.empty(_FIELDS, dtype=torch.int64), self._number(tag)
        self._comm.recv(header, peer, number, name=f"header of {tag}")
        fields = header.tolist()
        step, stage, microbatch, direction, count = fields[:5]
        if (step, stage, microbatch, direction) != (self._step, tag.stage, tag.microbatch, tag.direction):
            came = Tag(stage, microbatch, direction) if direction in (FORWARD, BACKWARD) else f"a message {fields[:5]}"
            raise RuntimeError(f"received {came} of step {step} in place of {tag} of step {self._step}")
        found: list[tuple[torch.Tensor | None, bool]] = []
        payload, place = [], 5
        for _ in range(count):
            code, need, dims = fields[place : place + 3]
            place += 3 + dims
            if code == _ABSENT:
                found.append((None, False))
                continue
            tensor = torch.empty(fields[place - dims : place], dtype=_DTYPES[code])
            found.append((tensor, bool(need)))
            if tensor.numel():
                payload.append(tensor.view(-1).view(torch.uint8))
        if payload:
            self._comm.recv(payload, peer, number, name=str(tag))
        self.waited_s += time.perf_counter() - start
        return found

    def finish(self) -> None:
        """Wait for all sends. Raises: their error."""
        while self._pending:
            self._end(self._pending.popleft())

    @staticmethod
    def _number(tag: Tag) -> int:
        return (tag.stage << 15 | tag.microbatch) << 1 | tag.direction

    def _retire(self) -> None:
        """Release the sends that have ended."""
        while self._pending and all(work.done() for work in self._pending[0].works):
            self._end(self._pending.popleft())

    def _end(self, sent: _Sent) -> None:
        for work in sent.works:
            work.wait()
        if [each._version for each in sent.tensors] != sent.versions:
            raise RuntimeError(f"{sent.tag} changed while they were sent: return a tensor that no later pass writes to")
