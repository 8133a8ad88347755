"""Masks and their removal: a cleaned model computes the same as the masked one, with smaller layers."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from compression_parts import (
    INNER,
    WIDTH,
    Net,
    bits,
    config,
    everything,
    heads,
    method,
    model,
    rows,
    tokens,
)
from zcomm import compression, zero
from zcomm.compression.masks import largest
from zcomm.compression.quantisers import quantise
from zcomm.parallel.styles import check_module


def train(net: nn.Module, given: dict[str, Any], steps: int, inputs: Any = tokens) -> compression.Schedule:
    schedule = compression.Schedule(net, given)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-2)
    for step in range(steps):
        net(inputs(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return schedule


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_the_largest_are_kept_and_of_equals_the_first() -> None:
    scores = torch.tensor([[1.0, 3.0], [3.0, 2.0]])
    assert largest(scores, 0.5).tolist() == [[False, True], [True, False]]
    assert largest(torch.ones(5), 0.41).tolist() == [True, True, True, False, False]
    assert largest(torch.ones(5), 1).all()


def test_l1_prunes_by_the_weights_of_the_beginning() -> None:
    net = model()
    weight = net.head.weight.detach().clone()
    given = config(method("sparse_pruning", {"dense_ratio": 0.3}, ["head"], method="l1", schedule_offset=2))
    compression.prepare(net, given)
    schedule = compression.Schedule(net, given)
    for step in range(4):
        pruned = net.head.weight.detach() == 0
        assert pruned.sum() == (0 if step < 2 else weight.numel() - math.ceil(0.3 * weight.numel())), step
        schedule.step()
    limit = weight.abs().flatten().sort(descending=True).values[math.ceil(0.3 * weight.numel()) - 1]
    assert torch.equal(net.head.weight, torch.where(weight.abs() >= limit, weight, 0))
    net.head.weight.sum().backward()
    assert torch.equal(net.head.parametrizations["weight"].original.grad != 0, ~pruned)  # type: ignore


@pytest.mark.parametrize("shape", ["sparse_pruning", "row_pruning", "head_pruning"])
def test_gradients_of_scores_are_those_of_the_mask(shape: str) -> None:
    net = model().double()
    given = {
        "sparse_pruning": config(method("sparse_pruning", {"dense_ratio": 0.5}, [r"0\.fc"], method="topk")),
        "row_pruning": config(method("row_pruning", {"dense_ratio": 0.5}, [r"0\.fc"], method="topk")),
        "head_pruning": config(method("head_pruning", {"dense_ratio": 0.5}, [r"0\.fc"], method="topk", num_heads=4)),
    }[shape]
    raw, bias = net.blocks[0].fc.weight.detach().clone(), net.blocks[0].fc.bias.detach().clone()
    compression.prepare(net, given)
    layer = net.blocks[0].fc
    chain = layer.parametrizations["weight"]
    scores = chain[0].mask.scores
    factor = largest(scores, 0.5).double().requires_grad_()
    wide = factor.repeat_interleave(WIDTH // 4, 1) if shape == "head_pruning" else factor
    x, upstream = torch.randn(7, WIDTH).double(), torch.randn(7, INNER).double()
    plain_bias = bias * factor.flatten() if shape == "row_pruning" else bias
    expected = nn.functional.linear(x, raw * wide, plain_bias)
    out = layer(x)
    torch.testing.assert_close(out, expected)
    (wanted,) = torch.autograd.grad(expected, factor, upstream)
    out.backward(upstream)
    torch.testing.assert_close(scores.grad, wanted)
    torch.testing.assert_close(chain.original.grad, (upstream.t() @ x) * wide)


@pytest.mark.parametrize("kind", ["l1", "topk"])
def test_a_cleaned_model_computes_the_same_in_smaller_layers(kind: str) -> None:
    given = everything(kind, offset=1)
    net = compression.prepare(model(), given)
    schedule = train(net, given, 6)
    assert schedule.training_steps == 6
    net.eval()
    before, copied = net(tokens()), copy.deepcopy(net)
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(net)
    assert compression.clean(net, given) is net
    torch.testing.assert_close(net(tokens()), before, rtol=1e-5, atol=1e-6)
    assert torch.equal(copied(tokens()), before)  # a copy is not touched
    for block in net.blocks:
        assert block.fc.out_features == block.out.in_features == INNER // 2 == len(block.fc.bias)
        assert block.o.in_features == block.q.out_features == block.k.out_features == WIDTH // 2 == len(block.v.bias)
        assert type(block.fc) is nn.Linear and type(block.fc.weight) is nn.Parameter
        assert len(set(block.q.weight.unique().tolist())) <= 4 * 2**4
    assert not any("parametrizations" in name for name, _ in net.named_parameters())
    net(tokens()).sum().backward()  # trains on
    torch.save(net, io.BytesIO())


@pytest.mark.parametrize("name", ["rows", "heads"])
def test_without_related_modules_zeros_remain(name: str) -> None:
    given = {"rows": rows("topk"), "heads": heads("l1")}[name]
    for section in given.values():
        del section["different_groups"]["one"]["related_modules"]
    net = compression.prepare(model(), config(given))
    before = net(tokens())
    compression.clean(net, config(given))
    assert torch.equal(net(tokens()), before)
    block = net.blocks[0]
    assert block.fc.out_features == INNER and block.o.in_features == WIDTH
    zeros = (block.fc.weight == 0).all(1) if name == "rows" else (block.o.weight == 0).all(0)
    assert zeros.sum() * 2 == len(zeros)


class Gated(nn.Module):
    """Llama's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return found


