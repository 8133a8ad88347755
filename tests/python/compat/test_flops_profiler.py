"""deepspeed.profiling.flops_profiler: counts of a known model, its texts, and arguments that are not available."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from zcomm.compat.deepspeed.profiling import flops_profiler
from zcomm.compat.deepspeed.profiling.flops_profiler import profiler


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.runs = 0

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        self.runs += 1
        assert not self.training
        hidden = self.first(x)
        for _ in range(times):
            out = self.last(hidden)
        return out


FIRST, LAST, PARAMS = 4 * 8 * 16, 4 * 16 * 4, 8 * 16 + 16 + 16 * 4 + 4  # MACs of four rows


def test_a_profile_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net = Net()
    found = flops_profiler.get_model_profile(net, (4, 8), as_string=False, warm_up=2)
    assert found == (2 * (FIRST + LAST), FIRST + LAST, PARAMS) and net.runs == 3 and net.training
    shown = capsys.readouterr().out
    assert "Net.first: 1.02 KFLOPs, 66.7 %" in shown and "samples" not in shown
    texts = flops_profiler.get_model_profile(
        net, args=[torch.ones(4, 8)], kwargs={"times": 3}, detailed=False, output_file=str(tmp_path / "a" / "b.txt")
    )
    assert texts == ("2.56 KFLOPS", "1.28 KMACs", "212")
    written = (tmp_path / "a" / "b.txt").read_text()
    assert "depth 1: Net.last 1.54 KFLOPs" in written and "share of forward" not in written
    assert capsys.readouterr().out == ""


def test_a_profiler_counts_between_start_and_stop() -> None:
    net = Net().eval()
    counter = flops_profiler.FlopsProfiler(net)
    with pytest.raises(RuntimeError, match="call start_profile"):
        counter.print_model_profile()
    for rows in (4, 8):
        counter.start_profile()
        net(torch.ones(rows, 8))
        counter.stop_profile()
        net(torch.ones(rows, 8))
        assert counter.get_total_macs() == (FIRST + LAST) * rows // 4
        assert counter.get_total_duration() > 0 and counter.get_total_params(as_string=True) == "212"
    counter.end_profile()
    assert counter.get_total_flops() == 0


def test_numbers_have_units() -> None:
    assert profiler.number_to_string(1.5e9) == "1.5 G" and profiler.params_to_string(7e9) == "7 B"
    assert profiler.flops_to_string(0) == "0 FLOPS" and profiler.duration_to_string(0.0025) == "2.5 ms"
    assert profiler.macs_to_string(2e6, units="K", precision=1) == "2000 KMACs"
    with pytest.raises(ValueError, match="units='Q'"):
        profiler.number_to_string(1, units="Q")


def test_what_is_not_available_is_an_error() -> None:
    net = Net()
    with pytest.raises(ValueError, match="needs input_shape=, args= or kwargs="):
        flops_profiler.get_model_profile(net)
    with pytest.raises(ValueError, match="mode='backward'"):
        flops_profiler.get_model_profile(net, (4, 8), mode="backward")
    with pytest.raises(NotImplementedError, match="ignore_list="):
        flops_profiler.get_model_profile(net, (4, 8), ignore_modules=[nn.Linear])
    assert net.training
    with pytest.raises(NotImplementedError, match="recompute_fwd_factor"):
        flops_profiler.FlopsProfiler(net, recompute_fwd_factor=1.0)
