"""DeepSpeed's commands next to ``deepspeed``: ``python -m zcomm.compat.deepspeed.commands NAME ...``.

The distribution zcomm-deepspeed has them as programs: ds_report, dsr, ds_bench, ds_io, ds_nvme_tune, ds_elastic, ds_ssh
and ds_to_universal. Each serves DeepSpeed's options by a command of zcomm, or by the part of it that a program uses.
An error of use is one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from zcomm.launch import hostfile
from zcomm.launch.errors import UserError
from zcomm.memory.sizes import as_nbytes

_MODULE = "zcomm.compat.deepspeed.commands"
Arguments = Sequence[str] | None


def _zcomm(*args: str) -> int:
    """Run the command `zcomm`, in a process of its own: it is above this module."""
    return subprocess.run([sys.executable, "-m", "zcomm.cli", *args], check=False).returncode


def report(args: Arguments = None) -> int:
    """ds_report, dsr: the operations with a counterpart, then `zcomm doctor`."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Show operations, versions and this machine.")
    parser.add_argument("--hide_operator_status", action="store_true", help="without the table of operations")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="no effect: reasons are in each line")
    given = parser.parse_args(args)
    from zcomm.compat.deepspeed.op_builder import __op_builders__

    if not given.hide_operator_status:
        for builder in __op_builders__:
            print(f"{builder.name:24} {'present' if builder.is_compatible() else f'absent: {builder._reason}'}")
        sys.stdout.flush()
    return _zcomm("doctor")


def elastic(args: Arguments = None) -> int:
    """ds_elastic: the batch and the numbers of ranks of a configuration's section "elasticity"."""
    parser = argparse.ArgumentParser(prog="ds_elastic", description="Show the batch that fits many numbers of ranks.")
    parser.add_argument("-c", "--config", type=Path, required=True, help="DeepSpeed's JSON configuration")
    parser.add_argument("-w", "--world-size", type=int, default=0, help="the number of ranks that is to be used")
    given = parser.parse_args(args)
    from zcomm.compat.deepspeed import __version__
    from zcomm.config.elasticity import compute_elastic_config
    from zcomm.config.source import read_source

    config, _ = read_source(given.config)
    print(json.dumps(config.get("elasticity"), indent=4))
    batch, ranks, *micro = compute_elastic_config(config, __version__, given.world_size)
    print(f"train_batch_size {batch}, numbers of ranks {', '.join(map(str, ranks))}")
    if micro:
        print(f"with {given.world_size} ranks: train_micro_batch_size_per_gpu {micro[0]}")
    return 0


