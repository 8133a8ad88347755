"""`zcomm doctor`: tries the features of this machine that zcomm can use, and says how to enable missing ones.

Each check returns findings; a check that itself fails is a finding too. Exit code 1 if any finding is a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import zcomm
from zcomm.cli.doctor_gpu import Finding
from zcomm.cli.parser import Commands
from zcomm.launch.environment import core_count

if TYPE_CHECKING:
    from rich.console import Console


_LAUNCHER_VARIABLES = ("ZCOMM_INIT_METHOD", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_STYLES = {"ok": "green", "note": "yellow", "fail": "bold red"}
_LOW_MEMLOCK_NBYTES = 64 << 20


def add_parser(commands: Commands) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "doctor", help="check this machine, with a remedy for each finding", allow_abbrev=False
    )
    parser.add_argument("--dir", type=Path, default=Path("."), help="directory to check for swapping (default: here)")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the tuning table, the speeds of this machine and its first GPU, and the drive of --dir, first",
    )
    parser.add_argument("--all", action="store_true", help="list environment variables that are not set, too")
    parser.set_defaults(command=command)


def command(args: argparse.Namespace) -> int:
    """Print all findings."""
    if args.calibrate:
        from zcomm.cli import calibrate, calibrate_gpu, calibrate_speeds, calibrate_swap

        print("measuring the tuning table (some seconds) ...", flush=True)
        calibrate.calibrate()
        print("measuring the speeds for `zcomm plan` (some seconds) ...", flush=True)
        calibrate_speeds.calibrate()
        try:
            if calibrate_gpu.calibrate() is not None:
                print("measured the speeds of the first GPU", flush=True)
        except (OSError, RuntimeError) as error:
            print(f"the GPU was not measured: {error}", flush=True)
        print(f"measuring the drive of {args.dir} (some seconds) ...", flush=True)
        try:
            calibrate_swap.calibrate(args.dir)
        except OSError as error:
            print(f"the drive was not measured: {error}", flush=True)
    findings = list(examine(args.dir, args.all))
    show(findings)
    return 1 if any(finding.state == "fail" for finding in findings) else 0


def show(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print the findings and their summary; in color if stdout is a terminal."""
    from rich.console import Console
    from rich.text import Text

    out = console or Console(highlight=False)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.state:5}", style=_STYLES[finding.state])
        line.append(f" {finding.name:{width}}  {finding.value}", style="default")
        out.print(line, soft_wrap=True)
        if finding.mend:
            out.print(Text(f"{'':5} {'':{width}}  -> {finding.mend}", style="cyan"), soft_wrap=True)
    out.print(Text(f"\n{summary(findings)}", style="bold"), soft_wrap=True)


def summary(findings: Sequence[Finding]) -> str:
    """Summarize the findings in one line."""
    notes, failures = (sum(finding.state == state for finding in findings) for state in ("note", "fail"))
    found = f"{notes} note{'s' if notes != 1 else ''}"
    if failures:
        return f"{failures} failure{'s' if failures != 1 else ''} to mend before training, {found}"
    return f"{found}, nothing blocks training"


