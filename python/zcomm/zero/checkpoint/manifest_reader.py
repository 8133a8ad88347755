"""A manifest's fields, checked one by one, because a hostile manifest can have a correct checksum.

Each error names the file and the field. No name of a file leads out of the folder (folder.py).
"""

from __future__ import annotations

import errno
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zcomm.zero.checkpoint.manifest import ENTRIES, NAME, READ, Manifest, written_fields
from zcomm.zero.files.folder import Folder, check_plain_name
from zcomm.zero.files.tensor_file import Entry
from zcomm.zero.format_names import format_names


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in the folder ``path``. Raises: as ``open_checkpoint``."""
    folder, manifest = open_checkpoint(path)
    folder.close()
    return manifest


def open_checkpoint(path: Path) -> tuple[Folder, Manifest]:
    """Open the checkpoint in the folder ``path``; the folder remains open.

    Raises: FileNotFoundError if there is none. OSError (EIO) if the manifest is damaged. ValueError naming the manifest
    and a field with a value that ``save`` does not write.
    """
    for last in (False, False, True):
        if not (path / NAME).is_file():
            inside = [each.name for each in path.iterdir() if (each / NAME).is_file()] if path.is_dir() else []
            which = f" (the folder holds {format_names(sorted(inside))}: name one of them)" if inside else ""
            raise FileNotFoundError(errno.ENOENT, f"there is no checkpoint{which}: no such file", str(path / NAME))
        folder = Folder(path)
        try:
            return folder, _parsed(folder.read(NAME), path / NAME)
        except FileNotFoundError:  # a save has replaced the folder meanwhile
            folder.close()
            if last:
                raise
        except BaseException:
            folder.close()
            raise
    raise AssertionError


def _parsed(data: bytes, path: Path) -> Manifest:
    first, _, body = data.partition(b"\n")
    try:
        head = json.loads(first)
    except (ValueError, RecursionError):
        raise OSError(errno.EIO, "the manifest is damaged", str(path)) from None
    if not isinstance(head, dict) or head.get("format") not in READ:
        expected = " or ".join(map(repr, READ))
        raise OSError(errno.EIO, f"the manifest does not begin with format {expected}", str(path))
    if zlib.crc32(body.rstrip(b"\n")) != head.get("crc32"):
        raise OSError(errno.EIO, "the manifest is damaged: its checksum is another", str(path))
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: it is not JSON: {error!r}") from None
    manifest = _Fields(values, path).manifest()
    manifest.crc32 = head["crc32"]
    return manifest


class _Fields:
    """The fields of one manifest. Each method: the field's value, or a ValueError that names it."""

    def __init__(self, values: Any, path: Path) -> None:
        self._path = path
        self._values = self._dict("the manifest", values)
        known = written_fields()
        for name in self._values:
            if name not in known:
                raise ValueError(f"{path}: the field {name!r} is not known; was it written by a newer zcomm?")

    def manifest(self) -> Manifest:
        files = {
            check_plain_name(name, self._path, "a name in files"): self._whole(f"files[{name!r}]", nbytes)
            for name, nbytes in self._dict("files", self._get("files", {})).items()
        }
        progress = self._get("progress", None)
        manifest = Manifest(
            world_size=self._whole("world_size", self._get("world_size"), 1),
            stage=self._whole("stage", self._get("stage"), 0, 3),
            precision=self._text("precision", self._get("precision")),
            optimizer_name=self._text("optimizer_name", self._get("optimizer_name")),
            parameters=self._list("parameters", self._get("parameters"), self._text),
            groups=self._list("groups", self._get("groups"), self._group),
            progress=None if progress is None else self._list("progress", progress, self._numbers),
            counters=self._counters(self._get("counters")),
            weights={},
            files=files,
            rank_files=self._list("rank_files", self._get("rank_files", []), self._text),
            scheduler=self._get("scheduler", None),
            client_state=self._get("client_state", None),
            extra=None if self._get("extra", None) is None else self._dict("extra", self._get("extra")),
        )
        for kind in ENTRIES:
            entries = self._dict(kind, self._get(kind, {}))
            read = {name: self._entry(f"{kind}[{name!r}]", entry, files) for name, entry in entries.items()}
            setattr(manifest, kind, read)
        self._check_rank_files(manifest)
        if self._get("frozen", None) is not None:
            manifest.frozen = self._weights("frozen", self._get("frozen"), manifest)
        manifest.added = self._weights("added", self._get("added", []), manifest)
        for alias, name in self._dict("aliases", self._get("aliases", {})).items():
            if not isinstance(name, str) or name not in manifest.weights:
                raise self._wrong(f"aliases[{alias!r}]", name, "the name of a weight")
            manifest.aliases[alias] = name
        for name, crc32 in self._dict("checksums", self._get("checksums", {})).items():
            if name not in files:
                raise self._wrong("a name in checksums", name, "one of files")
            manifest.checksums[name] = self._whole(f"checksums[{name!r}]", crc32, 0, 2**32 - 1)
        return manifest

    def _check_rank_files(self, manifest: Manifest) -> None:
        for number, name in enumerate(manifest.rank_files):
            if name not in manifest.files:
                raise self._wrong(f"rank_files[{number}]", name, "one of files")
        if len(manifest.rank_files) not in (0, manifest.world_size):
            expected = f"{manifest.world_size} names, one of each rank"
            raise self._wrong("rank_files", manifest.rank_files, expected)

    def _get(self, name: str, *default: Any) -> Any:
        if name not in self._values and not default:
            raise ValueError(f"{self._path}: the field {name!r} is missing")
        return self._values.get(name, *default)

    def _wrong(self, field: str, value: Any, expected: str) -> ValueError:
        shown = repr(value)
        shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
        return ValueError(f"{self._path}: {field} is {shown}; expected {expected}")

    def _dict(self, field: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(field, value, "an object")
        return value

    def _text(self, field: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self._wrong(field, value, "a string")
        return value

    def _whole(self, field: str, value: Any, low: int = 0, high: int = 2**63 - 1) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            most = "" if high == 2**63 - 1 else f" and at most {high}"
            raise self._wrong(field, value, f"a whole number of at least {low}{most}")
        return value

    def _list(self, field: str, value: Any, of: Callable[[str, Any], Any]) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong(field, value, "a list")
        return [of(f"{field}[{number}]", each) for number, each in enumerate(value)]

    def _weights(self, field: str, value: Any, manifest: Manifest) -> list[str]:
        names: list[str] = self._list(field, value, self._text)
        for number, name in enumerate(names):
            if name not in manifest.weights:
                raise self._wrong(f"{field}[{number}]", name, "the name of a weight")
        return names

    def _numbers(self, field: str, value: Any) -> dict[str, Any]:
        for key, number in self._dict(field, value).items():
            if not isinstance(number, (int, float)):
                raise self._wrong(f"{field}[{key!r}]", number, "a number")
        return dict(value)

    def _group(self, field: str, value: Any) -> dict[str, Any]:
        group = self._dict(field, value)
        return {
            "params": self._list(f"{field}.params", group.get("params"), self._text),
            "options": self._dict(f"{field}.options", group.get("options")),
        }

    def _counters(self, value: Any) -> dict[str, Any]:
        counters = self._dict("counters", value)
        for name in ("step_count", "skipped_steps"):
            self._whole(f"counters.{name}", counters.get(name))
        if "loss_scale" in counters:
            scale = self._numbers("counters.loss_scale", counters["loss_scale"])
            if not scale.get("scale", 0) > 0:
                raise self._wrong("counters.loss_scale.scale", scale.get("scale"), "a number more than 0")
            for name in ("hysteresis_left", "good_steps"):
                self._whole(f"counters.loss_scale.{name}", scale.get(name))
        self._list("counters.cohorts", counters.get("cohorts", []), self._cohort)
        return dict(counters)

    def _cohort(self, field: str, value: Any) -> None:
        cohort = self._dict(field, value)
        self._whole(f"{field}.group", cohort.get("group"))
        self._list(f"{field}.params", cohort.get("params"), self._text)
        self._numbers(f"{field}.counters", cohort.get("counters"))
        if cohort.get("scalars") is not None:
            self._numbers(f"{field}.scalars", cohort["scalars"])
        elif "scalars" not in cohort:
            raise self._wrong(f"{field}.scalars", None, "an object, or null")

    def _entry(self, field: str, value: Any, files: dict[str, int]) -> Entry:
        if not isinstance(value, list) or len(value) != 6:
            raise self._wrong(field, value, "[file, dtype, shape, first byte, bytes, crc32]")
        file, dtype, shape, begin, nbytes, crc32 = value
        if not isinstance(file, str) or file not in files:
            raise self._wrong(f"{field}: file", file, "one of files")
        sizes = tuple(self._list(f"{field}: shape", shape, self._whole))
        entry = Entry(
            file,
            self._text(f"{field}: dtype", dtype),
            sizes,
            self._whole(f"{field}: first byte", begin, 8),
            self._whole(f"{field}: bytes", nbytes),
            self._whole(f"{field}: crc32", crc32, 0, 2**32 - 1),
        )
        kind = entry.torch_dtype_or_none
        if kind is None:
            raise self._wrong(f"{field}: dtype", dtype, "a dtype of safetensors that torch has")
        wanted = kind.itemsize * math.prod(sizes)
        if math.prod(size for size in sizes if size) > 2**60:
            raise self._wrong(f"{field}: shape", shape, "sizes of a tensor")
        if nbytes != wanted:
            raise self._wrong(f"{field}: bytes", nbytes, f"{wanted}, those of {dtype} {list(sizes)}")
        if begin + nbytes > files[file]:
            raise self._wrong(f"{field}: first byte", begin, f"a tensor within the {files[file]} bytes of {file}")
        return entry
