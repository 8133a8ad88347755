"""The manifest of a checkpoint: the place of each tensor, and all other content, as JSON with a checksum."""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zcomm.zero.files import durable
from zcomm.zero.files.folder import Folder
from zcomm.zero.files.tensor_file import Entry

NAME = "manifest.json"
FORMAT = "zcomm checkpoint 2"
ENTRIES = ("weights", "optimizer", "values")
READ = ("zcomm checkpoint 1", FORMAT)  # format 1 has no checksums of bytes outside tensors


@dataclass
class Manifest:
    """The content of a manifest.

    weights, optimizer: entries by name (of a parameter or buffer; "ARRAY/NAME" of state, "master/NAME").

    parameters: those that the optimizer trains, in order. aliases: other names of a tied tensor. groups: options and
    names of the param groups. files: bytes of each file. rank_files: files of single ranks (random number generators).
    checksums: by file, of its bytes outside tensors. extra: extra state of modules; None: not recorded.
    values: tensors of the client state, the schedule and the extra state. frozen: the weights that are parameters and
    are not trained; None: not recorded. added: the weights that hooks of the model have added to its state dict.
    crc32: of the manifest's file, set by reading; not written.
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
    checksums: dict[str, int] = field(default_factory=dict)
    values: dict[str, Entry] = field(default_factory=dict)
    scheduler: Any = None
    client_state: Any = None
    extra: dict[str, Any] | None = None
    frozen: list[str] | None = None
    added: list[str] = field(default_factory=list)
    crc32: int = 0

    def write(self, folder: Path) -> None:
        values = {name: getattr(self, name) for name in written_fields()}
        for kind in ENTRIES:
            values[kind] = {name: entry.as_json() for name, entry in values[kind].items()}
        body = json.dumps(values, indent=1)
        text = json.dumps({"format": FORMAT, "crc32": zlib.crc32(body.encode())}) + "\n" + body + "\n"
        durable.write_file(folder / NAME, text.encode())

    def entries(self) -> list[tuple[str, Entry]]:
        """Return every tensor's entry, with its name."""
        return [*self.weights.items(), *self.optimizer.items(), *self.values.items()]

    def names(self) -> list[str]:
        """Return every name of a tensor or of an extra state of the model."""
        return [*self.weights, *self.aliases, *(self.extra or ())]

    def renamed(self, new: dict[str, str]) -> Manifest:
        """Return a manifest of the same files with names replaced by ``new``; other names are kept."""

        def of(name: str) -> str:
            return new.get(name, name)

        def of_state(key: str) -> str:
            array, _, name = key.partition("/")
            return f"{array}/{of(name)}"

        def of_number(key: str) -> str:
            return of_state(key) if "/" in key else key

        progress = self.progress and [{of_number(key): n for key, n in each.items()} for each in self.progress]
        cohorts = [{**each, "params": list(map(of, each["params"]))} for each in self.counters.get("cohorts", [])]
        return dataclasses.replace(
            self,
            parameters=list(map(of, self.parameters)),
            groups=[{**group, "params": list(map(of, group["params"]))} for group in self.groups],
            counters=self.counters | ({"cohorts": cohorts} if cohorts else {}),
            progress=progress,
            weights={of(name): entry for name, entry in self.weights.items()},
            optimizer={of_state(key): entry for key, entry in self.optimizer.items()},
            aliases={of(alias): of(name) for alias, name in self.aliases.items()},
            extra=None if self.extra is None else {of(name): state for name, state in self.extra.items()},
            frozen=None if self.frozen is None else list(map(of, self.frozen)),
            added=list(map(of, self.added)),
        )

    def missing_files(self, folder: Folder) -> list[str]:
        """Return complaints about files that are missing or have another size than in the manifest."""
        found = []
        for name, nbytes in self.files.items():
            try:
                there = folder.nbytes(name)
            except FileNotFoundError:
                found.append(f"{folder.path / name} is missing")
            except OSError as error:
                found.append(f"{folder.path / name}: {error.strerror}")
            else:
                if there != nbytes:
                    found.append(f"{folder.path / name} has {there} bytes, not {nbytes}")
        return found

    def check_file(self, folder: Folder, name: str) -> str | None:
        """Return a complaint about a file's bytes outside tensors, or None. ``missing_files`` reports missing files and
        wrong sizes."""
        begin = min((entry.begin for _, entry in self.entries() if entry.file == name), default=None)
        try:
            if folder.nbytes(name) != self.files[name] or zlib.crc32(folder.read(name, begin)) == self.checksums[name]:
                return None
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{folder.path / name}: {error.strerror}"
        return f"{folder.path / name}: its {'content' if begin is None else 'header'} differs from the bytes written"


def written_fields() -> list[str]:
    """Return the names of the fields in the file."""
    return [one.name for one in dataclasses.fields(Manifest) if one.name != "crc32"]
