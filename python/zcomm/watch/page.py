"""Page: a file of two memory pages in which a rank publishes its state. Fixed form, no pickle, mode 0600.

The first 4 KiB are the head, written once before the file gets its name. The second 4 KiB are two slots, which the rank
writes in turn: a rank that dies while it writes leaves the other slot whole. Each has a checksum and a number that
rises, so that a reader never uses half of a record.
Invariant: a reader validates everything: owner, mode, size, version, checksum, lengths and characters.
Thread rule: one thread writes at a time (``rank.RankPage`` has the lock); any process reads.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from zcomm.machine.new_file import replacing

NBYTES = 8192
SUFFIX = ".page"
_MAGIC, _VERSION = b"zcommpg\0", 1
_HEAD_NBYTES, _SLOT_NBYTES, _SLOTS = 4096, 2048, 2
_BEGIN = struct.Struct("<8sHxxIQ")  # magic, version, checksum of the rest, unused
_SLOT = struct.Struct("<IIQ")  # checksum of the rest, unused, number
TIERS = ("device", "cpu", "nvme")
MOST_DRIVES = 4


class PageError(ValueError):
    """Error of a file that is not a page of this version, or not of this user."""


@dataclass(frozen=True)
class Head:
    """Constant facts of a rank. Text that is too long is cut.

    pid, started, space, host: of the process, as machine.process.Process has them. started_at: seconds since 1970.
    job: the same for all ranks of a job, and of no other.
    """

    pid: int
    rank: int
    world_size: int
    local_rank: int
    started_at: float
    started: str
    space: str
    job: str
    host: str
    name: str
    backend: str
    command: str


_HEAD_NUMBERS = struct.Struct("<IIIId")
_HEAD_TEXTS = {"started": 24, "space": 64, "job": 32, "host": 64, "name": 64, "backend": 16, "command": 1024}


@dataclass(frozen=True)
class Drive:
    """Bytes that the swap files have moved to and from a folder, and seconds with a request in flight."""

    path: str = ""
    read_nbytes: float = 0.0
    read_s: float = 0.0
    written_nbytes: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True)
class Record:
    """State of a rank at one time. Numbers that are not known are NaN.

    state: "running", "ended", "failed". updated_at, step_at: seconds since 1970, of this record and of a step's end.
    step: the last one; steps: how many this rank has made since its page began. loss: the last that was logged.
    wall_s: seconds between the ends of steps; of these comm_s waiting for ranks, swap_s waiting for a drive, update_s
    in ``step()``. link_nbytes: of reduced and gathered buckets. All count from the page's begin; recent_*: only the
    last steps.
    memory, plan: bytes by TIERS, held and by ZeRO's formula; slots: working space in addition. drives: since the
    creation of the swap files. phase, operation, site: see Place of the training thread; since: time of its first
    observation at this place, with no step between.
    message: why it failed.
    """

    state: str = "running"
    updated_at: float = 0.0
    step: float = 0.0
    steps: float = 0.0
    step_at: float = 0.0
    loss: float = float("nan")
    wall_s: float = 0.0
    comm_s: float = 0.0
    swap_s: float = 0.0
    update_s: float = 0.0
    link_nbytes: float = 0.0
    recent_steps: float = 0.0
    recent_wall_s: float = 0.0
    recent_comm_s: float = 0.0
    recent_swap_s: float = 0.0
    recent_link_nbytes: float = 0.0
    since: float = 0.0
    memory: tuple[float, ...] = (0.0, 0.0, 0.0)
    slots: tuple[float, ...] = (0.0, 0.0, 0.0)
    plan: tuple[float, ...] = (float("nan"),) * 3
    drives: tuple[Drive, ...] = field(default=())
    recent_drives: tuple[Drive, ...] = field(default=())
    phase: str = ""
    operation: str = ""
    site: str = ""
    message: str = ""


_NUMBERS = [each.name for each in fields(Record) if each.type == "float"]
_RECORD_NUMBERS = struct.Struct(f"<{len(_NUMBERS) + 3 * len(TIERS)}d")
_RECORD_TEXTS = {"state": 8, "phase": 16, "operation": 96, "site": 160, "message": 512}
_DRIVE = struct.Struct("<4d")
_DRIVE_PATH = 64


def _packed(texts: dict[str, int], owner: object) -> bytes:
    return b"".join(_cut(str(getattr(owner, name)), size) for name, size in texts.items())


def _cut(text: str, size: int) -> bytes:
    """Return ``text`` in exactly ``size`` bytes of UTF-8, zeros behind."""
    data = text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore").encode()
    return data.ljust(size, b"\0")


def printable(text: str) -> str:
    """Return text on one line without control characters, because another process's text may go to a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _texts(sizes: dict[str, int], data: bytes) -> dict[str, str]:
    found, begin = {}, 0
    for name, size in sizes.items():
        found[name] = _text(data[begin : begin + size])
        begin += size
    return found


def _text(data: bytes) -> str:
    return printable(data.partition(b"\0")[0].decode("utf-8", "replace"))


def pack_head(head: Head) -> bytes:
    """Return the first 4 KiB of a page."""
    numbers = _HEAD_NUMBERS.pack(head.pid, head.rank, head.world_size, head.local_rank, head.started_at)
    body = numbers + _packed(_HEAD_TEXTS, head)
    return (_BEGIN.pack(_MAGIC, _VERSION, zlib.crc32(body), 0) + body).ljust(_HEAD_NBYTES, b"\0")


