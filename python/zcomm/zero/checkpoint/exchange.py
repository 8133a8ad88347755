"""What ranks tell each other while saving and loading: small JSON values, and who failed."""

from __future__ import annotations

import errno
import json
from typing import Any

import torch

from zcomm.comm import Communicator


def all_values(comm: Communicator, value: Any, name: str) -> list[Any]:
    """Each rank's ``value`` (JSON), in rank order. Collective."""
    data = json.dumps(value).encode()
    longest = torch.tensor([len(data)])
    comm.all_reduce(longest, op="max", name=f"{name}: length")
    padded = torch.zeros(int(longest) or 1, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
    every = comm.all_gather(padded, name=name)
    assert isinstance(every, torch.Tensor)
    rows = every.view(comm.world_size, -1)
    return [json.loads(bytes(row.numpy()).rstrip(b"\0")) for row in rows]


def agree(comm: Communicator, error: Exception | None, what: str) -> None:
    """Raise where any rank has an error: its own there, on the others an OSError that names the rank. Collective."""
    code = (error.errno or errno.EIO) if isinstance(error, OSError) else errno.EIO
    found = all_values(comm, None if error is None else [code, str(error)], what)
    if error is not None:
        raise error
    for rank, one in enumerate(found):
        if one is not None:
            raise OSError(one[0], f"{what} failed on rank {rank}: {one[1]}")
