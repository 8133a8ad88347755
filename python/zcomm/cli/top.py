"""`zcomm top`: the ranks of a running job, live, or of an ended job, from the pages that ranks write.

A frame (``watch.jobs.frame``) is plain data: ``--json`` prints it, another host sends it, and this module draws it.
Invariant: every text in a frame is drawn without control characters and without rich's markup.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zcomm.cli.parser import Commands
from zcomm.launch.errors import UserError
from zcomm.watch.folder import pages_folder
from zcomm.watch.jobs import choose, frame, read_jobs, time_words
from zcomm.watch.page import TIERS, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_DESCRIPTION = """\
Show the ranks of a job on this host, live: step, loss, the seconds of a step by part and for which rank they wait,
memory by tier against ZeRO's formula, GB/s, and where each rank is. Slow, stopped and dead ranks are named in words.
Without JOB: the one job that runs; of several the list; if none runs, the last one that ended."""
_HOST = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.:@%-]*")
_SSH_S = 30.0
_COLORS = {"running": "green", "ended": "", "stopped": "yellow", "failed": "red", "dead": "red"}
Frame = dict[str, Any]


def add_parser(commands: Commands) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "top",
        help="show the ranks of a running job, and the ranks that they wait for",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="begin of a job's name, a script's name or a rank's pid")
    parser.add_argument("--list", action="store_true", help="list all jobs, those that have ended, too")
    parser.add_argument("--once", action="store_true", help="print one frame as text")
    parser.add_argument("--json", action="store_true", help="print one frame as JSON, for programs")
    parser.add_argument("--host", metavar="HOST", help="look on that host, by ssh, with this Python's path")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between frames (default 1)")
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Show a job and return the exit code: 1 if there is none."""
    if not 0.1 <= args.interval <= 3600:
        raise UserError(f"--interval {args.interval:g}: expected 0.1 to 3600 seconds")
    if args.list and args.job is not None:
        raise UserError(f"--list {args.job}: --list takes no JOB")
    wanted = "" if args.list else args.job  # all names begin with ""
    read = _from_host(args.host, wanted) if args.host is not None else lambda: _from_here(wanted)
    frames = read()
    if args.json:
        print(json.dumps({"jobs": frames}, indent=1, allow_nan=False))
        return 0 if frames else 1
    if not frames:
        raise UserError(_nothing(args.job, args.host), exit_code=1)
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if args.list:
        console.print(_list(frames))
        return 0
    if len(frames) > 1 or args.once or not console.is_terminal or not frames[0]["running"]:
        console.print(_drawn(frames))
        return 0
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it
        _live(console, read, frames, args.interval)
    return 0