def test_the_gate_of_a_gated_mlp_loses_the_same_outputs() -> None:
    given = config(method("row_pruning", {"dense_ratio": 0.4}, ["up"], [["down", "gate"]], method="topk"))
    net, x = compression.prepare(nn.ModuleList([Gated()]), given), torch.randn(3, 6)
    before = net[0](x)
    compression.clean(net, given)
    torch.testing.assert_close(net[0](x), before, rtol=1e-5, atol=1e-6)
    assert net[0].gate.out_features == net[0].up.out_features == net[0].down.in_features == 4
    assert net[0].gate.in_features == net[0].down.out_features == 6


@pytest.mark.parametrize("kind", ["l1", "topk"])
def test_channels_are_cut_with_their_norm(kind: str) -> None:
    related = [["conv2", "bn1"]]
    given = config(
        method("channel_pruning", {"dense_ratio": 0.5}, ["conv1"], related, method=kind),
        bits(8, 8, ["conv"]),
        method("activation_quantization", {"bits": 8}, ["conv2"]),
    )
    net = compression.prepare(Net(), given)
    train(net, given, 4, images)
    net.eval()
    before = net(images())
    compression.clean(net, given)
    torch.testing.assert_close(net(images()), before, rtol=1e-5, atol=1e-6)
    assert (net.conv1.out_channels, net.bn1.num_features, net.conv2.in_channels) == (4, 4, 4)
    assert net.bn1.running_mean.shape == net.bn1.weight.shape == (4,)
    net.train()(images()).sum().backward()


def test_a_model_that_was_never_trained_is_cleaned_to_the_last_bits() -> None:
    given = config(bits(8, 3, ["head"], 100, schedule_offset=50))
    net = model()
    raw = net.head.weight.detach().clone()
    compression.clean(compression.prepare(net, given), given)
    assert torch.equal(net.head.weight, quantise(raw, 3))


def test_state_dicts_continue_a_compressed_run() -> None:
    given = everything("topk", offset=1)
    first, second = (compression.prepare(model(seed=seed), given) for seed in range(2))
    schedule = train(first, given, 3)
    second.load_state_dict(first.state_dict())
    other = compression.Schedule(second, given)
    other.load_state_dict(schedule.state_dict())
    assert torch.equal(first.eval()(tokens()), second.eval()(tokens()))


def test_a_state_dict_of_the_plain_model_loads_into_a_prepared_one() -> None:
    net, plain = compression.prepare(model(), config(bits(4, 4, ["fc", "embed"]))), model(seed=1)
    copied = copy.deepcopy(net)
    for each in (net, copied):
        each.load_state_dict(plain.state_dict())
        assert torch.equal(each.blocks[0].fc.parametrizations["weight"].original, plain.blocks[0].fc.weight)
        assert not torch.equal(each.blocks[0].fc.weight, plain.blocks[0].fc.weight)
    state = compression.clean(net, config(bits(4, 4, ["fc", "embed"]))).state_dict()
    net.load_state_dict(state)
    assert state.keys() == plain.state_dict().keys()


