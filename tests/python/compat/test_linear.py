"""``deepspeed.linear``: numbers of frozen, quantised and adapted layers, and the same sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zcomm
from zcomm.compat.deepspeed import linear
from zcomm.compat.deepspeed.linear import LoRAConfig, OptimizedLinear, QuantizationConfig, init_lora
from zcomm.compat.deepspeed.linear.optimized_linear import LoRAOptimizedLinear, QuantizedLinear, dequantized

FORMS = {"fp8": QuantizationConfig(), "int8": QuantizationConfig(8, 0), "int4": QuantizationConfig(4)}
NEAR = {"fp8": 1 / 16, "int8": 1 / 127, "int4": 1 / 7}  # of a block's largest element, at most


def test_the_choice() -> None:
    assert type(OptimizedLinear(4, 3)) is nn.Linear and OptimizedLinear(4, 3).weight.dtype == torch.bfloat16
    assert isinstance(OptimizedLinear(4, 3, quantization_config=FORMS["int8"]), QuantizedLinear)
    assert isinstance(OptimizedLinear(4, 3, lora_config=LoRAConfig(2)), LoRAOptimizedLinear)
    with pytest.raises(ValueError, match="expected a LoRAConfig, got dict"):
        OptimizedLinear(4, 3, lora_config={"lora_r": 3})
    with pytest.raises(NotImplementedError, match=r"q_bits=6, mantissa_bits=3\) is not available: q_bits=8"):
        OptimizedLinear(4, 3, quantization_config=QuantizationConfig(6))


@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("bias", [False, True])
def test_numbers(form: str | None, bias: bool) -> None:
    """Output and gradients are those of plain layers with the decoded weight; the adapter begins at zero."""
    torch.manual_seed(0)
    config = None if form is None else FORMS[form]
    layer = OptimizedLinear(300, 20, bias, LoRAConfig(4, 8.0), config, dtype=torch.float32)
    source = torch.randn(20, 300)
    state = {**layer.state_dict(), "weight": source} | ({"bias": torch.randn(20)} if bias else {})
    layer.load_state_dict(state)
    weight = layer.full_weight().detach()
    if form is not None:
        assert layer.weight.dtype == (torch.int8 if form == "int8" else torch.uint8)
        assert layer.weight.numel() < 20 * 300 * (0.6 if form == "int4" else 1.1)
        assert (weight - source).abs().max() <= NEAR[form] * source.abs().max()
    else:
        assert torch.equal(weight, source)
    x = torch.randn(5, 300, requires_grad=True)
    assert torch.equal(layer(x), functional.linear(x, weight, layer.bias))
    nn.init.normal_(layer.lora_weight_2.weight)
    out = layer(x)
    out.square().sum().backward()
    y, a, b = (t.detach().clone().requires_grad_() for t in (x, layer.lora_weight_1.weight, layer.lora_weight_2.weight))
    expected = functional.linear(y, weight, layer.bias) + 8.0 / 4 * (y @ a.t() @ b.t())
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    for found, wanted in ((x, y), (layer.lora_weight_1.weight, a), (layer.lora_weight_2.weight, b)):
        torch.testing.assert_close(found.grad, wanted.grad)
    assert layer.weight.grad is None and (layer.bias is None or layer.bias.grad is None)
    again = OptimizedLinear(300, 20, bias, LoRAConfig(4, 8.0), config, dtype=torch.float32)
    again.load_state_dict(layer.state_dict())  # codes
    assert torch.equal(again(x), out)


def test_a_quantised_layer_by_itself() -> None:
    torch.manual_seed(0)
    layer = OptimizedLinear(64, 8, True, None, FORMS["int8"], dtype=torch.float32)
    x = torch.randn(3, 2, 64, requires_grad=True)
    layer(x).square().sum().backward()
    y, plain = x.detach().clone().requires_grad_(), nn.Linear(64, 8)
    plain.load_state_dict({"weight": layer.dequantized(), "bias": layer.bias})
    plain(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(96, 64)
        self.second = nn.Linear(64, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_init_replaces_layers_meanwhile() -> None:
    real = nn.Linear
    with linear.Init(LoRAConfig(2), FORMS["int4"]):
        model = Net()
    assert nn.Linear is real and isinstance(model.first, LoRAOptimizedLinear)
    assert model.first.bias is not None and model.second.bias is None
    with pytest.raises(RuntimeError, match=r"call deepspeed\.linear\.init_lora"):
        model(torch.ones(1, 96))
    model.second.disable()
    init_lora(model)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained == ["first.lora_weight_1.weight", "first.lora_weight_2.weight"]
    with pytest.raises(RuntimeError, match="after init_lora"):
        model.first.disable()
    with linear.Init(quant_config=FORMS["int8"]):
        assert isinstance(Net().first, QuantizedLinear)


def test_an_engine_in_bf16() -> None:
    """The engine converts the model, but no codes."""
    torch.manual_seed(0)
    with linear.Init(LoRAConfig(4), FORMS["int8"]):
        model = Net()
    init_lora(model)
    codes = model.first.weight.detach().clone()
    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.005}},
        "zero_optimization": {"stage": 3},
    }
    engine = zcomm.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    x, losses = torch.randn(4, 96, dtype=torch.bfloat16), []
    for _ in range(10):
        loss = (engine(x) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2 and torch.equal(zcomm.zero.full_param(model.first.weight), codes)
    engine.destroy()
    zcomm.shutdown()


def _train(stage: int, form: str | None, folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    comm = zcomm.init()
    with linear.Init(LoRAConfig(4), None if form is None else FORMS[form]):
        model = Net()
    init_lora(model)
    frozen = {name: param.detach().clone() for name, param in model.named_parameters() if not param.requires_grad}
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.1, stage=stage, share_parameters=stage != 3)
    for step in range(4):
        if step == 2:
            opt.save(Path(folder) / f"{stage}")
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
    found = {name: tensor.clone() for name, tensor in opt.full_state_dict().items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in frozen.items())
    opt.load(Path(folder) / f"{stage}")
    for step in range(2, 4):
        x = torch.randn(4, 96, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
    again = opt.full_state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())
    opt.close()
    return found


@pytest.mark.parametrize("form", [None, "int8"])
def test_stage_3_has_the_bits_of_stage_0(tmp_path: Path, run_ranks: Any, form: str | None) -> None:
    """A frozen weight is sharded, codes are whole on each rank; both are saved."""
    plain = run_ranks(_train, 2, 0, form, str(tmp_path))[0]
    for found in run_ranks(_train, 2, 3, form, str(tmp_path)):
        assert found.keys() == plain.keys()
        for name, tensor in plain.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("lora", [None, LoRAConfig(4)])
def test_autocast(lora: LoRAConfig | None) -> None:
    """Output and gradients of autocast are those of a plain layer with the decoded weight."""
    torch.manual_seed(0)
    layer = OptimizedLinear(300, 20, True, lora, FORMS["int8"], dtype=torch.float32)
    layer.bias.requires_grad_(True)
    plain = nn.Linear(300, 20)
    plain.load_state_dict(
        {"weight": dequantized(layer.weight, FORMS["int8"], (20, 300), torch.float32), "bias": layer.bias}
    )
    x = torch.randn(5, 300, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, wanted = layer(x), plain(y)
    out.float().square().sum().backward()
    wanted.float().square().sum().backward()
    assert out.dtype == torch.bfloat16 and torch.equal(out, wanted)
    torch.testing.assert_close(x.grad, y.grad, rtol=0.02, atol=0.02)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("lora", [None, LoRAConfig(4)])
def test_a_weight_of_another_shape_is_refused(lora: LoRAConfig | None) -> None:
    layer = OptimizedLinear(300, 20, False, lora, FORMS["int8"])
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match=r"size mismatch for weight.*\[300, 20\]"):
        layer.load_state_dict({**layer.state_dict(), "weight": torch.randn(300, 20)})
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("lora", [None, LoRAConfig(2)])
def test_codes_of_another_form_are_refused(lora: LoRAConfig | None) -> None:
    states = {form: OptimizedLinear(8, 4, False, lora, FORMS[form]).state_dict() for form in ("fp8", "int8")}
    for form, other in (("fp8", "int8"), ("int8", "fp8")):
        layer = OptimizedLinear(8, 4, False, lora, FORMS[form])
        before = layer.weight.clone()
        with pytest.raises(ValueError, match=rf"weight: codes of torch.u?int8, expected torch.u?int8 \({form}\)"):
            layer.load_state_dict(states[other])
        assert torch.equal(layer.weight, before)
