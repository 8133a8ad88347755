"""The fused CPU optimizers as drop-ins: torch's numbers, torch's interface, exact masters for bf16."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zcomm
from programs import Program
from zcomm.optim import CPUSGD, CPUAdagrad, CPUAdam, CPULion

SHAPES = [(3,), (17, 5), (64, 64), (1,), (0,), (130,)]
Maker = Callable[..., torch.optim.Optimizer]


def params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def steps(opt: torch.optim.Optimizer, tensors: list[torch.nn.Parameter], count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + step)
        for param in tensors:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        opt.step()


class TorchLion(torch.optim.Optimizer):
    """The paper's code: torch has no Lion."""

    def __init__(self, tensors: Any, **options: Any) -> None:
        super().__init__(tensors, {"betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                grad = -param.grad if group["maximize"] else param.grad
                avg = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_((avg * beta1 + grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                avg.mul_(beta2).add_(grad, alpha=1 - beta2)


def adam(tensors: Any, **options: Any) -> CPUAdam:
    return CPUAdam(tensors, adamw=False, **options)


PAIRS: list[tuple[Maker, Maker, list[dict[str, Any]]]] = [
    (CPUAdam, torch.optim.AdamW, [{"betas": (0.8, 0.95), "weight_decay": 0.0}, {"eps": 1e-3, "weight_decay": 0.1}]),
    (adam, torch.optim.Adam, [{"betas": (0.8, 0.95)}, {"weight_decay": 0.1}]),
    (
        CPUSGD,
        torch.optim.SGD,
        [
            {},
            {"weight_decay": 0.1},
            {"momentum": 0.9},
            {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ],
    ),
    (
        CPUAdagrad,
        torch.optim.Adagrad,
        [{}, {"lr_decay": 0.1, "weight_decay": 0.1}, {"initial_accumulator_value": 0.5, "eps": 1e-3}],
    ),
    (CPULion, TorchLion, [{}, {"betas": (0.8, 0.95), "weight_decay": 0.1}]),
]
CASES = [pytest.param(ours, theirs, options) for ours, theirs, choices in PAIRS for options in choices]


def rounded(tensors: Any, **options: Any) -> CPUAdam:
    return CPUAdam(tensors, state_dtype=torch.bfloat16, **options)


MAKERS = [pytest.param(ours, theirs, choices[-1], id=ours.__name__) for ours, theirs, choices in PAIRS]
MAKERS.append(pytest.param(rounded, torch.optim.AdamW, {"weight_decay": 0.1}, id="rounded"))
TORCHS = [pytest.param(ours, theirs, choices[-1]) for ours, theirs, choices in PAIRS if theirs is not TorchLion]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_equals_torch_in_both_precisions(ours: Maker, theirs: Maker, options: dict[str, Any], maximize: bool) -> None:
    fused, single, double = params(), params(), [torch.nn.Parameter(p.detach().double()) for p in params()]
    for opt, tensors in ((ours, fused), (theirs, single), (theirs, double)):
        steps(opt(tensors, lr=1e-2, maximize=maximize, **options), tensors, 20)
    for a, b, c, start in zip(fused, single, double, params(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=5e-7)
        torch.testing.assert_close(a.double(), c, rtol=3e-6, atol=2e-6)
        assert a.numel() < 100 or not torch.allclose(a, start, atol=1e-3)


@pytest.mark.parametrize(("ours", "theirs", "options"), MAKERS)
def test_gradients_of_every_kind_of_view(ours: Maker, theirs: Maker, options: dict[str, Any]) -> None:
    """Only a gradient's values count, not the memory of a negated or strided view that replaces a plain one."""
    kinds: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda grad: grad.clone(),
        lambda grad: torch._neg_view(-grad),
        lambda grad: torch.complex(grad, -grad).conj().imag,
        lambda grad: grad[:, None].expand(-1, 2).contiguous()[:, 1],
        lambda grad: torch._efficientzerotensor(grad.shape),
    ]
    found = []
    for is_plain in (True, False):
        param = torch.nn.Parameter(torch.linspace(-1, 1, 130))
        opt = ours([param], lr=1e-2, **options)
        for step in range(2 * len(kinds)):
            kind = kinds[step % len(kinds)]
            grad = kind(torch.randn(130, generator=torch.Generator().manual_seed(step)))
            param.grad = grad + torch.zeros(130) if is_plain else grad
            opt.step(norm=True)  # type: ignore[call-arg]
            found.append(opt.grad_norm)  # type: ignore[attr-defined]
        found.append(param.tolist())
    half = len(found) // 2
    assert found[:half] == found[half:]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("ours", "theirs", "options"), [case for case in CASES if case.values[1] is not TorchLion])
def test_weights_and_gradients_that_are_not_finite(
    ours: Maker, theirs: Maker, options: dict[str, Any], maximize: bool
) -> None:
    """Infinite and NaN exactly as in torch: an infinite weight keeps its value without decay."""
    weights = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 3e38, 1e-40]
    gradients = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e-22]
    pairs = torch.tensor(list(itertools.product(weights, gradients))).repeat(3, 1)  # more than the widest vectors
    made = []
    for maker in (ours, theirs):
        param = torch.nn.Parameter(pairs[:, 0].clone())
        kinds = [options, *([{**options, "eps": 0.0}] if "eps" in inspect.signature(theirs).parameters else [])]
        for kind in kinds:
            opt = maker([param], lr=0.1, maximize=maximize, **kind)
            for _ in range(3):
                param.grad = pairs[:, 1].clone()
                opt.step()
                made.append(param.detach().nan_to_num(nan=7e37, posinf=8e37, neginf=-8e37))
    half = len(made) // 2
    for step, (mine, other) in enumerate(zip(made[:half], made[half:], strict=True)):
        wrong = [
            (pairs[i].tolist(), mine[i].item(), other[i].item())
            for i in range(len(pairs))
            if not near(mine[i], other[i])
        ]
        assert not wrong, f"step {step}: (weight, gradient), here, torch's: {wrong[:5]}"


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.uint8])
def test_an_infinite_weight_leaves_small_state_alone(state_dtype: torch.dtype) -> None:
    made = []
    for strange in (1.0, math.inf):
        param = torch.nn.Parameter(torch.ones(301))
        param.data[[3, 300]] = strange
        opt = adam([param], lr=0.1, state_dtype=state_dtype)
        for _ in range(3):
            param.grad = torch.linspace(-1, 1, 301)
            opt.step()
        assert param[[3, 300]].isinf().all() or strange == 1.0
        made.append([param.detach().nan_to_num(posinf=0.0), *(opt.state[param][name] for name in CPUAdam.ARRAYS)])
    plain, other = made
    other[0][[3, 300]] = plain[0][[3, 300]]
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_a_parameter_that_is_listed_again_steps_again(ours: Maker, theirs: Maker, options: dict[str, Any]) -> None:
    found = []
    for maker in (ours, theirs):
        tensors = params()
        tensors.append(torch.nn.Parameter(tensors[1].data))  # the same memory
        opt = maker([*tensors, tensors[2], tensors[4], tensors[2], tensors[0]], lr=1e-2, **options)
        steps(opt, tensors, 4)
        found.append([tensor.detach().clone() for tensor in tensors])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="more than one parameter group"):
        ours([{"params": tensors[:2]}, {"params": tensors[1:3]}])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        ours([tensors[0], tensors[0]])