def test_compiled_layers_follow_the_schedule() -> None:
    given = config(
        bits(6, 4, ["0"], quantize_groups=4),
        method("activation_quantization", {"bits": 8}, ["0"], schedule_offset=1),
        method("row_pruning", {"dense_ratio": 0.5}, ["0"], [["1"]], method="topk", schedule_offset=1),
    )
    net = compression.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), given)
    schedule, compiled = compression.Schedule(net, given), torch.compile(net, backend="eager", fullgraph=True)
    x, before = torch.randn(2, 8), torch.zeros(2, 8)
    for _ in range(3):
        out = compiled(x)
        assert torch.equal(out, net(x)) and not torch.equal(out, before)
        before = out
        schedule.step()


REFUSED: list[tuple[dict[str, Any], str]] = [
    (bits(8, 8, ["nothing"]), "'nothing' finds no Linear or Conv2d or Embedding, no module at all"),
    (method("row_pruning", {"dense_ratio": 0.5}, ["embed"]), "'embed' finds no Linear, only Embedding"),
    (bits(8, 8, ["(head"]), r"'\(head' is no regular expression"),
    (bits(8, 8, ["head", "he"]), "'he' finds head, which group one has already"),
    (bits(8, 8, ["head"], quantize_groups=5), 'quantize_groups": 5 does not divide the 48 elements of head.weight'),
    (
        method("row_pruning", {"dense_ratio": 0.5}, ["fc"], [["head"]]),
        "'head' finds 1 layers, and its pattern .* finds 2",
    ),
    (
        method("row_pruning", {"dense_ratio": 0.5}, ["fc"], [["q"]]),
        r"blocks.0.q.in_features is 16, and blocks.0.fc has 24",
    ),
    (method("head_pruning", {"dense_ratio": 0.5}, ["o$"], num_heads=5), 'num_heads": 5 does not divide the 16 inputs'),
    (method("head_pruning", {"dense_ratio": 0.5}, ["o$"], [["fc"]], num_heads=4), "fc.out_features is 24, and"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_a_wrong_setting_is_one_error_and_changes_nothing(given: dict[str, Any], message: str) -> None:
    net = model()
    before = net.state_dict()
    with pytest.raises(ValueError, match=message):
        compression.prepare(net, config(given))
    assert net.state_dict().keys() == before.keys() and not compression.is_prepared(net)


def test_models_that_cannot_be_prepared_or_cleaned() -> None:
    given = config(bits(8, 8, ["head", "embed"]))
    tied = model()
    tied.head = nn.Linear(WIDTH, 11, bias=False)
    tied.head.weight = tied.embed.weight
    with pytest.raises(ValueError, match=r"the weight of head is tied \(embed.weight, head.weight\)"):
        compression.prepare(tied, given)
    with pytest.raises(ValueError, match=r"head.weight \(Parameter\) has no whole values"):
        compression.prepare(model().to("meta"), given)
    with zero.Init(min_count=1):
        waiting = model()
    with pytest.raises(ValueError, match=r"head.weight \(Waiting\) has no whole values"):
        compression.prepare(waiting, given)
    prepared = compression.prepare(model(), given).head
    with pytest.raises(NotImplementedError, match="plan: head has parametrizations"):
        check_module("head", prepared, "colwise", None)
    for call in (compression.clean, compression.Schedule):
        with pytest.raises(ValueError, match=r"head is not prepared for it: call init_compression"):
            call(model(), given)
    net = compression.prepare(model(), config(bits(8, 8, ["head", "embed"]), rows("l1")))
    with pytest.raises(ValueError, match="prepared for compression already"):
        compression.prepare(net, given)
    with pytest.raises(ValueError, match=r"clean\(\): blocks.0.fc.* is not of this configuration"):
        compression.clean(net, given)


@pytest.mark.parametrize("related", ["fc", "out|out", "same"])
def test_a_layer_is_cut_once_in_one_place(related: str) -> None:
    """Otherwise clean() would fail in the middle, after the training."""
    if related == "same":
        given = config(
            rows("l1"), method("head_pruning", {"dense_ratio": 0.5}, ["out"], [["fc"]], method="l1", num_heads=2)
        )
    else:
        given = config(method("row_pruning", {"dense_ratio": 0.5}, ["fc"], [related.split("|")], method="l1"))
    net = model()
    with pytest.raises(ValueError, match=r"blocks.0.(fc|out) would lose (in|out)puts twice, for blocks.0.(fc|out) "):
        compression.prepare(net, given)
    assert not compression.is_prepared(net)
