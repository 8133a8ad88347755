"""The demo's text: bytes to train on, bytes to validate on, and the unigram entropy that a model must beat.

Default text: the standard library's own ``.py`` sources, in path order. A user's text: a file, or a directory's files.
Invariant: the same machine and the same arguments give the same bytes on every rank, so that no rank has to send them.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Installed packages and tests are not the library; tables and generated text (encodings, pydoc_data) teach little.
_SKIPPED = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
_BINARY_SUFFIXES = {".gz", ".zip", ".png", ".jpg", ".so", ".pyc", ".bin", ".pt", ".safetensors"}
_MAX_NBYTES = 8 << 20
_TINY_NBYTES = 4096  # below this neither training nor validation has one full context


class DataError(ValueError):
    """Error of a text that cannot be used; the message names the path and the remedy."""


@dataclass(frozen=True)
class Text:
    """Training and validation bytes (uint8 arrays) and their source."""

    source: str
    file_count: int
    train: np.ndarray
    validation: np.ndarray


def load_text(path: str | None = None, max_nbytes: int = _MAX_NBYTES) -> Text:
    """Read the text and split it: nine parts to train on, one part to validate on.

    With ten files or more every tenth file validates, so that both parts have the same mixture. With fewer, the last
    tenth of the bytes does.
    Raises: DataError if the path is missing, unreadable, or holds less than 4096 bytes of text.
    """
    files = _library_files() if path is None else _user_files(Path(path).expanduser())
    source = "Python's standard library" if path is None else str(path)
    contents = _read(files, max_nbytes)
    total = sum(len(content) for content in contents)
    if total < _TINY_NBYTES:
        raise DataError(f"{source} holds {total} bytes of UTF-8 text; training needs at least {_TINY_NBYTES}")
    if len(contents) >= 10:
        train = b"".join(content for i, content in enumerate(contents) if i % 10 != 9)
        validation = b"".join(content for i, content in enumerate(contents) if i % 10 == 9)
    if len(contents) < 10 or min(len(train), len(validation)) < total // 20:  # a few huge files: split by bytes
        whole = b"".join(contents)
        train, validation = whole[: -(total // 10)], whole[-(total // 10) :]
    return Text(source, len(contents), np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8))


def unigram_entropy(train: np.ndarray, validation: np.ndarray) -> float:
    """Return the mean cost in nats per byte of `validation` under the byte frequencies of `train` (add-one smoothed).

    This is the loss of the best model that looks at no context at all.
    """
    counts = np.bincount(train, minlength=256).astype(np.float64) + 1.0
    cost = -np.log(counts / counts.sum())
    seen = np.bincount(validation, minlength=256)
    return float((seen * cost).sum() / max(1, seen.sum()))


def bits_per_byte(nats: float) -> float:
    """Return nats per byte as bits per byte."""
    return nats / math.log(2.0)


def _library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in root.rglob("*.py") if not _SKIPPED.intersection(f.relative_to(root).parts[:-1])]
    if not files:
        raise DataError(f"no .py files in {root}: this Python carries no sources; give a text with --data PATH")
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def _user_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [f for f in path.rglob("*") if f.is_file() and f.suffix.lower() not in _BINARY_SUFFIXES]
    files = [f for f in files if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    if not files:
        raise DataError(f"{path}: no files in this directory (--data)")
    return sorted(files, key=lambda f: f.relative_to(path).as_posix())


def _read(files: list[Path], max_nbytes: int) -> list[bytes]:
    """Return the contents of the files that are UTF-8 text, up to `max_nbytes` in all."""
    contents: list[bytes] = []
    left = max_nbytes
    for file in files:
        if left <= 0:
            break
        try:
            with file.open("rb") as stream:
                content = stream.read(left)
            content.decode("utf-8", "strict" if len(content) < left else "ignore")  # a cut may split a character
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise DataError(f"{file}: {error.strerror} (--data)") from None
        if content:
            contents.append(content)
            left -= len(content)
    return contents
