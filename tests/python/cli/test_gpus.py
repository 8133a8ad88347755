"""NVML's answers become plain values, and the values become findings; on described machines, not on this one."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fake_nvml import (
    FakeGpu,
    FakeNvml,
    bus,
    eight_on_switches,
    eight_on_two_nodes,
    one_narrow,
    sysfs,
    two_linked,
)
from zcomm.cli.doctor_gpu import Finding, cuda_of_torch, findings, ranges
from zcomm.machine import gpus
from zcomm.machine.gpu_specs import pcie_bps, peak_flops


def found(machine: FakeNvml, folder: Path = Path("/nowhere"), build: str = "CUDA 13.0") -> list[Finding]:
    read = gpus.read(machine, folder)
    return list(findings(read, build, (13, 0), env={}, own_cpus=frozenset({0, 1})))


def of(listed: list[Finding], name: str) -> list[Finding]:
    return [finding for finding in listed if finding.name == name]


def test_every_value_is_read(tmp_path: Path) -> None:
    machine = FakeNvml([FakeGpu(bus_id=bus(0), cpus=(1, 65), nodes=(1,), rows=(0, 0, 1, 0))])
    where = sysfs(tmp_path, machine, numa_node="3", max_link_width="16", max_link_speed="32.0 GT/s PCIe")
    read = gpus.read(machine, where)
    (gpu,) = read.gpus
    assert (read.driver, read.cuda, read.absent) == ("580.65.06", (13, 0), "")
    assert (gpu.name, gpu.bus_id, gpu.capability) == ("NVIDIA H100 80GB HBM3", bus(0), (9, 0))
    assert (gpu.memory_nbytes, gpu.free_nbytes) == (80 << 30, 79 << 30)
    assert gpu.pcie == gpus.Pcie(5, 16, 5, 16, 5, 16)
    assert gpu.numa_node == 3 and gpu.cpus == (1, 65), "the kernel's node, and CPUs of the second word"
    assert gpu.persistence is True and gpu.mig is False and gpu.compute_mode == "default"
    assert gpu.health == gpus.Health(True, 0, True, False)
    assert "nvmlShutdown" in machine.calls
    assert gpus.read(machine, Path("/nowhere")).gpus[0].numa_node == 1, "where the kernel says nothing, NVML's node"


def test_each_query_may_fail_alone() -> None:
    whole = gpus.read(two_linked(), Path("/nowhere"))
    names = sorted({name for name in _asked(two_linked()) if name not in ("nvmlInit", "nvmlDeviceGetCount")})
    assert len(names) > 15
    for name, gone in itertools.product(names, (False, True)):
        machine = two_linked()
        machine.refused, machine.missing = ((), (name,)) if gone else ((name,), ())
        read = gpus.read(machine, Path("/nowhere"))
        assert len(read.gpus) == 2 and not read.absent, name
        if name == "nvmlDeviceGetHandleByIndex":
            assert all(gpu.lost for gpu in read.gpus)
        elif name not in ("nvmlShutdown", "nvmlDeviceGetGpuMaxPcieLinkGeneration"):
            same = [gpu.pcie.width for gpu in read.gpus] == [gpu.pcie.width for gpu in whole.gpus]
            assert same == (name != "nvmlDeviceGetCurrPcieLinkWidth"), name
        assert found(machine), name


def _asked(machine: FakeNvml) -> list[str]:
    gpus.read(machine, Path("/nowhere"))
    return machine.calls


def test_without_driver_library_or_gpu_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, words in (
        (FakeNvml(init_error="Driver Not Loaded"), "no NVIDIA driver here (NVML: Driver Not Loaded)"),
        (FakeNvml(init_error="NVML Shared Library Not Found"), "no NVIDIA driver here"),
        (FakeNvml(), "driver 580.65.06, but no GPU here"),
    ):
        (only,) = found(machine)
        assert only.state == "ok" and words in only.value
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (only,) = findings(gpus.read(), "built without CUDA")
    assert "pip install nvidia-ml-py" in only.value


def test_a_narrow_link_is_a_finding(tmp_path: Path) -> None:
    where = sysfs(tmp_path, one_narrow(), max_link_width="16")
    (link,) = of(found(one_narrow(), where), "gpu 0 PCIe")
    assert link.state == "note" and "x8" in link.value and "of x16: copies take 2 times" in link.value
    assert "generation 4 (now 1: it rises under load)" in link.value and "15.8 GB/s" in link.value
    assert "slot" in link.mend
    (link,) = of(found(one_narrow()), "gpu 0 PCIe")
    assert "could do generation 5" in link.value, "NVML alone counts what the slot has as the most"
    wide = FakeNvml([FakeGpu(width=(8, 16))])
    assert "of x16" in of(found(wide), "gpu 0 PCIe")[0].value
    assert of(found(FakeNvml([FakeGpu()])), "gpu 0 PCIe")[0].state == "ok"
    silent = FakeNvml([FakeGpu()], refused=("nvmlDeviceGetCurrPcieLinkWidth",))
    assert "virtual machines" in of(found(silent), "gpu 0 PCIe")[0].value


@pytest.mark.parametrize(
    ("gpu", "state", "words"),
    [
        (FakeGpu(mode=3), "note", "a second rank on this GPU fails"),
        (FakeGpu(mode=2), "fail", "prohibited"),
        (FakeGpu(mig=(1, 1)), "note", "MIG is on"),
        (FakeGpu(persistence=0), "note", "persistence mode is off"),
        (FakeGpu(errors=2), "note", "2 uncorrected ECC errors"),
        (FakeGpu(pages=1), "note", "waits to be taken out of use"),
        (FakeGpu(rows=(0, 1, 0, 1)), "fail", "could not be replaced"),
        (FakeGpu(lost=True), "fail", "GPU is lost"),
        (FakeGpu(cpus=(70, 71)), "note", "none of them near the GPU"),
    ],
)
def test_conditions_of_a_gpu(gpu: FakeGpu, state: str, words: str) -> None:
    (hit,) = [finding for finding in found(FakeNvml([gpu])) if words in finding.value]
    assert hit.state == state and hit.mend
    assert not [finding for finding in found(FakeNvml([FakeGpu()])) if finding.state != "ok"]


@pytest.mark.parametrize(
    ("served", "build", "torch", "states", "words"),
    [
        (13000, "CUDA 13.0", (13, 0), ["ok", "ok"], ""),
        (12040, "CUDA 12.8", (12, 4), ["note", "ok"], "runs, but not its PTX"),
        (12020, "CUDA 13.0", (12, 1), ["fail", "ok"], "install driver 580.65.06"),
        (11040, "CUDA 11.8", (12, 1), ["note", "fail"], "install driver 525.60.13"),
    ],
)
def test_driver_against_builds(served: int, build: str, torch: tuple[int, int], states: list[str], words: str) -> None:
    listed = list(findings(gpus.read(FakeNvml([FakeGpu()], cuda=served)), build, torch, {}, frozenset({0})))
    about = of(listed, "cuda of zcomm") + of(listed, "cuda of torch")
    assert [finding.state for finding in about] == states
    assert words in " ".join(f"{finding.value} {finding.mend}" for finding in about)


def test_builds_without_cuda_are_said() -> None:
    listed = found(FakeNvml([FakeGpu()]), build="built without CUDA")
    (ours,) = of(listed, "cuda of zcomm")
    assert ours.state == "note" and "nvcc" in ours.mend
    import torch

    text = torch.version.cuda
    assert cuda_of_torch() == (None if text is None else tuple(map(int, text.split(".")[:2])))


def test_links_and_their_order() -> None:
    linked = gpus.read(two_linked(), Path("/nowhere"))
    assert linked.links[0, 1] == gpus.Link("nvlink", 4, True)
    assert "all pairs: NVLink x4" in [finding.value for finding in found(two_linked())]
    switched = gpus.read(eight_on_switches(), Path("/nowhere"))
    assert set(switched.links.values()) == {gpus.Link("nvlink", 18, True)} and len(switched.links) == 28
    kinds = ("nvlink", "board", "switch", "switches", "bridge", "node", "cross", "unknown")
    by_kind = [gpus.Link(kind, int(kind == "nvlink")).rank for kind in kinds]
    assert by_kind == sorted(by_kind, reverse=True) and len(set(by_kind)) == 8
    assert gpus.Link("nvlink", 18).rank > gpus.Link("nvlink", 4).rank


def test_gpus_that_do_not_reach_each_other() -> None:
    assert not of(found(two_linked()), "gpu peer access")
    consumer = FakeNvml([FakeGpu(bus_id=bus(i), peers=False) for i in range(2)], {(0, 1): 30})
    assert not gpus.read(consumer, Path("/nowhere")).reach
    assert "all pairs: one host bridge, no peer access" in [finding.value for finding in found(consumer)]
    (said,) = of(found(consumer), "gpu peer access")
    assert said.state == "note" and "by way of the host" in said.value and "nvidia-smi topo" in said.mend
    silent = replace(consumer, missing=("nvmlDeviceGetP2PStatus",))
    assert gpus.read(silent, Path("/nowhere")).reach and not of(found(silent), "gpu peer access")


def test_links_of_two_nodes_are_listed_by_kind() -> None:
    listed = [finding.value for finding in of(found(eight_on_two_nodes()), "gpu links")]
    assert [line.split(":")[0] for line in listed] == ["one PCIe switch", "one NUMA node", "across NUMA nodes"]


def test_tables_of_speeds() -> None:
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("NVIDIA GeForce GTX 1080") is None
    assert peak_flops("NVIDIA L40S") == 362e12 and peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert pcie_bps(5, 16) == pytest.approx(63e9, rel=0.01) and pcie_bps(None, 16) is None


def test_ranges() -> None:
    assert ranges((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8" and ranges(None) == ""
