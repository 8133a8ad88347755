"""The GPUs of this machine as NVML sees them: plain values, read once.

``read()`` never raises: without GPUs ``absent`` has the reason in a line. Values that a driver or a virtual machine
does not report are None. NVML is loaded by nvidia-ml-py, and only here. Indices are NVML's, in order of the PCI bus:
CUDA's with ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` and no ``CUDA_VISIBLE_DEVICES``.
Source: NVML's reference; Linux's sysfs-bus-pci for the NUMA node and the limits of the card's connector.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
SYSFS = Path("/sys/bus/pci/devices")
_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
# NVML's common ancestor of two GPUs -> the kind of link, the nearest first.
_ANCESTORS = {0: "board", 10: "switch", 20: "switches", 30: "bridge", 40: "node", 50: "cross"}
_RANKS = {"unknown": 0, "cross": 1, "node": 2, "bridge": 3, "switches": 4, "switch": 5, "board": 6, "nvlink": 7}
_P2P_READ, _P2P_OK = 0, 0  # NVML's capability and its best status
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # GT/s in sysfs


@dataclass(frozen=True)
class Pcie:
    """The link: generation (which falls while the GPU is idle) and lanes. max_: of card and slot together. card_: of
    the card without the slot's limits."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None
    card_generation: int | None = None
    card_width: int | None = None


@dataclass(frozen=True)
class Health:
    """ECC counts since the driver was loaded; pages or rows that a reset will retire; failed remapping."""

    ecc: bool | None = None
    uncorrected_errors: int | None = None
    pending_retirement: bool | None = None
    failed_remapping: bool | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU. cpus: the near ones, None if the driver does not know."""

    index: int
    name: str = "unknown GPU"
    bus_id: str = ""
    memory_nbytes: int | None = None
    free_nbytes: int | None = None
    capability: tuple[int, int] | None = None
    pcie: Pcie = Pcie()
    health: Health = Health()
    numa_node: int | None = None
    cpus: tuple[int, ...] | None = None
    persistence: bool | None = None
    mig: bool | None = None
    compute_mode: str | None = None
    lost: str = ""  # why it cannot be read at all


@dataclass(frozen=True)
class Link:
    """The best path between two GPUs. nvlinks: their number. peer: whether the driver lets each read the other's
    memory; None if it does not know."""

    kind: str = "unknown"
    nvlinks: int = 0
    peer: bool | None = None

    @property
    def rank(self) -> int:
        """Rank of the link; the larger, the better: NVLink by count, then one switch, same NUMA node, across."""
        return 100 * _RANKS[self.kind] + self.nvlinks

    def describe(self) -> str:
        words = {"switch": "one PCIe switch", "switches": "PCIe switches", "bridge": "one host bridge"}
        words |= {"node": "one NUMA node", "cross": "across NUMA nodes", "board": "one board"}
        words |= {"nvlink": f"NVLink x{self.nvlinks}"}
        way = words.get(self.kind, "unknown")
        return f"{way}, no peer access" if self.peer is False else way


@dataclass(frozen=True)
class Machine:
    """All GPUs of this host. cuda: the driver's latest version; links: by (lower index, higher index)."""

    gpus: tuple[Gpu, ...] = ()
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    driver: str = ""
    cuda: tuple[int, int] | None = None
    absent: str = ""

    @property
    def reach(self) -> bool:
        """True if no pair of GPUs is known to lack peer access."""
        return all(link.peer is not False for link in self.links.values())


