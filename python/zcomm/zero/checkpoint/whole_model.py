"""The whole model as one safetensors file: rank 0 assembles each tensor and writes it, piece by piece.

Tied weights are written once, with their other names in the file's metadata (export.py).
Memory: a piece of a tensor and the shards; in the background a copy of the weights' shards, too (snapshot.py). The file
is written next to its place, synced, and renamed. Collective; if rank 0 cannot write all ranks raise, and the last file
remains.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from zcomm.comm.communicator import Communicator
from zcomm.zero.agree import ErrorHolder, agree, agreed, all_values, check_places
from zcomm.zero.checkpoint.extra_state import extra_names
from zcomm.zero.checkpoint.model_tensors import Named
from zcomm.zero.checkpoint.readable import Readable
from zcomm.zero.checkpoint.save import start
from zcomm.zero.checkpoint.snapshot import freeze
from zcomm.zero.checkpoint.whole_names import Rest, Row, names_of_all, of_all_ranks, rows_of
from zcomm.zero.files.save_task import SaveTask
from zcomm.zero.files.staging import NewFile
from zcomm.zero.files.tensor_file import Writer, check_dtypes
from zcomm.zero.format_names import format_names
from zcomm.zero.parts import Parts
from zcomm.zero.tensors import chunks


def save_model(parts: Parts, path: Path, wait: bool, lean: bool = False) -> SaveTask:
    """Write the weights, frozen ones included, and the saved buffers to ``path``, in the precision of training.

    lean: without frozen parameters. wait: False writes while training continues.
    Raises: OSError, ValueError (a dtype), on every rank.
    """
    parts.check_one_model("save_16bit_model()")
    kept = ErrorHolder()
    rows = [row for row in rows_of(parts) if not (lean and row.frozen)]
    found = agreed(parts.comm, f"saving {path}", lambda: Rest(parts, lean))
    names = names_of_all(parts, found.names)
    every = of_all_ranks(parts, found.every, names["rest"])
    aliases = {name: held.value for name, held in names["aliases"].items()}
    rest: Named = []
    with kept.errors():
        check_dtypes(every)
        extra = extra_names(parts.model)
        if extra and parts.comm.rank == 0:
            words = "%s: extra state of modules is not in this file (%s): a checkpoint has it"
            logging.getLogger("zcomm").warning(words, path, format_names(extra))
        if parts.comm.rank == 0:
            rest = [(name, tensor if wait else tensor.clone()) for name, tensor in every]
    with parts.comm.no_deadline():
        check_places("save_16bit_model()", all_values(parts.comm, os.path.realpath(path), "file of the model"))
        agree(parts.comm, kept.error, f"saving {path}")
        ends = ExitStack()
        source: Callable[[Communicator], Parts] = lambda comm: parts  # noqa: E731
        if not wait:
            ends.callback((frozen := freeze(parts, path, weights_only=True)).close)
            source = frozen.parts

    def write(comm: Communicator) -> None:
        with ends:
            _write(comm, source(comm), rest, aliases, path, rows)

    return start(parts, write, wait)


def _write(comm: Communicator, parts: Parts, rest: Named, aliases: dict[str, str], path: Path, rows: list[Row]) -> None:
    kept = ErrorHolder()
    with ExitStack() as ends:
        if comm.rank == 0:
            with kept.errors():
                ends.callback((new := NewFile(path)).discard)
                ends.callback(_close, writer := _open(new.path, parts, rest, aliases, rows))
        agree(comm, kept.error, f"saving {path}")
        readable = Readable(parts)
        for row in rows:
            for chunk in chunks.stream(readable.parts, row.name, row.cut, row.index, [chunks.WEIGHT], root=0):
                if comm.rank == 0 and kept.error is None:
                    with kept.errors():
                        writer.put(row.name, chunk[chunks.WEIGHT])
        agree(comm, kept.error or readable.error, f"saving {path}")
        if comm.rank == 0:
            with kept.errors():
                for name, tensor in rest:
                    writer.put(name, tensor)
                writer.check_whole()
                writer.close()
                new.put()
        agree(comm, kept.error, f"saving {path}")


def _close(writer: Writer) -> None:
    with suppress(OSError):
        writer.close()


def _open(new: Path, parts: Parts, rest: Named, aliases: dict[str, str], rows: list[Row]) -> Writer:
    plan = [(row.name, parts.state.form.dtype, row.shape) for row in rows]
    return Writer(new, plan + [(name, tensor.dtype, tensor.shape) for name, tensor in rest], aliases)
