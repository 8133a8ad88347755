"""SwapFile as a variant: fills, times and checks; buffers come from pinned_empty."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

import zcomm
from zcomm.offload import pinned_empty


class Buffers:
    """Source of writes and target of reads; shared by all variants, so that memory is paid once."""

    def __init__(self, nbytes: int) -> None:
        self.out = pinned_empty(nbytes, torch.uint8)
        self.into = pinned_empty(nbytes, torch.uint8)
        generator = torch.Generator().manual_seed(1)
        self.out.view(torch.int64).random_(generator=generator)


def openable(path: str) -> str:
    """Return a path by which other processes open the data file ``path`` of this one, which has no name."""
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}") == f"{os.path.abspath(path)} (deleted)":
                return f"/proc/{os.getpid()}/fd/{number}"
        except FileNotFoundError:  # of the listing itself
            continue
    return path  # the file system let it keep its name


class Swap:
    """One SwapFile with its keys. A tensor holds the buffer's data at the tensor's position."""

    def __init__(self, folder: Path, buffers: Buffers, **options: object) -> None:
        self.buffers = buffers
        self.file = zcomm.SwapFile(folder, buffers.out.nbytes, **options)  # type: ignore[arg-type]
        self.path = openable(str(self.file.stats()["path"]))

    def fill(self, nbytes: int, tensor_nbytes: int) -> None:
        """Write every key of this size once, so that timed writes overwrite."""
        self.seconds("write", nbytes, tensor_nbytes)

    def seconds(self, what: str, nbytes: int, tensor_nbytes: int) -> float:
        """Return the seconds of one pass; `mixed`: of each two tensors one is written, the other read."""
        pieces = [
            (f"{tensor_nbytes}/{begin}", slice(begin, begin + tensor_nbytes))
            for begin in range(0, nbytes, tensor_nbytes)
        ]
        begin_s = time.perf_counter()
        for number, (key, piece) in enumerate(pieces):
            if what == "write" or (what == "mixed" and number % 2):
                self.file.write(key, self.buffers.out[piece])
            else:
                self.file.read(key, self.buffers.into[piece])
        self.file.wait()
        return time.perf_counter() - begin_s

    def wrong(self, nbytes: int, tensor_nbytes: int) -> int:
        """Count bytes that come back other than they were written."""
        self.buffers.into[:nbytes].zero_()
        self.seconds("read", nbytes, tensor_nbytes)
        if torch.equal(self.buffers.into[:nbytes], self.buffers.out[:nbytes]):
            return 0
        return int((self.buffers.into[:nbytes] != self.buffers.out[:nbytes]).sum())

    def clear(self, nbytes: int, tensor_nbytes: int) -> None:
        for begin in range(0, nbytes, tensor_nbytes):
            self.file.release(f"{tensor_nbytes}/{begin}")

    def close(self) -> None:
        self.file.close()
