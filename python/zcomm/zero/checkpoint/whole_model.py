"""The whole model as one safetensors file: each tensor is put together on rank 0, which writes it before the next.

Tied weights are written once, with their other names in the file's metadata (export.py).
Memory: one tensor beside the shards; in the background a copy of the weights' shards, too (frozen.py). The file is
written beside its place, synced, and renamed. Collective; where rank 0 cannot write all raise, and the last file stays.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from zcomm.comm import Communicator
from zcomm.zero import access
from zcomm.zero.build import Parts
from zcomm.zero.checkpoint import durable
from zcomm.zero.checkpoint.exchange import agree
from zcomm.zero.checkpoint.frozen import freeze
from zcomm.zero.checkpoint.readable import Readable
from zcomm.zero.checkpoint.save import SaveTask, start
from zcomm.zero.checkpoint.share import aliases_of, other_tensors
from zcomm.zero.checkpoint.tensor_file import Writer, check_dtypes

Named = list[tuple[str, torch.Tensor]]


def save_model(parts: Parts, path: Path, wait: bool) -> SaveTask:
    """Write the weights, frozen ones included, and the saved buffers to ``path``, in the precision of training.

    wait: False writes while training goes on. Raises: OSError, ValueError (a dtype), on every rank.
    """
    check_dtypes(other_tensors(parts))
    rest = [(name, tensor.detach()) for name, tensor in other_tensors(parts)] if parts.comm.rank == 0 else []
    aliases = aliases_of(parts)
    frozen = None
    if not wait:
        with parts.comm.no_deadline():
            frozen = freeze(parts, path, weights_for=0)
        rest = [(name, tensor.clone()) for name, tensor in rest]

    def write(comm: Communicator) -> None:
        try:
            _write(comm, parts if frozen is None else frozen.parts(comm), rest, aliases, path)
        finally:
            if frozen is not None:
                frozen.close()

    return start(parts, write, wait)


def _write(comm: Communicator, parts: Parts, rest: Named, aliases: dict[str, str], path: Path) -> None:
    error: Exception | None = None
    writer: Writer | None = None
    new = path.with_name(f".{path.name}.saving")
    try:
        if comm.rank == 0:
            try:
                writer = _open(new, parts, rest, aliases)
            except OSError as caught:
                error = caught
        agree(comm, error, f"saving {path}")
        readable = Readable(parts)
        for index in range(len(parts.names)):
            whole = access.weight(readable.parts, index, root=0)
            if writer is not None and whole is not None:
                writer.add(whole)
        agree(comm, readable.error, f"saving {path}")
        if writer is not None:
            error = _finish(writer, rest, path)
        agree(comm, error, f"saving {path}")
    except BaseException:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
            new.unlink(missing_ok=True)
        raise


def _open(new: Path, parts: Parts, rest: Named, aliases: dict[str, str]) -> Writer:
    durable.make_folders(new.parent)
    new.unlink(missing_ok=True)
    dtype, places = parts.state.form.dtype, parts.geometry.places
    plan = [(name, dtype, place.shape) for name, place in zip(parts.names, places, strict=True)]
    return Writer(new, plan + [(name, tensor.dtype, tensor.shape) for name, tensor in rest], aliases)


def _finish(writer: Writer, rest: Named, path: Path) -> OSError | None:
    for _, tensor in rest:
        writer.add(tensor)
    try:
        writer.close()
        writer.path.replace(path)
        durable.sync_folder(path.parent)
    except OSError as error:
        return error
    return None
