"""Stage 3 on devices, of one rank and of several, with tiers of state and weights parameter by parameter.

The oracle is the same training on the CPU, to the bit. Ranks are threads.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import simulated
import zcomm
from device_jobs import Job, mixed_state, mixed_weights, train
from test_corners import KINDS, Net
from test_device_peers import DELAY_S, backward, compare, ranks, seeding
from tiers import long, one_in, slow
from zcomm.memory.device_streams import NO_PEERS

JOBS = [
    Job(3, "cpu", resident=True), Job(3, "cpu", resident=True, precision="bf16", clip=0.5, prefetch=0),
    Job(3, "nvme", resident=True, accum=2), Job(3, "cpu", resident=True, fraction=0.5, precision="fp16"),
    Job(3, "mixed", resident=True), Job(3, "mixed", mixed=True), Job(3, "nvme", mixed=True),
    Job(3, "mixed", mixed=True, prefetch=0, overlap=False), Job(3, "mixed", mixed=True, prefetch=3, accum=2),
    Job(3, "mixed", mixed=True, share_parameters=False), Job(3, "cpu", mixed=True, fraction=0.4, optimizer="nadam"),
    Job(3, None, mixed=True, optimizer="8bit"), Job(3, "mixed", mixed=True, precision="bf16", clip=0.5),
]  # fmt: skip


@pytest.mark.parametrize("job", one_in(3, 1, JOBS), ids=str)
def test_the_bits_of_the_cpu(job: Job, tmp_path: Path) -> None:
    compare(job, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_in(3, 2, KINDS[1:], long))  # test_zero_device, test_device_peers run the others
def test_models_off_the_straight_road(kind: str, tmp_path: Path) -> None:
    compare(Job(3, "mixed", kind=kind, mixed=True), tmp_path)
    simulated.stop()
    compare(Job(3, "cpu", kind=kind, resident=True), tmp_path)


@pytest.mark.slow
def test_three_ranks_and_many_late_steps(tmp_path: Path) -> None:
    compare(Job(3, "mixed", mixed=True, clip=1.0), tmp_path, 3, 20)


@pytest.mark.parametrize("kind", ["plain", slow("tied+reentrant"), slow("frozen"), "lora", slow("outside")])
def test_some_shards_of_one_rank_stay(kind: str, tmp_path: Path) -> None:
    for job in (Job(3, "mixed", kind=kind, mixed=True), Job(3, "cpu", kind=kind, mixed=True, prefetch=0, clip=0.5)):
        compare(job, tmp_path, 1)
        simulated.stop()


def test_each_pair_of_tiers(tmp_path: Path) -> None:
    """Tiers of state and weights in stage 3: the place of each bucket, and the bytes on the host's communicator."""
    simulated.play(joins=True)

    def body(comm: zcomm.Communicator) -> None:
        net = Net("plain")
        opt = Job(3, "mixed", mixed=True).build(net, str(tmp_path), comm)
        parts = opt._parts
        kinds = [type(state).__name__ for state in parts.state.kinds]
        assert kinds == ["SwappedState", "StagedState", "DeviceState"]
        sections = parts.geometry.buckets
        count = dict.fromkeys(product(("device", "cpu", "nvme"), repeat=2), 0)
        for section, bucket in ((pairs_of(net, parts)[bucket.index], bucket) for bucket in sections):
            count[section] += bucket.shard_count
        assert {pair for pair, found in count.items() if not found} == {("nvme", "device"), ("nvme", "nvme")}
        weights = {tier: sum(found for pair, found in count.items() if pair[1] == tier) for tier in ("device", "cpu")}
        followed = count["cpu", "device"]
        memory = opt.memory()
        assert memory["device"]["parameters"] == 4 * weights["device"]
        assert memory["cpu"]["parameters"] == 4 * (weights["cpu"] + followed)
        assert memory["device"]["gradients"] == 4 * count["device", "device"]
        assert memory["cpu"]["gradients"] == 4 * (sum(count.values()) - count["device", "device"])
        staged, there = parts.state.kinds[1:]
        assert sum(staged.counts) == count["device", "cpu"] + count["device", "nvme"]
        assert sum(there.counts) == count["device", "device"]
        assert parts.state.slot_nbytes == staged.slot_nbytes > 0 == there.slot_nbytes
        opt.close()

    ranks(2, tmp_path, body)


