"""A new file next to the one that it will replace, for one opener alone.

A process id is one for all threads of a process, and may be equal on two hosts or in two containers. Under a name that
openers share, one truncates the file that another is still writing, or has mapped: SIGBUS ends that process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[int]:
    """Make an empty, hidden file next to ``path``; it takes the name when the block ends, unless it raises.

    Yields the file's descriptor (reading and writing), which is closed at the end. Raises: OSError.
    """
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        yield file
        os.rename(hidden, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(hidden)
        raise
    finally:
        os.close(file)
