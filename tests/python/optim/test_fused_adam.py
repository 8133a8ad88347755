"""FusedAdam: CPUAdam's bits, torch's interface; its logic on a simulated device with CPU tensors, all on a GPU."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch

import zcomm
import zcomm_testing
from zcomm import _core
from zcomm.optim import CPUAdam, FusedAdam

SHAPES = [(3,), (17, 5), (64, 64), (1,), (0,), (130,), (5000,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STATES = [torch.float32, torch.bfloat16, torch.uint8]


class Simulated(FusedAdam):
    """Runs on the simulated device with host memory; its stream is the host itself, or a thread with delays."""

    DEVICE = "cpu"
    device = zcomm_testing.simulated_device()
    delayed: _core.Stream | None = None

    def _check_there(self) -> None:
        pass

    def _stream(self, device: torch.device) -> _core.Stream:
        return self.delayed or self.device.adopt_stream(0)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CLASSES = [
    pytest.param(Simulated, id="simulated"),
    pytest.param(FusedAdam, id="cuda", marks=ON_GPU),
]


def home(make: type[FusedAdam]) -> str:
    return make.DEVICE


def params(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def fill(tensors: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in tensors:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)


def grouped(tensors: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": tensors[:2]}, {"params": tensors[2:], "lr": 3e-3, "weight_decay": 0.2, "betas": (0.8, 0.95)}]


def expect_equal(ours: FusedAdam, theirs: CPUAdam) -> None:
    mine, other = ([p for group in opt.param_groups for p in group["params"]] for opt in (ours, theirs))
    for number, (a, b) in enumerate(zip(mine, other, strict=True)):
        assert torch.equal(a.detach().cpu(), b.detach()), f"parameter {number}"
        one, two = ours.state[a], theirs.state[b]
        assert one.keys() == two.keys()
        for name, value in two.items():
            assert one[name].dtype == value.dtype and torch.equal(one[name].cpu(), value), f"{name} of {number}"


@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_has_the_bits_of_cpu_adam(make: type[FusedAdam], dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    for options in ({}, {"adamw": False, "weight_decay": 0.1, "maximize": True}):
        ours, theirs = params(dtype, home(make)), params(dtype)
        one = make(grouped(ours), lr=1e-2, state_dtype=state_dtype, **options)
        two = CPUAdam(grouped(theirs), lr=1e-2, state_dtype=state_dtype, **options)
        for step in range(5):
            for tensors, opt in ((ours, one), (theirs, two)):
                fill(tensors, step)
                opt.step()
        expect_equal(one, two)


@pytest.mark.parametrize("make", CLASSES)
def test_numbers_may_be_on_the_device(make: type[FusedAdam]) -> None:
    """Scale, found_inf and learning rate as device tensors give the same bits as CPUAdam's numbers."""
    device = home(make)
    ours, theirs = params(device=device), params()
    lr = torch.tensor(1e-2, device=device)
    one, two = make(ours, lr=lr, weight_decay=0.1), CPUAdam(theirs, lr=1e-2, weight_decay=0.1)
    for step in range(8):
        fill(ours, step)
        fill(theirs, step)
        lr.fill_(1e-2 / (step + 1))
        two.param_groups[0]["lr"] = float(lr)
        scale, found = 2.0**step, float(step % 3 == 1)
        tensors = step < 4
        one.step(
            grad_scale=torch.tensor(scale, device=device) if tensors else scale,
            found_inf=torch.tensor([found], device=device) if tensors else bool(found),
            clip=0.7,
            norm=True,
        )
        two.step(grad_scale=scale, found_inf=bool(found), clip=0.7, norm=True)
        if found == 0:
            assert one.grad_norm == two.grad_norm
        expect_equal_steps = [float(one.state[p]["step"]) for p in ours]
        assert expect_equal_steps == [float(two.state[p]["step"]) for p in theirs]
    expect_equal(one, two)
    assert [float(one.state[p]["step"]) for p in ours] == [5.0] * len(ours)