@pytest.mark.parametrize(("ours", "theirs", "options"), MAKERS)
def test_a_negated_parameter_is_refused(ours: Maker, theirs: Maker, options: dict[str, Any]) -> None:
    param = torch.nn.Parameter(torch.ones(8))
    opt = ours([param], lr=1e-2, **options)
    for _ in range(3):  # the third step follows the plan of the second
        param.grad = torch.ones(8)
        opt.step()
    before = param.detach().clone()
    param.data = torch._neg_view(param.data)  # at the same address
    with pytest.raises(ValueError, match=r"negated view.*p\.data\.resolve_neg\(\)"):
        opt.step()
    assert torch.equal(param, -before)
    param.data = param.data.resolve_neg()
    opt.step()
    assert not torch.equal(param, -before)


@pytest.mark.parametrize(("ours", "theirs", "options"), MAKERS)
def test_bf16_parameters_train_as_the_fp32_master(ours: Maker, theirs: Maker, options: dict[str, Any]) -> None:
    """To the bit, and with updates far below the last bit of a bf16 weight."""
    weight16 = torch.nn.Parameter(torch.linspace(0.5, 2, 301).bfloat16())
    weight32 = torch.nn.Parameter(weight16.detach().float())
    opt16, opt32 = (ours([w], lr=1e-5, **options) for w in (weight16, weight32))
    start = weight32.detach().clone()
    for step in range(100):
        grad = torch.randn(301, generator=torch.Generator().manual_seed(step)).add_(0.5).bfloat16()
        weight16.grad, weight32.grad = grad.clone(), grad.float()
        opt16.step()
        opt32.step()
    remainder = opt16.state[weight16]["remainder"].to(torch.int32)
    high = weight16.detach().view(torch.int16).to(torch.int32) << 16
    assert torch.equal((high + remainder).view(torch.float32), weight32.detach())
    assert (weight32 - start).abs().max() > 1e-5, "the updates must have added up"


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch ties a gradient's dtype to its weight")
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ours", "theirs", "options"), MAKERS)
def test_gradients_of_any_dtype(
    ours: Maker, theirs: Maker, options: dict[str, Any], weight: torch.dtype, grad: torch.dtype
) -> None:
    mixed, same = (torch.nn.Parameter(torch.linspace(-1, 1, 77).to(weight)) for _ in range(2))
    mixed.grad_dtype = None
    same.grad_dtype = None
    values = torch.linspace(-0.5, 0.5, 77).to(grad)
    mixed.grad, same.grad = values, values.float()  # widening is exact
    for param in (mixed, same):
        ours([param], lr=1e-2, **options).step()
    assert torch.equal(mixed, same)


