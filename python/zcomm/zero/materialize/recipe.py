"""Recipes: the recorded operations that compute a storage without memory, and the future value of a parameter.

[Note: recipes] Inside ``Recorder`` (record.py) a large floating tensor that a constructor creates has a recipe instead
of memory: the operations on its storage. A random operation is recorded with the generator's state. It also runs once
on temporary memory, so that the generator advances as in an ordinary construction. A copy from a tensor of a mapped
file is a recipe, too: its elements are read from the file (mapped_file.py). An operation that overwrites the whole
storage removes the operations before it. An operation that reads a deferred tensor and creates another one runs on the
value and returns an ordinary tensor.
Recipes belong to storages (views, ``.data`` and ``detach()`` share them), and move to the parameters in
``Recorder.end`` (deferred.py). ``by_pieces`` cuts a recipe if its operations are known to allow it (replay.py).
Thread rule: a recipe changes while it is recorded, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from zcomm.comm.communicator import Communicator
from zcomm.zero.materialize import replay
from zcomm.zero.materialize.mapped_file import FileRange

_aten = torch.ops.aten


@dataclass
class Recipe:
    """The future value of the ``nbytes`` of one storage. ``ops`` in order; a fresh storage is zero."""

    nbytes: int
    ops: list[Op] = field(default_factory=list)

    def replay(self) -> torch.UntypedStorage:
        """Build a new storage with the value. Generators are unchanged."""
        memory = replay.pages(self.nbytes)
        for op in self.ops:
            op.run(memory)
        return memory


@dataclass(frozen=True)
class Ref:
    """A strided view of the replayed storage, or of another storage with its value at the time of recording."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    other: Recipe | None = None

    @staticmethod
    def to(tensor: torch.Tensor, other: Recipe | None = None) -> Ref:
        snapshot = None if other is None else Recipe(other.nbytes, list(other.ops))
        return Ref(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), snapshot)

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        if self.other is not None:
            memory = self.other.replay()
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.size, self.stride)

    def by_pieces(self) -> Callable[[int, int], torch.Tensor] | None:
        """Return ``read(begin, end)`` of its value in another storage; None if that recipe cannot be cut."""
        found = None if self.other is None else by_pieces(Deferred(self.other, self, 0))
        return None if found is None else found.read

    @property
    def contiguous(self) -> bool:
        """True if its elements follow each other in memory."""
        return replay.contiguous(self.size, self.stride)

    def covers(self, nbytes: int) -> bool:
        return self.size.numel() * self.dtype.itemsize == nbytes and 0 not in self.stride


@dataclass(frozen=True)
class Stored:
    """A contiguous tensor of ``size`` in a file."""

    place: FileRange
    size: torch.Size

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        return self.place.read(0, self.place.count).view(self.size)

    def by_pieces(self) -> Callable[[int, int], torch.Tensor]:
        return self.place.read


@dataclass(frozen=True)
class Op:
    """One recorded operation. ``state``: of ``generator`` before a random operation."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: torch.Generator | None = None
    state: torch.Tensor | None = None

    def run(self, memory: torch.UntypedStorage) -> None:
        args, kwargs = tree_map(
            lambda leaf: leaf.on(memory) if isinstance(leaf, (Ref, Stored)) else leaf, (self.args, self.kwargs)
        )
        if self.generator is None:
            self.func(*args, **kwargs)
            return
        now = self.generator.get_state()
        self.generator.set_state(self.state)  # type: ignore[arg-type]
        try:
            self.func(*args, **kwargs)
        finally:
            self.generator.set_state(now)


class ValuePart(Protocol):
    """A Part (part.py)."""

    def read(self, comm: Communicator, name: str, begin: int, end: int) -> torch.Tensor:
        """Return flat elements [begin, end) of the whole value. Collective."""

    def gather(self, comm: Communicator, name: str) -> torch.Tensor:
        """Return the whole value. Collective."""


@dataclass(frozen=True)
class Deferred:
    """The future value of a parameter on the meta device: its recipe, unless ``read`` or ``part`` is set.

    read: ``read(begin, end)`` returns flat elements from a file. part: this rank's elements of a value already set.
    """

    recipe: Recipe
    ref: Ref
    version: int
    read: Callable[[int, int], torch.Tensor] | None = None
    part: ValuePart | None = None


def by_pieces(deferred: Deferred) -> replay.Replay | None:
    """Return the replay of a recipe by pieces; None if an operation is not known to allow it."""
    ref = deferred.ref
    steps: list[replay.Step | replay.CopyStep] = []
    count = ref.size.numel()
    for op in deferred.recipe.ops:
        to = op.args[0] if op.args else None
        if not isinstance(to, Ref) or to.other is not None or to.dtype != ref.dtype or set(op.kwargs) - {"generator"}:
            return None
        begin = to.offset - ref.offset
        whole = begin == 0 and to.size.numel() == count
        if not to.contiguous:
            return None
        if op.func is _aten.copy_.default:
            source = op.args[1]
            read = source.by_pieces() if isinstance(source, (Ref, Stored)) and source.size == to.size else None
            if read is None:
                return None
            steps.append(replay.CopyStep(read, begin, begin + to.size.numel()))
            continue
        if not replay.Step.known(op.func, op.args[1:], ref.dtype, whole):
            return None
        steps.append(replay.Step(op.func, begin, begin + to.size.numel(), op.args[1:], op.state))
    return replay.Replay(count, ref.dtype, steps) if ref.contiguous else None
