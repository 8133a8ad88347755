"""Gradients of embeddings reduced as rows: indices and values of the rows that a rank's samples use.

A rank sends each row to the ranks that own elements of it (decision D2). So bytes grow with the rows in use, and not
with the vocabulary. The owner adds the ranks' rows in rank order, in fp32, and divides the sum once, as the dense
reduction does. A row that a rank does not send counts as zero. So on one host the bits of the weights are the same;
between hosts dense sums may have another order.
Order of calls: ``start`` waits for the other ranks, in the launch order, which is the same on all ranks. A rank without
rows takes part, too.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zcomm.memory.device_streams import Lane
from zcomm.zero.gradients.transport import Nbytes, ReducePlan, Transport
from zcomm.zero.groups.compression import EXACT
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.parts import TrainState

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class SparseGradients:
    """The embeddings of ``model`` with gradients that are reduced as rows: give it to ``ZeroOptimizer``.

    All weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` that no other module shares, with ``sparse=True`` or not.
    A weight tied to a layer has a gradient for every row, so it is reduced dense.
    names: of these weights. only: modules to choose from; None: all. Raises: ValueError for a module in ``only`` that
    is not an embedding of the model.
    """

    def __init__(self, model: nn.Module, only: Sequence[nn.Module] | None = None) -> None:
        users: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for param in module.parameters(recurse=False):
                users.setdefault(id(param), []).append(module)
        wanted = None if only is None else {id(module) for module in only}
        self.names: list[str] = []
        self._weights: list[torch.Tensor] = []
        for name, module in model.named_modules():
            if not isinstance(module, _EMBEDDINGS) or (wanted is not None and id(module) not in wanted):
                continue
            if all(isinstance(user, _EMBEDDINGS) for user in users[id(module.weight)]):
                self.names.append(f"{name}.weight".lstrip("."))
                self._weights.append(module.weight)
        if wanted is not None and len(wanted) != len(self.names):
            raise ValueError(
                f"SparseGradients: {len(wanted)} modules are given, of which {len(self.names)} are embeddings of the "
                "model with a weight of their own"
            )

    def __contains__(self, param: object) -> bool:
        return any(param is weight for weight in self._weights)

    def check(self, model: nn.Module, train: TrainState, comms: MeshComms, lane: Lane) -> None:
        """Raise NotImplementedError for an option that needs dense gradients, and ValueError for another model."""
        own = {id(param) for param in model.parameters()}
        for name, weight in zip(self.names, self._weights, strict=True):
            if id(weight) not in own:
                raise ValueError(
                    f"sparse_gradients: {name} is no longer in the model: make SparseGradients after such changes"
                )
        hops = comms.hops or comms.experts is not None
        refused = {
            "stage=3": (train.stage == 3, "units gather and reduce whole weights"),
            "a model on a device": (lane.on_device, "rows are gathered from host memory"),
            "a mesh with several hops": (hops, "rows are added by one group of ranks"),
            "compression=": (train.compression != EXACT, "rows travel exactly"),
            "gradients='nvme'": (train.offload.gradients == "nvme", "sums of rows are in memory"),
            "a 1-bit optimizer": (train.rule.exchanges, "it exchanges whole moments"),
        }
        for option, (found, reason) in refused.items():
            if found:
                raise NotImplementedError(
                    f"sparse_gradients with {option} is not available: {reason}; leave one of them out"
                )

    def transports(self, plan: ReducePlan, params: Sequence[Any]) -> dict[int, Transport]:
        """Return the transport of each bucket with one of these weights. params: in the numbering of the plan."""
        own = [bucket for bucket in plan.order if params[bucket.params[0]] in self]
        return dict.fromkeys((bucket.index for bucket in own), RowTransport(plan, own)) if own else {}

    def __repr__(self) -> str:
        return f"SparseGradients({', '.join(self.names)})"


class RowTransport(Transport):
    """Transport of buckets of one matrix each, as rows. No slots: memory grows with the rows in use."""

    takes_sparse = True

    def __init__(self, plan: ReducePlan, buckets: Sequence[FlatBucket]) -> None:
        super().__init__(plan, buckets, torch.zeros(sum(bucket.held_count for bucket in buckets)))
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by parameter: row numbers, ascending; values

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        width = self.plan.geometry.places[index].shape[1:].numel()
        if grad is None:
            self._rows[index] = (torch.empty(0, dtype=torch.int64), torch.empty(0, width, dtype=self.plan.dtype))
            return
        rows, values = rows_of(grad)
        self._rows[index] = (rows, values.reshape(len(rows), width).to(self.plan.dtype))

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        (index,) = bucket.params
        rows, values = self._rows.pop(index)
        begin = time.perf_counter()
        name = f"rows of bucket {bucket.index}"
        every, received = self._exchange(bucket, rows, values, name)
        self.waited_s += time.perf_counter() - begin
        sum_ = self.sums[bucket.index]
        if not accumulate:
            sum_.zero_()
        _add(sum_, bucket.held.start, every, received, self.plan.comm.world_size)

    def _exchange(
        self, bucket: FlatBucket, rows: torch.Tensor, values: torch.Tensor, name: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Send each rank the rows of which it owns elements. Returns: by rank, the row numbers and values from it."""
        comm, width = self.plan.comm, values.shape[1]
        bounds = [bucket.shard(number) for number in range(comm.world_size)]
        edges = torch.tensor([[part.start // width, -(-part.stop // width)] for part in bounds])
        cuts = torch.searchsorted(rows, edges).tolist()
        sent = [slice(low, high) for low, high in cuts]
        counts = torch.tensor([part.stop - part.start for part in sent])
        theirs = torch.empty_like(counts)
        comm.all_to_all(theirs, counts, name=f"{name}: counts")
        from_rank = theirs.tolist()
        numbers = [rows.new_empty(count) for count in from_rank]
        parts = [values.new_empty(count * width) for count in from_rank]
        comm.all_to_all(numbers, [rows[part] for part in sent], name=f"{name}: numbers")
        comm.all_to_all(parts, [values[part].reshape(-1) for part in sent], name=f"{name}: values")
        count = int(counts.sum())
        self.moved_nbytes += counts.nbytes + count * (rows.itemsize + width * values.itemsize)
        return numbers, [part.view(-1, width) for part in parts]

    def finish(self, bucket: FlatBucket) -> None:
        """Do nothing, because ``start`` has waited."""

    def forget(self) -> None:
        self._rows.clear()

    @property
    def nbytes(self) -> list[Nbytes]:
        return [("device", "gradients", self.flat.nbytes)]


def rows_of(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of a matrix' rows that are not zero, ascending, and their values. A NaN is not zero."""
    if grad.layout is torch.sparse_coo and grad.sparse_dim() == 1:
        grad = grad.coalesce()
        return grad.indices()[0], grad.values()
    dense = grad if grad.layout is torch.strided else grad.to_dense()
    rows = (dense != 0).flatten(1).any(dim=1).nonzero().view(-1)
    return rows, dense[rows]


def _add(
    sum_: torch.Tensor, begin: int, rows: Sequence[torch.Tensor], values: Sequence[torch.Tensor], ranks: int
) -> None:
    """Add the mean of the ranks' rows to a shard, which begins at element ``begin`` of the matrix."""
    every = torch.cat(list(rows)).unique()
    if not len(every):
        return
    width = values[0].shape[1]
    total = torch.zeros(len(every), width)
    for numbers, part in zip(rows, values, strict=True):  # in rank order; a rank sends a row once
        total.index_add_(0, torch.searchsorted(every, numbers), part.float())
    total /= ranks
    first, last = -(-begin // width), (begin + len(sum_)) // width  # rows that lie in the shard whole
    inside = (every >= first) & (every < last)
    if first < last:
        whole = sum_[first * width - begin : last * width - begin].view(-1, width)
        whole.index_add_(0, every[inside] - first, total[inside])
    for number, part in zip(every[~inside].tolist(), total[~inside], strict=True):
        low, high = max(number * width, begin), min((number + 1) * width, begin + len(sum_))
        sum_[low - begin : high - begin] += part[low - number * width : high - number * width]


class SparseTensor:
    """A matrix as some of its rows (DeepSpeed's name): ``indices``, ``values`` and ``dense_size``.

    dense_tensor: a matrix, dense or sparse; None: fill the attributes. Row numbers may repeat, and then add up.
    """

    def __init__(self, dense_tensor: torch.Tensor | None = None) -> None:
        self.orig_dense_tensor = dense_tensor
        self.indices: Any = None
        self.values: Any = None
        self.dense_size: Any = None
        if dense_tensor is not None:
            self.is_sparse, self.dtype = dense_tensor.is_sparse, dense_tensor.dtype
            self.indices, self.values = rows_of(dense_tensor)
            self.dense_size = list(dense_tensor.shape)

    @staticmethod
    def type() -> str:
        """Return the name that DeepSpeed gives the class."""
        return "deepspeed.SparseTensor"

    def to_coo_tensor(self) -> torch.Tensor:
        """Return the matrix as torch's sparse tensor, with one sparse dimension."""
        return torch.sparse_coo_tensor(self.indices.unsqueeze(0), self.values, self.dense_size, check_invariants=True)

    def to_dense(self) -> torch.Tensor:
        """Return the dense matrix."""
        dense: torch.Tensor = self.values.new_zeros(self.dense_size)
        return dense.index_add_(0, self.indices, self.values)

    def sparse_size(self) -> tuple[int, int]:
        """Return how many numbers the rows and their indices hold, and how many the dense matrix holds."""
        rows, columns = self.dense_size
        return self.indices.numel() + self.values.numel(), rows * columns

    def add(self, b: SparseTensor) -> None:
        """Add the rows of ``b``. Raises: ValueError if its shape differs."""
        if self.dense_size != b.dense_size:
            raise ValueError(f"SparseTensor.add: shape {b.dense_size}, expected {self.dense_size}")
        self.indices = torch.cat([self.indices, b.indices])
        self.values = torch.cat([self.values, b.values])

    def __repr__(self) -> str:
        return f"SparseTensor({len(self.indices)} rows of {self.dense_size})"
