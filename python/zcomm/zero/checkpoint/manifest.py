"""The manifest of a checkpoint: which tensor lies where, and all that is not a tensor, as JSON with a checksum."""

from __future__ import annotations

import dataclasses
import errno
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zcomm.zero.checkpoint import durable
from zcomm.zero.checkpoint.tensor_file import Entry
from zcomm.zero.listed import listed

NAME = "manifest.json"
FORMAT = "zcomm checkpoint 1"


@dataclass
class Manifest:
    """weights, optimizer: entries by name (of a parameter or buffer; "ARRAY/NAME" of state, "master/NAME").

    parameters: those that the optimizer trains, in order. aliases: other names of a tied tensor. groups: options and
    names of the param groups. files: bytes of each file. rank_files: those of single ranks (random number generators).
    """

    world_size: int
    stage: int
    precision: str
    optimizer_name: str
    parameters: list[str]
    groups: list[dict[str, Any]]
    progress: list[dict[str, Any]] | None
    counters: dict[str, Any]
    weights: dict[str, Entry] = field(default_factory=dict)
    optimizer: dict[str, Entry] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    rank_files: list[str] = field(default_factory=list)
    scheduler: Any = None
    client_state: Any = None

    def write(self, folder: Path) -> None:
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        for kind in ("weights", "optimizer"):
            values[kind] = {name: entry.as_json() for name, entry in values[kind].items()}
        body = json.dumps(values, indent=1)
        text = json.dumps({"format": FORMAT, "crc32": zlib.crc32(body.encode())}) + "\n" + body + "\n"
        durable.write_file(folder / NAME, text.encode())

    def missing_files(self, folder: Path) -> list[str]:
        """Files that are not there in the size that was written."""
        found = []
        for name, nbytes in self.files.items():
            path = folder / name
            if not path.is_file():
                found.append(f"{path} is missing")
            elif path.stat().st_size != nbytes:
                found.append(f"{path} has {path.stat().st_size} bytes, not {nbytes}")
        return found


def read_manifest(folder: Path) -> Manifest:
    """Raises: FileNotFoundError where there is no checkpoint, OSError (EIO) where the manifest is damaged."""
    path = folder / NAME
    if not path.is_file():
        inside = [each.name for each in folder.iterdir() if (each / NAME).is_file()] if folder.is_dir() else []
        which = f" (the folder holds {listed(sorted(inside))}: name one of them)" if inside else ""
        raise FileNotFoundError(errno.ENOENT, f"there is no checkpoint{which}: no such file", str(path))
    try:
        first, _, body = path.read_text(encoding="utf-8").partition("\n")
        head = json.loads(first)
    except ValueError:
        raise OSError(errno.EIO, "the manifest is damaged", str(path)) from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise OSError(errno.EIO, f"the manifest does not begin with format {FORMAT!r}", str(path))
    if zlib.crc32(body.rstrip("\n").encode()) != head.get("crc32"):
        raise OSError(errno.EIO, "the manifest is damaged: its checksum is another", str(path))
    values = json.loads(body)
    for kind in ("weights", "optimizer"):
        values[kind] = {name: Entry.from_json(entry) for name, entry in values[kind].items()}
    return Manifest(**values)
