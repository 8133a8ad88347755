"""Reads and writes of whole sharded tensors: master weights, gradients and optimizer state of one parameter.

Collective: every rank calls the same function for the same parameter, between ``backward()`` and the next forward.
A rank copies its elements into a tensor of zeros; the sum of all ranks' bit patterns is the whole tensor, exactly.
Source: DeepSpeed's safe_get_full_fp32_param, safe_get_full_grad and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import torch

from zcomm.optim.fused import STATE_BLOCK
from zcomm.zero.cache.swap import NoSwap
from zcomm.zero.layout.cut import expert_part
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.layout.tiles import Coded, TileForm, cut_between, decoded, encoded
from zcomm.zero.parts import Parts
from zcomm.zero.poison import broadcast_error, check_error
from zcomm.zero.sharded.grad import GradStandIn

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter that this rank keeps: elements ``flat`` of the parameter are the elements ``inside`` of
    the tile ``tile`` of a bucket's shard."""

    bucket: FlatBucket
    tile: slice
    inside: slice
    flat: slice

    @property
    def count(self) -> int:
        """Elements of the tile."""
        return int(self.tile.stop) - int(self.tile.start)


def pieces(parts: Parts, index: int, elements: slice | None = None, first: bool = False) -> Iterator[Piece]:
    """Yield this rank's pieces of parameter ``index``, or of some of its elements, tile by tile. first: only pieces of
    which this rank has the first copy, so that each element of a parameter is in one piece."""
    for span in parts.geometry.spans(index):
        bucket = parts.geometry.every[span.bucket]
        if first and not bucket.first:
            continue
        part = bucket.part
        at = span.offset - span.begin - part.start  # begin of the parameter, relative to the shard
        wanted = slice(span.begin, span.begin + span.count)
        if elements is not None:
            wanted = slice(max(wanted.start, elements.start), min(wanted.stop, elements.stop))
        count = part.stop - part.start
        begin, end = max(at + wanted.start, 0), min(at + wanted.stop, count)
        if begin >= end:
            continue
        for tile in cut_between(begin, end, count):
            low, high = max(begin, tile.start), min(end, tile.stop)
            if low < high:
                inside = slice(low - tile.start, high - tile.start)
                yield Piece(bucket, tile, inside, slice(low - at, high - at))


def by_bucket(found: Iterable[Piece]) -> Iterator[tuple[FlatBucket, list[Piece]]]:
    """Yield the pieces of each bucket; a parameter in blocks has several buckets."""
    for _, mine in groupby(found, key=lambda piece: piece.bucket.index):
        of_bucket = list(mine)
        yield of_bucket[0].bucket, of_bucket


def own_elements(parts: Parts, index: int) -> list[slice]:
    """Return the slices of flat elements of parameter ``index`` that this rank keeps, in order."""
    found: list[slice] = []
    for piece in pieces(parts, index):
        if found and found[-1].stop == piece.flat.start:
            found[-1] = slice(found[-1].start, piece.flat.stop)
        else:
            found.append(piece.flat)
    return found


def _whole(parts: Parts, index: int, local: torch.Tensor, root: int | None) -> torch.Tensor | None:
    """Sum ``local`` of all ranks, in the parameter's shape. local: fp32, zeros for other ranks' elements."""
    _add_up(parts, index, local.view(torch.int32), root, f"whole {parts.names[index]}")
    if root is not None and parts.root_of(index, root) != parts.data_of(index).rank:
        return None
    return joined(parts, index, local.view(parts.geometry.places[index].shape))