def examine(directory: Path, unset: bool = False) -> Iterator[Finding]:
    """Run all checks, in order. unset: list the environment variables that are not set, too."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions,
        _machine,
        _core,
        _gpus,
        _limits,
        _tuning,
        functools.partial(_swap, directory),
        functools.partial(_variables, unset),
    )
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            name = getattr(check, "func", check).__name__.strip("_")
            yield Finding("fail", name, f"{type(error).__name__}: {error}")
    if not unset:
        yield Finding("ok", "variables", "zcomm doctor --all lists those that are not set")


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "zcomm", zcomm.__version__)
    yield Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")
    for package, state, mend in (
        ("torch", "fail", "pip install torch"),
        ("numpy", "fail", "pip install numpy"),
        ("safetensors", "fail", "pip install safetensors"),
        ("psutil", "fail", "pip install psutil"),
        ("rich", "fail", "pip install rich"),
        ("nvidia-ml-py", "note", "pip install nvidia-ml-py, to see GPUs"),
        ("matplotlib", "note", "pip install matplotlib, for the demo's loss.png"),
    ):
        try:
            yield Finding("ok", package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding(state, package, "not installed", mend)


def _machine() -> Iterator[Finding]:
    yield Finding("ok", "kernel", f"{platform.system()} {platform.release()} {platform.machine()}")
    usable, present = core_count(), os.cpu_count() or 0
    yield Finding("ok", "cores", f"{usable} usable of {present}")
    memory_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("ok", "memory", f"{memory_nbytes / 2**30:.1f} GiB")


def _core() -> Iterator[Finding]:
    from zcomm import _core as core

    isa, best = core.isa(), core.best_isa()
    if isa == best:
        yield Finding("ok", "instruction set", isa)
    else:
        yield Finding("note", "instruction set", f"{isa} (this CPU could run {best})", "unset ZCOMM_ISA")
    yield Finding("ok", "core threads", str(core.threads()))
    built = core.cuda_info()
    if core.cuda_available() or not built.startswith("CUDA"):
        yield Finding("ok", "cuda", built)
    else:
        yield Finding("ok", "cuda", f"not used: the core is built with {built}, and no CUDA device is here")


def _gpus() -> Iterator[Finding]:
    from zcomm import _core as core
    from zcomm.cli.doctor_gpu import findings, speeds
    from zcomm.machine import gpus

    machine = gpus.read()
    yield from findings(machine, core.cuda_info())
    yield from speeds(machine)


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("ok", "memlock", "unlimited")
    elif soft >= _LOW_MEMLOCK_NBYTES:
        yield Finding("ok", "memlock", f"{soft / 2**20:.0f} MiB")
    else:
        mend = "raise it (ulimit -l, or memlock in /etc/security/limits.conf)"
        yield Finding("note", "memlock", f"{soft / 2**10:.0f} KiB", mend)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft < 1024
    yield Finding("note" if low else "ok", "open files", str(soft), "ulimit -n 4096" if low else "")
    with contextlib.suppress(OSError):
        enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().split("[")[1].split("]")[0]
        shmem = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().split("[")[1].split("]")[0]
        collapse = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 1) and shmem != "deny"
        asked = "symmetric memory: asked for (Linux >= 6.1)" if collapse else f"symmetric memory: {shmem}"
        yield Finding("ok", "huge pages", f"private memory: {enabled}, {asked}")


def _tuning() -> Iterator[Finding]:
    from zcomm.machine import tuning

    table = tuning.load()
    measured = table.origin.startswith("measured")
    mend = "" if measured else "zcomm doctor --calibrate measures it"
    yield Finding("ok" if measured else "note", "tuning table", table.origin, mend)
    for kind, words in zip(tuning.KINDS, ("a CPU each", "CPUs shared"), strict=True):
        row = table.rows.get(kind, tuning.Tuning())
        slots = f"slots {row.slot_count} x {row.slot_nbytes >> 10} KiB for private tensors"
        yield Finding("ok", f"ranks with {words}", f"one-shot up to {row.one_shot_nbytes >> 10} KiB, {slots}")


def _swap(directory: Path) -> Iterator[Finding]:
    """Open real swap files in a temporary directory and yield the findings."""
    with tempfile.TemporaryDirectory(prefix="zcomm-doctor-", dir=directory) as own:
        try:
            zcomm.SwapFile(own, 1 << 20, engine="io_uring").close()
            yield Finding("ok", "io_uring", "works")
        except NotImplementedError as error:
            mend = "threads swap instead, with more CPU time; let the kernel or the container allow io_uring"
            yield Finding("note", "io_uring", str(error), mend)
        swap = zcomm.SwapFile(own, 1 << 20)
        direct = bool(swap.stats()["direct"])
        swap.close()
        where = directory.absolute()
        if direct:
            yield Finding("ok", "O_DIRECT", f"works in {where}")
        else:
            mend = "swap goes through the page cache; use a local ext4 or xfs drive"
            yield Finding("note", "O_DIRECT", f"refused in {where}", mend)
    yield _swap_tuning(directory)
    yield Finding("ok", "disk", f"{shutil.disk_usage(directory).free / 2**30:.1f} GiB free in {where}")


def _swap_tuning(directory: Path) -> Finding:
    from zcomm.machine import swap_tuning

    tuned = swap_tuning.load(directory)
    value = f"blocks of {tuned.block_nbytes >> 10} KiB, {tuned.depth} in flight: {tuned.origin}"
    if tuned.origin.startswith("measured") or swap_tuning.drive(directory) is None:
        return Finding("ok", "swap tuning", value)
    return Finding("note", "swap tuning", value, "zcomm doctor --calibrate --dir DIR measures the drive of DIR")


def _variables(unset: bool) -> Iterator[Finding]:
    from zcomm import _core as core
    from zcomm.bootstrap import hosts

    described = {**dict(core.env_variables()), **dict(hosts.VARIABLES)}
    for name, meaning in described.items():
        value = os.environ.get(name)
        if value is None and not unset:
            continue
        yield Finding("ok", name, f"{'unset' if value is None else value}: {meaning}")
    for name in _LAUNCHER_VARIABLES:
        if name in os.environ:
            yield Finding("ok", name, os.environ[name])
