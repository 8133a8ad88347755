"""Quantized: weights that are kept in 8 or 4 bits, and decoded as their unit is gathered.

[Note: images] A shard of a bucket is kept as an image: its pieces, each encoded by itself, one after the other. A piece
is at most PIECE elements of one parameter, and of one block of rows. Parameters of two and more dimensions are
encoded, each 256 elements with a scale (zcomm/codec.hpp). Embeddings and heads have 8 bits, because 4 cost too much
there. Others are copied. A piece begins at a multiple of 64 bytes. A block begins at a page, and an image ends at one,
so that O_DIRECT reads them without a copy.
Rounding is to nearest. A value is code times scale, so that a resident model of decoded weights computes the same.
Thread rule: as HostSource: ``fetch`` and ``fetch_part`` on the gathering thread, the rest on the main thread.
Source: groups of ZeRO-Inference's and LLM.int8()'s (arXiv:2208.07339) kind, by the codecs of collectives.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zcomm import _core
from zcomm.comm.tensors import core_dtype, tensor_of
from zcomm.zero.cache.span_cache import WorkGroup, whole_pages
from zcomm.zero.layout.flat import WHOLE_SHARD, FlatBucket, Geometry
from zcomm.zero.params.shards import SPAN_NBYTES, HostSource

PIECE = 1 << 18  # elements
_ALIGN = 64
_GROUP = 256  # elements with one scale
_WINDOWS = 3  # images that are read ahead
_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of a shard, kept from byte ``at`` of its image on. codec: None: as they are. first: it
    begins a block of rows, at a page."""

    begin: int
    end: int
    at: int
    nbytes: int
    codec: _core.Codec | None
    first: bool


