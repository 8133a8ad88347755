"""Memory of a host and a GPU: bytes per parameter, the layers that fit, and the largest model that trains.

Bytes per parameter. zcomm: weights 2, fp32 sums of gradients 4, remainder and m and v 10 (which may be on the drive).
The peers: fp32 weights, gradients, m and v 16, and their pinned buffers (torch rounds each up to a power of two). The
buffers are not measured, so the number is a high guess.

The largest model is planned by bytes, then shown by two steps in a process of its own. Models are the 7b's shape with
more or fewer layers. A model that does not train is tried with 15 % less, at most three times.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness.device import PLAYED, Rows, available_nbytes

KEPT, STATE, PEERS = 6, 10, 20
LAST_PASS = 2  # gradients that an update adds to sums of several micro-batches, without clipping
RESERVE_NBYTES = (1 if PLAYED else 5) << 30  # Python, torch and CUDA, host slots (1 GiB), batches
_GPU, _HOST, _DRIVE = 0.80, 0.85, 0.85  # parts that may be planned with
_DRIVE_NBYTES = 20 << 30  # of it at most: its state is written at the start, and read and written in each step
_WORK_NBYTES = 12 << 30  # on the GPU: activations and logits of the micro-batch, slots, workspaces


def needed_nbytes(name: str, numel: int, fraction: float) -> int:
    """Return the bytes that a variant needs. fraction: of zcomm-nvme's state that is on the drive."""
    if not name.startswith("zcomm"):
        return (KEPT if name.endswith("nvme") else PEERS) * numel + RESERVE_NBYTES
    on_drive = fraction if name.endswith("nvme") else 0.0
    return KEPT * numel + round(STATE * numel * (1.0 - on_drive)) + RESERVE_NBYTES


def lacking(name: str, numel: int, fraction: float, available: int, more: int = 0) -> str | None:
    """Return why the variant is not started, or None. more: bytes per parameter."""
    needed = needed_nbytes(name, numel, fraction) + more * numel
    if needed <= available:
        return None
    return f"needs {needed / 2**30:.0f} GiB of host memory, of which {available / 2**30:.0f} GiB are available"


def fitting_layers(most: int, numel_of: Callable[[int], int], name: str, fraction: float, available: int) -> int:
    """Return the layers that fit, at most ``most``; 0: not even one layer fits."""
    return next((n for n in range(most, 0, -1) if lacking(name, numel_of(n), fraction, available) is None), 0)


def plan(gpu: int, host: int, drive: int, numel_of: Any, most: int = 200) -> tuple[int, float]:
    """Return the most layers that fit, and the part of their state on the drive.

    (0, 0.0) if one layer does not fit.
    """
    for layers in range(most, 0, -1):
        numel = numel_of(layers)
        on_drive = min(STATE * numel, int(_DRIVE * drive))
        if 2 * numel + _WORK_NBYTES <= _GPU * gpu and (KEPT + STATE) * numel - on_drive <= _HOST * host:
            return layers, on_drive / (STATE * numel)
    return 0, 0.0


def search(arguments: argparse.Namespace, gpu_nbytes: int, program: Sequence[str]) -> int:
    from zcomm.demo.llama import PRESETS

    def numel_of(layers: int) -> int:
        return replace(PRESETS["7b"], num_hidden_layers=layers).numel()

    host = int(arguments.host_gib * 2**30) if arguments.host_gib else available_nbytes()
    drive = min(shutil.disk_usage(arguments.nvme_path).free, _DRIVE_NBYTES)
    layers, fraction = plan(gpu_nbytes, host, drive, numel_of)
    print(
        f"# planned: {layers} layers, {numel_of(max(layers, 1)) / 1e9:.1f}e9 parameters, {fraction:.2f} of the state "
        f"on the drive ({host >> 30} GiB of host memory, {drive >> 30} GiB on the drive)"
    )
    found: dict[str, int] = {}
    rows = Rows(arguments.json, "The largest model that trains")
    for variant in ("zcomm-nvme", "deepspeed-nvme"):
        if variant.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
            print("# DeepSpeed is not installed")
            continue
        tried = layers
        for _ in range(3):
            if not tried:
                break
            if attempt(arguments, program, variant, tried, fraction):
                found[variant] = tried
                there = {"host GiB": host >> 30, "drive GiB": drive >> 30}
                rows.add(variant=variant, layers=tried, params=numel_of(tried), **there)
                break
            tried = int(tried * 0.85)
    return 0 if "zcomm-nvme" in found else 1


def attempt(arguments: argparse.Namespace, program: Sequence[str], variant: str, layers: int, fraction: float) -> bool:
    """Try two steps in another process, which writes the row; return True if it trained."""
    words = ["--model", "7b", "--layers", str(layers), "--variants", variant, "--fraction", f"{fraction:.4f}"]
    words += ["--nvme-path", arguments.nvme_path, "--rounds", "1", "--accum", "1", "--batch", "4", "--attempt"]
    words += ["--json", arguments.json] if arguments.json else []
    done = subprocess.run([*program, *words], text=True, capture_output=True, check=False)
    print(done.stdout[-2000:], end="", flush=True)
    trained = done.returncode == 0 and f"variant {variant}" in done.stdout
    if not trained:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        print(f"# {variant}, {layers} layers: {lines[-1][:300]}", flush=True)
    return trained
