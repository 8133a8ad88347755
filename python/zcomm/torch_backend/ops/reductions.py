"""all_reduce, reduce, reduce_scatter of a process group, under the names by which torch calls them.

A list is one fused operation per dtype. What the core cannot reduce is moved and reduced by torch (emulate.py).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions
from torch.autograd.graph import increment_version

from zcomm import _core
from zcomm.torch_backend.futures.work import Done, Pending
from zcomm.torch_backend.issue import Issue, Start
from zcomm.torch_backend.ops import emulate
from zcomm.torch_backend.ops.sparse import sparse_all_reduce
from zcomm.torch_backend.options import Kind, made, native, only_one, premul_factor, root_of
from zcomm.torch_backend.staging import Staging, is_plain, parts, refuse_sharded_gradients, span, spans, writing_to

Tensors = list[torch.Tensor]
Finish = Any


class Reductions(Issue):
    # --- all_reduce -------------------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Done | Pending:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if type(opts) is not AllreduceOptions:
            opts = made(AllreduceOptions, opts, timeout, reduceOp=op)
        tensor = only_one("all_reduce", tensors, "allreduce_coalesced for all at once")
        how = native(opts.reduceOp.op, tensor.dtype)
        if how is not None and is_plain(tensor):
            dtype, core_op, width = how
            core, place = self._core, [(tensor.data_ptr(), tensor.numel() * width)]
            if self._is_simple(opts):  # what _issue does, with fewer frames for the core to look through
                self._sequence += 1
                try:
                    core.all_reduce(place, dtype, core_op, "", False)
                except TimeoutError as error:
                    raise self._explained(error) from None
                increment_version(tensors)
                return Done(tensors)
            return self._issue(
                "all_reduce", opts, tensors, lambda a: core.all_reduce(place, dtype, core_op, "", a), keep=tensors
            )
        if tensor.is_sparse:
            return sparse_all_reduce(self, tensor, opts)
        return self._all_reduce_list(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Done | Pending:
        return self._all_reduce_list(tensors, made(AllreduceOptions, opts))

    def _all_reduce_list(self, tensors: Tensors, opts: Any) -> Done | Pending:
        staging = Staging("all_reduce")
        kind = opts.reduceOp.op
        dense = [staging.updates(tensor) for tensor in tensors]
        if kind == Kind.PREMUL_SUM:
            kind = self._premultiply(dense, opts)
        starts: list[Start] = []
        finishes: list[Finish] = []
        for dtype, some in _by_dtype(dense).items():
            how = native(kind, dtype)
            if how is None:
                self._emulate_all_reduce(kind, some, starts, finishes)
                continue
            places = spans(some, how[2])
            starts.append(lambda a, p=places, h=how: self._core.all_reduce(p, h[0], h[1], "", a))  # type: ignore[misc]
        return self._issue("all_reduce", opts, tensors, starts, staging, _all(finishes), keep=(tensors, dense))

    def _emulate_all_reduce(self, kind: Any, tensors: Tensors, starts: list[Start], finishes: list[Finish]) -> None:
        emulate.check("all_reduce", kind, tensors[0].dtype)
        stacks = [tensor.new_empty((self._size, *tensor.shape)) for tensor in tensors]
        inputs = [span(tensor, tensor.element_size()) for tensor in tensors]
        outputs = [span(stack, stack.element_size()) for stack in stacks]
        starts.append(lambda a: self._core.all_gather(inputs, outputs, _core.DType.uint8, "", a))
        finishes.append(lambda: _copy_each(tensors, [emulate.combine(kind, stack) for stack in stacks]))

    def _premultiply(self, dense: Tensors, opts: Any) -> Any:
        factor = premul_factor(opts.reduceOp)
        for tensor in dense:
            with writing_to(tensor):
                tensor.mul_(factor)
        return Kind.SUM

    # --- reduce -----------------------------------------------------------------------------------------------

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Done | Pending:
        opts = made(ReduceOptions, opts, timeout, reduceOp=op, rootRank=root)
        return self._reduce([only_one("reduce", tensors, "torch.cat them")], opts)

    def _reduce(self, tensors: Tensors, opts: Any) -> Done | Pending:
        refuse_sharded_gradients("reduce", tensors)
        staging, kind, root = Staging("reduce"), opts.reduceOp.op, root_of("reduce", opts)
        is_root = root == self._rank
        dense = [staging.updates(tensor) if is_root else staging.reads(tensor) for tensor in tensors]
        if kind == Kind.PREMUL_SUM:
            dense = dense if is_root else [tensor.clone() for tensor in dense]
            kind = self._premultiply(dense, opts)
        starts: list[Start] = []
        finishes: list[Finish] = []
        for dtype, some in _by_dtype(dense).items():
            how = native(kind, dtype)
            if how is None:
                self._emulate_reduce(kind, some, root, starts, finishes)
                continue
            places = spans(some, how[2])
            starts.append(lambda a, p=places, h=how: self._core.reduce(p, h[0], h[1], root, "", a))  # type: ignore[misc]
        written = tensors if is_root else ()
        return self._issue("reduce", opts, tensors, starts, staging, _all(finishes), (tensors, dense), written)

    def _emulate_reduce(
        self, kind: Any, tensors: Tensors, root: int, starts: list[Start], finishes: list[Finish]
    ) -> None:
        emulate.check("reduce", kind, tensors[0].dtype)
        stacks = [t.new_empty((self._size, *t.shape)) for t in tensors] if root == self._rank else []
        inputs = [span(tensor, tensor.element_size()) for tensor in tensors]
        outputs = [span(stack, stack.element_size()) for stack in stacks]
        starts.append(lambda a: self._core.gather(inputs, outputs, _core.DType.uint8, root, "", a))
        if stacks:
            finishes.append(lambda: _copy_each(tensors, [emulate.combine(kind, stack) for stack in stacks]))

    # --- reduce_scatter ---------------------------------------------------------------------------------------

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Done | Pending:
        return self._reduce_scatter([output], [input], made(ReduceScatterOptions, opts, timeout))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done | Pending:
        return self._reduce_scatter(outputs, inputs, made(ReduceScatterOptions, opts))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self,
        outputs: Any,
        input_lists: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Done | Pending:
        opts = made(ReduceScatterOptions, opts, timeout, reduceOp=op)
        if isinstance(outputs, torch.Tensor):
            outputs, input_lists = [outputs], [input_lists]
        only_one("reduce_scatter", outputs, "reduce_scatter_tensor_coalesced for all at once")
        staging = Staging("reduce_scatter")
        inputs = []
        for output, chunks in zip(outputs, input_lists, strict=True):
            if len(chunks) != self._size:
                raise ValueError(f"reduce_scatter: {len(chunks)} inputs for {self._size} ranks")
            if chunks[self._rank].numel() != output.numel():
                raise ValueError(
                    f"reduce_scatter: the output has {output.numel()} elements, "
                    f"input {self._rank} of rank {self._rank} has {chunks[self._rank].numel()}"
                )
            if len({chunk.numel() for chunk in chunks}) > 1:
                return self._reduce_scatter_uneven(outputs, input_lists, opts)
            inputs.append(staging.flat_reads(chunks))
        return self._reduce_scatter(outputs, inputs, opts)

    def _reduce_scatter(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Done | Pending:
        staging, kind = Staging("reduce_scatter"), opts.reduceOp.op
        for output, source in zip(outputs, inputs, strict=True):
            self._check_parts("reduce_scatter", "output", output, "input", source)
        sources = [staging.reads(source) for source in inputs]
        targets = [staging.writes(output) for output in outputs]
        if kind == Kind.PREMUL_SUM:
            sources = [source.clone() for source in sources]
            kind = self._premultiply(sources, opts)
        starts: list[Start] = []
        finishes: list[Finish] = []
        for dtype, some in _by_dtype(targets).items():
            chosen = [source for source in sources if source.dtype == dtype]
            how = native(kind, dtype)
            if how is None:
                self._emulate_reduce_scatter(kind, some, chosen, starts, finishes)
                continue
            to, of = spans(some, how[2]), spans(chosen, how[2])
            starts.append(
                lambda a, o=of, t=to, h=how: self._core.reduce_scatter(o, t, h[0], h[1], h[0], False, "", a)  # type: ignore[misc]
            )
        keep = (outputs, sources, targets)
        return self._issue("reduce_scatter", opts, outputs, starts, staging, _all(finishes), keep)

    def _emulate_reduce_scatter(
        self, kind: Any, targets: Tensors, sources: Tensors, starts: list[Start], finishes: list[Finish]
    ) -> None:
        emulate.check("reduce_scatter", kind, targets[0].dtype)
        for target, source in zip(targets, sources, strict=True):
            stack = source.new_empty((self._size, target.numel()))
            counts, width = [target.numel()] * self._size, target.element_size()
            of, to = parts(source, counts, width), parts(stack, counts, width)
            starts.append(
                lambda a, o=of, t=to: self._core.all_to_all(o, t, _core.DType.uint8, "", a)  # type: ignore[misc]
            )
            finishes.append(
                lambda t=target, s=stack, _=source: _copy_each([t], [emulate.combine(kind, s).view(t.shape)])
            )

    def _reduce_scatter_uneven(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> Done | Pending:
        """Run one reduce per rank, as NCCL does it."""
        staging, kind = Staging("reduce_scatter"), opts.reduceOp.op
        starts: list[Start] = []
        keep: list[Any] = [outputs]
        for output, chunks in zip(outputs, input_lists, strict=True):
            how = native(kind, output.dtype)
            if how is None:
                raise NotImplementedError(f"reduce_scatter: {kind.name} of {output.dtype} in chunks of different sizes")
            target = staging.writes(output)
            for root, chunk in enumerate(chunks):
                source = staging.reads(chunk)
                if root == self._rank:
                    target.detach().view(-1).copy_(source.detach().view(-1))
                    source = target
                keep.append(source)
                place = [span(source, how[2])]
                starts.append(
                    lambda a, p=place, h=how, r=root: self._core.reduce(p, h[0], h[1], r, "", a)  # type: ignore[misc]
                )
        return self._issue("reduce_scatter", opts, outputs, starts, staging, keep=keep)

    def _check_parts(self, what: str, one: str, part: torch.Tensor, other: str, whole: torch.Tensor) -> None:
        if whole.dtype != part.dtype:
            raise ValueError(f"{what}: the {one} is {part.dtype}, the {other} {whole.dtype}")
        if whole.numel() != part.numel() * self._size:
            raise ValueError(
                f"{what}: the {other} has {whole.numel()} elements, the {one} {part.numel()}; "
                f"the {one} must be 1/{self._size} of the {other}"
            )


def _by_dtype(tensors: Tensors) -> dict[torch.dtype, Tensors]:
    groups: dict[torch.dtype, Tensors] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def _copy_each(targets: Tensors, values: Tensors) -> None:
    for target, value in zip(targets, values, strict=True):
        with writing_to(target):
            target.copy_(value)


def _all(finishes: list[Finish]) -> Finish:
    if not finishes:
        return None
    return lambda: [finish() for finish in finishes]
