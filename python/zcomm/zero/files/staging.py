"""Folders and files that appear whole or not at all: written next to their place, synced, then moved by one rename.

An existing folder is exchanged atomically (renameat2 of Linux). If the file system cannot, the old folder is first set
aside as ``.NAME.previous``, which ``durable.find`` knows. The next save removes the remains of a killed save.
Conditions that would make the rename fail are checked before the first write.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
from pathlib import Path

from zcomm.zero.files import durable
from zcomm.zero.files.claim import Claim
from zcomm.zero.files.folder import remove_unread

CONFIG, GENERATION = "config.json", "generation_config.json"  # of a transformers model: the manifest lists neither


class NewFolder:
    """The folder ``path``, which is written next to its place ``final`` and renamed to it by ``put``.

    Raises: FileExistsError if ``final`` holds anything but a checkpoint, because that would be lost. OSError (EBUSY)
    for a mount point, and if another save is writing to ``final``.
    """

    def __init__(self, final: Path) -> None:
        self.final = final = durable.resolved(final)
        durable.make_folders(final.parent)
        self._claim = Claim(final)
        try:
            _check_place(final)
            _remove_left(final)
            self.path = _new_folder(final)
            self._shown = False
        except BaseException:
            self._claim.release()
            raise

    def put(self) -> None:
        """Rename it to ``final``; then remove the old folder, and a folder that a killed save had set aside."""
        folder, final, previous = self.path, self.final, durable.previous_of(self.final)
        durable.sync_folder(folder)
        durable.before_write("rename")
        if not final.exists():
            os.rename(folder, final)
        elif not durable._exchange(folder, final):
            remove_unread(previous)
            if previous.exists():  # it is being read: the next save removes it
                os.rename(previous, _new_folder(final))
            os.rename(final, previous)
            durable.before_write("rename the new one")
            os.rename(folder, final)
        self._shown = True  # from here on ``path`` is the old folder, which remains until the new one is synced
        durable.sync_folder(final.parent)
        for old in (folder, previous):
            remove_unread(old)
        self._claim.release()

    def discard(self) -> None:
        """Remove the folder unless ``put`` has renamed it, and release the claim."""
        if not self._shown:
            shutil.rmtree(self.path, ignore_errors=True)
        self._claim.release()

    def __enter__(self) -> NewFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()


class NewFile:
    """The file ``path``, which is written next to its place ``final`` and renamed to it by ``put``.

    Raises: OSError (EBUSY) if another save is writing to ``final``.
    """

    def __init__(self, final: Path) -> None:
        self.final = final = durable.resolved(final)
        durable.make_folders(final.parent)
        if final.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a folder is there already", str(final))
        self._claim = Claim(final)
        self.path = final.with_name(f".{final.name}.saving")
        try:
            self.path.unlink(missing_ok=True)
        except BaseException:
            self._claim.release()
            raise

    def put(self) -> None:
        """Rename it to ``final``."""
        durable.before_write(f"rename {self.final.name}")
        os.replace(self.path, self.final)
        durable.sync_folder(self.final.parent)
        self._claim.release()

    def discard(self) -> None:
        """Remove the file unless ``put`` has renamed it, and release the claim."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._claim.release()

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()


def _check_place(final: Path) -> None:
    if _is_mount(final):
        raise OSError(
            errno.EBUSY, "it is a mount point, which cannot be replaced; save into a folder in it", str(final)
        )
    if final.exists() or final.is_symlink():
        obstacle = _obstacle(final)
        if obstacle:
            raise FileExistsError(errno.EEXIST, obstacle, str(final))


def _obstacle(final: Path) -> str:
    """Describe the content of an existing ``final`` that would be lost; "": none."""
    if not _may_go(final):
        return "this is not a checkpoint, it will not be replaced; save elsewhere"
    every = list(final.iterdir())
    folders = [each.name for each in every if each.is_dir() and not each.is_symlink()]
    if folders:
        return f"it holds the folder {folders[0]}, which would be lost with it; save elsewhere, or move that"
    names, listed = {each.name for each in every}, _listed_files(final)
    if listed is None and names:
        return "its manifest cannot be read, so its other contents are unknown; save elsewhere, or remove it"
    foreign = sorted(names - (listed or set()))
    if foreign:
        return f"it holds {foreign[0]}, which no save has written and which would be lost; save elsewhere, or move that"
    return ""


def _listed_files(final: Path) -> set[str] | None:
    """Return the files that a save wrote into the checkpoint ``final``; None: its manifest cannot be read."""
    try:
        values = json.loads((final / "manifest.json").read_bytes().partition(b"\n")[2])
        return {"manifest.json", CONFIG, GENERATION, *map(str, values["files"])}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _is_mount(final: Path) -> bool:
    """Return True for a mount point, also a bind mount of the same file system, which has the same device number."""
    if os.path.ismount(final):
        return True
    real = os.path.realpath(final)
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            points = [line.split()[4] for line in file]
    except (OSError, IndexError):
        return False
    return os.fsencode(real) in [re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), each) for each in points]


def _may_go(final: Path) -> bool:
    """Return True for an empty folder, or one with a manifest.json that begins as a checkpoint's."""
    try:
        with (final / "manifest.json").open("rb") as file:
            return b"zcomm checkpoint" in file.read(64)
    except OSError:
        return final.is_dir() and not any(final.iterdir())


def _new_folder(final: Path) -> Path:
    for number in itertools.count():
        path = final.parent / f".{final.name}.saving-{os.getpid()}{number or ''}"
        with contextlib.suppress(FileExistsError):  # an old folder that is being read
            path.mkdir(mode=0o700)
            break
    return path


def _remove_left(final: Path) -> None:
    """Remove the remains of killed saves of this folder. The claim is held, so that no other save is running."""
    ours = re.compile(rf"\.{re.escape(final.name)}\.saving-[0-9]+")
    for name in os.listdir(final.parent):
        if ours.fullmatch(name):
            remove_unread(final.parent / name)
