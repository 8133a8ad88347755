"""all_reduce, reduce, reduce_scatter of a process group, under the names by which torch calls them.

A list is one fused operation per dtype. Reductions that the core lacks are gathered and computed by torch (emulate.py).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions
from torch.autograd.graph import increment_version

from zcomm import _core
from zcomm.torch_backend.issue import Issue, Start
from zcomm.torch_backend.ops import emulate
from zcomm.torch_backend.ops.sparse import sparse_all_reduce
from zcomm.torch_backend.options import Kind, made, native, only_one, premul_factor, root_of
from zcomm.torch_backend.staging import Staging, is_plain, mixed, parts, refuse_sharded_gradients, spans, writing_to
from zcomm.torch_backend.work import Done, Pending

Tensors = list[torch.Tensor]


class Reductions(Issue):
    # --- all_reduce, reduce -----------------------------------------------------------------------------------

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
            dtype, core_op, width, name = how
            core, place = self._core, [(tensor.data_ptr(), tensor.numel() * width)]
            if self._is_simple(opts):  # as _issue, with fewer frames for the core to walk
                self._sequence += 1
                try:
                    core.all_reduce(place, dtype, core_op, name, False)
                except TimeoutError as error:
                    raise self._explained(error) from None
                increment_version(tensors)
                return Done(tensors)
            start = partial(core.all_reduce, place, dtype, core_op, name)
            return self._issue("all_reduce", opts, tensors, [start], keep=tensors)
        if tensor.is_sparse:
            return sparse_all_reduce(self, tensor, opts)
        return self._reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Done | Pending:
        return self._reduce("all_reduce", tensors, made(AllreduceOptions, opts))

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
        tensor = only_one("reduce", tensors, "torch.cat them")
        refuse_sharded_gradients("reduce", [tensor])
        return self._reduce("reduce", [tensor], opts, root_of("reduce", opts))

    def _reduce(self, what: str, tensors: Tensors, opts: Any, *root: int) -> Done | Pending:
        """Reduce on all ranks, or on the rank ``root``."""
        staging, kind, core = Staging(what), opts.reduceOp.op, self._core
        writes = not root or root[0] == self._rank
        dense = [staging.updates(tensor) if writes else staging.reads(tensor) for tensor in tensors]
        within = _within(kind, tensors)
        if kind == Kind.PREMUL_SUM:
            dense = dense if writes else [tensor.clone() for tensor in dense]
            kind = self._premultiply(dense, opts)
        starts: list[Start] = []
        combines: list[Callable[[], None]] = []
        for dtype, some in _by_dtype(dense).items():
            if (how := native(kind, dtype)) is not None:
                core_dtype, op, width, name = how
                reduce: Any = core.reduce if root else core.all_reduce
                starts.append(partial(reduce, spans(some, width), core_dtype, op, *root, _joined(name, within)))
                continue
            emulate.check(what, kind, dtype, some[0].device)
            stacks = [tensor.new_empty((self._size, *tensor.shape)) for tensor in some] if writes else []
            gather: Any = core.gather if root else core.all_gather
            of, to = spans(some, dtype.itemsize), spans(stacks, dtype.itemsize)
            name = _joined(emulate.name(what, kind, dtype), within)
            starts.append(partial(gather, of, to, _core.DType.uint8, *root, name))
            if writes:
                combines.append(partial(_combine, kind, some, stacks))
        written = None if writes else ()
        return self._issue(what, opts, tensors, starts, staging, _all(combines), (tensors, dense), written)

    def _premultiply(self, dense: Tensors, opts: Any) -> Any:
        factor = premul_factor(opts.reduceOp)
        for tensor in dense:
            with writing_to(tensor):
                tensor.mul_(factor)
        return Kind.SUM

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
            if source.dtype != output.dtype:
                raise ValueError(f"reduce_scatter: the output is {output.dtype}, the input {source.dtype}")
            if source.numel() != output.numel() * self._size:
                raise ValueError(
                    f"reduce_scatter: the input has {source.numel()} elements, the output {output.numel()}; "
                    f"the output must be 1/{self._size} of the input"
                )
        sources = [staging.reads(source) for source in inputs]
        targets = [staging.writes(output) for output in outputs]
        within = _within(kind, outputs)
        if kind == Kind.PREMUL_SUM:
            sources = [source.clone() for source in sources]
            kind = self._premultiply(sources, opts)
        starts: list[Start] = []
        combines: list[Callable[[], None]] = []
        for dtype, some in _by_dtype(targets).items():
            chosen = [source for source in sources if source.dtype == dtype]
            if (how := native(kind, dtype)) is not None:
                core_dtype, op, width, name = how
                of, to = spans(chosen, width), spans(some, width)
                reduce_scatter: Any = self._core.reduce_scatter
                name = _joined(name, within)
                starts.append(partial(reduce_scatter, of, to, core_dtype, op, core_dtype, False, name))
                continue
            emulate.check("reduce_scatter", kind, dtype, some[0].device)
            name = _joined(emulate.name("reduce_scatter", kind, dtype), within)
            for target, source in zip(some, chosen, strict=True):
                stack = source.new_empty((self._size, target.numel()))
                counts = [target.numel()] * self._size
                of, to = parts(source, counts, dtype.itemsize), parts(stack, counts, dtype.itemsize)
                starts.append(partial(self._core.all_to_all, of, to, _core.DType.uint8, name))
                combines.append(partial(_combine, kind, [target], [stack]))
        keep = (outputs, sources, targets)
        return self._issue("reduce_scatter", opts, outputs, starts, staging, _all(combines), keep)

    def _reduce_scatter_uneven(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> Done | Pending:
        """Run one reduce per rank, as NCCL does it."""
        staging, kind = Staging("reduce_scatter"), opts.reduceOp.op
        starts: list[Start] = []
        keep: list[Any] = [outputs]
        for output, chunks in zip(outputs, input_lists, strict=True):
            how = native(kind, output.dtype)
            if how is None:
                raise NotImplementedError(f"reduce_scatter: {kind.name} of {output.dtype} in chunks of different sizes")
            other = next((number for number, chunk in enumerate(chunks) if chunk.dtype != output.dtype), None)
            if other is not None:
                raise ValueError(
                    f"reduce_scatter: the output is {output.dtype}, input {other} is {chunks[other].dtype}"
                )
            core_dtype, op, width, name = how
            name = _joined("reduce_scatter in chunks of different sizes", name)
            target = staging.writes(output)
            for root, chunk in enumerate(chunks):
                source = staging.reads(chunk)
                if root == self._rank:
                    target.detach().view(-1).copy_(source.detach().view(-1))
                    source = target
                keep.append(source)
                starts.append(partial(self._core.reduce, spans([source], width), core_dtype, op, root, name))
        return self._issue("reduce_scatter", opts, outputs, starts, staging, keep=keep)


def _by_dtype(tensors: Tensors) -> dict[torch.dtype, Tensors]:
    groups: dict[torch.dtype, Tensors] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def _within(kind: Any, tensors: Tensors) -> str:
    """Name the properties of a call that ranks compare in addition to dtype and reduction of each operation."""
    return _joined("PREMUL_SUM" if kind == Kind.PREMUL_SUM else "", mixed(tensors))


def _joined(*names: str) -> str:
    return " in ".join(name for name in names if name)


def _combine(kind: Any, targets: Tensors, stacks: Tensors) -> None:
    for target, stack in zip(targets, stacks, strict=True):
        with writing_to(target):
            target.copy_(emulate.combine(kind, stack).view(target.shape))


def _all(combines: list[Callable[[], None]]) -> Any:
    return (lambda: [combine() for combine in combines]) if combines else None