def io(args: Arguments = None) -> int:
    """ds_io: time of writes or reads of one file by ``aio_handle``."""
    parser = argparse.ArgumentParser(prog="ds_io", description="Measure writes (or reads) of a file in a folder.")
    parser.add_argument("--folder", type=Path, required=True, help="folder on the drive; the file is removed")
    parser.add_argument("--io_size", type=as_nbytes, required=True, help="bytes, for example 400M")
    parser.add_argument("--read", action="store_true", help="measure reads (default: writes)")
    parser.add_argument("--block_size", type=as_nbytes, default=1_000_000, help="bytes of a request (default 1M)")
    parser.add_argument("--queue_depth", type=int, default=32, help="requests at a time (16 at most)")
    parser.add_argument("--io_parallel", type=int, default=1, help="multiplies --queue_depth")
    parser.add_argument("--loops", type=int, default=3, help="repetitions")
    parser.add_argument("--validate", action="store_true", help="compare the bytes afterwards")
    given = parser.parse_args(args)
    import torch

    from zcomm.compat.deepspeed.aio import aio_handle

    handle = aio_handle(given.block_size, given.queue_depth, intra_op_parallelism=given.io_parallel)
    count = max(given.io_size // 4096, 1) * 4096  # whole pages go past the page cache
    data = handle.new_cpu_locked_tensor(count, torch.empty(0, dtype=torch.uint8)).random_(0, 256)
    out = handle.new_cpu_locked_tensor(count if given.read else 0, data)
    with tempfile.TemporaryDirectory(prefix="ds_io-", dir=given.folder) as folder:
        path = Path(folder) / "data"
        handle.sync_pwrite(data, path)
        for _ in range(given.loops):
            start = time.perf_counter()
            if given.read:
                handle.sync_pread(out, path)
            else:
                handle.sync_pwrite(data, path)
            seconds = time.perf_counter() - start
            kind, rate = "read" if given.read else "write", count / seconds / 1e9
            print(f"{kind}: {count} bytes in {seconds:.4f} s, {rate:.3f} GB/s")
            wrong = given.read and not out.equal(data)
            if given.validate and (wrong or path.read_bytes() != data.numpy().tobytes()):
                raise OSError(f"{path}: its bytes differ from the written ones")
    return 0


def nvme_tune(args: Arguments = None) -> int:
    """ds_nvme_tune: measure a drive, keep the result for SwapFile, and print it as DeepSpeed's section "aio"."""
    parser = argparse.ArgumentParser(prog="ds_nvme_tune", description="Choose block size and depth for drives.")
    parser.add_argument("--nvme_dir", nargs="+", type=Path, required=True, help="a folder on each drive")
    for name in ("no_read", "no_write", "gpu", "gds", "flush_page_cache", "verbose"):
        parser.add_argument(f"--{name}", action="store_true", help="no effect")
    for name in ("sweep_config", "io_size", "log_dir", "loops"):
        parser.add_argument(f"--{name}", help="no effect: some seconds, and 768 MiB of the drive")
    given = parser.parse_args(args)
    from zcomm.machine import swap_tuning

    for folder in given.nvme_dir:
        code = _zcomm("doctor", "--calibrate", "--dir", str(folder))
        if code:
            return code
        found = swap_tuning.load(folder)
        print(f"{folder} ({found.origin}): SwapFile and offload to this drive use it")
        values = {"block_size": found.block_nbytes, "queue_depth": found.depth, "intra_op_parallelism": 1}
        print(json.dumps({"aio": {**values, "single_submit": False, "overlap_events": True}}, indent=4))
    return 0


def ssh(args: Arguments = None) -> int:
    """ds_ssh: run a command on all hosts of a hostfile, by pdsh, or by ssh on one after the other."""
    parser = argparse.ArgumentParser(prog="ds_ssh", description="Run a command on every host of a hostfile.")
    parser.add_argument("-f", "--hostfile", type=Path, default=hostfile.DEFAULT, help=f"default: {hostfile.DEFAULT}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    given = parser.parse_args(args)
    hosts = list(hostfile.read(given.hostfile))
    if not given.command:
        parser.error("a command is missing")
    if shutil.which("pdsh"):
        command = ["pdsh", "-w", ",".join(hosts), *given.command]
        return subprocess.run(command, env={**os.environ, "PDSH_RCMD_TYPE": "ssh"}, check=False).returncode
    codes = []
    for host in hosts:
        print(f"{host}:", flush=True)
        codes.append(subprocess.run(["ssh", host, shlex.join(given.command)], check=False).returncode)
    return max(codes)


# Bytes over the busiest link, divided by the bytes of the tensor, of N ranks; see nccl-tests' PERFORMANCE.md.
_LINKS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "pt2pt": lambda ranks: 1.0,
}


def bench(args: Arguments = None) -> int:
    """ds_bench: times of ``deepspeed.comm``'s collectives among ranks, which it starts if it is not one of them."""
    argv = list(sys.argv[1:] if args is None else args)
    parser = argparse.ArgumentParser(prog="ds_bench", description="Measure collectives of deepspeed.comm.")
    for name in _LINKS:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help="measure it (default: all)")
    parser.add_argument("--trials", type=int, default=5, help="repetitions that are measured")
    parser.add_argument("--warmups", type=int, default=5, help="repetitions before")
    parser.add_argument("--minsize", type=int, default=10, help="the smallest tensor has 2**N elements")
    parser.add_argument("--maxsize", type=int, default=20, help="the largest tensor has 2**N elements")
    parser.add_argument("--dtype", default="float", choices=("float", "bfloat16", "half"), help="of the tensors")
    parser.add_argument("--num_gpus", type=int, default=2, help="ranks on this host, if none are running")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    for name in ("scan", "raw", "async-op", "debug"):
        parser.add_argument(f"--{name}", action="store_true", help="no effect: all sizes are measured")
    for name in ("backend", "dist", "bw-unit", "mem-factor"):
        parser.add_argument(f"--{name}", help="no effect")
    given = parser.parse_args(argv)
    if "RANK" not in os.environ:
        start = ("run", "-n", str(given.num_gpus), "--deepspeed", "zcomm", "--no-prefix", "-m", _MODULE, "bench")
        return _zcomm(*start, *argv)
    chosen = [name for name in _LINKS if getattr(given, name)] or list(_LINKS)
    _measure(given, chosen)
    return 0


