"""The fused CPU optimizers with small state (bf16, 8 bits) and fp16 weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from test_optim import params, rounded, steps
from zcomm.optim import CPUAdam


def test_bf16_state_trains_as_fp32_state() -> None:
    """A noisy quadratic ends at the same distance as with fp32 state."""
    target = torch.linspace(-1, 1, 4096)
    ends = []
    for state_dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.zeros(4096))
        opt = CPUAdam([weight], lr=3e-3, state_dtype=state_dtype)
        for step in range(300):
            noise = torch.randn(4096, generator=torch.Generator().manual_seed(step))
            weight.grad = (weight.detach() - target) * (0.99**step) + 0.1 * noise
            opt.step()
        ends.append((weight.detach() - target).square().mean().item())
        assert opt.state[weight]["exp_avg_sq"].dtype is state_dtype
    assert ends[1] == pytest.approx(ends[0], rel=0.02)


def test_bf16_state_is_of_the_place_among_all_parameters() -> None:
    whole = torch.nn.Parameter(torch.zeros(300))
    parts = [torch.nn.Parameter(torch.zeros(n)) for n in (100, 1, 199)]
    a, b = rounded([whole], lr=1e-2), rounded(parts, lr=1e-2)
    for step in range(5):
        whole.grad = torch.randn(300, generator=torch.Generator().manual_seed(step))
        for param, grad in zip(parts, whole.grad.split([100, 1, 199]), strict=True):
            param.grad = grad.clone()
        a.step()
        b.step()
    assert torch.equal(torch.cat([p.detach() for p in parts]), whole.detach())


def test_bf16_state_goes_to_torch_and_back() -> None:
    tensors = params()
    opt = rounded(tensors, lr=1e-2)
    steps(opt, tensors, 3)
    theirs = torch.optim.AdamW(tensors)
    theirs.load_state_dict(opt.state_dict())
    steps(theirs, tensors, 1)
    back = rounded(tensors, lr=1e-2)
    back.load_state_dict(theirs.state_dict())
    steps(back, tensors, 1)
    assert back.state[tensors[0]]["exp_avg"].dtype == torch.bfloat16


def test_coded_state_saves_and_resumes_to_the_bit(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((7, 100), (256,), (1,), (0,))]
        opt = CPUAdam(params, lr=1e-2, state_dtype="8bit")
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            opt.step()
        assert opt.state[params[0]]["exp_avg"].dtype == torch.uint8
        assert opt.state[params[0]]["scales"].shape == (3, 2)
        torch.save(opt.state_dict(), tmp_path / "state.pt")
        copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
        again = CPUAdam(copies, lr=1e-2)  # state_dtype comes with the state
        again.load_state_dict(torch.load(tmp_path / "state.pt"))
        for param, copied in zip(params, copies, strict=True):
            param.grad = torch.randn_like(param)
            copied.grad = param.grad.clone()
        opt.step()
        again.step()
        for param, copied in zip(params, copies, strict=True):
            assert torch.equal(param, copied)


def test_coded_state_from_and_to_floats() -> None:
    """torch's state is encoded when it is loaded into 8 bits, and decoded when the group uses floats again."""
    start = torch.randn(1000)
    theirs, ours = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([theirs], lr=1e-3)
    for _ in range(5):
        theirs.grad = torch.randn(1000)
        reference.step()
    opt = CPUAdam([ours], lr=1e-3)
    opt.load_state_dict(reference.state_dict())
    opt.param_groups[0]["state_dtype"] = torch.uint8
    ours.grad = torch.zeros(1000)
    opt.step()
    m, v = opt.wide_state(ours)
    expected = reference.state[theirs]
    assert (m - 0.9 * expected["exp_avg"]).abs().max() < 0.1 * expected["exp_avg"].abs().max()
    assert ((v / expected["exp_avg_sq"]).log().abs() < 0.2).all()
    opt.param_groups[0]["state_dtype"] = torch.float32
    opt.step()
    assert opt.state[ours]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(opt.state[ours]["exp_avg"], 0.9 * m)


def test_coded_state_trains_as_well() -> None:
    """A small regression ends as with fp32 state, within the range of other seeds."""

    def last_loss(state_dtype: torch.dtype | str, seed: int) -> float:
        torch.manual_seed(0)
        x = torch.randn(256, 20)
        y = torch.tanh(x @ torch.randn(20, 5)) + 0.1 * torch.randn(256, 5)
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
        opt = CPUAdam(model.parameters(), lr=3e-3, weight_decay=1e-3, state_dtype=state_dtype)
        for _ in range(200):
            opt.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
        return float(loss.detach())

    exact = [last_loss(torch.float32, seed) for seed in range(4)]
    spread = max(exact) - min(exact)
    for state_dtype in (torch.bfloat16, "8bit"):
        assert abs(last_loss(state_dtype, 0) - exact[0]) < 2 * spread + 0.02 * exact[0]


def test_state_dtype_is_checked() -> None:
    with pytest.raises(ValueError, match=r"state_dtype=torch.float16 must be torch.float32, torch.bfloat16 or torch"):
        CPUAdam([torch.nn.Parameter(torch.randn(2))], state_dtype=torch.float16)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_fp16_parameter_trains_as_fp32(state_dtype: torch.dtype, tmp_path: Path) -> None:
    start = torch.randn(3, 333).half()
    half, full = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    opt, reference = (CPUAdam([param], lr=1e-3, state_dtype=state_dtype) for param in (half, full))
    for turn in range(4):
        half.grad = torch.randn(3, 333).half()
        full.grad = half.grad.float()
        opt.step()
        reference.step()
        assert torch.equal(opt.state[half]["master"], full) and torch.equal(half, full.half())
        if turn == 1:
            torch.save(opt.state_dict(), tmp_path / "state.pt")
            opt = CPUAdam([half])
            opt.load_state_dict(torch.load(tmp_path / "state.pt"))
