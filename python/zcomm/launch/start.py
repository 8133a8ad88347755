"""Start of a job as its options say: which nodes, which ranks on each, by which launcher.

Precedence of nodes: -n means this host; otherwise the hostfile; otherwise the GPUs of this host, or one rank.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from zcomm.launch import hostfile, runners
from zcomm.launch.environment import exported, read_environment_file
from zcomm.launch.errors import UserError
from zcomm.launch.front import launch
from zcomm.launch.hostfile import Pool
from zcomm.launch.job import Job
from zcomm.launch.nodes import NodeSupervisor
from zcomm.launch.options import DEFAULT_PORT
from zcomm.launch.payload import Payload
from zcomm.machine import gpus

_QUIET = ("warning", "error", "critical")


def start(job: Job, options: argparse.Namespace, ranks: int | None = None) -> int:
    """Start the ranks of ``job`` and return its exit code.

    job: this sets its number of ranks, its place and fields that depend on them. options: see ``options.add_options``.
    ranks: how many, on this host; None: as the hostfile or the GPUs say.
    Raises: ValueError for options, a hostfile or slots that cannot be right; UserError; OSError.
    """
    check_options(options, ranks)
    job = _with_options(job, options)
    pool = None if ranks else _pool(options)
    with _pid_file(options.save_pid):
        if pool is None:
            return _launch_here(_here(job, options, ranks))
        payload = _payload(job, options, pool)
        _check_rank(payload.job)
        if options.no_ssh:
            return _one_node(payload, options.node_rank)
        only = next(iter(pool)) if len(pool) == 1 else None
        if only and not options.force_multi and runners.has_address(only):
            devices = tuple(map(str, pool[only]))
            job = replace(payload.job, world_size=len(devices), devices=devices, port=options.master_port)
            return _launch_here(_sourced(job, options.venv_script))
        runners.check_payload(payload)
        chosen = runners.Options(_split(options.launcher_args), options.ssh_port, options.venv_script)
        return launch(payload.job, NodeSupervisor(payload, chosen))


def program(script: str, is_module: bool, no_python: bool, check: bool = True) -> tuple[list[str], int]:
    """Return the command line of a rank up to its arguments, and the index of --local_rank=N.

    check: look for the script here. Raises: UserError if there is none.
    """
    if is_module and no_python:
        raise UserError("-m and --no-python exclude each other")
    if is_module:
        return [sys.executable, "-m", script], 3
    if no_python:
        return [script], 1
    if script.startswith("-"):
        raise UserError(f"{script}: no such option, and no script; options go before the script")
    if check and not Path(script).is_file():
        raise UserError(f"{script}: no such script")
    return [sys.executable, script], 2


def note(options: argparse.Namespace, text: str) -> None:
    """Print a line about a choice, unless the user wants none."""
    if not options.quiet and options.log_level not in _QUIET:
        print(text, file=sys.stderr, flush=True)


def _split(launcher_args: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(launcher_args))
    except ValueError as error:
        raise ValueError(f"--launcher_args {launcher_args!r}: {error}") from None


def _launch_here(job: Job) -> int:
    _check_rank(job)
    return launch(job)


def _check_rank(job: Job) -> None:
    if job.only_rank is not None and not 0 <= job.only_rank < job.world_size:
        raise ValueError(f"--only-rank {job.only_rank}: ranks are 0 to {job.world_size - 1}")


def check_options(options: argparse.Namespace, ranks: int | None = None) -> None:
    """Refuse options that exclude each other. Raises: ValueError."""
    if options.include and options.exclude:
        raise ValueError("--include and --exclude exclude each other")
    counts = options.num_nodes >= 0 or options.num_gpus >= 0
    if counts and (options.include or options.exclude):
        raise ValueError("--num_nodes and --num_gpus exclude --include and --exclude")
    if ranks is not None:
        for word in ("hostfile", "include", "exclude", "num_nodes", "num_gpus"):
            if getattr(options, word) not in (None, "", -1):
                raise ValueError(f"-n excludes --{word}: the slots of the hosts are the number of ranks")
    for word in ("master_port", "ssh_port"):
        port = getattr(options, word)
        if port is not None and not 1 <= port <= 65535:
            raise ValueError(f"--{word} {port}: expected a port, 1 to 65535")
    if options.master_addr:
        hostfile.check_host(options.master_addr)
    if options.bind_core_list is not None and not options.bind_cores_to_rank:
        raise ValueError("--bind_core_list needs --bind_cores_to_rank")
    if options.elastic_training and options.no_local_rank:
        raise ValueError("--elastic_training never gives --local_rank; leave --no_local_rank out")
    if not options.elastic_training and (options.min_elastic_nodes, options.max_elastic_nodes) != (-1, -1):
        raise ValueError("--min_elastic_nodes and --max_elastic_nodes need --elastic_training")


def _with_options(job: Job, options: argparse.Namespace) -> Job:
    cores = None
    if options.bind_cores_to_rank:
        cores = options.bind_core_list or ""
    logs = options.enable_each_rank_log
    if logs != "None":
        if job.tee:
            raise ValueError("--enable_each_rank_log and --tee exclude each other")
        if Path(logs).is_file():
            raise ValueError(f"--enable_each_rank_log {logs}: is a file; expected a folder")
        job = replace(job, tee=Path(logs), shown=False)
    return replace(job, cores=cores, local_rank_at=None if options.no_local_rank else job.local_rank_at)


def _pool(options: argparse.Namespace) -> Pool | None:
    """Return the hosts and slots that the options choose; None: this host, without a choice of GPUs."""
    file = Path(options.hostfile) if options.hostfile else hostfile.DEFAULT
    if options.hostfile and not file.exists():
        raise ValueError(f"--hostfile {file}: no such file")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    is_chosen = bool(options.include or options.exclude) or options.num_nodes >= 0 or options.num_gpus >= 0
    if file.exists():
        whole = hostfile.slots_of(hostfile.read(file))
    elif not is_chosen and not options.force_multi:
        return None
    else:
        if visible:
            note(options, f"note: CUDA_VISIBLE_DEVICES={visible} is not used; --include and --num_gpus choose the GPUs")
        if options.num_nodes > 1:
            raise ValueError(f"--num_nodes {options.num_nodes}: there is no hostfile, so this host is the only one")
        count = len(gpus.read().gpus) or max(options.num_gpus, 1)
        whole = {"localhost": list(range(count))}
    chosen = hostfile.limit(
        hostfile.choose(whole, options.include, options.exclude), options.num_nodes, options.num_gpus
    )
    if not chosen:
        raise ValueError(f"--exclude {options.exclude}: no host is left")
    return chosen


def _here(job: Job, options: argparse.Namespace, ranks: int | None) -> Job:
    """Return the job for this host: with as many ranks as asked, or as there are GPUs to use."""
    if options.no_ssh or options.force_multi:
        word = "no_ssh" if options.no_ssh else "force_multi"
        raise ValueError(f"--{word} needs a hostfile: -H FILE")
    if options.launcher not in ("ssh", "pdsh"):  # which may be the defaults
        raise ValueError(f"--launcher {options.launcher} needs a hostfile: -H FILE")
    if ranks is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            ranks = len(gpus.read().gpus)
        else:
            ranks = len([each for each in visible.split(",") if each.strip() and each.strip() != "-1"])
        if ranks == 0:
            ranks = 1
            note(options, f"{job.announce}: no GPU here, so this is one rank; -n sets their number")
    job = replace(job, world_size=ranks, port=options.master_port, elastic=_elastic(options, 1))
    return _sourced(job, options.venv_script)


def _sourced(job: Job, script: str | None) -> Job:
    """Return the job with ``script`` sourced before each rank."""
    if not script:
        return job
    words = ["bash", "-c", runners.SOURCE, "bash", os.path.abspath(script)]
    at = None if job.local_rank_at is None else job.local_rank_at + len(words)
    return replace(job, argv=[*words, *job.argv], local_rank_at=at)


def _payload(job: Job, options: argparse.Namespace, pool: Pool) -> Payload:
    environment = exported(os.environ)
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    for folder in (Path.home(), Path.cwd()):
        if (folder / name).is_file():
            environment |= read_environment_file(folder / name)
    world_size = sum(map(len, pool.values()))
    job = replace(
        job,
        world_size=world_size,
        environment=environment | job.environment,
        elastic=_elastic(options, len(pool)),
    )
    return Payload(
        nonce=secrets.token_hex(16),
        launcher=options.launcher,
        cwd=os.getcwd(),
        nodes=pool,
        address=options.master_addr or _master(pool),
        port=options.master_port or DEFAULT_PORT,
        job=job,
    )


def _elastic(options: argparse.Namespace, nodes: int) -> tuple[int, int] | None:
    if not options.elastic_training:
        return None
    least = 1 if options.min_elastic_nodes == -1 else options.min_elastic_nodes
    most = nodes if options.max_elastic_nodes == -1 else options.max_elastic_nodes
    if not 1 <= least <= most:
        raise ValueError(f"elastic nodes: min {least} and max {most}; expected 1 <= min <= max")
    return least, most


def _master(pool: Pool) -> str:
    """Return the address at which all nodes reach the first: its name, unless it calls itself localhost."""
    first, *others = pool
    if first not in ("localhost", "127.0.0.1", "::1") or not others:
        return first
    for host in others:
        if runners.is_here(host):
            continue
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise ValueError(f"--master_addr: give the address of {first} for {host} ({error})") from None
    return first


def _one_node(payload: Payload, node: int) -> int:
    if not 0 <= node < len(payload.nodes):
        raise ValueError(f"--no_ssh: --node_rank {node} is not one of the {len(payload.nodes)} nodes")
    job = payload.job_of(node, os.environ)
    assert job.place is not None
    name = f"zcomm run {payload.address}:{payload.port}"  # the same on all nodes
    return launch(replace(job, place=replace(job.place, job_id=name)))


@contextmanager
def _pid_file(is_wanted: bool) -> Iterator[None]:
    """Keep this process's pid in a file while the job runs, as DeepSpeed does. Raises: UserError if the file exists."""
    if not is_wanted:
        yield
        return
    file = Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed"
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise UserError(f"--save_pid: {file} is there already") from None
    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(str(os.getpid()))
        yield
    finally:
        file.unlink(missing_ok=True)