def _measure(given: argparse.Namespace, chosen: Iterable[str]) -> None:
    import torch

    from zcomm.compat import deepspeed
    from zcomm.compat.deepspeed import comm as dist

    deepspeed.init_distributed()
    rank, ranks, kind = dist.get_rank(), dist.get_world_size(), getattr(torch, given.dtype)
    if rank == 0:
        print(f"{ranks} ranks, {given.dtype}; GB/s: bytes over the busiest link per second")
    for name in chosen:
        for power in range(given.minsize, given.maxsize + 1, 2):
            count = max(2**power // ranks, 1) * ranks
            tensor, out = torch.ones(count, dtype=kind), torch.empty(count, dtype=kind)

            def run(name: str = name, tensor: Any = tensor, out: Any = out) -> None:
                if name == "all_reduce":
                    dist.all_reduce(tensor)
                elif name == "all_gather":
                    dist.all_gather_into_tensor(out, tensor[: tensor.numel() // ranks])
                elif name == "all_to_all":
                    dist.all_to_all_single(out, tensor)
                elif name == "broadcast":
                    dist.broadcast(tensor, 0)
                elif rank == 0 and ranks > 1:
                    dist.send(tensor, 1)
                elif rank == 1:
                    dist.recv(out, 0)

            for _ in range(given.warmups):
                run()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(given.trials):
                run()
            dist.barrier()
            seconds = (time.perf_counter() - start) / max(given.trials, 1)
            if rank == 0:
                rate = tensor.nbytes * _LINKS[name](ranks) / seconds / 1e9
                print(f"{name:12} {tensor.nbytes:12} bytes {seconds * 1e6:12.1f} us {rate:9.3f} GB/s", flush=True)


def to_universal(args: Arguments = None) -> int:
    """ds_to_universal: see ``deepspeed.checkpoint.ds_to_universal``."""
    from zcomm.compat.deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(ds_to_universal.parse_arguments(args))
    return 0


COMMANDS: dict[str, Callable[[Arguments], int]] = {
    "report": report,
    "bench": bench,
    "io": io,
    "nvme_tune": nvme_tune,
    "elastic": elastic,
    "ssh": ssh,
    "to_universal": to_universal,
}


def run(name: str, args: Arguments = None) -> None:
    """Run a command, and end the program with its exit code."""
    try:
        code = COMMANDS[name](args)
    except UserError as error:
        print(f"ds_{name}: error: {error}", file=sys.stderr)
        code = error.exit_code
    except (ValueError, OSError, NotImplementedError, KeyError) as error:
        print(f"ds_{name}: error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    run(sys.argv[1], sys.argv[2:])
