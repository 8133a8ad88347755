"""Host memory that a variant of `bench/offload.py train` needs, and how many layers fit, so that none is killed.

Bytes per parameter. zcomm: weights 2, fp32 sums of gradients 4, remainder and m and v 10 (which may be on the drive).
The peers: fp32 weights, gradients, m and v 16, and what their pinned buffers take beside (torch rounds each up to a
power of two). Not measured here, so it is a guess upwards.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.device import PLAYED

KEPT, STATE, PEERS = 6, 10, 20
RESERVE_NBYTES = (1 if PLAYED else 5) << 30  # Python, torch and CUDA, host slots (1 GiB), batches


def needed_nbytes(name: str, numel: int, fraction: float) -> int:
    """Return the bytes that a variant needs. fraction: of zcomm-nvme's state that is on the drive."""
    if not name.startswith("zcomm"):
        return (KEPT if name.endswith("nvme") else PEERS) * numel + RESERVE_NBYTES
    on_drive = fraction if name.endswith("nvme") else 0.0
    return KEPT * numel + round(STATE * numel * (1.0 - on_drive)) + RESERVE_NBYTES


def lacking(name: str, numel: int, fraction: float, available: int) -> str | None:
    """Return why the variant is not started, or None."""
    needed = needed_nbytes(name, numel, fraction)
    if needed <= available:
        return None
    return f"needs {needed / 2**30:.0f} GiB of host memory, of which {available / 2**30:.0f} GiB are available"


def fitting_layers(most: int, numel_of: Callable[[int], int], name: str, fraction: float, available: int) -> int:
    """Return the layers that fit, at most ``most``; 0: not even one layer fits."""
    return next((n for n in range(most, 0, -1) if lacking(name, numel_of(n), fraction, available) is None), 0)