def test_host_slots_have_room_for_what_comes_by_them(tmp_path: Path) -> None:
    simulated.play(joins=True)

    def body(comm: zcomm.Communicator) -> None:
        offload = zcomm.Offload(None, lambda name, param: "nvme" if name.endswith("bias") else "device")
        opt = zcomm.ZeroOptimizer(Net("plain"), stage=3, offload=offload, nvme_path=str(tmp_path), comm=comm)
        store = opt._parts.store
        filler = store.memory.fillers[0]
        host = max(sum(bucket.count for bucket, _ in filler._of(unit)) for unit in store.units)
        assert [flat.nbytes for flat, _ in filler.slots] == [4 * host] * 2
        assert 8 * host < max(unit.nbytes for unit in store.units)
        opt.close()

    ranks(2, tmp_path, body)


def pairs_of(net: nn.Module, parts: Any) -> dict[int, tuple[str, str]]:
    """Tiers of state and weights by bucket, as the job's functions give them."""
    return {
        bucket.index: (mixed_state(name, net.get_parameter(name)), mixed_weights(name, net.get_parameter(name)))
        for bucket in parts.geometry.buckets
        for name in (parts.names[bucket.params[0]],)
    }


def test_offloaded_state_leaves_gathers_between_devices(tmp_path: Path) -> None:
    """Gradients and new shards cross the host; units do not."""
    simulated.play(joins=True)

    def body(comm: zcomm.Communicator) -> None:
        net = Net("plain")
        opt = Job(3, "cpu", resident=True).build(net, str(tmp_path), comm)
        store = opt._parts.store
        assert len(store.memory.fillers) == 2 and not store.on_device
        assert opt.memory()["device"]["parameters"] == opt.memory()["cpu"]["parameters"] > 0
        crossed, units = [0], list(store.units)
        lane = opt._parts.lane
        copy = lane.h2d.copy

        def counted(copies: Any, *how: Any) -> None:
            crossed[0] += sum(tensor.nbytes for tensor, _ in copies)
            copy(copies, *how)

        lane.h2d.copy = counted
        for number in range(2):
            backward(net, opt, comm.rank, number)
            assert crossed[0] == number * opt.memory()["device"]["parameters"]
            opt.step()
            opt.zero_grad()
        assert len(units) > 3 and not store.window_nbytes and store.memory.fillers[0].gathers == 0
        assert opt._parts.comms.peers is NO_PEERS, "one communicator between the devices suffices"
        opt.close()

    ranks(2, tmp_path, body)


@pytest.mark.parametrize("job", [Job(3, None, resident=True), Job(3, "mixed", mixed=True, clip=0.5)], ids=str)
def test_shards_are_on_the_host_where_devices_do_not_reach_each_other(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(comm: zcomm.Communicator) -> dict[str, Any]:
        return train(job, str(tmp_path), 3, comm)

    plain = ranks(2, tmp_path, body)
    simulated.play(DELAY_S)  # they do not
    with caplog.at_level("WARNING", "zcomm"):
        assert ranks(2, tmp_path, body) == plain
    said = [record.getMessage() for record in caplog.records if "do not reach each other" in record.getMessage()]
    assert len(said) == 1 and "shards that are not offloaded are in host memory" in said[0], "rank 0 alone"

    def memory(comm: zcomm.Communicator) -> tuple[dict[str, dict[str, int]], int]:
        with seeding:
            net = Net("plain")
        opt = job.build(net, str(tmp_path), comm)
        found = (
            opt.memory(),
            sum(b.shard_count for b in opt._parts.geometry.every if opt._parts.store.tier_of(b) != "nvme"),
        )
        opt.close()
        return found

    for found, in_memory in ranks(2, tmp_path, memory):
        assert found["device"]["parameters"] == 0 and found["cpu"]["parameters"] == 4 * in_memory
