"""An interrupt between any two lines of unit-wise stage 3: the next pass has the same bits, and no data are lost."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from interrupts import leaves_a_block
from tiers import slow
from zcomm.zero.sharded.param import ShardedParameter
from zcomm.zero.units.unit import UnitState

FILES = (
    "zero/units/store.py",
    "zero/units/life.py",
    "zero/units/memory.py",
    "zero/units/host.py",
    "zero/units/gather.py",
    "zero/units/hooks.py",
    "zero/units/weights.py",
    "zero/units/slot.py",
    "zero/units/saved_tensors.py",
    "zero/units/life.py",
)


class Interrupter:
    """Raises KeyboardInterrupt at the ``at``-th line of FILES in this thread; 0: only counts the lines."""

    def __init__(self, at: int) -> None:
        self.at, self.lines, self.where = at, 0, ""

    def __enter__(self) -> Interrupter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if "zcomm/zero/" in name and name.endswith(FILES) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not leaves_a_block(frame):
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def one_pass(model: nn.Module) -> float:
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    return loss.item()


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(("offload", "prefetch"), [slow(None, 1), ("nvme", 0)])
def test_an_interrupt_at_any_line_leaves_what_can_be_trained(
    tmp_path: Path, offload: str | None, prefetch: int
) -> None:
    torch.manual_seed(0)
    model = Net()
    how: dict[str, Any] = {"stage": 3, "offload": offload, "nvme_path": tmp_path, "share_parameters": False}
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.0, prefetch=prefetch, **how)
    for _ in range(2):
        wanted = one_pass(model)
        opt.step()
        opt.zero_grad()
    store = opt._live.store
    slots = len(store.memory.slots)
    with Interrupter(0) as counter:
        one_pass(model)
    opt.step()
    opt.zero_grad()
    assert counter.lines > 500
    chosen = random.Random(7).sample(range(1, counter.lines + 1), 250)
    interrupted = set()
    for at in chosen:
        with Interrupter(at) as interrupter:
            try:
                one_pass(model)
            except KeyboardInterrupt:
                interrupted.add(interrupter.where)
        opt.zero_grad()
        try:
            assert one_pass(model) == wanted
            if at % 2:
                opt.step()
            opt.zero_grad()
            assert one_pass(model) == wanted
            opt.step()
            opt.zero_grad()
            store.life.invalidate()  # reads of the next forward's first units may be pending
            assert all(unit.state is UnitState.SHARDED for unit in store.units)
            assert all(isinstance(p, ShardedParameter) for p in model.parameters())
            assert sorted(store.memory.ring.free) == list(range(len(store.memory.slots))), "no slot is lost"
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {interrupter.where} (line {at})") from error
    assert len(interrupted) > 60
    assert torch._C._is_torch_function_enabled()
    assert len(store.memory.slots) <= slots + 1
    opt.close()
    zcomm.shutdown()


def test_zero_grad_after_an_interrupt_makes_stand_ins_again(tmp_path: Path) -> None:
    model = Net()
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=3, offload="nvme", nvme_path=tmp_path, lr=0.1)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        one_pass(model)
    handle.remove()
    opt.zero_grad()
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    one_pass(model)
    opt.step()
    opt.zero_grad()
    opt.close()
    zcomm.shutdown()
