"""The GPUs in `zcomm doctor`: findings and their mends, from the result of gpus.read()."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zcomm.cli.sizes import shown
from zcomm.machine import gpu_speeds
from zcomm.machine.gpu_specs import pcie_bps
from zcomm.machine.gpus import Gpu, Machine


@dataclass(frozen=True)
class Finding:
    """One checked thing. state: ok, note (works, but slower or unusual), fail. mend: the remedy."""

    state: str
    name: str
    value: str
    mend: str = ""


Version = tuple[int, int]
# The driver of each CUDA generation's first release; later minor releases of CUDA run on that driver, too.
_FIRST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def findings(
    machine: Machine,
    build: str,
    torch_cuda: Version | None = None,
    env: Mapping[str, str] = os.environ,
    own_cpus: frozenset[int] | None = None,
) -> Iterator[Finding]:
    """Yield all findings about GPUs.

    build: the core's ``cuda_info()``. torch_cuda: torch's own (default: of the torch that is installed).
    own_cpus: CPUs that this process may run on.
    """
    import psutil  # the docs read the options without packages

    if machine.absent:
        yield Finding("ok", "gpus", machine.absent)
        return
    yield from _versions(machine, build, torch_cuda or cuda_of_torch())
    cpus = frozenset(os.sched_getaffinity(0)) if own_cpus is None else own_cpus
    for gpu in machine.gpus:
        yield from _gpu(gpu, cpus)
    yield from _between(machine)
    yield Finding(
        "ok",
        "pinned memory",
        f"{shown(psutil.virtual_memory().available)} of host memory are free to lock; memlock does not bound CUDA's "
        "page locking (it bounds mlock and RDMA)",
    )
    for name in _VARIABLES:
        if name in env:
            yield Finding("ok", name, env[name])


def speeds(machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each model of a GPU: its speeds, or how to measure them."""
    for name in dict.fromkeys(gpu.name for gpu in machine.gpus if not gpu.lost):
        found = gpu_speeds.load(name)
        if found is None:
            yield Finding("note", "gpu speeds", f"{name}: not measured", "zcomm doctor --calibrate, for zcomm plan")
        else:
            rates = f"{found.down_bps / 1e9:.1f} GB/s down, {found.up_bps / 1e9:.1f} up, both at once"
            yield Finding("ok", "gpu speeds", f"{name}: {found.flops / 1e12:.0f} TFLOP/s in blocks, {rates}")