@pytest.mark.parametrize("how", ["state_dict", "torch.save", "deepcopy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ours", "theirs", "options"), MAKERS)
def test_resumes_to_the_bit(ours: Maker, theirs: Maker, options: dict[str, Any], dtype: torch.dtype, how: str) -> None:
    straight, resumed = params(dtype), params(dtype)
    steps(ours(straight, lr=1e-2, **options), straight, 10)
    first = ours(resumed, lr=1e-2, **options)
    steps(first, resumed, 5)
    if how == "deepcopy":
        resumed, second = copy.deepcopy((resumed, first))
    else:
        state = first.state_dict()
        if how == "torch.save":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file)
        second = ours(resumed, lr=1e-2, **options)
        second.load_state_dict(state)
    steps(second, resumed, 5, first=5)
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("ours", "theirs", "options"), TORCHS)
def test_state_goes_from_torch_and_back(ours: Maker, theirs: Maker, options: dict[str, Any]) -> None:
    """15 steps by torch, against 5 each by torch, ours, and torch again."""
    expected, tensors = params(), params()
    steps(theirs(expected, lr=1e-2, **options), expected, 15)
    opts = [make(tensors, lr=0.5) for make in (theirs, ours, theirs)]  # options are part of the state
    opts[0] = theirs(tensors, lr=1e-2, **options)
    for turn, opt in enumerate(opts):
        if turn > 0:
            opt.load_state_dict(copy.deepcopy(opts[turn - 1].state_dict()))
        steps(opt, tensors, 5, first=5 * turn)
    for a, b in zip(tensors, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=5e-7)


@pytest.mark.parametrize(("ours", "theirs", "options"), TORCHS)
def test_loading_copies(ours: Maker, theirs: Maker, options: dict[str, Any]) -> None:
    first, second = params(), params()
    a, b = theirs(first, lr=1e-2, **options), ours(second, lr=1e-2, **options)
    steps(a, first, 3)
    before = copy.deepcopy(a.state_dict()["state"])
    b.load_state_dict(a.state_dict())
    steps(b, second, 2)
    for number, state in a.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[number][name]))


@pytest.mark.parametrize("adamw", [False, True])
def test_decoupled_decay_travels_with_adams_state(adamw: bool) -> None:
    source = params()
    opt = (torch.optim.AdamW if adamw else torch.optim.Adam)(source, weight_decay=0.1)
    if "decoupled_weight_decay" not in opt.defaults:
        pytest.skip("this torch does not say which of the two a state is of")
    steps(opt, source, 1)
    ours = CPUAdam(params(), adamw=not adamw)
    ours.load_state_dict(opt.state_dict())
    assert ours.param_groups[0]["decoupled_weight_decay"] is adamw
    assert CPUAdam([{"params": params(), "adamw": adamw}]).param_groups[0]["decoupled_weight_decay"] is adamw


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0), torch.tensor(3), torch.tensor([3.0])[0]])
def test_step_may_be_a_number_or_a_tensor(step: Any) -> None:
    tensors, others = params(), params()
    opt = CPUAdam(tensors)
    steps(opt, tensors, 3)
    state = copy.deepcopy(opt.state_dict())
    for one in state["state"].values():
        one["step"] = step
    for a, b in zip(others, tensors, strict=True):
        a.data.copy_(b.data)
    loaded = CPUAdam(others)
    loaded.load_state_dict(state)
    steps(opt, tensors, 1, first=3)
    steps(loaded, others, 1, first=3)
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
    now = loaded.state[others[0]]["step"]
    assert isinstance(now, torch.Tensor)
    assert now.dtype == torch.float32
    assert now.item() == 4


