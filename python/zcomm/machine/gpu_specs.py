"""Peak rates of GPUs and their links, by the vendor's tables: the denominators of MFU and shares of a roof.

FLOP/s: dense matrix products in bf16 with fp32 accumulation, without sparsity; a board with lower power or clocks
than the table's reaches less. PCIe: bytes per second of one direction on the line, before packet headers, which
take 10 to 15 % of it. Source: NVIDIA's data sheets; PCI Express Base Specification 6.0.
"""

from __future__ import annotations

# The first name that is contained decides, so the longer ones come first.
_BF16_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.0),
    ("RTX A6000", 154.8),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 4080", 97.5),
    ("RTX 3090", 71.0),
)
_LANE_BPS = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
PAYLOAD = 0.85  # of the line, after packet headers: a usual figure, to plan with


def peak_flops(name: str) -> float | None:
    """Return the dense bf16 FLOP/s of the GPU with NVML's or torch's ``name``; None if it is not in the table."""
    for part, tflops in _BF16_TFLOPS:
        if part.lower() in name.lower():
            return tflops * 1e12
    return None


def pcie_bps(generation: int | None, width: int | None) -> float | None:
    """Return the bytes per second on the line, one direction; None if generation or width is unknown."""
    lane = _LANE_BPS.get(generation or 0)
    return None if lane is None or not width else lane * width
