"""Schedules of DeepSpeed's pipelines: the order of a pipeline's instructions, as lists for programs that read them.

The engine does not run these lists: torch's schedules order its passes (zcomm.parallel). Pure arithmetic. In step t of
1F1B stage s of S runs forward (t - s) / 2, if that is whole. Otherwise it runs backward (t - (2 S - 1 - s)) / 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """An instruction; its keyword arguments are attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        self.__dict__.update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the weights."""


class ReduceGrads(PipeInstruction):
    """Reduce gradients over the data ranks."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied weights over their stages."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for one of the stage's buffers."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load a micro-batch."""


class ForwardPass(BufferOpInstruction):
    """Run a forward pass."""


class BackwardPass(BufferOpInstruction):
    """Run a backward pass."""


class SendActivation(BufferOpInstruction):
    """Send activations to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive activations from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send gradients to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive gradients from the next stage."""


class PipeSchedule(ABC):
    """The instructions of stage ``stage_id`` of ``stages`` for ``micro_batches``: an iterator of lists, by step."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self._steps: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers of a stage."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """The stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """True for the first stage."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """True for the last stage."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> PipeSchedule:
        self._steps = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._steps is None:
            self._steps = self.steps()
        return next(self._steps)

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    @property
    def _loads(self) -> bool:
        return self.is_first_stage or self.is_last_stage


class InferenceSchedule(PipeSchedule):
    """Forward passes: stage s runs micro-batch t - s in step t, and sends the one before it."""

    def num_pipe_buffers(self) -> int:
        """Return 2."""
        return 2

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        for step in range(self.micro_batches + self.stages - 1):
            number = step - self.stage_id
            runs, sends = self._valid_micro_batch(number), self._valid_micro_batch(number - 1)
            buffer = self._buffer_idx(step + self.stage_id)
            found: list[PipeInstruction] = [LoadMicroBatch(buffer)] if runs and self._loads else []
            moves: list[PipeInstruction] = []
            if sends and self._valid_stage(self.next_stage):
                moves.append(SendActivation(1 - buffer))
            if runs and self._valid_stage(self.prev_stage):
                moves.append(RecvActivation(buffer))
            found += moves if self.stage_id % 2 == 0 else reversed(moves)
            yield [*found, ForwardPass(buffer)] if runs else found


class TrainSchedule(PipeSchedule):
    """1F1B: after its first forwards a stage alternates forward and backward."""

    def num_pipe_buffers(self) -> int:
        """Return the most micro-batches that are between forward and backward, at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """Return the micro-batch of a step, which may not exist, and whether it is a forward."""
        is_forward = (step_id - self.stage_id) % 2 == 0
        start = self.stage_id if is_forward else 2 * self.stages - 1 - self.stage_id
        return (step_id - start) // 2, is_forward

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        count, last = 2 * (self.micro_batches + self.stages - 1), -1
        for step in range(count):
            number, is_forward = self._step_to_micro_batch(step)
            runs, ended = self._valid_micro_batch(number), self._valid_micro_batch(last)
            own, before = self._buffer_idx(number), self._buffer_idx(last)
            found: list[PipeInstruction] = []
            if is_forward and self._valid_stage(self.prev_stage):
                found += [SendGrad(before)] if ended else []
                found += [RecvActivation(own)] if runs else []
            elif not is_forward and self._valid_stage(self.next_stage):
                found += [RecvGrad(own)] if runs else []
                found += [SendActivation(before)] if ended else []
            if runs and is_forward and self._loads:
                found.append(LoadMicroBatch(own))
            if runs:
                found.append(ForwardPass(own) if is_forward else BackwardPass(own))
            if step == count - 1:
                found += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            last = number
            yield found


class DataParallelSchedule(PipeSchedule):
    """Gradient accumulation without stages."""

    def num_pipe_buffers(self) -> int:
        """Return 1."""
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        for number in range(self.micro_batches):
            passes: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            yield [*passes, ReduceGrads(), OptimizerStep()] if number == self.micro_batches - 1 else passes