def test_groups_closure_and_missing_gradients() -> None:
    fast, slow, idle = (torch.nn.Parameter(torch.ones(5)) for _ in range(3))
    opt = CPUSGD([{"params": [fast], "lr": 0.5}, {"params": [slow, idle]}], lr=0.25)

    def closure() -> float:
        opt.zero_grad()
        loss = fast.sum() + slow.sum()
        loss.backward()
        return float(loss.detach())

    assert opt.step(closure) == 10.0
    assert torch.equal(fast, torch.full((5,), 0.5))
    assert torch.equal(slow, torch.full((5,), 0.75))
    assert torch.equal(idle, torch.ones(5))
    torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "momentum": 0.9})
    assert len(opt.param_groups) == 3


def test_momentum_may_come_and_go() -> None:
    ours, theirs = params(), params()
    a, b = CPUSGD(ours, lr=1e-2), torch.optim.SGD(theirs, lr=1e-2)
    for turn, momentum in enumerate((0.0, 0.9, 0.9, 0.0, 0.5)):
        for opt, tensors in ((a, ours), (b, theirs)):
            opt.param_groups[0]["momentum"] = momentum
            steps(opt, tensors, 1, first=turn)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-6, atol=5e-7)


def test_state_replaced_by_hand_is_adopted() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    opt = CPUSGD([weight], lr=1.0, momentum=0.5)
    weight.grad = torch.zeros(4)
    opt.step()
    opt.state[weight]["momentum_buffer"] = torch.full((4,), 2.0)
    opt.step()
    assert torch.equal(weight, torch.full((4,), -1.0))
    opt.state[weight]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"momentum_buffer has shape \(3,\)"):
        opt.step()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (CPUAdam, {"lr": -1.0}),
        (CPUAdam, {"eps": -1e-8}),
        (CPUAdam, {"weight_decay": -0.1}),
        (CPUAdam, {"betas": (0.9, 1.0)}),
        (CPUAdam, {"state_dtype": torch.float16}),
        (CPULion, {"betas": (-0.1, 0.9)}),
        (CPUSGD, {"momentum": -0.5}),
        (CPUSGD, {"nesterov": True}),
        (CPUSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        (CPUAdagrad, {"lr_decay": float("nan")}),
        (CPUAdagrad, {"initial_accumulator_value": -1.0}),
    ],
)
def test_bad_arguments_are_named(make: Maker, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(ValueError, match=name):
        make(params(), **options)
    with pytest.raises(ValueError, match=name):
        make([{"params": params(), **options}])


@pytest.mark.parametrize(("ours", "theirs", "options"), MAKERS)
def test_what_is_not_had_is_refused(ours: Maker, theirs: Maker, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="float64"):
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        weight.grad = torch.ones_like(weight)
        ours([weight]).step()
    table = torch.nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match=r"\(5, 3\).*sparse"):
        ours(table.parameters()).step()


@pytest.mark.parametrize(
    ("ours", "theirs", "differs"),
    [
        (CPUAdam, torch.optim.AdamW, {"weight_decay": 0.0}),
        (CPUAdam, torch.optim.Adam, {"decoupled_weight_decay": True}),
        (CPUSGD, torch.optim.SGD, {}),
        (CPUAdagrad, torch.optim.Adagrad, {}),
    ],
)
def test_defaults_are_torchs_or_the_docstring_says_so(ours: Any, theirs: Any, differs: dict[str, Any]) -> None:
    mine, torchs = ours(params()).defaults, theirs(params()).defaults
    shared = mine.keys() & torchs.keys()
    wanted = {key: value for key, value in differs.items() if key in shared}  # torch 2.6 has fewer
    assert {key: mine[key] for key in shared if mine[key] != torchs[key]} == wanted
    if "weight_decay" in differs:
        assert "0 by default" in ours.__doc__ and "AdamW's default is 0.01" in ours.__doc__
        assert torchs["weight_decay"] == 0.01


def test_an_option_without_a_kernel_that_is_set_later_is_refused() -> None:
    weights = params()
    opt = CPUAdam(weights)
    opt.param_groups[0]["amsgrad"] = True
    weights[0].grad = torch.ones_like(weights[0])
    before = weights[0].detach().clone()
    with pytest.raises(NotImplementedError, match="amsgrad=True"):
        opt.step()
    assert torch.equal(weights[0], before)


def test_amsgrad_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="amsgrad"):
        CPUAdam(params(), amsgrad=True)
    tensors = params()
    opt = torch.optim.Adam(tensors, amsgrad=True)
    steps(opt, tensors, 1)
    ours = CPUAdam(params())
    with pytest.raises(NotImplementedError, match="amsgrad"):
        ours.load_state_dict(opt.state_dict())
    assert ours.param_groups[0]["amsgrad"] is False, "a refused state must not be half loaded"


