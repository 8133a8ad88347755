"""The race checker from Python: an offload pipeline on a recorded, simulated device, right and wrong."""

from __future__ import annotations

import re

import pytest
import torch

import zcomm_testing

SLOTS = 2


class Pipeline:
    """Gradients leave a device by slots, are summed on the CPU, and return; `forget` omits one ordering."""

    def __init__(self, forget: str = "") -> None:
        self.trace = zcomm_testing.Trace()
        self.device = zcomm_testing.record_device(zcomm_testing.simulated_device(seed=5, max_delay_s=2e-4), self.trace)
        self.forget = forget
        self.compute, self.copy = self.device.make_stream(), self.device.make_stream()
        self.trace.rename(self.compute, "compute")
        self.trace.rename(self.copy, "copy")
        self.gradient = self.device.allocate(4096)
        self.slots = [torch.zeros(4096, dtype=torch.uint8) for _ in range(SLOTS)]
        self.ready = self.device.make_event()
        self.taken = self.device.make_event()
        self.landed = [self.device.make_event() for _ in range(SLOTS)]

    def use(self, index: int) -> None:
        """Do the CPU's part, one step after the device's."""
        if self.forget != "landed":
            self.landed[index].synchronize()
        self.trace.touch(None, self.slots[index].data_ptr(), 4096, "rw", "CPU step")

    def run(self, steps: int) -> list[zcomm_testing.Race]:
        for step in range(steps):
            self.trace.set_subject(f"step {step}")
            slot, landed = self.slots[step % SLOTS], self.landed[step % SLOTS]
            if self.forget != "taken":
                self.compute.wait(self.taken)
            self.compute.fill(self.gradient.address, step, 4096)
            self.compute.record(self.ready)
            if self.forget != "ready":
                self.copy.wait(self.ready)
            self.copy.copy(slot.data_ptr(), self.gradient.address, 4096)
            self.copy.record(landed)
            self.copy.record(self.taken)
            if step > 0:
                self.use((step - 1) % SLOTS)
        self.copy.synchronize()
        self.compute.synchronize()
        return self.trace.races()


def test_a_right_pipeline_is_clean() -> None:
    pipeline = Pipeline()
    assert pipeline.run(12) == []
    assert pipeline.trace.operations == 35


@pytest.mark.parametrize(
    ("forget", "story"),
    [
        ("taken", r"copy reads .*'copy, step 0'.*compute writes .*let compute wait for it before 'fill, step 1'"),
        ("ready", r"compute writes .*'fill, step 0'.*copy reads .*let copy wait for it before 'copy, step 0'"),
        ("landed", r"copy writes .*'copy, step 0'.*the host writes .*'CPU step, step 1'.*let the host synchronize"),
    ],
)
def test_each_forgotten_order_is_found(forget: str, story: str) -> None:
    pipeline = Pipeline(forget)
    races = pipeline.run(4)
    assert races
    assert re.search(story, str(races[0])), str(races[0])
    assert races[0].overlap[1] - races[0].overlap[0] == 4096
    assert pipeline.trace.race_count >= len(races)


def test_queues() -> None:
    trace = zcomm_testing.Trace()
    trace.touch("comm", 4096, 64, "w", "reduce_scatter")
    trace.touch(None, 4100, 4, "r", "step")
    (race,) = trace.races()
    assert race.first.actor == "comm" and race.first.is_write and race.second.label == "step"
    assert race.overlap == (4100, 4104) and race.first.range == (4096, 4160)
    trace.order("comm", None)
    trace.touch(None, 4096, 64, "rw", "step")
    assert trace.race_count == 1
    with pytest.raises(ValueError, match="access='x'"):
        trace.touch(None, 0, 1, "x", "")


def test_an_event_orders_a_queue() -> None:
    trace = zcomm_testing.Trace()
    device = zcomm_testing.record_device(zcomm_testing.simulated_device(), trace)
    stream, event, memory = device.make_stream(), device.make_event(), device.allocate(64)
    stream.fill(memory.address, 0, 64)
    stream.record(event)
    trace.order(event, "comm")
    trace.touch("comm", memory.address, 64, "w", "all_reduce")
    assert trace.race_count == 0
    trace.order("comm", None)
    trace.order("comm", stream)
    stream.fill(memory.address, 0, 64)
    assert trace.race_count == 0
    stream.synchronize()
    with pytest.raises(ValueError, match="recorded device"):
        trace.order(zcomm_testing.simulated_device().make_event(), None)
