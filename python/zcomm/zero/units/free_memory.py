"""Free memory of a device or of the host."""

from __future__ import annotations

import psutil
import torch


def free_nbytes(device: torch.device) -> int:
    """Bytes that an allocation on ``device`` finds free now. A cuda device counts what torch has cached as used."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