def test_the_package_has_them() -> None:
    assert zcomm.optim.CPUAdam is CPUAdam


def test_a_refused_group_is_not_added() -> None:
    for optimizer, bad in ((CPUAdam, {"lr": -1.0}), (CPUSGD, {"momentum": -1.0}), (CPUAdagrad, {"eps": -1.0})):
        opt = optimizer([torch.nn.Parameter(torch.ones(3))])
        with pytest.raises(ValueError, match=r"-1\.0"):
            opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **bad})
        assert len(opt.param_groups) == 1
    opt = CPUAdagrad([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="float64"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    good = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="float64"):
        opt.add_param_group({"params": [good, torch.nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert len(opt.param_groups) == 1 and good not in opt.state
    assert list(opt.state_dict()["state"]) == [0]
    opt.add_param_group({"params": [good]})
    assert list(opt.state_dict()["state"]) == [0, 1]


@pytest.mark.parametrize("make", [CPUAdam, CPUSGD, CPULion, CPUAdagrad])
def test_scaled_clipped_skipped(make: Any) -> None:
    """grad_scale divides, clip multiplies, found_inf skips without counting; grad_norm is of unscaled gradients."""
    start, grad = torch.randn(5000), torch.randn(5000)
    plain, scaled = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    one, other = make([plain], lr=1e-2), make([scaled], lr=1e-2)
    other.threads = 1
    for _ in range(3):
        plain.grad, scaled.grad = grad * 0.5, grad * 1024
        one.step()
        other.step(found_inf=torch.ones(1))
        other.step(grad_scale=torch.tensor(1024.0), found_inf=torch.zeros(1), clip=0.5, norm=True)
        assert torch.equal(plain, scaled)
        assert other.grad_norm == pytest.approx(float(grad.double().norm()), rel=1e-6)
    other.step(found_inf=True)
    assert other.grad_norm is not None, "it was not asked for"
    other.step(found_inf=True, norm=True)
    assert other.grad_norm is None, "not that of an earlier step"
    scaled.grad[7] = torch.inf
    other.step(norm=True)
    assert math.isnan(other.grad_norm)


def test_grad_scaler_of_torch() -> None:
    """torch.amp.GradScaler passes its scale and found_inf to the one pass."""
    param = torch.nn.Parameter(torch.randn(100))
    start, opt = param.detach().clone(), CPUAdam([param], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.square().sum() * torch.inf).backward()
    scaler.step(opt)
    scaler.update()
    assert torch.equal(param, start) and scaler.get_scale() == 512.0
    opt.zero_grad()
    scaler.scale(param.square().sum()).backward()
    scaler.step(opt)
    expected = torch.nn.Parameter(start.clone())
    expected.grad = 2 * start
    CPUAdam([expected], lr=1e-2).step()
    assert torch.equal(param, expected)


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ({}, lambda cpus: cpus),
        ({"LOCAL_WORLD_SIZE": "2"}, lambda cpus: max(1, cpus // 2)),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1000"}, lambda cpus: 1),
        ({"LOCAL_WORLD_SIZE": "2", "ZCOMM_THREADS": "3"}, lambda cpus: 3),
    ],
)
def test_threads_are_of_the_cores_and_the_ranks(
    start_program: Callable[..., Program], launcher: dict[str, str], size: Callable[[int], int]
) -> None:
    """Without zcomm.init; torchrun sets OMP_NUM_THREADS to 1, which must have no effect."""
    sizes = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "ZCOMM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in sizes}
    code = "from zcomm import _core; import zcomm.optim; print(_core.threads())"
    environment = {**kept, "OMP_NUM_THREADS": "1", **launcher}
    told, errors = start_program(code, env=environment).communicate()
    assert int(told or -1) == size(len(os.sched_getaffinity(0))), errors


@pytest.mark.parametrize("kind", [CPUAdam, CPUSGD, CPULion, CPUAdagrad])
def test_an_unknown_argument_names_the_class_and_its_arguments(kind: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__} has no argument 'weight_deca'; did you mean 'weight_decay'"
    ):
        kind([torch.ones(1)], weight_deca=0.1)
    with pytest.raises(TypeError, match=rf"^{kind.__name__} has no argument 'zzz'; It has lr, "):
        kind([torch.ones(1)], zzz=0.1)
    assert kind(params=[torch.ones(1)], lr=0.5).defaults["lr"] == 0.5
