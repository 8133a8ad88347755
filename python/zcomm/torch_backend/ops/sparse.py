"""all_reduce of sparse COO tensors: the gradients of ``nn.Embedding(sparse=True)``. Blocking.

Every rank gathers all indices and values, a different number from each rank, and sums them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions

from zcomm.torch_backend.options import Kind, name_of
from zcomm.torch_backend.staging import writing_to
from zcomm.torch_backend.work import Ended


def sparse_all_reduce(group: Any, tensor: torch.Tensor, opts: Any) -> Ended:
    """Sum in place. Raises: ValueError for another reduction or for tensors of different shapes."""
    if tensor.is_cuda:
        raise NotImplementedError(f"all_reduce: a sparse tensor is on {tensor.device}; they are summed on the CPU only")
    if opts.reduceOp.op != Kind.SUM:
        raise ValueError(f"all_reduce: {opts.reduceOp.op.name} of a sparse tensor; only SUM is supported")
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    layout = torch.tensor([mine.sparse_dim(), mine.dense_dim(), *mine.shape, indices.shape[1]], dtype=torch.int64)
    within = f"all_reduce SUM of sparse {name_of(tensor.dtype)}"
    layouts = _gathered(group, layout, [layout.shape] * group.size(), within)
    for rank, other in enumerate(layouts):
        if not torch.equal(other[:-1], layout[:-1]):
            raise ValueError(
                f"all_reduce: sparse tensors of different layouts (sparse dims, dense dims, shape): "
                f"{layout[:-1].tolist()} here, {other[:-1].tolist()} on rank {rank}"
            )
    counts = [int(other[-1]) for other in layouts]
    all_indices = _gathered(group, indices, [(indices.shape[0], count) for count in counts])
    all_values = _gathered(group, values, [(count, *values.shape[1:]) for count in counts])
    total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), tensor.shape).coalesce()
    with writing_to(tensor):
        tensor.copy_(total)
    return Ended([tensor])


def _gathered(group: Any, tensor: torch.Tensor, shapes: list[Any], within: str = "") -> list[torch.Tensor]:
    outputs = [tensor.new_empty(shape) for shape in shapes]
    group._all_gather_lists([outputs], [tensor], AllgatherOptions(), within).wait()
    return outputs
