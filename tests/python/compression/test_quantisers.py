"""Quantised weights and inputs: the published formulas in exact loops over elements are the oracle."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from compression_parts import bits, config, method, model, tokens
from zcomm import compression
from zcomm.compression.activations import ActivationQuantiser
from zcomm.compression.quantisers import quantise
from zcomm.compression.weights import WeightQuantiser


def nearest(value: float) -> int:
    return round(Fraction(value))  # ties to even, as torch.round


def by_hand(group: list[float], count: int, kind: str) -> list[float]:
    """Return one group by the formulas of the papers, element by element in fp64."""
    size = [abs(each) for each in group]
    mean = math.fsum(size) / len(size)
    if count == 1:
        return [math.copysign(mean, each) if each else 0.0 for each in group]
    if count == 2:
        large = [each for each in size if each > 0.7 * mean]
        level = math.fsum(large) / len(large)
        return [math.copysign(level, each) if abs(each) > 0.7 * mean else 0.0 for each in group]
    if kind == "symmetric":
        scale = 2 * max(size) / 2**count
        return [min(max(nearest(each / scale), -(2 ** (count - 1))), 2 ** (count - 1) - 1) * scale for each in group]
    scale = (max(group) - min(group)) / 2**count
    zero = nearest(min(group) / scale) * scale
    return [min(max(nearest((each - zero) / scale), 0), 2**count - 1) * scale + zero for each in group]


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize(
    ("count", "kind"),
    [(1, "symmetric"), (2, "symmetric"), *((n, kind) for n in (3, 4, 8, 12) for kind in ("symmetric", "asymmetric"))],
)
def test_groups_are_the_published_formulas(count: int, kind: str, groups: int) -> None:
    torch.manual_seed(count)
    value = torch.randn(6, 5, dtype=torch.float64) + 0.3
    found = quantise(value, count, kind, groups)
    expected = [each for group in value.view(groups, -1).tolist() for each in by_hand(group, count, kind)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64).view(6, 5), rtol=1e-14, atol=1e-15)
    if count > 2:
        assert all(len(set(group)) <= 2**count for group in found.view(groups, -1).tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_types_are_computed_in_fp32(dtype: torch.dtype) -> None:
    value = torch.randn(4, 32).to(dtype)
    for count, kind in ((8, "symmetric"), (8, "asymmetric"), (2, "symmetric"), (1, "symmetric")):
        found = quantise(value, count, kind, 4)
        assert found.dtype == dtype
        assert torch.equal(found, quantise(value.float(), count, kind, 4).to(dtype))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_zeros_equal_values_and_nan(count: int) -> None:
    value = torch.randn(3, 4)
    value[0] = 0
    value[2, 1] = math.nan
    found = quantise(value, count, groups=3)
    assert torch.equal(found[0], value[0])
    assert found[1].isfinite().all()
    assert found[2].isnan().any()
    equal = torch.full((2, 3), 0.1)
    assert torch.equal(quantise(equal, 4, "asymmetric", 2), equal)
    assert quantise(torch.zeros(0, 3), count).shape == (0, 3)


def test_groups_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"4 groups do not divide the 15 elements of shape \[3, 5\]"):
        quantise(torch.zeros(3, 5), 8, groups=4)


def test_stochastic_rounding_has_the_right_mean_and_neighbours() -> None:
    torch.manual_seed(3)
    value = torch.full((1, 40000), 0.3)
    value[0, 0] = 1.0  # scale 1/4
    found = quantise(value, 3, stochastic=True)[0, 1:]
    assert set(found.tolist()) == {0.25, 0.5}
    assert abs(found.mean().item() - 0.3) < 0.003


@pytest.mark.parametrize(("start", "target"), [(1, 1), (2, 2), (8, 8), (8, 3)])
def test_gradients_pass_straight_through(start: int, target: int) -> None:
    layer = nn.Linear(6, 4).double()
    raw, x = layer.weight.detach().clone(), torch.randn(5, 6, dtype=torch.float64)
    compression.prepare(wrapped := nn.Sequential(layer), config(bits(start, target, ["0"], quantize_groups=2)))
    out: torch.Tensor = wrapped(x)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    weight = quantise(raw, start, groups=2)
    assert torch.equal(out, nn.functional.linear(x, weight, layer.bias))
    trained = layer.parametrizations["weight"].original  # type: ignore[index, union-attr]
    assert torch.equal(trained, raw) and trained.grad is not None
    torch.testing.assert_close(trained.grad, upstream.t() @ x, rtol=1e-14, atol=1e-14)


def test_bits_fall_by_the_period_which_doubles() -> None:
    part = WeightQuantiser(12, 8, 50)
    seen = []
    for steps in (None, 0, 49, 50, 99, 100, 199, 200, 399, 400, 10**6):
        part.at(steps)
        seen.append(part.bits)
    assert seen == [None, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8]
    part = WeightQuantiser(4, 1, 0)
    seen = []
    for steps in range(5):
        part.at(steps)
        seen.append(part.bits)
    assert seen == [4, 3, 2, 1, 1]


def test_mixed_weights_go_over_in_parts() -> None:
    mixed = {"enabled": True, "quantize_change_ratio": 0.25}
    given = config(bits(8, 4, ["head"], 4, fp16_mixed_quantize=mixed, schedule_offset=1))
    net = compression.prepare(model(), given)
    raw, schedule = net.head.parametrizations["weight"].original, compression.Schedule(net, given)  # type: ignore
    for step, (count, kept) in enumerate([(0, 1), (8, 0.75), (8, 0.5), (8, 0.25), (8, 0), (7, 0.75), (7, 0.5)]):
        schedule.at(step)
        full = quantise(raw, count) if count else raw
        torch.testing.assert_close(net.head.weight, kept * raw + (1 - kept) * full)  # type: ignore[union-attr]


def test_in_the_forward_means_the_last_bits_from_the_start() -> None:
    given = config(bits(8, 3, ["head"], 100, quantize_weight_in_forward=True))
    net = compression.prepare(model(), given)
    raw = net.head.parametrizations["weight"].original  # type: ignore
    assert torch.equal(net.head.weight, quantise(raw, 3))  # type: ignore[union-attr]


def test_an_embedding_has_a_range_of_each_row() -> None:
    net = model()
    raw = net.embed.weight.detach().clone()
    compression.prepare(net, config(bits(1, 1, ["embed"], quantize_groups=7)))
    assert torch.equal(net.embed.weight, quantise(raw, 1, groups=11))


def test_stochastic_in_training_only() -> None:
    net = compression.prepare(model(), config(bits(4, 4, ["head"], rounding="stochastic")))
    raw = net.head.parametrizations["weight"].original.detach()  # type: ignore
    torch.manual_seed(1)
    first, second = net.head.weight, net.head.weight  # type: ignore[union-attr]
    assert not torch.equal(first, second)  # type: ignore[arg-type]
    assert torch.equal(net.eval().head.weight, quantise(raw, 4))  # type: ignore


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_inputs_have_a_range_of_each_token(kind: str) -> None:
    net = model()
    before, seen = net.head.weight.detach(), []
    handle = net.head.register_forward_hook(lambda layer, args, out: seen.append(args[0]))
    given = config(method("activation_quantization", {"bits": 4}, ["head"], quantization_type=kind))
    plain = net(tokens())
    (inputs,) = seen
    handle.remove()
    compression.prepare(net, given)
    expected = torch.cat([quantise(token, 4, kind) for token in inputs.detach().flatten(0, 1)]).view_as(inputs)
    out = net(tokens())
    assert torch.equal(out, nn.functional.linear(expected, before, net.head.bias)) and not torch.equal(out, plain)
    upstream = torch.randn_like(out)
    inner = torch.randn(2, 5, 16, requires_grad=True)
    net.head(input=inner).backward(upstream[:2])  # by its name
    torch.testing.assert_close(inner.grad, upstream[:2] @ before)


def test_images_have_a_range_of_each_sample() -> None:
    part = ActivationQuantiser(4, images=True)
    part.enabled = True
    value = torch.randn(3, 2, 4, 4)
    assert torch.equal(part(value), torch.stack([quantise(each, 4) for each in value]))


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_a_static_range_is_a_moving_average_of_training(kind: str) -> None:
    part = ActivationQuantiser(8, kind, static=True)
    part.enabled = True
    value = torch.randn(4, 6)
    assert torch.equal(part.eval()(value), value)  # nothing seen yet
    part.train()
    ends: Any = None
    for seed in range(3):
        value = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        seen = (value.min(), value.max())
        ends = seen if ends is None else tuple(0.95 * old + 0.05 * new for old, new in zip(ends, seen, strict=True))
        found = part(value)
        torch.testing.assert_close(part.range, torch.stack(ends))
        assert torch.equal(found, quantise(value, 8, kind, limits=(part.range[0], part.range[1])))
    kept = part.range.clone()
    part.eval()(100 * value)
    assert torch.equal(part.range, kept) and "range" in part.state_dict()
    assert part(100 * value).abs().max() <= kept.abs().max() * 2  # clamped
