"""A new file next to the one that it will replace, exclusive to one opener.

All threads of a process share its id, and processes on two hosts or in two containers may have equal ids. If openers
shared a name, one would truncate the file that another still writes or has mapped, and SIGBUS would end that process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[int]:
    """Create an empty, hidden file next to ``path``, and rename it to ``path`` when the block ends without an error.

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
