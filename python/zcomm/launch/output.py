"""Output of the ranks, forwarded to the launcher's own stdout and stderr line by line; the last lines are kept.

Several ranks' progress bars would overwrite each other (a carriage return leads back to one line): their states become
lines, at most one a second. A traceback that another rank has shown already becomes one line.
Invariant: a line of one rank is never cut by another's. Nothing here blocks on a rank; it may block on the reader of
the launcher's output, which is the usual back-pressure of a pipe.
Thread rule: one thread, the supervisor's event loop.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

_TAIL_LINES = 20
_LONGEST_NBYTES = 1 << 16  # a line longer than this is passed on in pieces
_BAR_S = 1.0  # between two states of a progress bar
_TRACEBACK = b"Traceback (most recent call last):"
_LONGEST_TRACEBACK = 2000  # lines
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")  # a bare carriage return ends a progress bar's line
_INTERRUPT = re.compile(
    rb"(?:^Exception ignored in.*\n)?^Traceback \(most recent call last\):\n"
    rb"(?:(?: .*)?\n)*?(?:KeyboardInterrupt|(?:zcomm\.)?PeerLost).*\n?"
    rb"(?:\n(?:During handling|The above exception).*\n\n)?",
    re.MULTILINE,
)


class ReaderGone(Exception):
    """Error raised when the reader of the launcher's output has closed it."""


class Stream:
    """One pipe from one rank.

    prefix: put before each line. target: descriptor of the launcher's own stream. tee: file for the raw bytes.
    seen: lines already shown, if each is shown only once; shared by the streams of all ranks. tracebacks: the rank of
    each traceback already shown; shared, too. If no other rank is shown, progress bars keep their line.
    shown: False keeps the last lines, and forwards nothing. sieve: called with each line first; returns the lines to
    show in its place.
    """

    def __init__(
        self,
        source: int,
        target: int,
        prefix: bytes = b"",
        tee: BinaryIO | None = None,
        seen: set[bytes] | None = None,
        *,
        tracebacks: dict[bytes, int] | None = None,
        rank: int = 0,
        alone: bool = False,
        shown: bool = True,
        sieve: Callable[[bytes], list[bytes]] | None = None,
    ) -> None:
        os.set_blocking(source, False)
        self.source = source
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.exception = ""
        """Last line of the last traceback that was shown, if nothing followed it."""
        self._tracebacks = tracebacks
        self._rank = rank
        self._alone = alone
        self._shown = shown
        self._sieve = sieve
        self._block: list[bytes] = []  # of a traceback that is not complete yet
        self._bar_at = 0.0
        self._bar = b""  # state of a progress bar that was not shown
        self._target = target
        self._prefix = prefix
        self._tee = tee
        self._seen = seen
        self._partial = b""
        self._held: list[bytes] | None = None

    def hold(self) -> None:
        """Keep further lines back until `close`, which drops the tracebacks of an interrupt."""
        if self._held is None:
            self._held = []

    def pump(self) -> bool:
        """Forward all available output; return False at the end of the stream."""
        while True:
            try:
                content = os.read(self.source, 1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not content:
                return False
            if self._tee:
                self._tee.write(content)
                self._tee.flush()
            self._split(content)

    def close(self) -> None:
        """Forward the remaining output and close the pipe."""
        self.pump()
        os.close(self.source)
        if self._tee:
            self._tee.close()
        rest, self._partial = self._partial, b""
        if rest:
            self._emit([rest + b"\n"])
        if self._held:
            held, self._held = b"".join(self._held), None
            self._emit(_LINE.findall(_INTERRUPT.sub(b"", held)))
        rest_of_block, self._block = self._block, []
        if self._bar:
            rest_of_block.append(self._bar + b"\n")
        self._write(rest_of_block)

    def _split(self, content: bytes) -> None:
        content = self._partial + content
        lines = _LINE.findall(content)
        self._partial = content[sum(map(len, lines)) :]
        if self._partial.endswith(b"\r") or len(self._partial) > _LONGEST_NBYTES:
            lines.append(self._partial)
            self._partial = b""
        self._emit(lines)

    def _emit(self, lines: list[bytes]) -> None:
        if self._sieve is not None:
            lines = [left for line in lines for left in self._sieve(line)]
        if self._held is not None:
            self._held += lines
            return
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self.tail.append(text[:500])
        if not self._shown:
            return
        if not self._alone:
            lines = [shown for line in lines for shown in self._without_bar(line)]
        if self._tracebacks is not None:
            lines = [shown for line in lines for shown in self._folded(line, self._tracebacks)]
        self._write(lines)

    def _without_bar(self, line: bytes) -> list[bytes]:
        """Return a state of a progress bar as a line, or nothing if the last one was shown just now."""
        if not line.endswith(b"\r"):
            self._bar = b""
            return [line]
        text = line.rstrip(b"\r")
        if not text:
            return []
        if time.monotonic() - self._bar_at < _BAR_S:
            self._bar = text
            return []
        self._bar_at, self._bar = time.monotonic(), b""
        return [text + b"\n"]

    def _folded(self, line: bytes, tracebacks: dict[bytes, int]) -> list[bytes]:
        """Return the lines to show; lines of a traceback are held until it is complete."""
        if not self._block:
            if line.rstrip() == _TRACEBACK:
                self._block = [line]
                return []
            if line.strip():
                self.exception = ""
            return [line]
        self._block.append(line)
        if line.startswith(b" ") and len(self._block) < _LONGEST_TRACEBACK:
            return []
        block, self._block = self._block, []
        self.exception = line.decode("utf-8", "replace").strip()
        first = tracebacks.setdefault(b"".join(block[:-1]), self._rank)
        if first == self._rank:
            return block
        return [line.rstrip() + f" (traceback: as rank {first}'s above)\n".encode()]

    def _write(self, lines: list[bytes]) -> None:
        if self._seen is not None:
            lines = [line for line in lines if not line.strip() or line not in self._seen]
            if len(self._seen) < 10_000:
                self._seen.update(lines)
        if lines:
            write_all(self._target, b"".join(self._prefix + line for line in lines))


def write_all(target: int, content: bytes) -> None:
    """Write everything. Raises: ReaderGone when the other side has closed."""
    view = memoryview(content)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:  # another process made this stdout non-blocking: wait until it is writable
            select.select([], [target], [])
        except (BrokenPipeError, OSError) as error:
            raise ReaderGone from error
