"""Transfer of ranks' records from the nodes to the front's report of a run (``zcomm run --report DIR``).

DIR is a folder of the front's host. On a node the ranks write into its private directory. When they have ended, the
files go to the front, compressed, as marked lines of stderr.
Invariant: a file of the report is whole, or absent.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from zcomm.launch.job import Job
from zcomm.launch.payload import report_line
from zcomm.watch.rank import REPORT, records_name

_PIECE = 3600  # characters: with the rest of its line below a pipe's atomic write


def written_here(job: Job, private: Path) -> Job:
    """Return the job with ``private`` as the folder of its ranks' records, if the front wants a report."""
    if REPORT not in job.environment:
        return job
    return replace(job, environment={**job.environment, REPORT: str(private)})


def record_lines(marker: bytes, folder: Path) -> Iterator[bytes]:
    """Yield the lines that carry the records in ``folder`` to the front. Raises: OSError."""
    for path in sorted(folder.glob(records_name("*"))):
        text = base64.b64encode(zlib.compress(path.read_bytes(), 1)).decode()
        for begin in range(0, len(text), _PIECE):
            left = max(0, len(text) - begin - _PIECE)
            told = {"records": path.name, "at": path.stat().st_mtime, "left": left}
            yield report_line(marker, {**told, "piece": text[begin : begin + _PIECE]})


class Records:
    """Files of records that the front assembles. folder: the report's.

    An elastic job may start a rank on one node and later on another: the file that was written last counts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun: dict[tuple[str, float], str] = {}
        self._written_at: dict[str, float] = {}

    def add(self, told: dict[str, Any]) -> None:
        """Store a piece, and write the file when it is whole.

        Raises: ValueError, KeyError for an invalid piece; OSError.
        """
        name, at = Path(told["records"]).name, float(told["at"])
        text = self._begun.pop((name, at), "") + told["piece"]
        if told["left"]:
            self._begun[name, at] = text
        elif at >= self._written_at.get(name, at):
            try:
                content = zlib.decompress(base64.b64decode(text))
            except zlib.error as error:
                raise ValueError(str(error)) from None
            (self._folder / name).write_bytes(content)
            self._written_at[name] = at
