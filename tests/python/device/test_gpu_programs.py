"""Programs as users write them, with a model on a GPU: torch on the same device has the same numbers.

Each body also runs with the CPU as the device ("played"), so that a GPU run differs only in the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simulated
import zcomm
from zcomm import _core

HERE = torch.cuda.is_available() and _core.cuda_available()
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="needs a CUDA device, and a build and a torch with CUDA"),
]
WHERE = ["played", pytest.param("cuda", marks=ON_GPU)]
STAGES = [2, 3]
STEPS = 4


def device_of(where: str) -> str:
    """Return the device of tensors; "played": from now on ZeroOptimizer treats CPU tensors as device tensors."""
    if where == "played":
        simulated.play(0.0005)
    return "cuda" if where == "cuda" else "cpu"


def made(device: str) -> tuple[nn.Sequential, nn.Sequential]:
    """Make a model, and its twin that torch trains."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3)).to(device)
    return net, copy.deepcopy(net)


def batch(number: int, device: str) -> torch.Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(number)).to(device)


def assert_near(opt: zcomm.ZeroOptimizer, twin: nn.Module, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    found = opt.full_state_dict()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(found[name].cpu().float(), value.cpu().float(), rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeeds_calls(where: str, stage: int) -> None:
    """A configuration with offload, accumulation and clipping; the engine moves a CPU model to the device."""
    device = device_of(where)
    net, twin = made("cpu")
    twin = twin.to(device)
    offloaded = ["offload_optimizer", "offload_param"] if stage == 3 else ["offload_optimizer"]
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, **{name: {"device": "cpu"} for name in offloaded}},
    }
    engine, *_ = zcomm.initialize(model=net, config=config, device=device)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
    for number in range(2 * STEPS):
        x = batch(number, device)
        loss = engine(x).square().mean()
        assert loss.device.type == device
        engine.backward(loss)
        engine.step()
        theirs = twin(x).square().mean()
        (theirs / 2).backward()
        torch.testing.assert_close(loss.detach(), theirs.detach(), rtol=1e-3, atol=1e-5)
        if number % 2:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            other.step()
            other.zero_grad()
    assert isinstance(engine.optimizer, zcomm.ZeroOptimizer)
    assert_near(engine.optimizer, twin)
    engine.optimizer.close()


def plainly(opt: Any, loss: torch.Tensor, _scaler: Any) -> None:
    loss.backward()
    opt.step()
    opt.zero_grad()


def by_scaler(opt: Any, loss: torch.Tensor, scaler: Any) -> None:
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, plainly), (torch.float16, by_scaler)])
def test_autocast(where: str, stage: int, dtype: torch.dtype, step: Callable[..., None]) -> None:
    device = device_of(where)
    net, twin = made(device)
    opt = zcomm.ZeroOptimizer(net, "adamw", lr=1e-2, stage=stage, offload="cpu")
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    scalers = [torch.amp.GradScaler(device, init_scale=1024.0) for _ in range(2)]
    for number in range(STEPS):
        x, losses = batch(number, device), []
        for model, optimizer, scaler in ((net, opt, scalers[0]), (twin, other, scalers[1])):
            with torch.autocast(device, dtype=dtype):
                loss = model(x).float().square().mean()
            step(optimizer, loss, scaler)
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=2e-2, atol=1e-4)
    assert_near(opt, twin, rtol=2e-2, atol=2e-3)
    opt.close()


@pytest.mark.timeout_s(200)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("stage", STAGES)
def test_a_compiled_model(where: str, stage: int) -> None:
    device = device_of(where)
    net, twin = made(device)
    opt = zcomm.ZeroOptimizer(net, "adamw", lr=1e-2, stage=stage, offload="cpu")
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    compiled = torch.compile(net, backend="inductor" if where == "cuda" else "aot_eager")
    for number in range(STEPS):
        x = batch(number, device)
        plainly(opt, compiled(x).square().mean(), None)
        plainly(other, twin(x).square().mean(), None)
    assert_near(opt, twin, rtol=1e-3, atol=1e-4)
    opt.close()
    torch._dynamo.reset()


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def draw(model: nn.Module) -> None:
    """Draw a weight on the CPU, because a device draws other numbers than a played one."""
    value = torch.randn(200, 200, generator=torch.Generator().manual_seed(3)) * 0.1
    with torch.no_grad():
        model[2].weight.copy_(value)  # type: ignore[index]


def load(model: nn.Module) -> None:
    torch.manual_seed(9)
    model.load_state_dict(
        nn.Sequential(nn.Linear(40, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3)).state_dict()
    )


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("edit", [halve, draw, load])
@pytest.mark.parametrize("offload", ["cpu", None])
def test_weights_that_the_program_edits(
    where: str, stage: int, edit: Callable[[nn.Module], None], offload: Any
) -> None:
    device = device_of(where)
    net, twin = made(device)
    opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=stage, offload=offload)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(STEPS):
        x = batch(number, device)
        plainly(opt, net(x).square().mean(), None)
        plainly(other, twin(x).square().mean(), None)
        if number == 1:
            edit(net)
            edit(twin)
    assert_near(opt, twin)
    opt.close()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_a_device_loads_on_the_cpu(where: str, stage: int, tmp_path: Path) -> None:
    device = device_of(where)
    net, _ = made(device)
    opt = zcomm.ZeroOptimizer(net, "adamw", lr=1e-2, stage=stage, offload="cpu")
    for number in range(2):
        plainly(opt, net(batch(number, device)).square().mean(), None)
    opt.save(tmp_path / "saved")
    saved = opt.full_state_dict()
    simulated.stop()
    other, _ = made("cpu")
    loaded = zcomm.ZeroOptimizer(other, "adamw", lr=1e-2, stage=2)
    loaded.load(tmp_path / "saved")
    assert all(torch.equal(saved[name].cpu(), value) for name, value in loaded.full_state_dict().items())
    plainly(opt, net(batch(2, device)).square().mean(), None)
    plainly(loaded, other(batch(2, "cpu")).square().mean(), None)
    for name, value in opt.full_state_dict().items():
        torch.testing.assert_close(value.cpu(), loaded.full_state_dict()[name], rtol=1e-4, atol=2e-5)
    loaded.close()
    opt.close()
