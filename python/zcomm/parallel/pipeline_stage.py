"""Stage: one stage of a pipeline, as the schedules of torch.distributed.pipelining call it.

torch's schedules decide the order of forwards and backwards. They ask a stage for operations that send and receive, and
for its passes. This stage sends and receives by itself (pipeline_messages.py), so it returns no operations. It needs
neither torch.distributed's process group nor shapes in advance.
Thread rule: the thread that runs the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from zcomm.parallel.pipeline_messages import BACKWARD, FORWARD, StageMessages, Tag

Passes = Callable[[bool], AbstractContextManager[Any]]


class _Inputs:
    """Tensors that a stage has received, and the gradients that its backward pass leaves."""

    def __init__(self, found: list[tuple[torch.Tensor | None, bool]], trains: bool) -> None:
        self.tensors = [tensor for tensor, _ in found]
        self.needs = [need and trains for _, need in found]
        self.grads: tuple[torch.Tensor | None, ...] = (None,) * len(found)

    def entered(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors as results of a node of autograd, so that layers may change them in place."""
        if not any(self.needs):
            return tuple(self.tensors)
        anchor = torch.empty(0, requires_grad=True)
        entered: tuple[torch.Tensor | None, ...] = _Enter.apply(anchor, self)  # type: ignore[no-untyped-call]
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, inputs: _Inputs) -> Any:
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        pairs = list(zip(inputs.tensors, inputs.needs, strict=True))
        ctx.mark_non_differentiable(*(tensor for tensor, need in pairs if tensor is not None and not need))
        return tuple(inputs.tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.inputs.grads = grads
        return None, None


class Stage(_PipelineStageBase):
    """Stage ``index`` of ``count``. module: is called with the inputs of a micro-batch.

    size: ranks of the pipeline; stages go round them. passes: context of a backward pass; its argument is True for the
    stage's last one in a step.
    """

    def __init__(
        self, module: Callable[..., Any], index: int, count: int, size: int, messages: StageMessages, passes: Passes
    ) -> None:
        # The base's constructor would ask torch.distributed for a process group.
        self.submod, self.stage_index, self.num_stages = cast(nn.Module, module), index, count
        self.device, self.group, self.group_rank, self.group_size = torch.device("cpu"), None, index % size, size
        self.stage_index_to_group_rank = {stage: stage % size for stage in range(count)}
        self.has_backward = True
        self.dw_builder = None
        self.output_chunks: list[Any] = []
        self.args_recv_info, self.act_send_info = {0: ()}, {}
        self._messages, self._passes = messages, passes
        self.clear_runtime_states()

    def begin(self, trains: bool) -> None:
        """Begin a step. trains: with backward passes."""
        self.has_backward = trains
        self.clear_runtime_states()

    # --- calls of a schedule ----------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Forget the micro-batches of the last step."""
        self.output_chunks.clear()
        self._inputs: dict[int, _Inputs] = {}
        self._outputs: dict[int, tuple[Any, ...]] = {}

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run the forward pass of a micro-batch. args: of the first stage; others receive theirs."""
        tag = Tag(self.stage_index, fwd_chunk_id, FORWARD)
        self._at(fwd_chunk_id, "forward")
        if not self.is_first:
            self._at(fwd_chunk_id, "waiting for activations")
            inputs = _Inputs(self._messages.recv(self._peer(-1), tag), self.has_backward and torch.is_grad_enabled())
            self._at(fwd_chunk_id, "forward")
            self._inputs[fwd_chunk_id], args = inputs, inputs.entered()
        output = self.submod(*args)
        is_tuple = isinstance(output, (tuple, list))
        outputs = tuple(output) if is_tuple else (output,)
        if not self.is_last:
            self._check(outputs, is_tuple)
        elif save_forward_output:
            self.output_chunks.append(output)
        self._outputs[fwd_chunk_id] = outputs
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward pass of a micro-batch, of ``loss`` on the last stage."""
        assert full_backward, "the schedules offered here run whole backward passes"
        outputs: tuple[Any, ...] = self._outputs.pop(bwd_chunk_id)
        pairs: list[tuple[Any, Any]]
        if self.is_last:
            if not loss.requires_grad:
                raise RuntimeError("the loss depends on no trained weight (requires_grad is False)")
            pairs = [(loss, None)]
        else:
            self._at(bwd_chunk_id, "waiting for gradients")
            found = self._messages.recv(self._peer(1), Tag(self.stage_index, bwd_chunk_id, BACKWARD))
            grads = [grad for grad, _ in found]
            if len(grads) != len(outputs):
                raise RuntimeError(f"received {len(grads)} gradients of {len(outputs)} outputs")
            pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        del outputs
        self._at(bwd_chunk_id, "backward")
        pairs = [(output, grad) for output, grad in pairs if output.requires_grad]
        with self._passes(last_backward):
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Send a micro-batch's activations; returns no operation."""
        outputs = self._outputs[fwd_chunk_id]
        if not self.has_backward:
            del self._outputs[fwd_chunk_id]
        if not self.is_last:
            self._at(fwd_chunk_id, "sending activations")
            needs = [output is not None and output.requires_grad for output in outputs]
            self._messages.send(outputs, needs, self._peer(1), Tag(self.stage_index + 1, fwd_chunk_id, FORWARD))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Send the gradients of a micro-batch's inputs; returns no operation."""
        if self.has_backward and not self.is_first:
            self._at(bwd_chunk_id, "sending gradients")
            grads = self._inputs.pop(bwd_chunk_id).grads
            tag = Tag(self.stage_index - 1, bwd_chunk_id, BACKWARD)
            self._messages.send(grads, [False] * len(grads), self._peer(-1), tag)
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return no operation: the forward pass receives."""
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return no operation: the backward pass receives."""
        return []

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do nothing: losses are weighted."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the optimizer or the pipeline sums gradients."""

    # --- parts ----------------------------------------------------------------------------------------------------

    def _at(self, microbatch: int, action: str) -> None:
        self._messages.place = f"stage {self.stage_index}, micro-batch {microbatch}, {action}"

    def _peer(self, step: int) -> int:
        return self.stage_index_to_group_rank[self.stage_index + step]

    def _check(self, outputs: tuple[Any, ...], is_tuple: bool) -> None:
        """Raise TypeError for outputs that cannot be sent."""
        if is_tuple and len(outputs) == 1:
            raise TypeError("the output is a tuple of one tensor: return the tensor itself")
        for number, output in enumerate(outputs):
            if output is not None and not isinstance(output, torch.Tensor):
                raise TypeError(
                    f"output {number} is a {type(output).__name__}: a stage sends a tensor, or a tuple of tensors"
                )
