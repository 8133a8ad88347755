"""A stand-in for pynvml: machines described by plain values, and queries that fail like a driver's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """An error like pynvml's."""


@dataclass
class FakeGpu:
    """The answers of the queries of one GPU. nvlinks: bus ids at the other ends."""

    name: str = "NVIDIA H100 80GB HBM3"
    bus_id: str = "00000000:3B:00.0"
    total: int = 80 << 30
    free: int = 79 << 30
    capability: tuple[int, int] = (9, 0)
    generation: tuple[int, int, int] = (5, 5, 5)  # current, maximum of card and slot, maximum of the card
    width: tuple[int, int] = (16, 16)  # current, maximum of card and slot
    cpus: tuple[int, ...] = (0, 1)
    nodes: tuple[int, ...] = (0,)
    persistence: int = 1
    mode: int = 0
    mig: tuple[int, int] = (0, 0)
    ecc: tuple[int, int] = (1, 1)
    errors: int = 0
    pages: int = 0
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    nvlinks: tuple[str, ...] = ()
    peers: bool = True  # reads the memory of others that do so, too
    lost: bool = False


@dataclass
class FakeNvml:
    """The module. levels: common ancestors by pair, 50 if missing. refused: names of queries that fail.
    init_error: the text that nvmlInit raises. missing: names that this version lacks."""

    gpus: list[FakeGpu] = field(default_factory=list)
    levels: dict[tuple[int, int], int] = field(default_factory=dict)
    driver: str = "580.65.06"
    cuda: int = 13000
    refused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    init_error: str = ""
    NVML_NVLINK_MAX_LINKS: int = 18
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name in self.__dict__["missing"]:
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.refused:
                raise NVMLError("Not Supported")
            return getattr(self, f"_{name.removeprefix('nvml')}")(*args)

        return call

    def _Init(self) -> None:
        if self.init_error:
            raise NVMLError(self.init_error)

    def _Shutdown(self) -> None: ...

    def _SystemGetDriverVersion(self) -> bytes:
        return self.driver.encode()  # older versions give bytes

    def _SystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def _DeviceGetCount(self) -> int:
        return len(self.gpus)

    def _DeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self.gpus[index].lost:
            raise NVMLError("GPU is lost")
        return self.gpus[index]

    def _DeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(total=gpu.total, free=gpu.free)

    def _DeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(busId=gpu.bus_id)

    def _DeviceGetTopologyCommonAncestor(self, a: FakeGpu, b: FakeGpu) -> int:
        pair = sorted((self.gpus.index(a), self.gpus.index(b)))
        return self.levels.get((pair[0], pair[1]), 50)

    def _DeviceGetP2PStatus(self, a: FakeGpu, b: FakeGpu, capability: int) -> int:
        assert capability == 0, "reading"
        return 0 if a.peers and b.peers else 1

    def _DeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        if not gpu.nvlinks:
            raise NVMLError("Not Supported")
        return int(link < len(gpu.nvlinks))

    def _DeviceGetNvLinkRemotePciInfo(self, gpu: FakeGpu, link: int) -> Any:
        return SimpleNamespace(busId=gpu.nvlinks[link])

    def _DeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0), "uncorrected, since the driver was loaded"
        return gpu.errors

    def _DeviceGetCpuAffinity(self, gpu: FakeGpu, words: int) -> list[int]:
        return _mask(gpu.cpus, max(words, 2))

    def _DeviceGetMemoryAffinity(self, gpu: FakeGpu, words: int, scope: int) -> list[int]:
        assert scope == 0
        return _mask(gpu.nodes, words)

    def _DeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def _DeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return gpu.capability

    def _DeviceGetCurrPcieLinkGeneration(self, gpu: FakeGpu) -> int:
        return gpu.generation[0]

    def _DeviceGetMaxPcieLinkGeneration(self, gpu: FakeGpu) -> int:
        return gpu.generation[1]

    def _DeviceGetGpuMaxPcieLinkGeneration(self, gpu: FakeGpu) -> int:
        return gpu.generation[2]

    def _DeviceGetCurrPcieLinkWidth(self, gpu: FakeGpu) -> int:
        return gpu.width[0]

    def _DeviceGetMaxPcieLinkWidth(self, gpu: FakeGpu) -> int:
        return gpu.width[1]

    def _DeviceGetPersistenceMode(self, gpu: FakeGpu) -> int:
        return gpu.persistence

    def _DeviceGetComputeMode(self, gpu: FakeGpu) -> int:
        return gpu.mode

    def _DeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return list(gpu.mig)

    def _DeviceGetEccMode(self, gpu: FakeGpu) -> list[int]:
        return list(gpu.ecc)

    def _DeviceGetRetiredPagesPendingStatus(self, gpu: FakeGpu) -> int:
        return gpu.pages

    def _DeviceGetRemappedRows(self, gpu: FakeGpu) -> tuple[int, int, int, int]:
        return gpu.rows


def _mask(numbers: tuple[int, ...], words: int) -> list[int]:
    found = [0] * words
    for number in numbers:
        found[number // 64] |= 1 << number % 64
    return found


def bus(index: int) -> str:
    return f"00000000:{index + 1:02X}:00.0"


def one_narrow() -> FakeNvml:
    """One card in a slot with half its lanes, idle."""
    return FakeNvml([FakeGpu(bus_id=bus(0), generation=(1, 4, 5), width=(8, 8), name="NVIDIA RTX A6000")])


def two_linked() -> FakeNvml:
    """Two cards with four NVLinks between them."""
    gpus = [FakeGpu(bus_id=bus(i), nvlinks=(bus(1 - i),) * 4) for i in range(2)]
    return FakeNvml(gpus, {(0, 1): 40})


def eight_on_two_nodes() -> FakeNvml:
    """Pairs under one switch, four per NUMA node, numbered across: 0, 2, 4, 6 are on one node."""
    gpus = [
        FakeGpu(bus_id=bus(i), nodes=(i % 2,), cpus=tuple(range(64 * (i % 2), 64 * (i % 2) + 64))) for i in range(8)
    ]
    levels = {}
    for a in range(8):
        for b in range(a + 1, 8):
            if a % 2 == b % 2:
                levels[a, b] = 10 if a // 4 == b // 4 else 40
    return FakeNvml(gpus, levels)


def eight_on_switches() -> FakeNvml:
    """HGX: 18 NVLinks of each GPU go to NVSwitches."""
    far = tuple(f"00000000:C{k % 4}:00.0" for k in range(18))
    return FakeNvml([FakeGpu(bus_id=bus(i), nvlinks=far) for i in range(8)])


def sysfs(root: Path, machine: FakeNvml, **files: str) -> Path:
    """Write the kernel's folder of each card, with these files."""
    for gpu in machine.gpus:
        folder = root / gpu.bus_id.lower()[-12:]
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n")
    return root