def read(nvml: Any = None, sysfs: Path = SYSFS) -> Machine:
    """Read the values of NVML and the kernel. nvml: replaces the module pynvml."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return Machine(absent="not looked for: nvidia-ml-py is not installed (pip install nvidia-ml-py)")
    try:
        nvml.nvmlInit()
    except Exception as error:  # NVMLError, or ctypes' own for a broken library
        return Machine(absent=f"no NVIDIA driver here (NVML: {error})")
    try:
        return _Reader(nvml, sysfs).machine()
    finally:
        _ask(lambda: nvml.nvmlShutdown())


def _ask(function: Callable[..., T], *args: Any) -> T | None:
    """Call ``function``; return None if this driver, GPU or virtual machine does not answer.

    Each function may be missing or refuse.
    """
    try:
        return function(*args)
    except Exception:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


class _Reader:
    def __init__(self, nvml: Any, sysfs: Path) -> None:
        self.nvml, self.sysfs = nvml, sysfs

    def ask(self, name: str, *args: Any) -> Any:
        function = getattr(self.nvml, name, None)  # older nvidia-ml-py
        return None if function is None else _ask(function, *args)

    def machine(self) -> Machine:
        driver = _text(self.ask("nvmlSystemGetDriverVersion"))
        number = self.ask("nvmlSystemGetCudaDriverVersion")
        cuda = None if not number else (number // 1000, number % 1000 // 10)
        count = self.ask("nvmlDeviceGetCount") or 0
        if not count:
            return Machine(driver=driver, cuda=cuda, absent=f"driver {driver or '?'}, but no GPU here")
        handles: dict[int, Any] = {}
        gpus = []
        for index in range(count):
            try:
                handles[index] = self.nvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(self.gpu(index, handles[index]))
            except Exception as error:
                gpus.append(Gpu(index, lost=str(error)))
        return Machine(tuple(gpus), dict(self.links(handles, gpus)), driver, cuda)

    def gpu(self, index: int, handle: Any) -> Gpu:
        memory, pci = self.ask("nvmlDeviceGetMemoryInfo", handle), self.ask("nvmlDeviceGetPciInfo", handle)
        bus_id = _text(getattr(pci, "busId", ""))
        mig, mode = self.ask("nvmlDeviceGetMigMode", handle), self.ask("nvmlDeviceGetComputeMode", handle)
        persistence = self.ask("nvmlDeviceGetPersistenceMode", handle)
        return Gpu(
            index=index,
            name=_text(self.ask("nvmlDeviceGetName", handle)) or "unknown GPU",
            bus_id=bus_id,
            memory_nbytes=None if memory is None else int(memory.total),
            free_nbytes=None if memory is None else int(memory.free),
            capability=self.ask("nvmlDeviceGetCudaComputeCapability", handle),
            pcie=self.pcie(handle, bus_id),
            health=self.health(handle),
            numa_node=self.numa_node(handle, bus_id),
            cpus=self.cpus(handle),
            persistence=None if persistence is None else bool(persistence),
            mig=None if mig is None else bool(mig[0]),
            compute_mode=None if mode is None else _MODES.get(int(mode), str(mode)),
        )

    def pcie(self, handle: Any, bus_id: str) -> Pcie:
        speed = self.of_sysfs(bus_id, "max_link_speed").partition(" ")[0]
        width = self.of_sysfs(bus_id, "max_link_width")
        known = float(speed) if speed.replace(".", "", 1).isdigit() else 0.0
        return Pcie(
            generation=self.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            width=self.ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            max_generation=self.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            max_width=self.ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            card_generation=self.ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle) or _GENERATIONS.get(known),
            card_width=int(width) if width.isdigit() and 0 < int(width) <= 32 else None,
        )

    def health(self, handle: Any) -> Health:
        mode = self.ask("nvmlDeviceGetEccMode", handle)
        # 1: uncorrected errors; 0: volatile counts
        errors = self.ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0)
        pages, rows = (
            self.ask(name, handle) for name in ("nvmlDeviceGetRetiredPagesPendingStatus", "nvmlDeviceGetRemappedRows")
        )
        pending = None if pages is None and rows is None else bool(pages) or bool(rows and rows[2])
        return Health(
            ecc=None if mode is None else bool(mode[0]),
            uncorrected_errors=None if errors is None else int(errors),
            pending_retirement=pending,
            failed_remapping=None if rows is None else bool(rows[3]),
        )

    def numa_node(self, handle: Any, bus_id: str) -> int | None:
        """Return the NUMA node. -1 in sysfs is a machine with one node, or a firmware that does not report it."""
        text = self.of_sysfs(bus_id, "numa_node")
        if text.isdigit():
            return int(text)
        nodes = _bits(self.ask("nvmlDeviceGetMemoryAffinity", handle, 4, 0))  # 0: scope NUMA node
        return nodes[0] if nodes is not None and len(nodes) == 1 else None

    def cpus(self, handle: Any) -> tuple[int, ...] | None:
        words = -(-(os.cpu_count() or 1) // 64)
        return _bits(self.ask("nvmlDeviceGetCpuAffinity", handle, words))

    def of_sysfs(self, bus_id: str, name: str) -> str:
        """Read a file of the card in sysfs. The kernel's bus ids have a domain of 4 digits, NVML's 8."""
        if not bus_id:
            return ""
        try:
            return (self.sysfs / bus_id.lower()[-12:] / name).read_text().strip()
        except OSError:
            return ""

    def links(self, handles: dict[int, Any], gpus: list[Gpu]) -> Iterator[tuple[tuple[int, int], Link]]:
        """Find the links: NVLinks to each other, or both to NVSwitches; else by the common ancestor on the PCI bus."""
        ends = {index: list(self.nvlink_ends(handle)) for index, handle in handles.items()}
        known = {gpu.bus_id.lower()[-12:] for gpu in gpus if gpu.bus_id}
        to_switches = {i: sum(end not in known for end in found) for i, found in ends.items()}
        for a, first in handles.items():
            for b, second in handles.items():
                if a >= b:
                    continue
                other = gpus[b].bus_id.lower()[-12:]
                nvlinks = ends[a].count(other) + min(to_switches[a], to_switches[b])
                level = self.ask("nvmlDeviceGetTopologyCommonAncestor", first, second)
                kind = "nvlink" if nvlinks else _ANCESTORS.get(-1 if level is None else int(level), "unknown")
                status = self.ask("nvmlDeviceGetP2PStatus", first, second, _P2P_READ)
                yield (a, b), Link(kind, nvlinks, None if status is None else int(status) == _P2P_OK)

    def nvlink_ends(self, handle: Any) -> Iterator[str]:
        """Yield the bus id at the other end of each link that is up."""
        for link in range(int(getattr(self.nvml, "NVML_NVLINK_MAX_LINKS", 18))):
            if self.ask("nvmlDeviceGetNvLinkState", handle, link) == 1:
                far = self.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
                if far is not None:
                    yield _text(far.busId).lower()[-12:]


def _bits(words: Any) -> tuple[int, ...] | None:
    """Return the numbers of the bits that are set in 64-bit words; None for none."""
    if words is None:
        return None
    found = tuple(64 * k + bit for k, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1)
    return found or None