def _live(console: Any, read: Callable[[], list[Frame]], frames: list[Frame], interval_s: float) -> None:
    """Draw frames until the job ends."""
    from rich.live import Live

    name = frames[0]["job"]
    with Live(_drawn(frames), console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while frames and frames[0]["running"]:
            time.sleep(interval_s)
            frames = [each for each in read() if each["job"] == name] or frames[:0]
            if frames:
                live.update(_drawn(frames), refresh=True)


def _from_here(job: str | None) -> list[Frame]:
    """Return the frames of this host's jobs."""
    try:
        folder, now = pages_folder(), time.time()
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
    return [frame(each, now) for each in choose(read_jobs(folder, now), job)]


def _from_host(host: str, job: str | None) -> Callable[[], list[Frame]]:
    """Return a function that reads the frames of another host's jobs. Raises: UserError for an invalid name."""
    if not _HOST.fullmatch(host):
        raise UserError(f"--host {host!r}: expected the name or address of a host, or USER@HOST")
    there = [sys.executable, "-m", "zcomm.cli", "top", "--json", *([] if job is None else ["--", job])]
    if paths := os.environ.get("PYTHONPATH"):
        there = ["env", f"PYTHONPATH={paths}", *there]  # zcomm may be found by it, as for `zcomm run`
    remote = shlex.join(there)  # ssh sends one string to the remote shell
    argv = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--", host, remote]

    def read() -> list[Frame]:
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SSH_S
            )
        except FileNotFoundError:
            raise UserError("--host: no ssh is installed here") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"--host {host}: no answer within {_SSH_S:.0f} s") from None
        try:
            return [_checked(each) for each in json.loads(done.stdout)["jobs"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise UserError(f"--host {host}: {printable(last)} (ssh ended with {done.returncode})") from None

    return read


def _checked(given: Any) -> Frame:
    """Return a frame that can be drawn. Raises: KeyError, TypeError, ValueError, AttributeError."""
    _drawn([given])
    return dict(given)


def _nothing(job: str | None, host: str | None) -> str:
    where = f"on {host}" if host is not None else f"in {pages_folder() or 'no folder (ZCOMM_WATCH=0)'}"
    what = "no job of this user" if job is None else f"{job}: no such job of this user"
    return f"{what} has a page {where}; a job has one from zcomm.init() on (and the same TMPDIR is needed)"


# --- drawing --------------------------------------------------------------------------------------------------------


def _drawn(frames: Sequence[Frame]) -> RenderableType:
    from rich.console import Group

    if len(frames) > 1:
        listed: RenderableType = _list(frames)
        return listed
    (one,) = frames
    parts: list[RenderableType] = [_text(_title(one), "bold"), "", _times(one), "", _places(one), "", _sizes(one)]
    if any(rank["drives"] for rank in one["ranks"]):
        parts += ["", _drives(one)]
    parts += ["", *(_text(f"* {finding}", "yellow") for finding in one["findings"])]
    if not one["findings"]:
        parts.append(_text("* all ranks run, and none keeps the others waiting" if one["running"] else "* has ended"))
    return Group(*parts)


def _text(words: Any, style: str = "") -> Any:
    from rich.text import Text

    return Text(printable(str(words)), style=style)


def _title(one: Frame) -> str:
    state = "runs since" if one["running"] else "ended; began"
    ago = "" if one["running"] else " ago"
    return (
        f"{one['name']}  job {one['job']}  {one['world_size']} ranks, {one['backend']}, on {one['host']}  "
        f"{state} {time_words(one['age_s'])}{ago}"
    )


def _table(headings: str) -> Any:
    """Return an empty table. headings: by "|"; "<": on the left. Narrow, for terminals of 80 columns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings.split("|"):
        left = heading.startswith("<")
        table.add_column(heading.removeprefix("<"), justify="left" if left else "right", overflow="fold")
    return table


def _list(frames: Sequence[Frame]) -> Any:
    table = _table("<job|<script|<state|ranks|step|began, ago")
    for each in frames:
        states = {rank["state"] for rank in each["ranks"]}
        step = max(rank["step"] for rank in each["ranks"])
        state = ", ".join(sorted(states))
        row = (each["job"], each["name"], state, each["world_size"], step, time_words(each["age_s"]))
        table.add_row(*map(_text, row))
    return table


def _times(one: Frame) -> Any:
    """Return the seconds of a step by part, in milliseconds."""
    table = _table("rank|<state|step|loss|ms/step|compute|comm.|waits|<for|swap")
    for rank in one["ranks"]:
        for_rank = "" if rank["waits_for"] is None else f"rank {rank['waits_for']}"
        loss = "-" if rank["loss"] is None else f"{rank['loss']:.4g}"
        parts = [_ms(rank[name]) for name in ("step_s", "compute_s", "communication_s", "waiting_s")]
        row = (rank["rank"], rank["state"], rank["step"], loss, *parts, for_rank, _ms(rank["swap_s"]))
        cells = [_text(cell) for cell in row]
        cells[1] = _text(rank["state"], _COLORS.get(rank["state"], ""))
        table.add_row(*cells)
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _places(one: Frame) -> Any:
    """Return each rank's phase, call and line, and the time since it reached them."""
    table = _table("rank|<doing|<call|<line|since")
    for rank in one["ranks"]:
        if rank["state"] in ("ended", "failed"):
            row = (rank["rank"], rank["state"], "", "", time_words(rank["updated_s"]))
        else:
            call = f"{rank['operation']}()" if rank["operation"] else ""
            row = (rank["rank"], rank["phase"], call, rank["site"], time_words(rank["place_age_s"]))
        table.add_row(*map(_text, row))
    return table


def _sizes(one: Frame) -> Any:
    """Return the memory of the used tiers next to the plan's, and the rate between ranks."""
    ranks = one["ranks"]
    used = [tier for tier in TIERS if any(each[kind][tier] for each in ranks for kind in ("memory", "slots", "plan"))]
    largest = max((each["memory"][tier] for each in ranks for tier in used), default=0.0)
    unit, size = ("GiB", 2**30) if largest >= 20 * 2**30 else ("MiB", 2**20)
    table = _table("|".join([f"{unit}: rank", *(f"{tier}|plan|slots" for tier in used), "link GB/s"]))
    for rank in ranks:
        row = [str(rank["rank"])]
        for tier in used:
            row += [_size(rank[kind][tier], size) for kind in ("memory", "plan", "slots")]
        table.add_row(*map(_text, [*row, _rate(rank["link_gbps"])]))
    return table


def _size(nbytes: float | None, unit: int) -> str:
    return "-" if nbytes is None else f"{nbytes / unit:.{0 if nbytes >= 100 * unit else 1}f}"


def _drives(one: Frame) -> Any:
    table = _table("rank|<drive|GB/s read|written")
    for rank in one["ranks"]:
        for drive in rank["drives"]:
            row = (rank["rank"], drive["path"], _rate(drive["read_gbps"]), _rate(drive["write_gbps"]))
            table.add_row(*map(_text, row))
    return table


def _rate(gbps: float | None) -> str:
    return "-" if gbps is None else f"{gbps:.2f}"