def cuda_of_torch() -> Version | None:
    """Return the CUDA that torch was built with, without importing torch, which takes seconds; None: without CUDA."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    text = ""
    for folder in found.submodule_search_locations:
        file = Path(folder) / "version.py"
        text += file.read_text() if file.exists() else ""
    return _version(next(iter(re.findall(r"^cuda\b[^=]*=\s*['\"]([\d.]+)", text, re.M)), ""))


def _version(text: str) -> Version | None:
    found = re.search(r"(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


def _versions(machine: Machine, build: str, torch_cuda: Version | None) -> Iterator[Finding]:
    served = "unknown" if machine.cuda is None else "{}.{}".format(*machine.cuda)
    yield Finding("ok", "driver", f"{machine.driver or 'unknown'}, serves CUDA up to {served}")
    built = _version(build)
    if built is None:
        yield Finding("note", "cuda of zcomm", build, "install zcomm with nvcc: ZCOMM_CUDA=ON pip install .")
    if torch_cuda is None:
        yield Finding("note", "cuda of torch", "torch is without CUDA", "pip install torch (not its CPU wheels)")
    for library, needs in (("zcomm", built), ("torch", torch_cuda)):
        if needs is not None and machine.cuda is not None:
            yield _suits(library, needs, machine.cuda)
    if built and torch_cuda and built[0] != torch_cuda[0]:
        yield Finding(
            "ok",
            "cuda versions",
            f"zcomm is built with CUDA {built[0]}, torch with {torch_cuda[0]}: the core has its runtime in itself",
        )


def _suits(library: str, needs: Version, served: Version) -> Finding:
    name, text = f"cuda of {library}", "{}.{}".format(*needs)
    if needs[0] > served[0]:
        first = _FIRST_DRIVERS.get(needs[0], f"one of CUDA {needs[0]}")
        value = f"{text}, but the driver serves CUDA {served[0]}.{served[1]} at most: it is too old"
        return Finding("fail", name, value, f"install driver {first} or newer, or a {library} of CUDA {served[0]}")
    if needs > served:
        value = f"{text}, newer than the driver's {served[0]}.{served[1]} of the same generation: runs, but not its PTX"
        return Finding("note", name, value, "GPUs newer than the build need a newer driver")
    return Finding("ok", name, text)


def _gpu(gpu: Gpu, own_cpus: frozenset[int]) -> Iterator[Finding]:
    name = f"gpu {gpu.index}"
    if gpu.lost:
        yield Finding("fail", name, gpu.lost, "look for Xid in dmesg; reset the GPU or reboot")
        return
    memory = "memory unknown"
    if gpu.memory_nbytes is not None:
        memory = f"{shown(gpu.memory_nbytes)}, {shown(gpu.free_nbytes or 0)} free"
    near = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
    near += f", CPUs {ranges(gpu.cpus)}" if gpu.cpus else ""
    architecture = "" if gpu.capability is None else ", sm_{}{}".format(*gpu.capability)
    yield Finding("ok", name, f"{gpu.name}{architecture}: {memory}{near}")
    if gpu.cpus and own_cpus and not own_cpus & set(gpu.cpus):
        value = f"this process may run on CPUs {ranges(tuple(sorted(own_cpus)))}, none of them near the GPU"
        yield Finding("note", f"{name} cpus", value, f"taskset -c {ranges(gpu.cpus)}, or numactl --cpunodebind")
    yield from _pcie(gpu, name)
    yield from _modes(gpu, name)
    yield from _health(gpu, name)


def _pcie(gpu: Gpu, name: str) -> Iterator[Finding]:
    link = gpu.pcie
    if link.width is None or link.generation is None:
        yield Finding("ok", f"{name} PCIe", "not told (usual in virtual machines); bench/offload.py copies measures it")
        return
    lanes = max(filter(None, (link.max_width, link.card_width)), default=link.width)
    best = link.max_generation or link.generation
    rate = pcie_bps(best, link.width)
    speed = "" if rate is None else f", {rate / 1e9:.1f} GB/s each way on the line"
    idle = f" (now {link.generation}: it rises under load)" if link.generation < best else ""
    value = f"generation {best}{idle}, x{link.width}{speed}"
    card = link.card_generation or best
    if link.width < lanes:
        mend = "reseat the card, or use a slot with all lanes (the mainboard's manual; lspci -vv: LnkSta, LnkCap)"
        factor = f"{lanes / link.width:.3g}"
        yield Finding("note", f"{name} PCIe", f"{value}, of x{lanes}: copies take {factor} times as long", mend)
    elif best < card:
        value += f"; the card could do generation {card}"
        yield Finding("note", f"{name} PCIe", value, "a slot or a firmware setting of that generation")
    else:
        yield Finding("ok", f"{name} PCIe", value)


def _modes(gpu: Gpu, name: str) -> Iterator[Finding]:
    mode, mend = gpu.compute_mode, f"nvidia-smi -i {gpu.index} -c DEFAULT (as root)"
    if mode == "prohibited":
        yield Finding("fail", f"{name} mode", "compute is prohibited", mend)
    elif mode not in (None, "default"):
        yield Finding("note", f"{name} mode", f"{mode}: a second rank on this GPU fails", mend)
    if gpu.mig:
        value = "MIG is on: a process gets one instance, with its part of the memory and no peer access"
        yield Finding("note", f"{name} mode", value, f"nvidia-smi -i {gpu.index} -mig 0 (as root), for all of the GPU")
    if gpu.persistence is False:
        value = "persistence mode is off: the first use after a pause takes seconds"
        yield Finding("note", f"{name} mode", value, "nvidia-persistenced, or nvidia-smi -pm 1 (as root)")


def _health(gpu: Gpu, name: str) -> Iterator[Finding]:
    health = gpu.health
    if health.failed_remapping:
        yield Finding("fail", f"{name} memory", "bad rows could not be replaced", "have the GPU replaced")
    if health.pending_retirement:
        value = "bad memory waits to be taken out of use"
        yield Finding("note", f"{name} memory", value, "reset the GPU (nvidia-smi -r) or reboot when it is idle")
    if health.uncorrected_errors:
        value = f"{health.uncorrected_errors} uncorrected ECC errors since the driver was loaded"
        yield Finding(
            "note", f"{name} memory", value, "look for Xid 48, 63, 64, 94, 95 in dmesg; if they recur: replace"
        )
    if health.ecc is False:
        yield Finding("ok", f"{name} memory", "ECC is off")


def _between(machine: Machine) -> Iterator[Finding]:
    pairs: dict[str, list[str]] = {}
    for (a, b), link in sorted(machine.links.items(), key=lambda item: -item[1].rank):
        pairs.setdefault(link.describe(), []).append(f"{a}-{b}")
    for words, listed in pairs.items():
        value = f"all pairs: {words}" if len(pairs) == 1 else f"{words}: {', '.join(listed)}"
        yield Finding("ok", "gpu links", value)
    if not machine.reach:
        value = "some GPUs do not read each other's memory: gradients of several ranks go by way of the host"
        hint = "usual on consumer cards; on others look for ACS or the IOMMU of PCIe (nvidia-smi topo -p2p r)"
        yield Finding("note", "gpu peer access", value, hint)


def ranges(numbers: tuple[int, ...] | None) -> str:
    """Join numbers to ranges: (0, 1, 2, 5) -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers or ():
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