def joined(parts: Parts, index: int, part: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of the parts that ranks have. Collective over all ranks, of experts over those along
    "expert", if there are any. part: the same on all ranks with the same tensors."""
    cut, of_expert = parts.cuts[index], expert_part(parts.store.parameter(index))
    if cut.count == 1:
        return part
    if of_expert is not None:
        return of_expert.joined(part, f"experts of {parts.names[index]}")
    parts.check_one_model(f"the whole {parts.names[index]}")
    whole = torch.zeros(cut.shape, dtype=part.dtype)
    if parts.comms.data.rank == 0:
        cut.place(whole, part.contiguous())
    parts.comm.all_reduce(whole.view(-1).view(torch.uint8), name=f"parts of {parts.names[index]}")
    return whole


def _add_up(parts: Parts, index: int, bits: torch.Tensor, root: int | None, name: str) -> None:
    """Sum ``bits`` of all ranks with parameter ``index``. Other ranks' elements are zero, so that sums of integers are
    the elements' bits."""
    if root is None:
        parts.data_of(index).all_reduce(bits, name=name)
    else:
        parts.data_of(index).reduce(bits, root=parts.root_of(index, root), name=name)


def together(parts: Parts, act: Callable[[], T], what: str) -> T:
    """Return the result of ``act``, which is not collective. If a drive fails on one rank, all raise. Collective."""
    if isinstance(parts.swap, NoSwap):
        return act()
    try:
        found = act()
    except BaseException as error:
        broadcast_error(parts.comm, error)
        raise
    check_error(parts.comm, what)
    return found


def master(parts: Parts, index: int, root: int | None = None) -> torch.Tensor | None:
    """Return a copy of the exact fp32 master of a parameter (of a frozen one the weight itself). root: the only rank
    that receives it, the others return None."""
    local = together(parts, lambda: own_master(parts, index, first=True), f"reading {parts.names[index]}")
    return _whole(parts, index, local, root)


def whole_weight(parts: Parts, index: int) -> torch.Tensor:
    """Return a whole copy of the exact weight of a parameter, in its dtype. Collective."""

    local = together(parts, lambda: own_weight(parts, index), f"reading {parts.names[index]}")
    _add_up(parts, index, local.view(-1).view(torch.uint8), None, f"whole weight {parts.names[index]}")
    return local


def own_weight(parts: Parts, index: int) -> torch.Tensor:
    """Return a copy of the weight in its dtype, with zeros for elements of which other ranks have the first copy.
    Local."""
    place = parts.geometry.places[index]
    local = torch.zeros(place.count, dtype=parts.state.form.dtype)
    for bucket, mine in by_bucket(pieces(parts, index, first=True)):
        shard = parts.store.read(bucket)
        for piece in mine:
            local[piece.flat] = shard[piece.tile][piece.inside]
    return local.view(place.shape)


def own_master(parts: Parts, index: int, first: bool = False) -> torch.Tensor:
    """Return a copy of the master, flat, with zeros for other ranks' elements. first: see ``pieces``. Local."""
    form = parts.state.form
    local = torch.zeros(parts.geometry.places[index].count)
    for bucket, mine in by_bucket(pieces(parts, index, first=first)):
        whole = parts.store.read(bucket)
        for piece in mine:
            weight = whole[piece.tile]
            if is_master(parts, index):
                local[piece.flat] = weight[piece.inside]
                continue
            with parts.state.tile(bucket.index, piece.tile) as state:
                local[piece.flat] = form.master(weight, state)[piece.inside]
    return local


def array(parts: Parts, index: int, key: str, root: int | None = None) -> torch.Tensor | None:
    """Return an array of a parameter's optimizer state, an fp32 copy."""
    local = together(parts, lambda: own_array(parts, index, key, first=True), f"reading {key} of {parts.names[index]}")
    return _whole(parts, index, local, root)


def own_array(parts: Parts, index: int, key: str, first: bool = False) -> torch.Tensor:
    """Return a copy of a state array, flat, with zeros for other ranks' elements. first: see ``pieces``. Local."""
    form = parts.state.form
    local = torch.zeros(parts.geometry.places[index].count)
    for piece in pieces(parts, index, first=first):
        with parts.state.tile(piece.bucket.index, piece.tile) as state:
            if form.coded:
                local[piece.flat] = decoded(form.codes(state, piece.count, piece.inside))[key]
            else:
                local[piece.flat] = form.array(state, piece.count, key)[piece.inside]
    return local


def set_master(parts: Parts, index: int, read: Callable[[slice], torch.Tensor]) -> None:
    """Set this rank's part of the master to ``read(elements)``, fp32, and of the weight to its rounded value. Call
    ``publish`` afterwards."""
    for piece, weight in _weights(parts, index):
        if is_master(parts, index):
            weight[piece.inside] = read(piece.flat)
        else:
            _set_exact(parts, piece, weight, read(piece.flat))


def change(parts: Parts, index: int, value: torch.Tensor) -> None:
    """Set elements of weight and master to ``value`` (flat, in the weights' dtype) if any bit of the weight differs.
    Other elements keep their exact master. Call ``publish`` afterwards."""
    for piece, weight in _weights(parts, index):
        new, old = value[piece.flat], weight[piece.inside]
        if is_master(parts, index):
            old.copy_(new)
            continue
        changed = old.view(torch.int16) != new.view(torch.int16)
        if bool(changed.any()):
            _set_exact(parts, piece, weight, new.float(), changed)


def edit(parts: Parts, index: int, act: Callable[[torch.Tensor, slice], object]) -> None:
    """Change this rank's weights in place by ``act(piece, elements)``, as flat pieces in the weights' dtype. Not
    collective; ``publish`` is not called.

    The masters follow as after a write of the program to weights in memory, which leaves no old value. So the bits are
    the same in every stage and tier.
    """
    if next(pieces(parts, index), None) is None:
        act(torch.empty(0, dtype=parts.state.form.dtype), slice(0, 0))  # raises as on other ranks
    for piece, weight in _weights(parts, index):
        act(weight[piece.inside], piece.flat)


def is_master(parts: Parts, index: int) -> bool:
    """Return True if the weight is its own master."""
    return parts.state.form.dtype == torch.float32 or parts.geometry.is_frozen(index)


def _weights(parts: Parts, index: int) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield this rank's pieces, each with the weights of its tile; store the caller's changes of these weights."""
    for bucket, mine in by_bucket(pieces(parts, index)):
        whole = parts.store.load(bucket)
        for piece in mine:
            yield piece, whole[piece.tile]
        parts.store.save(bucket, whole)


def _set_exact(
    parts: Parts, piece: Piece, weight: torch.Tensor, value: torch.Tensor, where: torch.Tensor | None = None
) -> None:
    """Set the master of a piece, or of its elements in the given mask, to ``value`` (fp32), and the weight to the
    rounded value."""
    form = parts.state.form
    with parts.state.tile(piece.bucket.index, piece.tile, store=True) as state:
        exact = form.master(weight, state).clone()
        exact[piece.inside] = value if where is None else torch.where(where, value, exact[piece.inside])
        form.set_master(weight, state, exact)


def codes(parts: Parts, index: int, root: int | None = None) -> Coded | None:
    """Return a copy of a parameter's 8-bit optimizer state, not decoded."""
    local = together(parts, lambda: _own_codes(parts, index), f"reading state of {parts.names[index]}")
    for key, value in local.items():
        bits = value.view(torch.int32) if key == "scales" else value
        _add_up(parts, index, bits, root, f"whole {key} of {parts.names[index]}")
    if root is not None and parts.root_of(index, root) != parts.data_of(index).rank:
        return None
    shape = parts.geometry.places[index].shape
    return {key: value if key == "scales" else value.view(shape) for key, value in local.items()}


def _own_codes(parts: Parts, index: int) -> Coded:
    form, count = parts.state.form, parts.geometry.places[index].count
    local: Coded = {"scales": torch.zeros(-(-count // STATE_BLOCK), len(form.arrays))}
    local |= {key: torch.zeros(count, dtype=torch.uint8) for key in form.arrays}
    for piece in pieces(parts, index, first=True):
        with parts.state.tile(piece.bucket.index, piece.tile) as state:
            for key, value in form.codes(state, piece.count, piece.inside).items():
                local[key][_of_key(key, piece.flat)] = value
    return local


def _of_key(key: str, elements: slice) -> slice:
    """Return the entries of ``elements`` in array ``key``: for "scales" their blocks, otherwise the elements."""
    if key != "scales":
        return elements
    return slice(elements.start // STATE_BLOCK, -(-elements.stop // STATE_BLOCK))


def set_codes(parts: Parts, index: int, read: Callable[[str, slice], torch.Tensor]) -> None:
    """Set this rank's part of 8-bit state to ``read(key, elements)``; for "scales" it returns the blocks' scales."""
    _set_state(parts, index, Reads(codes=read))


def set_arrays(parts: Parts, index: int, reads: dict[str, Callable[[slice], torch.Tensor]]) -> None:
    """Set this rank's part of state arrays to ``reads[key](elements)``, fp32."""
    _set_state(parts, index, Reads(arrays=reads))


def _set_state(parts: Parts, index: int, reads: Reads) -> None:
    for piece in pieces(parts, index):
        with parts.state.tile(piece.bucket.index, piece.tile, store=True) as state:
            reads.set_state(parts.state.form, state, piece)


@dataclass(frozen=True)
class Reads:
    """Sources of a parameter's values, by elements: the master and state arrays in fp32, or codes of 8-bit state by key
    and elements. Values without a source are unchanged."""

    master: Callable[[slice], torch.Tensor] | None = None
    arrays: Mapping[str, Callable[[slice], torch.Tensor]] = field(default_factory=dict)
    codes: Callable[[str, slice], torch.Tensor] | None = None

    def set_state(self, form: TileForm, state: torch.Tensor, piece: Piece) -> None:
        """Change the state of a piece's tile."""
        if self.codes is not None:
            for key, value in form.codes(state, piece.count, piece.inside).items():
                value.copy_(self.codes(key, _of_key(key, piece.flat)).view(value.shape))
        elif form.coded and self.arrays:
            now = form.codes(state, piece.count, piece.inside)
            wide = decoded(now)
            for key, read in self.arrays.items():
                wide[key].copy_(read(piece.flat))
            for key, value in encoded(wide).items():
                now[key].copy_(value)
        else:
            for key, read in self.arrays.items():
                form.array(state, piece.count, key)[piece.inside] = read(piece.flat)


def set_bucket(parts: Parts, bucket: FlatBucket, reads: Mapping[int, Reads]) -> None:
    """Set masters, rounded weights and state of parameters of one bucket, by number: tile by tile, with one write of
    the weights. Call ``publish`` afterwards."""
    found: dict[int, list[tuple[Reads, Piece]]] = {}  # by the tile's first element
    for index in bucket.params:
        if index in reads:
            for piece in pieces(parts, index, _elements_in(parts, bucket, index)):
                found.setdefault(piece.tile.start, []).append((reads[index], piece))
    if not found:
        return
    form, shard = parts.state.form, parts.store.load(bucket)
    exact_weights = is_master(parts, bucket.params[0])
    for of_tile in found.values():
        tile = of_tile[0][1].tile
        masters = [(each.master, piece) for each, piece in of_tile if each.master is not None]
        weight = shard[tile]
        if exact_weights:
            for read, piece in masters:
                weight[piece.inside] = read(piece.flat)
        if (exact_weights or not masters) and not any(each.arrays or each.codes for each, _ in of_tile):
            continue
        with parts.state.tile(bucket.index, tile, store=True) as state:
            if masters and not exact_weights:
                exact = form.master(weight, state).clone()
                for read, piece in masters:
                    exact[piece.inside] = read(piece.flat)
                form.set_master(weight, state, exact)
            for each, piece in of_tile:
                each.set_state(form, state, piece)
    parts.store.save(bucket, shard)


def _elements_in(parts: Parts, bucket: FlatBucket, index: int) -> slice:
    span = parts.geometry.span_in(bucket, index)
    return slice(span.begin, span.begin + span.count)


def gradient(parts: Parts, index: int) -> torch.Tensor | None:
    """Return the gradient that a step would use, in true units, fp32, a copy on the CPU; None if ``p.grad`` is
    None."""
    grad = parts.store.parameter(index).grad
    if grad is None:
        return None
    if isinstance(grad, GradStandIn):
        return joined(parts, index, parts.reducer.values.whole(index).clone())
    mean = grad.detach().to("cpu", torch.float32, copy=True).contiguous()
    data = parts.data_of(index)
    data.all_reduce(mean, "avg", name=f"whole gradient of {parts.names[index]}")
    mean = joined(parts, index, mean)
    return mean if data.world_size == parts.comms.divide_by else mean * (data.world_size / parts.comms.divide_by)


def set_gradient(parts: Parts, index: int, value: torch.Tensor) -> None:
    """Replace the gradient that a step would use by ``value``, flat, in true units."""
    grad = parts.store.parameter(index).grad
    if grad is None:
        raise RuntimeError(f"{parts.names[index]} has no gradient to set: call backward() first")
    with torch.no_grad():
        grad.copy_(value.view(grad.shape))