@pytest.mark.parametrize("make", CLASSES)
def test_groups_closure_and_missing_gradients(make: type[FusedAdam]) -> None:
    device = home(make)
    ours, theirs = params(device=device), params()
    one, two = make(ours[:4]), CPUAdam(theirs[:4])
    for step in range(6):
        if step == 2:
            one.add_param_group({"params": ours[4:], "lr": 0.5})
            two.add_param_group({"params": theirs[4:], "lr": 0.5})
        for tensors, opt in ((ours, one), (theirs, two)):
            fill(tensors, step)
            tensors[step % 3].grad = None
            tensors[3].grad = None if step < 4 else tensors[3].grad
            assert opt.step(lambda: 1.5) == 1.5
    expect_equal(one, two)
    assert float(one.state[ours[3]]["step"]) == 2 and float(one.state[ours[6]]["step"]) == 4


@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_goes_to_cpu_adam_and_back(make: type[FusedAdam], dtype: torch.dtype) -> None:
    device = home(make)
    ours, theirs = params(dtype, device), params(dtype)
    one, two = make(ours, lr=1e-2), CPUAdam(theirs, lr=1e-2)
    for step in range(3):
        fill(ours, step)
        one.step()
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            b.copy_(a)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    two.load_state_dict(torch.load(file, weights_only=False))
    again = params(dtype, device)
    with torch.no_grad():
        for a, b in zip(ours, again, strict=True):
            b.copy_(a)
    three = make(again, lr=0.5)
    three.load_state_dict(two.state_dict())
    for tensors, opt in ((ours, one), (theirs, two), (again, three)):
        for step in range(3, 6):
            fill(tensors, step)
            opt.step()
    expect_equal(one, two)
    expect_equal(three, two)
    assert float(three.state[again[0]]["step"]) == 6


@pytest.mark.parametrize("make", CLASSES)
def test_state_goes_to_torch_and_back(make: type[FusedAdam]) -> None:
    device = home(make)
    ours, theirs = params(device=device), params(device=device)
    one, two = make(ours, lr=1e-2, weight_decay=0.1), torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    for step in range(4):
        for tensors, opt in ((ours, one), (theirs, two)):
            fill(tensors, step)
            opt.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=5e-7)
    torchs = copy.deepcopy(two.state_dict())
    if device == "cuda":  # otherwise torch requires False
        two.load_state_dict(one.state_dict())
        assert two.param_groups[0]["capturable"]
        fill(theirs, 9)
        two.step()
    again = params(device=device)
    with torch.no_grad():
        for a, b in zip(ours, again, strict=True):
            b.copy_(a)
    three = make(again)
    three.load_state_dict(torchs)
    fill(again, 4)
    three.step()
    assert three.param_groups[0]["lr"] == 1e-2 and three.param_groups[0]["capturable"]
    assert three.state[again[0]]["step"].device.type == device and float(three.state[again[0]]["step"]) == 5


@pytest.mark.parametrize("make", CLASSES)
def test_copies_and_state_replaced_by_hand(make: type[FusedAdam]) -> None:
    ours = params(device=home(make))
    one = make(ours, lr=1e-2, state_dtype="8bit")
    fill(ours, 0)
    one.step()
    twin_params = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    twin = make(twin_params, lr=1e-2, state_dtype="8bit")
    twin.load_state_dict(copy.deepcopy(one.state_dict()))
    for tensors, opt in ((ours, one), (twin_params, twin)):
        fill(tensors, 1)
        opt.step()
    for a, b in zip(ours, twin_params, strict=True):
        assert torch.equal(a, b)
    first, second = one.wide_state(ours[2])
    one.state[ours[2]].update(exp_avg=torch.zeros_like(first), exp_avg_sq=torch.ones_like(second))
    fill(ours, 2)
    one.step()
    assert one.wide_state(ours[2])[1].min() > 0.9
    copied = copy.deepcopy(one)
    assert copied.param_groups[0]["lr"] == 1e-2


