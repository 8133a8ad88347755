"""Operations of a process group that move data between all ranks, under the names by which torch calls them.

All dtypes are supported; a dtype that the core does not know moves as bytes. Lists of adjacent chunks (as from
``list(flat.chunk(n))``) are used in place, others go through one flat scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from zcomm.comm.tensors import integers
from zcomm.torch_backend.issue import Issue, Start
from zcomm.torch_backend.options import made, only_one, root_of
from zcomm.torch_backend.staging import Staging, is_sharded_gradient, mixed, parts, spans, wire
from zcomm.torch_backend.work import Done, Pending

Tensors = list[torch.Tensor]


class Movements(Issue):
    def broadcast(
        self,
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Done | Pending:
        opts = made(BroadcastOptions, opts, timeout, rootRank=root)
        source, staging = root_of("broadcast", opts), Staging("broadcast")
        tensor = only_one("broadcast", tensors, "torch.cat them")
        if is_sharded_gradient(tensor):  # reading it is collective
            dense = staging.updates(tensor)
        else:
            dense = staging.reads(tensor) if source == self._rank else staging.writes(tensor)
        dtype, width, name = wire(dense.dtype)
        start = partial(self._core.broadcast, spans([dense], width), dtype, source, name)
        written = () if source == self._rank else None
        return self._issue("broadcast", opts, [tensor], [start], staging, keep=(tensor, dense), written=written)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Done | Pending:
        opts = made(BarrierOptions, opts, timeout)
        return self._issue("barrier", opts, [], [partial(self._core.barrier, "")])

    # --- all_gather -------------------------------------------------------------------------------------------

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Done | Pending:
        return self._all_gather([output], [input], made(AllgatherOptions, opts, timeout))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done | Pending:
        return self._all_gather(outputs, inputs, made(AllgatherOptions, opts))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Done | Pending:
        staging = Staging("all_gather")
        for output, source in zip(outputs, inputs, strict=True):
            if output.dtype != source.dtype:
                raise ValueError(f"all_gather: the output is {output.dtype}, the input {source.dtype}")
            if output.numel() != source.numel() * self._size:
                raise ValueError(
                    f"all_gather: the output has {output.numel()} elements, expected {self._size} times the "
                    f"{source.numel()} of the input"
                )
        sources = [staging.reads(source) for source in inputs]
        targets = [staging.writes(output) for output in outputs]
        return self._issue(
            "all_gather", opts, outputs, self._gathers(sources, targets, ""), staging, keep=(outputs, sources, targets)
        )

    def _gathers(self, sources: Tensors, targets: Tensors, within: str) -> list[Start]:
        """Make one fused operation per dtype. within: names the call of which this is a step; "" for none."""
        starts: list[Start] = []
        mixture = mixed(sources)
        for kind in dict.fromkeys(source.dtype for source in sources):
            dtype, width, name = wire(kind)
            of = spans([source for source in sources if source.dtype == kind], width)
            to = spans([target for target in targets if target.dtype == kind], width)
            starts.append(partial(self._core.all_gather, of, to, dtype, within or mixture or name))
        return starts

    def allgather(
        self,
        output_lists: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Done | Pending:
        opts = made(AllgatherOptions, opts, timeout)
        if isinstance(inputs, torch.Tensor):
            output_lists, inputs = [output_lists], [inputs]
        only_one("all_gather", inputs, "all_gather_into_tensor_coalesced for all at once")
        return self._all_gather_lists(output_lists, inputs, opts)

    def allgather_coalesced(self, lists_by_rank: list[Tensors], inputs: Tensors, opts: Any = None) -> Done | Pending:
        output_lists = [list(outputs) for outputs in zip(*lists_by_rank, strict=True)]
        return self._all_gather_lists(output_lists, inputs, made(AllgatherOptions, opts))

    def _all_gather_lists(
        self, output_lists: list[Tensors], inputs: Tensors, opts: Any, within: str = ""
    ) -> Done | Pending:
        staging = Staging("all_gather")
        if any(len({output.numel() for output in outputs}) > 1 for outputs in output_lists):
            return self._all_gather_uneven(output_lists, inputs, opts)
        sources, targets = [], []
        for outputs, source in zip(output_lists, inputs, strict=True):
            self._check_list("all_gather", "outputs", outputs, "input", source)
            sources.append(staging.reads(source))
            targets.append(staging.flat_writes(outputs))
        results = [output for outputs in output_lists for output in outputs]
        keep = (results, sources, targets)
        return self._issue("all_gather", opts, results, self._gathers(sources, targets, within), staging, keep=keep)

    def _all_gather_uneven(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> Done | Pending:
        """Send each rank's own count to all ranks: all_to_all of one input."""
        staging = Staging("all_gather")
        starts: list[Start] = []
        keep: list[Any] = []
        for outputs, source in zip(output_lists, inputs, strict=True):
            if len(outputs) != self._size or outputs[self._rank].numel() != source.numel():
                raise ValueError(
                    f"all_gather: outputs of {[output.numel() for output in outputs]} elements, one for each of "
                    f"{self._size} ranks, but the input of rank {self._rank} has {source.numel()}"
                )
            other = next((rank for rank, output in enumerate(outputs) if output.dtype != source.dtype), None)
            if other is not None:
                raise ValueError(f"all_gather: outputs[{other}] is {outputs[other].dtype}, the input is {source.dtype}")
            dtype, width, name = wire(source.dtype)
            dense = staging.reads(source)
            targets = [staging.writes(output) for output in outputs]
            of, to = spans([dense] * self._size, width), spans(targets, width)
            keep.append((dense, targets))
            name = f"all_gather in chunks of different sizes{name and ' of ' + name}"
            starts.append(partial(self._core.all_to_all, of, to, dtype, name))
        results = [output for outputs in output_lists for output in outputs]
        return self._issue("all_gather", opts, results, starts, staging, keep=(results, keep))

    # --- gather, scatter --------------------------------------------------------------------------------------

    def gather(
        self,
        output_lists: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Done | Pending:
        opts = made(GatherOptions, opts, timeout, rootRank=root)
        if isinstance(inputs, torch.Tensor):
            output_lists, inputs = ([output_lists] if output_lists else []), [inputs]
        root, staging = root_of("gather", opts), Staging("gather")
        results: Tensors = []
        flats: Tensors = []
        source = only_one("gather", inputs, "torch.cat them")
        dtype, width, name = wire(source.dtype)
        dense = staging.reads(source)
        if root == self._rank:
            (results,) = output_lists
            self._check_list("gather", "outputs", results, "input", source)
            flats = [staging.flat_writes(results)]
        elif output_lists and any(len(outputs) for outputs in output_lists):
            raise ValueError(f"gather: outputs are given on rank {self._rank}, but only root={root} receives")
        start = partial(self._core.gather, spans([dense], width), spans(flats, width), dtype, root, name)
        return self._issue("gather", opts, results, [start], staging, keep=(results, dense, flats))

    def scatter(
        self,
        outputs: Any,
        input_lists: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Done | Pending:
        opts = made(ScatterOptions, opts, timeout, rootRank=root)
        if isinstance(outputs, torch.Tensor):
            outputs, input_lists = [outputs], ([input_lists] if input_lists else [])
        root, staging = root_of("scatter", opts), Staging("scatter")
        output = only_one("scatter", outputs, "torch.cat them")
        dtype, width, name = wire(output.dtype)
        flats: Tensors = []
        if root == self._rank:
            (chunks,) = input_lists
            self._check_list("scatter", "inputs", chunks, "output", output)
            flats = [staging.flat_reads(chunks)]
        elif input_lists and any(len(inputs) for inputs in input_lists):
            raise ValueError(f"scatter: inputs are given on rank {self._rank}, but only root={root} sends")
        target = staging.writes(output)
        start = partial(self._core.scatter, spans(flats, width), spans([target], width), dtype, root, name)
        return self._issue("scatter", opts, outputs, [start], staging, keep=(outputs, target, flats))

    # --- all_to_all -------------------------------------------------------------------------------------------

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> Done | Pending:
        opts, staging = made(AllToAllOptions, opts, timeout), Staging("all_to_all")
        if len(outputs) != self._size or len(inputs) != self._size:
            raise ValueError(f"all_to_all: {len(outputs)} outputs, {len(inputs)} inputs for {self._size} ranks")
        kinds = {tensor.dtype for tensor in (*outputs, *inputs)}
        if len(kinds) != 1:
            raise ValueError(f"all_to_all: tensors of different dtypes: {', '.join(map(str, kinds))}")
        dtype, width, name = wire(outputs[0].dtype)
        sources = [staging.reads(source) for source in inputs]
        targets = [staging.writes(output) for output in outputs]
        of, to = spans(sources, width), spans(targets, width)
        start = partial(self._core.all_to_all, of, to, dtype, name)
        return self._issue("all_to_all", opts, outputs, [start], staging, keep=(outputs, sources, targets))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Done | Pending:
        opts, staging = made(AllToAllOptions, opts, timeout), Staging("all_to_all")
        if output.dtype != input.dtype:
            raise ValueError(f"all_to_all: the output is {output.dtype}, the input {input.dtype}")
        dtype, width, name = wire(output.dtype)
        source, target = staging.reads(input), staging.writes(output)
        of = parts(source, self._counts("input", input, input_splits), width)
        to = parts(target, self._counts("output", output, output_splits), width)
        start = partial(self._core.all_to_all, of, to, dtype, name)
        return self._issue("all_to_all", opts, [output], [start], staging, keep=(output, source, target))

    alltoall_base = all_to_all_single

    def _counts(self, side: str, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        """Return the elements for each rank, from splits of dim 0 (none: equal ones)."""
        rows = tensor.shape[0] if tensor.dim() else 1
        splits = [] if splits is None else integers(f"all_to_all: {side} splits", splits)
        if not splits:
            if rows % self._size:
                raise ValueError(
                    f"all_to_all: Tensor's dim 0 does not divide equally across group size: "
                    f"the {side} has {rows} rows for {self._size} ranks; give the splits"
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size:
            raise ValueError(
                f"all_to_all: Number of tensor splits not equal to group size: {list(splits)} for {self._size} ranks"
            )
        if sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all: Split sizes doesn't match total dim 0 size: {side} splits {splits}, {rows} rows"
            )
        row = tensor.numel() // rows if rows else 0
        return [count * row for count in splits]

    # --- checks -----------------------------------------------------------------------------------------------

    def _check_list(self, what: str, many: str, chunks: Tensors, one: str, tensor: torch.Tensor) -> None:
        if len(chunks) != self._size:
            raise ValueError(f"{what}: {len(chunks)} {many} for {self._size} ranks")
        for rank, chunk in enumerate(chunks):
            if chunk.numel() != tensor.numel() or chunk.dtype != tensor.dtype:
                raise ValueError(
                    f"{what}: {many}[{rank}] is {chunk.dtype} of {chunk.numel()} elements, "
                    f"the {one} {tensor.dtype} of {tensor.numel()}"
                )
