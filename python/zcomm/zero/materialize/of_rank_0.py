"""Values of zero.Init before ZeroOptimizer: all ranks use rank 0's, also if their random seeds differ.

Recipes of ranks that run one program differ only in the states of generators. So ``share_recipes`` compares digests of
recipes without these states, and sends rank 0's states. No value is computed or sent. ``_UNKNOWN`` stands for a value
without a digest, which counts as different, so that rank 0 has to send it.
A Part is this rank's elements of a value that was set before (``from_pretrained`` under ``zero.Init``). A model that is
loaded module by module is never whole on a rank, because each rank keeps its share of each parameter. Memory: the
share, in pages of its own. ``gather`` allocates the whole value, ``read`` a piece. Both are collective.
Thread rule: the main thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zcomm.comm.communicator import Communicator
from zcomm.zero.agree import from_root
from zcomm.zero.materialize import deferred, mapped_file
from zcomm.zero.materialize.mapped_file import FileRange
from zcomm.zero.materialize.recipe import Recipe, Ref, Stored
from zcomm.zero.materialize.replay import empty_pages, pages

SMALL_NBYTES = 1 << 16  # larger values in memory have no digest, because it would cost as much as sending them
_NBYTES = 16  # of a digest
_UNKNOWN = bytes(_NBYTES)
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def share_recipes(comm: Communicator, params: Sequence[torch.Tensor]) -> list[int]:
    """Copy rank 0's states of generators into the recipes of ``params``. Collective.

    params: without memory and without parts, or with memory. Returns: the positions of parameters with values
    that may still differ between ranks. The result is the same on all ranks.
    """
    if comm.world_size == 1 or not params:
        return []
    slots = [list(_states(param)) for param in params]
    mine = []
    for param, found in zip(params, slots, strict=True):
        form = _form(param)
        full = hashlib.blake2b(form, digest_size=_NBYTES)
        for recipe, at in found:
            _add(full, recipe.ops[at].state)
        mine.append(form + full.digest())
    digests = torch.frombuffer(bytearray(b"".join(mine)), dtype=torch.uint8)
    every = comm.all_gather(digests, name="recipes of values before ZeroOptimizer")
    assert isinstance(every, torch.Tensor)
    rows = every.view(comm.world_size, len(params), 2, _NBYTES)
    form_same, full_same = (rows == rows[0]).all(3).all(0).unbind(1)
    form_same = form_same & rows[0, :, 0].bool().any(1)
    wanted = (form_same & ~full_same).tolist()
    _send_states(comm, [slot for found, want in zip(slots, wanted, strict=True) if want for slot in found])
    return [position for position, same in enumerate(form_same.tolist()) if not same]


def _states(param: torch.Tensor) -> Iterator[tuple[Recipe, int]]:
    """Yield the random operations of the recipe of ``param``, if it has one."""
    if isinstance(param, deferred.Waiting) and deferred.future(param).read is None:
        yield from _states_in(deferred.future(param).recipe)


def _states_in(recipe: Recipe) -> Iterator[tuple[Recipe, int]]:
    for at, op in enumerate(recipe.ops):
        for leaf in tree_leaves((op.args, op.kwargs)):
            if isinstance(leaf, Ref) and leaf.other is not None:
                yield from _states_in(leaf.other)
        if op.state is not None:
            yield recipe, at


def _send_states(comm: Communicator, slots: Sequence[tuple[Recipe, int]]) -> None:
    states = [recipe.ops[at].state for recipe, at in slots]
    if not states:
        return
    sizes = [state.numel() for state in states if state is not None]
    octets = torch.cat([state for state in states if state is not None])
    comm.broadcast(octets, root=0, name="generators of values before ZeroOptimizer")
    for (recipe, at), state in zip(slots, octets.split(sizes), strict=True):
        recipe.ops[at] = dataclasses.replace(recipe.ops[at], state=state.clone())


class _Unknown(Exception):
    """A value has no digest."""


def _form(param: torch.Tensor) -> bytes:
    """Return the digest of a value, or of its recipe without the states of generators."""
    digest = hashlib.blake2b(digest_size=_NBYTES)
    try:
        with torch._C.DisableTorchFunctionSubclass():
            if param.is_meta:
                _add_future(digest, param)
            else:
                _add(digest, param.detach())
    except _Unknown:
        return _UNKNOWN
    return digest.digest()


def _add_future(digest: Any, param: Any) -> None:
    future = deferred.future(param)
    _add(digest, param.dtype)
    if future.read is not None:
        _add(digest, "each rank reads its elements from a file")
        return
    _add(digest, future.ref)
    _add(digest, future.recipe)


def _add(digest: Any, value: Any) -> None:
    """Add ``value`` to ``digest``. Raises: _Unknown."""
    if isinstance(value, _PLAIN):
        _add_octets(digest, repr(value).encode())
    elif isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, Ref):
        _add_each(digest, (value.dtype, value.size, value.stride, value.offset, value.other))
    elif isinstance(value, Stored):
        _add_place(digest, value.place)
        _add(digest, value.size)
    elif isinstance(value, Recipe):
        for op in value.ops:
            _add_each(digest, (_name(op.func), op.args, sorted(op.kwargs.items(), key=str)))
            _add(digest, None if op.state is None else op.state.numel())
    elif isinstance(value, torch.Generator):
        pass  # the operation has its state
    elif isinstance(value, tuple | list):
        _add_each(digest, value)
    else:
        raise _Unknown


def _name(func: Any) -> str:
    return f"{func.__module__}.{func.__qualname__}" if isinstance(func, FunctionType) else str(func)


def _add_each(digest: Any, values: Sequence[Any]) -> None:
    _add(digest, len(values))
    for value in values:
        _add(digest, value)


def _add_tensor(digest: Any, value: torch.Tensor) -> None:
    _add_each(digest, (value.dtype, value.shape))
    place = mapped_file.file_range(value)
    if place is not None:
        _add_place(digest, place)
    elif value.nbytes > SMALL_NBYTES or not value.is_cpu or value.layout != torch.strided:
        raise _Unknown
    else:
        octets = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        _add_octets(digest, bytes(octets.numpy()))


def _add_place(digest: Any, place: FileRange) -> None:
    _add_each(digest, (place.file.path, place.file.identity, place.offset, place.dtype, place.count))


def _add_octets(digest: Any, octets: bytes) -> None:
    digest.update(len(octets).to_bytes(8, "little") + octets)


class Part:
    """The elements of ``value``, the same on each rank, that rank ``rank`` of ``world_size`` keeps."""

    def __init__(self, value: torch.Tensor, rank: int, world_size: int) -> None:
        self._shape, self._dtype, self._world_size = value.shape, value.dtype, world_size
        octets = value.detach().contiguous().reshape(-1).view(torch.uint8)
        self._nbytes = octets.numel()
        size = -(-self._nbytes // world_size)
        mine = octets[rank * size : (rank + 1) * size]
        self._octets = torch.empty(0, dtype=torch.uint8).set_(pages(size), 0, (size,), (1,))  # zeros at the end
        self._octets[: mine.numel()].copy_(mine)

    def gather(self, comm: Communicator, name: str) -> torch.Tensor:
        """Return the whole value. Raises: ValueError if ``comm`` has other ranks than the parts."""
        self._check(comm, name)
        whole = comm.all_gather(self._octets, name=f"value of {name}")
        assert isinstance(whole, torch.Tensor)
        return whole[: self._nbytes].view(self._dtype).view(self._shape)

    def read(self, comm: Communicator, name: str, begin: int, end: int) -> torch.Tensor:
        """Return flat elements [begin, end) of the whole value. Raises: as ``gather``."""
        self._check(comm, name)
        out = torch.empty(end - begin, dtype=self._dtype)
        octets, size = out.view(torch.uint8), self._octets.numel()
        first, last = begin * out.itemsize, end * out.itemsize
        for rank in range(first // size, -(-last // size)):
            low, high = max(first, rank * size), min(last, (rank + 1) * size)
            piece = octets[low - first : high - first]
            if comm.rank == rank:
                piece.copy_(self._octets[low - rank * size : high - rank * size])
            comm.broadcast(piece, root=rank, name=f"value of {name}")
        return out

    def _check(self, comm: Communicator, name: str) -> None:
        _check(comm, self._world_size, name)


class RootValue:
    """The value of ``param`` that rank ``root`` reads from a file, without memory. read: None on the other ranks."""

    def __init__(
        self, param: torch.Tensor, read: Callable[[int, int], torch.Tensor] | None, root: int, world_size: int
    ) -> None:
        self._shape, self._dtype = param.shape, param.dtype
        self._read, self._root, self._world_size = read, root, world_size

    def gather(self, comm: Communicator, name: str) -> torch.Tensor:
        """Return the whole value. Raises: as ``read``."""
        return self.read(comm, name, 0, self._shape.numel()).view(self._shape)

    def read(self, comm: Communicator, name: str, begin: int, end: int) -> torch.Tensor:
        """Return flat elements [begin, end) of the whole value. Collective. Raises: ValueError if ``comm`` has other
        ranks; OSError on all ranks, with the same text, if the file cannot be read."""
        _check(comm, self._world_size, name)
        out = from_root(comm, self._root, f"reading {name}", lambda: self._read(begin, end))  # type: ignore[misc]
        if out is None:
            # Not from the heap, because each freed piece would leave a hole that is too small for the next.
            out = empty_pages(end - begin, self._dtype)
        comm.broadcast(out, root=self._root, name=f"value of {name}")
        return out


def _check(comm: Communicator, world_size: int, name: str) -> None:
    if comm.world_size != world_size:
        raise ValueError(
            f"{name} was set inside of zcomm.zero.Init() by {world_size} ranks, which have a part each, but "
            f"ZeroOptimizer's communicator has {comm.world_size}: use the job's"
        )
