"""Hybrid shards (ZeroOptimizer(mesh=)) of models on (simulated) devices: the bits of the same mesh on the CPU.

Devices of a group are joined in one of WAYS. "both": those of a shard group reach each other, NCCL joins the groups.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
import zcomm
import zcomm_testing
from device_jobs import Job, train
from test_corners import Net, loss_of
from thread_world import ranks
from tiers import one_in, slow
from zero_jobs import digest

DELAY_S = 0.0005
seeding = threading.Lock()


WAYS = ("host", "peers", "nccl", "both")


@pytest.fixture(name="nccl")
def _nccl() -> Iterator[zcomm_testing.FakeNccl]:
    nccl = zcomm_testing.FakeNccl()
    before = nccl.complaints
    yield nccl
    simulated.stop()  # its lanes have the stand-in, and there is one at a time
    gc.collect()
    assert nccl.complaints == before  # standard error has them


def played(
    world_size: int,
    folder: Path,
    body: Callable[[zcomm.Communicator], Any],
    nccl: zcomm_testing.FakeNccl | None = None,
    way: str = "host",
) -> list[Any]:
    simulated.play(DELAY_S, joins=way in ("peers", "both"), nccl=nccl if way in ("nccl", "both") else None)
    try:
        return ranks(world_size, folder, body)
    finally:
        simulated.stop()


JOBS = [
    Job(0, "cpu"), Job(0, None, precision="bf16", clip=1.0, accum=2), Job(1, "cpu", precision="bf16", accum=2),
    Job(1, None, clip=0.5), Job(2, "cpu", bucket_mb=25.0), Job(2, "mixed", clip=0.5, accum=3),
    Job(2, "nvme", precision="bf16"), Job(2, "cpu", share_parameters=False, overlap=False),
    Job(2, "cpu", behind=True, precision="bf16"), Job(2, "cpu", behind=True, clip=0.5), Job(2, fraction=0.5),
    Job(2, None, optimizer="8bit"), Job(3, "cpu", precision="bf16", clip=0.5, accum=2),
    Job(3, "cpu", share_parameters=False), Job(3, None, resident=True), Job(3, "nvme", gradients="nvme"),
    Job(3, "nvme", gradients="nvme", update="backward"), Job(3, "mixed", mixed=True, precision="fp16"),
    Job(3, "cpu", behind=True), Job(3, "cpu", optimizer="lamb"), Job(2, "cpu", gradients="nvme"),
]  # fmt: skip
SIZES = [{"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 1}, {"replicate": 1, "shard": 2, "sequence": 2}]


CASES = [(mesh, job, "host") for mesh in SIZES for job in JOBS]
THREE = {"replicate": 3, "shard": 1}  # a sum of three has an order, and shards are no multiples of three
RESIDENT = [
    Job(0, None), Job(0, None, precision="bf16", clip=1.0, accum=2), Job(1, None, precision="fp16", accum=3),
    Job(2, None, clip=0.5), Job(2, None, accum=3), Job(2, None, bucket_mb=25.0), Job(2, "mixed", clip=0.5),
    Job(2, fraction=0.5, precision="bf16", behind=True), Job(2, None, precision="bf16", overlap=False),
    Job(3, None, resident=True), Job(3, None, resident=True, precision="bf16", clip=0.5, accum=2, prefetch=0),
    Job(3, "mixed", mixed=True), Job(3, "cpu", resident=True), Job(2, None, optimizer="8bit"), Job(3, None),
]  # fmt: skip
CASES += [
    (mesh, job, WAYS[1 + (m + j) % 3]) for m, mesh in enumerate((*SIZES, THREE)) for j, job in enumerate(RESIDENT)
]


@pytest.mark.parametrize(("mesh", "job", "way"), one_in(12, 5, CASES), ids=str)
def test_the_bits_of_the_same_mesh_on_the_cpu(
    mesh: dict[str, int], job: Job, way: str, nccl: zcomm_testing.FakeNccl, tmp_path: Path
) -> None:
    def body(job: Job, comm: zcomm.Communicator) -> dict[str, Any]:
        return train(job, str(tmp_path), 4, comm, zcomm.ProcessMesh(comm, **mesh))

    world_size = mesh["replicate"] * mesh["shard"] * mesh.get("sequence", 1)
    plain = ranks(world_size, tmp_path, partial(body, job.plain))
    there = played(world_size, tmp_path, partial(body, job), nccl, way)
    assert there == plain
    assert len({each["bits"] for each in there}) == 1
    assert len(set(plain[0]["losses"])) == len(plain[0]["losses"])


def program(job: Job, folder: Path, comm: zcomm.Communicator) -> list[Any]:
    """Read and change gradients and weights between passes and steps, save, load into another mesh."""
    with seeding:
        torch.manual_seed(comm.rank)
        net = Net("plain")
    opt = job.build(net, str(folder), comm, zcomm.ProcessMesh(comm, replicate=2, shard=2))
    weight, found = net.embed.weight, []
    for number in range(6):
        opt.backward(loss_of(net, comm.rank, number))
        if number in (1, 2):  # after the last pass of a step, and after its first
            found.append(digest({"gradient": zcomm.zero.full_grad(weight)}))
        if number == 3:
            zcomm.zero.set_full_param(weight, 0.5 * zcomm.zero.full_param(weight))
        opt.step()
        opt.zero_grad()
        if number == 3:
            opt.save(folder / "saved")
    opt.backward(loss_of(net, comm.rank, 9))
    opt.zero_grad()  # a pass without a step
    for number in (6, 7, 8):  # a pass more than expected adds a mean of its own
        opt.boundary = number == 8
        opt.backward(loss_of(net, comm.rank, number))
        opt.step()
        opt.zero_grad()
    found.append(digest(opt.full_state_dict()))
    opt.close()
    net = Net("plain")
    loaded = job.build(net, str(folder), comm, zcomm.ProcessMesh(comm, replicate=1, shard=4))
    loaded.load(folder / "saved")
    for number in (4, 5):
        loaded.backward(loss_of(net, comm.rank, number))
        loaded.step()
        loaded.zero_grad()
    found.append(float(loaded.grad_norm).hex())
    loaded.close()
    return found


PROGRAMS = [
    (Job(2, "cpu", accum=2, clip=0.5), "host"), (Job(3, "cpu", accum=2, share_parameters=False), "host"),
    (Job(2, None, accum=2, clip=0.5), "both"), (Job(3, None, accum=2, resident=True), "nccl"),
]  # fmt: skip


@pytest.mark.parametrize(("job", "way"), PROGRAMS, ids=str)
def test_programs_that_look_and_change(job: Job, way: str, nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    plain = ranks(4, tmp_path, partial(program, job, tmp_path))
    assert played(4, tmp_path, partial(program, job, tmp_path), nccl, way) == plain
    assert all(each == plain[0] for each in plain)


@pytest.mark.parametrize(
    ("stage", "way"), [(2, "both"), slow(0, "nccl"), slow(1, "peers"), (3, "nccl"), slow(3, "both")]
)
def test_bytes_and_paths(stage: int, way: str, nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    """Nothing crosses the host. Sums cross groups once in a step, in fp32; weights are gathered in the shard group."""
    sent: list[tuple[str, int, str, int]] = []  # operation, ranks, name, bytes of the larger side
    lock, counts = threading.Lock(), list[bool]()

    def count(kind: str, original: Any) -> Any:
        def call(self: Any, tensors: Any, *args: Any, **options: Any) -> Any:
            if not counts:
                return original(self, tensors, *args, **options)
            larger = tensors if kind == "reduce_scatter" else options["out"]
            nbytes = sum(each.nbytes for each in (larger if isinstance(larger, list) else [larger]))
            with lock:
                sent.append((f"{self.backend} {kind}", self.rank, options["name"], nbytes))
            return original(self, tensors, *args, **options)

        return call

    def body(comm: zcomm.Communicator) -> None:
        net = Net("plain")
        job = Job(stage, None, resident=True, accum=2, precision="bf16")
        opt = job.build(net, str(tmp_path), comm, zcomm.ProcessMesh(comm, replicate=2, shard=2))
        assert sum(opt.memory()["cpu"].values()) == 0
        comms = opt._parts.comms
        assert comms.peers.backend == ("nccl" if way == "nccl" else "cuda_ipc")
        assert comms.peers_across.backend == ("cuda_ipc" if way == "peers" else "nccl")
        comm.barrier()
        counts.append(True)
        for number in range(4):
            opt.backward(loss_of(net, comm.rank, number))
            opt.step()
            opt.zero_grad()
        shards = sum(4 * bucket.shard_count for bucket in opt._parts.geometry.buckets)
        comm.barrier()
        if comm.rank == 0:
            names = {name.split(" ")[0] for _, _, name, _ in sent}
            assert names == {"gradients", "unit" if stage == 3 else "parameters"}, names
            assert not [each for each in sent if each[0].split(" ")[0] not in ("nccl", "cuda_ipc")]
            across = [each for each in sent if "across groups" in each[2]]
            inside = sum(each[3] for each in sent if each[2].startswith("gradients") and each not in across)
            assert sum(each[3] for each in across) == 4 * 2 * 2 * shards  # ranks, steps, out and back
            assert inside == 4 * 4 * shards  # ranks, passes: bf16 slots of two shards
        comm.barrier()
        opt.close()

    before = {kind: getattr(zcomm.Communicator, kind) for kind in ("reduce_scatter", "all_gather")}
    try:
        for kind, original in before.items():
            setattr(zcomm.Communicator, kind, count(kind, original))
        played(4, tmp_path, body, nccl, way)
    finally:
        for kind, original in before.items():
            setattr(zcomm.Communicator, kind, original)


def broken(
    folder: Path, fault: Callable[[Any, Net], bool], stage: int, raised: threading.Barrier, comm: zcomm.Communicator
) -> str:
    """Train until an error, which ``fault`` on rank 3 before the third step causes. Return its text."""
    net = Net("plain")
    mesh = zcomm.ProcessMesh(comm, replicate=2, shard=2)
    opt = Job(stage, None, resident=True).build(net, str(folder), comm, mesh)
    words = "no error"
    for number in range(8):
        try:
            if number == 2 and comm.rank == 3 and fault(opt, net):
                return "at fault"
            opt.backward(loss_of(net, comm.rank, number))
            opt.step()
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            break
        opt.zero_grad()
    for _ in range(2):
        with pytest.raises((RuntimeError, zcomm.PeerLost)):
            opt.step()
    with suppress(threading.BrokenBarrierError):  # no rank needs another one's end
        raised.wait(2)
    opt.close()
    return words


@pytest.mark.parametrize(("stage", "way"), [(2, "both"), slow(2, "nccl"), slow(3, "nccl"), slow(3, "peers")])
def test_a_rank_that_ends_is_named_in_all_groups(
    stage: int, way: str, nccl: zcomm_testing.FakeNccl, tmp_path: Path
) -> None:
    def leave(opt: Any, net: Net) -> bool:
        opt.close()
        return True

    *found, _ = played(4, tmp_path, partial(broken, tmp_path, leave, stage, threading.Barrier(3)), nccl, way)
    print(*found, sep="\n")
    for text in found:
        assert re.search(r"rank 3\b", text) or re.search(r"rank 1 left.*its ranks 0, 1 are ranks [12], 3 of", text), (
            text
        )


@pytest.mark.parametrize("way", ["nccl", slow("both")])
def test_a_swapped_call_is_named(way: str, nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    """Rank 3 sums two buckets across groups in the other order. No update with wrong sums remains unseen."""

    def swap(opt: Any, net: Net) -> bool:
        transport = opt._parts.reducer.accumulators.kinds[0]
        across, names = transport.across, [f"gradients of bucket {n}, across groups" for n in (0, 1)]
        start = type(across).start

        def swapped(bucket: Any, sum_: Any, mine: Any, name: str) -> Any:
            return start(across, bucket, sum_, mine, names[1 - names.index(name)] if name in names else name)

        across.start = swapped
        return False

    found = played(4, tmp_path, partial(broken, tmp_path, swap, 2, threading.Barrier(4)), nccl, way)
    for text in found:
        assert "CollectiveMismatch" in text or "different operations" in text, text
        assert "across groups" in text, text


def test_forms_that_are_refused(tmp_path: Path) -> None:
    forms: dict[str, dict[str, Any]] = {
        "hpz=True": {"mesh": {"replicate": 2, "shard": 2}, "stage": 3, "hpz": True},
        "an axis with other tensors": {"mesh": {"tensor": 2, "shard": 2}},
        "codecs run on the host": {
            "mesh": {"replicate": 2, "shard": 2},
            "compression": zcomm.Compression(gradients="int8"),
        },
        "memory=": {"mesh": {"replicate": 2, "shard": 2}, "memory": "1GiB"},
    }

    def body(comm: zcomm.Communicator) -> None:
        for text, form in forms.items():
            mesh = zcomm.ProcessMesh(comm, **form["mesh"])
            with pytest.raises((NotImplementedError, ValueError), match=text):
                zcomm.ZeroOptimizer(Net("plain"), "adamw", comm=comm, **{**form, "mesh": mesh})

    played(4, tmp_path, body)
