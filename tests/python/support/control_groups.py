"""A control group of the kernel with a memory limit, if this user can make one: a wall for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_JOIN = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True)
class Wall:
    """A limit on all memory of the processes that ``command`` starts. name: the mechanism."""

    name: str
    prefix: tuple[str, ...]
    folder: Path | None = None  # of a group that was made here

    def command(self, *words: str) -> list[str]:
        """Return the command that runs ``words`` behind the wall."""
        return [*self.prefix, *words]

    @property
    def peak_nbytes(self) -> int | None:
        """Peak memory of the group, including page cache; None if it is unknown."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if self.folder is not None and (self.folder / name).exists():
                return int((self.folder / name).read_text())
        return None


class NoWall(Exception):
    """Error: no group can be made on this machine; the text has the reasons."""


@contextlib.contextmanager
def wall(limit_nbytes: int) -> Iterator[Wall]:
    """Make a group; it is removed afterwards. Raises: NoWall."""
    reasons = []
    for make in (_version_1, _version_2):
        try:
            folder = make(limit_nbytes)
        except (OSError, NoWall) as error:
            reasons.append(str(error))
            continue
        name = f"control group, version {1 if make is _version_1 else 2}"
        try:
            yield Wall(name, ("sh", "-c", _JOIN, str(folder / "cgroup.procs")), folder)
        finally:
            _remove(folder)
        return
    for user in ((), ("--user",)):
        prefix = ("systemd-run", *user, "--scope", "--quiet", "--collect")
        prefix += ("-p", f"MemoryMax={limit_nbytes}", "-p", "MemorySwapMax=0", "--")
        why = _why_not(*prefix, "true")
        if why is None:
            yield Wall(" ".join(prefix[: 1 + len(user)]), prefix)
            return
        reasons.append(why)
    raise NoWall("; ".join(reasons))


def _own(controller: str) -> str:
    """Return the path of this process's group. Raises: NoWall."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    raise NoWall(f"no control groups with {controller or 'version 2'}")


def _version_1(limit_nbytes: int) -> Path:
    folder = Path(f"/sys/fs/cgroup/memory{_own('memory')}", f"zcomm-test-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(limit_nbytes))
        with contextlib.suppress(OSError):  # a kernel that does not count swap
            (folder / "memory.memsw.limit_in_bytes").write_text(str(limit_nbytes))
    except OSError:
        _remove(folder)
        raise
    return folder


def _version_2(limit_nbytes: int) -> Path:
    own = Path(f"/sys/fs/cgroup{_own('')}")
    why = NoWall(f"{own}: no group below it, or beside it, has memory.max")
    for above in (own, own.parent):
        folder = above / f"zcomm-test-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir()
        except OSError as error:
            why = NoWall(str(error))
            continue
        try:
            (folder / "memory.max").write_text(str(limit_nbytes))
            with contextlib.suppress(OSError):
                (folder / "memory.swap.max").write_text("0")
            return folder
        except OSError as error:  # the memory controller is not for groups below `above`
            why = NoWall(str(error))
            _remove(folder)
    raise why


def _remove(folder: Path) -> None:
    for _ in range(50):  # the kernel may still count a process that has ended
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return


def _why_not(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return f"no {command[0]}"
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=20, env=os.environ, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[0]} hangs"
    return None if tried.returncode == 0 else (tried.stderr.strip() or f"exit status {tried.returncode}")
