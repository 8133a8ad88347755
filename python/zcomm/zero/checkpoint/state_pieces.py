"""state_pieces: weights and optimizer state for the program, a piece of a parameter at a time.

It yields the tensors that ``save`` writes, for exports to other formats, checks, and models that are larger than
memory. Memory: a piece of each array (chunks.CHUNK_COUNT elements), and a tile or span of arrays on a drive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zcomm.zero.agree import agree
from zcomm.zero.checkpoint.readable import Readable
from zcomm.zero.checkpoint.whole_names import Rest, names_of_all, of_all_ranks, rows_of
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.remedy import with_remedy
from zcomm.zero.tensors import chunks

CALL = "iter_state()"


@dataclass(frozen=True)
class StatePiece:
    """Consecutive elements of a parameter, and of its optimizer state.

    name, shape: of the whole parameter. begin: flat index of the piece's first element. values: flat tensors of equal
    length by key, valid until the next piece is requested.
    """

    name: str
    shape: torch.Size
    begin: int
    values: dict[str, torch.Tensor]


def keys_of(parts: Parts, train: TrainState, wanted: Sequence[str]) -> list[str]:
    """Return ``wanted``, or all keys if it is empty. Raises: ValueError naming a key that is not kept."""
    shown = [train.rule.shown(position) for position in range(len(train.param_groups))]
    state = dict.fromkeys(key for names in shown for key in names)
    master = [chunks.MASTER] if parts.state.form.dtype != torch.float32 else []
    known = [chunks.WEIGHT, *master, *state]
    for key in wanted:
        if key not in known:
            raise ValueError(f"{CALL}: nothing is kept as {key!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(wanted)) or known


def state_pieces(
    parts: Parts, train: TrainState, keys: Sequence[str], root: int, steps: int, is_open: Callable[[], bool]
) -> Iterator[StatePiece]:
    """Yield the pieces on rank ``root``, parameter by parameter. Collective to the end.

    steps: the optimizer's step count when its updates were settled. is_open: False once it is closed.

    Raises: OSError of a failed read on all ranks, after the last piece. RuntimeError for a step, or a close, before the
    last piece.
    """

    def check() -> None:
        if not is_open():
            raise RuntimeError(f"{CALL}: the optimizer was closed before the last piece")
        if train.step_count != steps:
            raise RuntimeError(f"{CALL}: step() was called before the last piece; begin again")

    parts.check_one_model(CALL)
    readable = Readable(parts)
    check()
    rest = Rest(parts)
    added = {name for name, _ in rest.tensors.added}
    others = [
        each
        for each in of_all_ranks(parts, rest.every, names_of_all(parts, rest.names)["rest"])
        if each[0] not in added
    ]
    with with_remedy(CALL, train), parts.comm.no_deadline():
        for row in rows_of(parts):
            names = {chunks.WEIGHT: chunks.WEIGHT}
            if row.group is not None:
                names |= {chunks.MASTER: chunks.MASTER, **train.rule.shown(row.group)}
            arrays = {key: names[key] for key in keys if key in names}
            begin = 0
            if not arrays:
                continue
            found = chunks.stream(readable.parts, row.name, row.cut, row.index, list(arrays.values()), root)
            while (chunk := _next(parts, train, found)) is not None:
                if readable.error is None:
                    values = {key: chunk[array] for key, array in arrays.items()}
                    yield StatePiece(row.name, row.shape, begin, values)
                begin += chunk[next(iter(arrays.values()))].numel()
                check()
        if parts.comm.rank == root and chunks.WEIGHT in keys and readable.error is None:
            for name, tensor in others:
                flat = tensor.detach().reshape(-1)
                for begin, part in enumerate(flat.split(chunks.CHUNK_COUNT) if flat.numel() else [flat]):
                    yield StatePiece(name, tensor.shape, begin * chunks.CHUNK_COUNT, {chunks.WEIGHT: part})
        agree(parts.comm, readable.error, f"reading for {CALL}")


def _next(parts: Parts, train: TrainState, found: Iterator[chunks.Chunk]) -> chunks.Chunk | None:
    """Return the next chunk, or None. Replaced data of parameters are attached only during this call.

    The program may train before it requests the next piece, or never request it.
    """
    with parts.looking():
        return next(found, None)
