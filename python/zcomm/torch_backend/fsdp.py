"""FSDP2's collectives by a zcomm communicator, with any process group: ``use(model)``, ``compress(model, ...)``.

``fully_shard`` accepts custom all_gather and reduce_scatter. With these a model on a group of Gloo, or of another
backend, gathers and reduces by zcomm. The rest of the program is unchanged. On the backend "zcomm" this module is not
needed, but for ``compress``, which sends weights and gradients encoded. All calls return when they are done; FSDP2
overlaps them by its streams.

Thread rule: as the communicator; FSDP2 calls them in the same order on all ranks.
Source: torch.distributed.fsdp, FSDPModule.set_custom_all_gather and set_custom_reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zcomm.comm.codec import ERROR_DTYPES, Codec, Compression, codec_of
from zcomm.comm.communicator import Communicator
from zcomm.comm.job import init

__all__ = ["AllGather", "ReduceScatter", "compress", "use"]


class _Collective:
    """A collective over a communicator: the check of FSDP2's group, and memory for its buffers."""

    def __init__(self, comm: Communicator | None = None) -> None:
        self.comm = comm or init()
        self._checked: set[int] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a buffer of FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _check(self, name: str, group: dist.ProcessGroup) -> None:
        """Raise ValueError if ``group`` and the communicator differ in their number of ranks or in this rank."""
        if id(group) in self._checked:
            return
        if (dist.get_world_size(group), dist.get_rank(group)) != (self.comm.world_size, self.comm.rank):
            raise ValueError(
                f"{name}: FSDP2's group has this process as rank {dist.get_rank(group)} of "
                f"{dist.get_world_size(group)}, the communicator as rank {self.comm.rank} of {self.comm.world_size}; "
                "give the communicator of the same ranks (comm.split)"
            )
        self._checked.add(id(group))


class AllGather(_Collective):
    """An all_gather for ``FSDPModule.set_custom_all_gather``.

    comm: of the same ranks as FSDP2's group; None: the job's. codec: None, or the form in which weights travel: all
    ranks then compute with decode(encode(weight)), and the optimizer's weights stay exact.
    """

    def __init__(self, comm: Communicator | None = None, codec: Codec | str | None = None) -> None:
        super().__init__(comm)
        self.codec = None if codec is None else codec_of(codec)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` with the inputs of all ranks, in rank order.

        Raises: ValueError for bytes with a codec: FSDP2 gathers weights of mixed dtypes as bytes.
        """
        self._check("AllGather", group)
        if self.codec is not None and input_tensor.dtype == torch.uint8:
            raise ValueError(
                "AllGather: FSDP2 gathers the weights of this module as bytes, because they have several dtypes, and "
                f"codec {self.codec} encodes no bytes: use one dtype for each fully_shard, or Compression(weights=None)"
            )
        self.comm.all_gather(input_tensor.view(-1), out=output_tensor.view(-1), name="FSDP2", codec=self.codec)


class ReduceScatter(_Collective):
    """A reduce_scatter for ``FSDPModule.set_custom_reduce_scatter``. comm: as AllGather's.

    compression: None, or the codec of gradients, with error feedback. Its errors belong to one module, so each module
    then has a ReduceScatter of its own.
    """

    def __init__(self, comm: Communicator | None = None, compression: Compression | None = None) -> None:
        super().__init__(comm)
        self.compression = compression or Compression()
        self._error: torch.Tensor | None = None
        self._calls = 0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` over the ranks, in fp32 for 16-bit types, and keep this rank's part.

        Raises: ValueError for an op other than sum, avg, min, max, prod (with a codec sum, avg). For FSDP2's own divide
        factor call ``set_force_sum_reduction_for_comms(True)``: else it asks for a sum with a factor, which CPU groups
        lack.
        """
        self._check("ReduceScatter", group)
        given, out, codec = input_tensor.view(-1), output_tensor.view(-1), self.compression.gradient_codec
        if codec is None:
            self.comm.reduce_scatter(given, op, out=out, name="FSDP2")
            return
        error = self._error_for(given)
        self.comm.reduce_scatter(given, op, out=out, name="FSDP2", codec=codec, error=error, keep=self.compression.keep)

    @property
    def error_nbytes(self) -> int:
        """Bytes of the errors: 4 (bf16 2, int8 1.008) for each element of the module's gradients, after a backward."""
        return 0 if self._error is None else self._error.nbytes

    def _error_for(self, given: torch.Tensor) -> torch.Tensor:
        """Return the errors of the last call; zeros for other gradients, and after ``reset_steps`` calls."""
        fresh = self.comm.codec_errors(given, dtype=ERROR_DTYPES[self.compression.error_dtype])
        assert isinstance(fresh, torch.Tensor)
        steps = self.compression.reset_steps
        if self._error is None or self._error.numel() != fresh.numel() or (steps and self._calls % steps == 0):
            self._error = fresh
        self._calls += 1
        return self._error


def use(model: nn.Module, comm: Communicator | None = None) -> None:
    """Set zcomm's all_gather and reduce_scatter in all modules of ``model`` that ``fully_shard`` has wrapped.

    comm: of the same ranks as FSDP2's group; None: the job's (``zcomm.init()``).
    Raises: ValueError if no module is sharded, NotImplementedError for a torch without custom collectives.
    """
    gather, scatter = AllGather(comm), ReduceScatter(comm)
    for module in _sharded("use", model):
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)


def compress(model: nn.Module, compression: Compression, comm: Communicator | None = None) -> None:
    """Let the weights and gradients of all modules that ``fully_shard`` has wrapped travel encoded.

    compression: weights and gradients, each a codec or None; None moves exact values, by zcomm, too. Gradients have
        error feedback in fp32: 4 bytes on each rank for each gradient element of whole modules. Errors start at zero,
        and are in no checkpoint. If in each step other parameters of a module lack gradients, of as many elements, the
        errors of one count for another.
    comm: of the same ranks as FSDP2's group; None: the job's (``zcomm.init()``).
    Raises: ValueError if no module is sharded; NotImplementedError for a torch without custom collectives, for
    ``differences=True``, and for ``hops="all"`` if ranks share hosts (backend "hierarchical").
    """
    comm = comm or init()
    if compression.differences:
        raise NotImplementedError(
            f"compress(): {compression}: FSDP2 keeps no weights that were sent last: leave differences= out"
        )
    if compression.hops == "all" and comm.backend == "hierarchical":
        raise NotImplementedError(
            "compress(): hops='all' on backend 'hierarchical': the ranks of a host add in shared memory, exactly; use "
            "hops='across', or zcomm.init(backend='tcp')"
        )
    gather = AllGather(comm, compression.weights)
    for module in _sharded("compress", model):
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(ReduceScatter(comm, compression))


def _sharded(what: str, model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError(f"{what}(): no module of the model is sharded: call fully_shard(model) first")
    if not hasattr(sharded[0], "set_custom_reduce_scatter"):
        raise NotImplementedError(
            f"{what}(): torch {torch.__version__} has no custom collectives in FSDP2: update torch"
        )
    return sharded