def test_on_a_stream_that_is_late() -> None:
    """The host neither reads nor frees data of a step before the device has used them."""

    class Late(Simulated):
        delayed = zcomm_testing.simulated_device(seed=5, max_delay_s=2e-3).make_stream()

    ours, theirs = params(torch.bfloat16), params(torch.bfloat16)
    one, two = Late(grouped(ours)), CPUAdam(grouped(theirs))
    for step in range(4):
        scale = torch.tensor(4.0)
        for tensors in (ours, theirs):
            fill(tensors, step)
        one.step(grad_scale=scale)
        two.step(grad_scale=4.0)
        assert Late.delayed is not None
        Late.delayed.synchronize()
    expect_equal(one, two)


def test_without_a_device_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    expected = (
        (zcomm.CudaError, "no CUDA device") if "without" not in _core.cuda_info() else (NotImplementedError, "CUDA")
    )
    with pytest.raises(expected[0], match=expected[1]):
        FusedAdam(params())


def test_what_is_not_had_is_refused() -> None:
    ours = params()
    with pytest.raises(NotImplementedError, match="amsgrad"):
        Simulated(ours, amsgrad=True)
    with pytest.raises(ValueError, match="betas"):
        Simulated(ours, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="on meta"):
        Simulated([torch.nn.Parameter(torch.zeros(3, device="meta"))])
    opt = Simulated(ours, lr=torch.tensor(1e-3), fused=True, foreach=None, capturable=False)
    fill(ours, 0)
    with pytest.raises(ValueError, match="not a single number"):
        opt.step(grad_scale=torch.ones(2))
    ours[0].grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (3,))
    with pytest.raises(NotImplementedError, match="sparse"):
        opt.step()
    ours[0].grad = None
    with pytest.raises(ValueError, match="lr=-1"):
        Simulated(ours, lr=-1.0)


def test_norm_of_gradients_that_are_not_finite() -> None:
    ours = params()
    opt = Simulated(ours)
    fill(ours, 0)
    opt.step(norm=True)
    assert opt.grad_norm is not None and math.isclose(
        opt.grad_norm, math.sqrt(sum(float(p.grad.double().square().sum()) for p in ours)), rel_tol=1e-12
    )
    ours[1].grad[0, 0] = math.inf
    opt.step(norm=True)
    assert math.isnan(opt.grad_norm)


def test_grad_scaler_of_torch() -> None:
    """torch.amp.GradScaler leaves scale and found_inf as device tensors, and no step waits for them."""
    ours = params()
    opt, scaler = Simulated(ours, lr=1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        start = [p.detach().clone() for p in ours]
        opt.zero_grad()
        loss = sum((p * (step + 1.0)).sum() for p in ours)
        scaler.scale(loss).backward()
        if step == 2:
            ours[0].grad[0] = math.inf
        scaler.step(opt)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(start, ours, strict=True))
        assert moved == (step != 2)
    assert float(opt.state[ours[0]]["step"]) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_counts_on_as_it_is_replayed() -> None:
    ours, theirs = params(device="cuda"), params()
    lr = torch.tensor(1e-2, device="cuda")
    one, two = FusedAdam(ours, lr=lr), CPUAdam(theirs, lr=1e-2)
    stream = torch.cuda.Stream()
    for step in range(2):
        fill(ours, step)
        fill(theirs, step)
        with torch.cuda.stream(stream):
            one.step()
        two.step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    grads = [p.grad for p in ours]
    with torch.cuda.graph(graph):
        one.step()
    for step in range(2, 6):
        fill(theirs, step)
        for grad, other in zip(grads, theirs, strict=True):
            grad.copy_(other.grad)
        lr.fill_(1e-2 / step)
        two.param_groups[0]["lr"] = float(lr)
        graph.replay()
        two.step()
    torch.cuda.synchronize()
    expect_equal(one, two)