def pack_record(record: Record, number: int) -> bytes:
    """Return a slot with the record; its checksum covers the number."""
    numbers = [getattr(record, name) for name in _NUMBERS]
    parts = [
        _RECORD_NUMBERS.pack(*numbers, *record.memory, *record.slots, *record.plan),
        _packed(_RECORD_TEXTS, record),
    ]
    for drives in (record.drives, record.recent_drives):
        parts.append(bytes([min(len(drives), MOST_DRIVES)]))
        for drive in _at_most(drives):
            parts.append(_DRIVE.pack(drive.read_nbytes, drive.read_s, drive.written_nbytes, drive.write_s))
            parts.append(_cut(drive.path, _DRIVE_PATH))
    body = b"".join(parts)
    data = _SLOT.pack(0, 0, number) + body
    data = _SLOT.pack(zlib.crc32(data[4:].ljust(_SLOT_NBYTES - 4, b"\0")), 0, number) + body
    assert len(data) <= _SLOT_NBYTES
    return data.ljust(_SLOT_NBYTES, b"\0")


def _at_most(drives: Sequence[Drive]) -> list[Drive]:
    """Return at most MOST_DRIVES drives; the last one sums all further drives."""
    kept, rest = list(drives[: MOST_DRIVES - 1]), drives[MOST_DRIVES - 1 :]
    if rest:
        name = rest[0].path if len(rest) == 1 else f"{len(rest)} more"
        sums = (sum(getattr(d, key) for d in rest) for key in ("read_nbytes", "read_s", "written_nbytes", "write_s"))
        kept.append(Drive(name, *sums))
    return kept


def unpack_head(data: bytes) -> Head:
    """Return the head of a page. Raises: PageError."""
    magic, version, checksum, _ = _BEGIN.unpack_from(data)
    if magic != _MAGIC:
        raise PageError("not a page of zcomm")
    if version != _VERSION:
        raise PageError(f"a page of version {version}, this zcomm reads version {_VERSION}")
    size = _HEAD_NUMBERS.size + sum(_HEAD_TEXTS.values())
    body = data[_BEGIN.size : _BEGIN.size + size]
    if zlib.crc32(body) != checksum:
        raise PageError("the head of the page is damaged")
    numbers = _HEAD_NUMBERS.unpack_from(body)
    texts: dict[str, Any] = _texts(_HEAD_TEXTS, body[_HEAD_NUMBERS.size :])
    return Head(*numbers, **texts)


def unpack_record(data: bytes) -> tuple[int, Record] | None:
    """Return number and record of a slot, or None for one that is empty or only half written."""
    checksum, _, number = _SLOT.unpack_from(data)
    if number == 0 or zlib.crc32(data[4:_SLOT_NBYTES]) != checksum:
        return None
    begin = _SLOT.size
    numbers = _RECORD_NUMBERS.unpack_from(data, begin)
    begin += _RECORD_NUMBERS.size
    texts = _texts(_RECORD_TEXTS, data[begin:])
    begin += sum(_RECORD_TEXTS.values())
    lists: list[tuple[Drive, ...]] = []
    for _ in range(2):
        count, drives = data[begin], []
        begin += 1
        if count > MOST_DRIVES:
            return None
        for _ in range(count):
            values = _DRIVE.unpack_from(data, begin)
            begin += _DRIVE.size
            drives.append(Drive(_text(data[begin : begin + _DRIVE_PATH]), *values))
            begin += _DRIVE_PATH
        lists.append(tuple(drives))
    named = dict(zip(_NUMBERS, numbers, strict=False))
    if not all(math.isfinite(value) for name, value in named.items() if name != "loss"):
        return None
    tiers = [numbers[at : at + len(TIERS)] for at in range(len(_NUMBERS), len(numbers), len(TIERS))]
    sizes = dict(zip(("memory", "slots", "plan"), tiers, strict=True))
    every: dict[str, Any] = {**named, **sizes, **texts}
    return number, Record(**every, drives=lists[0], recent_drives=lists[1])


class PageWriter:
    """The page of this process, mapped. Raises: OSError if the file cannot be created."""

    def __init__(self, path: Path, head: Head, first: Record) -> None:
        self.path = path
        self._number = 0
        with replacing(path) as file:
            os.posix_fallocate(file, 0, NBYTES)  # a full file system is an error here, and no SIGBUS later
            self._map = mmap.mmap(file, NBYTES)
            self._map[:_HEAD_NBYTES] = pack_head(head)
            self.write(first)

    def write(self, record: Record) -> None:
        """Write a record; the previous one remains until the next write."""
        self._number += 1
        begin = _HEAD_NBYTES + self._number % _SLOTS * _SLOT_NBYTES
        self._map[begin : begin + _SLOT_NBYTES] = pack_record(record, self._number)

    def close(self) -> None:
        """Unmap the page. The file is kept."""
        self._map.close()


def read_page(path: Path) -> tuple[Head, Record]:
    """Read a page. Raises: PageError; OSError."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PageError("not a private file of this user (mode 0600)")
        if found.st_size != NBYTES:
            raise PageError(f"{found.st_size} bytes, a page has {NBYTES}")
        for _ in range(100):  # both slots half written: only if the rank has written twice during one read
            data = os.pread(file, NBYTES, 0)
            if len(data) != NBYTES:
                break
            slots = (data[_HEAD_NBYTES + n * _SLOT_NBYTES :][:_SLOT_NBYTES] for n in range(_SLOTS))
            whole = [slot for slot in map(unpack_record, slots) if slot is not None]
            if whole:
                return unpack_head(data), max(whole, key=lambda slot: slot[0])[1]
        raise PageError("the page has no whole record")
    finally:
        os.close(file)