@dataclass(frozen=True)
class Quantized:
    """The form of kept weights, for ``Offload(stored=)``. finer: names of parameters that have 8 bits in any case."""

    name: Literal["int8", "int4"]
    finer: tuple[str, ...] = ()

    def pieces(self, bucket: FlatBucket, geometry: Geometry, names: Sequence[str], itemsize: int) -> list[Piece]:
        """Return the pieces of this rank's shard of ``bucket``."""
        part, at, found = bucket.part, 0, list[Piece]()
        for index in bucket.params:
            begin, high = geometry.span_in(bucket, index).within(part)
            codec = None
            if len(geometry.places[index].shape) > 1:
                codec = _core.Codec(_core.CodecKind.block_int, 8 if names[index] in self.finer else _BITS[self.name])
            block = bucket.block if bucket.block % _GROUP == 0 else 0
            while begin < high:
                first = block > 0 and begin % block == 0
                at = whole_pages(at) if first else -(-at // _ALIGN) * _ALIGN
                count = min(PIECE, high - begin, block - begin % block if block else PIECE)
                nbytes = count * itemsize if codec is None else codec.encoded_nbytes(count)
                found.append(Piece(begin - part.start, begin - part.start + count, at, nbytes, codec, first))
                begin, at = begin + count, at + nbytes
        return found

    def nbytes(self, bucket: FlatBucket, geometry: Geometry, names: Sequence[str], itemsize: int) -> int:
        """Return the bytes of the image."""
        pieces = self.pieces(bucket, geometry, names, itemsize)
        return whole_pages(pieces[-1].at + pieces[-1].nbytes if pieces else 1)

    def sources(
        self,
        geometry: Geometry,
        names: Sequence[str],
        every: Sequence[FlatBucket],
        tiers: Sequence[str],
        dtype: torch.dtype,
        arena: _core.PinnedArena,
        swap: Any,
    ) -> dict[int, HostSource]:
        """Build the sources of ``every`` bucket, by number. tiers: of each."""
        found: dict[int, HostSource] = {}
        for kind, on_drive in ((_RamImages, False), (_DriveImages, True)):
            mine = [bucket for bucket, tier in zip(every, tiers, strict=True) if (tier == "nvme") == on_drive]
            if mine:
                pieces = {b.index: self.pieces(b, geometry, names, dtype.itemsize) for b in mine}
                images = {b.index: self.nbytes(b, geometry, names, dtype.itemsize) for b in mine}
                found |= dict.fromkeys(pieces, kind(pieces, images, dtype, arena, swap))
        return found


class _Images(HostSource):
    """Shards that are kept as images. pieces, sizes: by number of the bucket."""

    def __init__(
        self,
        pieces: dict[int, list[Piece]],
        sizes: dict[int, int],
        dtype: torch.dtype,
        arena: _core.PinnedArena,
        swap: Any,
    ) -> None:
        self._pieces, self._sizes, self._dtype, self._core_dtype = pieces, sizes, dtype, core_dtype(dtype)
        self._stored: set[int] = set()
        self._open(arena, swap)

    def _open(self, arena: _core.PinnedArena, swap: Any) -> None:
        """Reserve the images' space."""
        raise NotImplementedError

    def _place(self, number: int) -> torch.Tensor:
        """Return memory for an image, for ``_keep``."""
        raise NotImplementedError

    def _keep(self, number: int, image: torch.Tensor) -> None:
        raise NotImplementedError

    def _image(self, number: int, part: slice) -> torch.Tensor:
        """Return the image, with at least its bytes of ``part``."""
        raise NotImplementedError

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return torch.zeros(bucket.shard_count, dtype=self._dtype)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        image = self._place(bucket.index)
        kept = self.load(bucket) if bucket.index in self._stored else None
        if kept is not None:
            image.copy_(self._image(bucket.index, slice(0, self._sizes[bucket.index])))
        for piece in self._pieces[bucket.index]:
            values, into = weight[piece.begin : piece.end], image[piece.at : piece.at + piece.nbytes]
            if kept is not None and torch.equal(values, kept[piece.begin : piece.end]):
                continue  # because its codes would be rounded again
            if piece.codec is None:
                into.copy_(values.view(torch.uint8))
            else:
                _core.encode(piece.codec, into.data_ptr(), values.data_ptr(), self._core_dtype, piece.end - piece.begin)
        self._keep(bucket.index, image)
        self._stored.add(bucket.index)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        out = self.begin(bucket)
        self.fetch_part(bucket, slice(0, bucket.shard_count), out)
        return out

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        return self.load(bucket)[part]

    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        pieces = [p for p in self._pieces[bucket.index] if p.begin < part.stop and part.start < p.end]
        if not pieces:
            return
        image, flat = self._image(bucket.index, slice(pieces[0].at, pieces[-1].at + pieces[-1].nbytes)), out.view(-1)
        for piece in pieces:
            low, high = max(piece.begin, part.start), min(piece.end, part.stop)
            into = flat[low - part.start : high - part.start]
            if high - low == piece.end - piece.begin:
                self._decode(piece, image, into)
            else:
                whole = torch.empty(piece.end - piece.begin, dtype=self._dtype)
                self._decode(piece, image, whole)
                into.copy_(whole[low - piece.begin : high - piece.begin])

    def _decode(self, piece: Piece, image: torch.Tensor, out: torch.Tensor) -> None:
        coded = image[piece.at : piece.at + piece.nbytes]
        if piece.codec is None:
            out.view(torch.uint8).copy_(coded)
        else:
            _core.decode(piece.codec, out.data_ptr(), [coded.data_ptr()], out.numel(), self._core_dtype)


class _RamImages(_Images):
    """Images in host memory."""

    def _open(self, arena: _core.PinnedArena, swap: Any) -> None:
        memory: torch.Tensor = tensor_of(arena.allocate(sum(self._sizes.values())), torch.uint8)
        self._memory: dict[int, torch.Tensor] = dict(
            zip(self._sizes, memory.split(list(self._sizes.values())), strict=False)
        )

    def _place(self, number: int) -> torch.Tensor:
        return self._memory[number]

    def _keep(self, number: int, image: torch.Tensor) -> None:
        pass  # it is in place

    def _image(self, number: int, part: slice) -> torch.Tensor:
        return self._memory[number]

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> None:
        self.fetch_part(bucket, slice(0, bucket.shard_count), out)

    def close(self) -> None:
        self._memory.clear()


class _Fetch:
    """A fetch from the drive, with the interface of a WorkGroup."""

    def __init__(self, images: _DriveImages, bucket: FlatBucket, out: torch.Tensor) -> None:
        self.images, self.bucket, self.out, self.ended = images, bucket, out, False

    def wait(self) -> None:
        self.images.finish(self)


class _DriveImages(_Images):
    """Images in a swap file, with a key for each SPAN_NBYTES. A block of rows begins a key.

    Images that were fetched next in the last pass are read ahead, so that the drive has requests while one is decoded.
    """

    on_drive = True

    def _open(self, arena: _core.PinnedArena, swap: Any) -> None:
        self._swap, self._works = swap, dict[int, WorkGroup]()  # of windows, by number
        largest, count = max(self._sizes.values()), min(_WINDOWS, len(self._sizes))
        memory = tensor_of(arena.allocate(count * largest), torch.uint8)
        self._windows = [memory[window * largest :][:largest] for window in range(count)]
        self._held: dict[int, tuple[int, int]] = {}  # by bucket: window, and writes of the image when it was read
        self._writes = dict.fromkeys(self._sizes, 0)
        self._queue: deque[_Fetch] = deque()
        self._next, self._last = dict[int, int](), -1  # the bucket that was fetched after another, and last
        for number in self._sizes:
            for key, span in self._keys(number):
                swap.reserve(key, span.stop - span.start, fixed=True)

    def _keys(self, number: int, part: slice | None = None) -> list[tuple[str, slice]]:
        cuts = [0, *(piece.at for piece in self._pieces[number] if piece.first and piece.at), self._sizes[number]]
        spans = [
            slice(at, min(at + SPAN_NBYTES, end))
            for begin, end in itertools.pairwise(cuts)
            for at in range(begin, end, SPAN_NBYTES)
        ]
        return [
            (f"parameters.{number}.{span.start}", span)
            for span in spans
            if part is None or (span.start < part.stop and part.start < span.stop)
        ]

    def _place(self, number: int) -> torch.Tensor:
        nbytes = self._sizes[number]
        memory = torch.zeros(nbytes + _core.page_nbytes(), dtype=torch.uint8)
        return memory[-memory.data_ptr() % _core.page_nbytes() :][:nbytes]

    def _start(self, number: int, image: torch.Tensor, act: Any, part: slice | None = None) -> WorkGroup:
        works = WorkGroup()
        for key, span in self._keys(number, part):
            works.add(act(key, image.data_ptr() + span.start, span.stop - span.start))
        return works

    def _keep(self, number: int, image: torch.Tensor) -> None:
        self._start(number, image, self._swap.write).wait()
        self._writes[number] += 1

    def _image(self, number: int, part: slice) -> torch.Tensor:
        image = self._place(number)
        self._start(number, image, self._swap.read, part).wait()
        return image

    # --- on the gathering thread --------------------------------------------------------------------------------

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> Any:
        work = _Fetch(self, bucket, out)
        self._queue.append(work)
        self._next[self._last], self._last = bucket.index, bucket.index
        self._read_ahead()
        return work

    def finish(self, work: _Fetch) -> None:
        """Decode the images in the queue up to ``work``. Raises: OSError; the queue is empty then."""
        try:
            while not work.ended:
                first = self._queue[0]
                self._finish(first.bucket.index, first.out)
                self._queue.popleft().ended = True
                self._read_ahead()
        except BaseException:
            self._queue.clear()
            self.forget()
            raise

    def _finish(self, number: int, out: torch.Tensor) -> None:
        window, _ = self._held[number]
        self._works[window].wait()
        for piece in self._pieces[number]:
            self._decode(piece, self._windows[window], out[piece.begin : piece.end])
        del self._held[number]

    def _read_ahead(self) -> None:
        """Start to read the images in the queue, and those expected after them, into free windows."""
        wanted = [work.bucket.index for work in self._queue][: len(self._windows)]
        follow = self._last
        while len(wanted) < len(self._windows):
            follow = self._next.get(follow, -1)
            if follow in wanted or follow < 0:
                break
            wanted.append(follow)
        for number, (_, writes) in list(self._held.items()):
            if number not in wanted or writes != self._writes[number]:
                self._drop(number)
        free = set(range(len(self._windows))) - {window for window, _ in self._held.values()}
        for number in wanted:
            if number not in self._held:
                window = free.pop()
                self._held[number] = window, self._writes[number]
                self._works[window] = self._start(number, self._windows[window], self._swap.read)

    def _drop(self, number: int) -> None:
        """Give up an image that was read ahead. Waits; drops errors, because the next read raises them again."""
        window, _ = self._held.pop(number)
        with suppress(OSError):
            self._works[window].wait()

    def forget(self) -> None:
        """Give up all images that were read ahead."""
        for number in list(self._held):
            self._drop(number)

    def close(self) -> None:
        self.forget()
        self._windows.clear()


def finer_names(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of embeddings, and of a head of transformers."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tables = [each for each in (*model.modules(), head) if isinstance(each, torch.nn.Embedding) or each is head]
    ids = {id(param) for each in tables if each is not None for param in each.parameters(recurse=False)}
    return tuple(name for name, param in model.named_parameters(remove_duplicate=False) if id(param) in ids)
