"""Tensor parallelism: a model divided over the axis "tensor" trains as the whole model on one rank does."""

from __future__ import annotations

import copy
import logging
import math
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import zcomm
from tensor_jobs import PLAN, VOCABULARY, WIDTH, Net, loss_of, whole
from torch_world import world

Run = Callable[..., list[Any]]


def difference(model: nn.Module, other: nn.Module, of: Callable[[nn.Parameter], Any] = lambda p: p.detach()) -> float:
    """Return the greatest difference of the models' parameters, or of tensors ``of`` them."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((whole(of(p)) - of(q)).abs().max()) for p, q in pairs)


# --- without ZeroOptimizer, float64 ---------------------------------------------------------------------------


def exact(tied: bool, plan: Mapping[str, Any]) -> list[float]:
    """Return the greatest differences of losses, gradients and weights from the whole model in 20 steps."""
    with world() as (rank, size):
        zcomm.init(timeout=60)
        alone = Net(0, tied).double()
        model = zcomm.parallel.tensor(Net(rank, tied).double(), zcomm.ProcessMesh(tensor=size), plan)
        assert tied == (model.head.weight is model.embed.weight)
        opts = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in (model, alone)]
        worst = [0.0, 0.0]
        for step in range(20):
            losses = []
            for each, opt in zip((model, alone), opts, strict=True):
                opt.zero_grad()
                losses.append(loss_of(each, step))
                losses[-1].backward()
            worst[0] = max(worst[0], abs(float(losses[0].detach() - losses[1].detach())))
            worst[1] = max(worst[1], difference(model, alone, lambda p: p.grad))
            for opt in opts:
                opt.step()
        zcomm.shutdown()
        return [*worst, difference(model, alone)]


@pytest.mark.parametrize(
    ("size", "tied", "plan"),
    [
        (2, True, PLAN),
        pytest.param(2, False, PLAN, marks=pytest.mark.slow),
        pytest.param(4, True, {**PLAN, "head": "replicate"}, marks=pytest.mark.slow),
    ],
)
def test_losses_gradients_and_weights_are_those_of_the_whole_model(
    run_ranks: Run, size: int, tied: bool, plan: Mapping[str, Any]
) -> None:
    for found in run_ranks(exact, size, tied, plan):
        assert max(found) < 1e-9, found


# --- with ZeroOptimizer, fp32 ---------------------------------------------------------------------------------


def trained(sizes: Mapping[str, int], accum: int, options: dict[str, Any]) -> list[float]:
    """Return the greatest differences of losses, norms and weights from torch's AdamW on the whole model."""
    with world() as (rank, _):
        zcomm.init(timeout=60)
        mesh = zcomm.ProcessMesh(**sizes)
        data, place = sizes.get("data", 1), dict(zip(mesh.axes, mesh.coordinate, strict=True)).get("data", 0)
        alone = Net(0)
        model = zcomm.parallel.tensor(Net(rank), mesh, PLAN)
        opt = zcomm.ZeroOptimizer(
            model, "adamw", lr=0.01, mesh=mesh, clip_norm=0.5, grad_accum=accum, bucket_mb=0.001, **options
        )
        reference = torch.optim.AdamW(alone.parameters(), lr=0.01)
        worst = [0.0, 0.0]
        for step in range(20):
            numbers = [(step * accum + micro) * data for micro in range(accum)]
            for first in numbers:
                loss = loss_of(model, first + place)
                loss.backward()
                opt.step()
                opt.zero_grad()
                worst[0] = max(worst[0], abs(float(loss.detach() - loss_of(alone, first + place).detach())))
            reference.zero_grad()
            for number in (first + other for first in numbers for other in range(data)):
                (loss_of(alone, number) / data / accum).backward()
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            worst[1] = max(worst[1], abs(float(norm) - float(opt.grad_norm or 0)))
            reference.step()
        opt.close()
        worst.append(difference(model, alone))
        zcomm.shutdown()
        return worst


@pytest.mark.parametrize(
    ("sizes", "accum", "options"),
    [
        ({"tensor": 2}, 3, {"stage": 0}),
        ({"data": 2, "tensor": 2}, 2, {"stage": 1}),
        pytest.param({"tensor": 2}, 1, {"stage": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "tensor": 2}, 1, {"stage": 2, "share_parameters": False}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "data": 2}, 2, {"stage": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 4}, 1, {"stage": 1, "overlap": False}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "tensor": 2}, 1, {"stage": 0}, marks=pytest.mark.slow),
    ],
)
def test_zero_trains_the_parts(run_ranks: Run, sizes: dict[str, int], accum: int, options: dict[str, Any]) -> None:
    for found in run_ranks(trained, math.prod(sizes.values()), sizes, accum, options):
        assert max(found) < 1e-5, found


# --- edits by the program -------------------------------------------------------------------------------------


def touch_weights(model: Net) -> None:
    with torch.no_grad():
        model.layers[0].up.weight.mul_(1.5)  # type: ignore[operator, union-attr]
        model.layers[0].down.weight.data.mul_(0.5)  # type: ignore[operator, union-attr]
        value = torch.linspace(-1, 1, WIDTH * VOCABULARY).view(VOCABULARY, WIDTH)
        weight = model.head.weight
        parts = isinstance(weight, DTensor)
        weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements) if parts else value)


def touch_gradients(model: Net) -> None:
    up, down = model.layers[0].up, model.layers[1].down  # type: ignore[union-attr]
    up.weight.grad.mul_(0.5)  # type: ignore[operator, union-attr]
    down.weight.grad = None  # type: ignore[union-attr]
    weight = model.embed.weight
    assigned = torch.full((VOCABULARY, WIDTH), 0.01)
    parts = isinstance(weight, DTensor)
    weight.grad = distribute_tensor(assigned, weight.device_mesh, weight.placements) if parts else assigned


def replace_weight(model: Net) -> None:
    """Convert there and back: torch swaps a DTensor's content for other memory, as ``model.half()`` does."""
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(model.head.weight.detach() * 2))


def touched(sizes: Mapping[str, int], stage: int) -> dict[str, float]:
    """Return differences from the whole model after each way to touch weights and gradients."""
    found = {}
    with world() as (rank, _):
        zcomm.init(timeout=60)
        mesh = zcomm.ProcessMesh(**sizes)
        alone = Net(0)
        model = zcomm.parallel.tensor(Net(rank), mesh, PLAN)
        opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.01, mesh=mesh, stage=stage, weight_decay=0.0)
        reference = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.0)
        before = copy.deepcopy(model.state_dict())
        for step, (weights, gradients) in enumerate(
            [(None, None), (touch_weights, None), (None, touch_gradients), (replace_weight, None), (None, None)]
        ):
            for each, own in ((model, opt), (alone, reference)):
                if weights is not None:
                    weights(each)
                own.zero_grad()
                loss_of(each, step).backward()
                if gradients is not None:
                    gradients(each)
                own.step()
            found[f"step {step}"] = difference(model, alone)
        loss_of(model, 9).backward()
        loss_of(alone, 9).backward()
        theirs = [p.grad for p in model.parameters() if isinstance(p, DTensor)]
        found["p.grad.norm()"] = max(
            abs(float(whole(mine.norm())) - float(full.grad.norm()))  # type: ignore[union-attr]
            for mine, (name, full) in zip(
                theirs, [(n, p) for n, p in alone.named_parameters() if "norm" not in n], strict=True
            )
        )
        after = model.state_dict()
        assert all(isinstance(after[name], type(before[name])) for name in before)
        opt.close()
        loss_of(model, 0).backward()  # its own memory again
        found["closed"] = float(any(p.grad is None for p in model.parameters()))
        zcomm.shutdown()
    return found


@pytest.mark.parametrize(
    ("sizes", "stage"), [({"tensor": 2}, 2), pytest.param({"tensor": 2}, 0, marks=pytest.mark.slow)]
)
def test_weights_and_gradients_that_a_program_touches(run_ranks: Run, sizes: dict[str, int], stage: int) -> None:
    for found in run_ranks(touched, math.prod(sizes.values()), sizes, stage):
        assert max(found.values()) < 1e-5, found


# --- refusals -------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A layer with an adapter, by peft's names."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.lora_A = layer, nn.Linear(WIDTH, 2)


def refusals() -> dict[str, str]:
    """Return the errors of this rank, by case."""
    found: dict[str, str] = {}

    def refused(case: str, call: Callable[[], object]) -> None:
        try:
            call()
            found[case] = "nothing"
        except (ValueError, NotImplementedError, RuntimeError) as error:
            found[case] = f"{type(error).__name__}: {error}"

    try:
        zcomm.init(timeout=60)
        refused("no process group", lambda: zcomm.parallel.tensor(Net(0), zcomm.ProcessMesh(tensor=2), PLAN))
    finally:
        zcomm.shutdown()
    with world() as (rank, _):
        zcomm.init(timeout=60)
        mesh = zcomm.ProcessMesh(tensor=2)
        divide = zcomm.parallel.tensor
        refused("no axis", lambda: divide(Net(0), zcomm.ProcessMesh(data=2), PLAN))
        refused("no plan", lambda: divide(Net(0), mesh))
        refused("unknown name", lambda: divide(Net(0), mesh, {"layer.*.up": "colwise"}))
        refused("unknown style", lambda: divide(Net(0), mesh, {"layers.*.up": "sequence_parallel"}))
        refused("nothing divided", lambda: divide(Net(0), mesh, {"layers.*.up": "replicate"}))
        refused("uneven", lambda: divide(Net(0), mesh, {"layers.*.down": "colwise"}))
        refused("by rank", lambda: divide(Net(0), mesh, {"head": ("colwise_rep", "replicate")[rank], **PLAN_UP}))
        refused("on one rank", lambda: divide(Net(0), mesh, PLAN if rank == 0 else {"nothing": "colwise"}))
        model = divide(Net(0), mesh, PLAN)
        adapted = divide(Net(0), mesh, PLAN)
        adapted.head = Adapted(adapted.head)  # type: ignore[assignment]
        refused("adapter", lambda: zcomm.ZeroOptimizer(adapted, lr=1.0, mesh=mesh))
        refused("twice", lambda: divide(model, mesh, PLAN))
        build = zcomm.ZeroOptimizer
        refused("without mesh", lambda: build(model, lr=1.0))
        refused("other mesh", lambda: build(model, lr=1.0, mesh=zcomm.ProcessMesh(data=2, tensor=1)))
        refused("stage 3", lambda: build(model, lr=1.0, mesh=mesh, stage=3))
        refused("memory", lambda: build(model, lr=1.0, mesh=mesh, memory="4GiB"))
        refused("lamb", lambda: build(model, "lamb", lr=1.0, mesh=mesh))
        opt = build(model, "sgd", lr=1.0, mesh=mesh)
        loss_of(model, 0).backward()
        model.embed.weight.grad = torch.zeros(VOCABULARY, WIDTH)
        refused("plain p.grad", opt.step)
        weight = model.head.weight
        for other in (torch.zeros(VOCABULARY, WIDTH), weight.detach() * 2):
            weight.grad = model.embed.weight.grad = None
            weight.data = other
            refused(f"p.data = {type(other).__name__}", opt.step)
        opt.step()  # with the weights as they were
        assert torch.equal(whole(weight.detach()), zcomm.zero.full_param(weight))
        refused("half", lambda: (model.half(), opt.step()))
        refused("plain state", lambda: model.load_state_dict(Net(0).state_dict()))
        opt.close()
        zcomm.shutdown()
    return found


PLAN_UP = {"layers.*.up": "colwise"}
WORDS = {
    "no process group": "ValueError: parallel.tensor() needs a process group of torch",
    "no axis": 'no axis "tensor"',
    "no plan": "ValueError: Net has no plan for tensor parallelism",
    "unknown name": "ValueError: plan: no module is called 'layer.*.up'",
    "unknown style": "NotImplementedError: plan: the style 'sequence_parallel' of 'layers.*.up' (layers.0.up)",
    "nothing divided": "ValueError: parallel.tensor(): the plan divides no layer of Net",
    "uneven": "ValueError: layers.0.down.weight has size 7 in dimension 0, which the 2 ranks",
    "by rank": "ValueError: parallel.tensor(): ranks 0 and 1 of the axis differ in head: colwise_rep",
    "on one rank": "ValueError: rank 1 of the axis: plan: no module is called 'nothing'",
    "adapter": "NotImplementedError: head.lora_A.weight is an adapter of a layer in parts",
    "twice": "ValueError: embed.weight is divided already",
    "without mesh": "ValueError: embed.weight is a DTensor",
    "other mesh": "ValueError: embed.weight is a DTensor over",
    "stage 3": "NotImplementedError: stage=3 with the DTensor embed.weight",
    "memory": "NotImplementedError: memory='4GiB' with the DTensor embed.weight",
    "lamb": "NotImplementedError: lamb, which needs whole parameters, with mesh=",
    "p.data = Tensor": "RuntimeError: p.data of a parameter of shape (12, 7) was assigned, which changes no DTensor",
    "p.data = DTensor": "RuntimeError: p.data of a parameter of shape (12, 7) was assigned, which changes no DTensor",
    "half": "RuntimeError: parameter embed.weight is torch.float16 now, but ZeroOptimizer was built for torch.float32",
    "plain state": "RuntimeError: Error(s) in loading state_dict for Net:",
    "plain p.grad": "RuntimeError: p.grad of embed.weight is a tensor of shape (12, 7), but",
}


def test_patterns_are_of_whole_parts() -> None:
    from zcomm.parallel.tensors import _fits

    fitting = [("layers.*.up", "layers.0.up"), ("*.up", "up"), ("*.up", "layers.0.up"), ("head", "head")]
    others = [("layers.*.up", "layers.0.1.up"), ("*.up", "layers.0.upper"), ("*.up", "gate_up"), ("up", "layers.0.up")]
    assert [_fits(*each) for each in (*fitting, *others)] == [True] * 4 + [False] * 4


def test_errors_name_the_value_on_all_ranks(run_ranks: Run) -> None:
    for found in run_ranks(refusals, 2):
        wrong = {case: found[case] for case, words in WORDS.items() if words not in found[case]}
        if found["on one rank"].startswith("ValueError: plan: no module is called 'nothing'"):
            wrong.pop("on one rank", None)  # on that rank
        assert not wrong, wrong


# --- faults ---------------------------------------------------------------------------------------------------


def killed() -> None:
    with world() as (rank, _):
        zcomm.init(timeout=60)
        mesh = zcomm.ProcessMesh(tensor=2)
        model = zcomm.parallel.tensor(Net(0), mesh, PLAN)
        opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.01, mesh=mesh)
        for step in range(5):
            loss_of(model, step).backward()
            if rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            opt.step()
            opt.zero_grad()


@pytest.mark.slow
def test_a_killed_rank_is_named(run_ranks: Run) -> None:
    alive, dead = run_ranks(killed, 2, check=False, timeout_s=60.0)
    assert dead.exitcode == -signal.SIGKILL
    assert alive.error is not None and "rank 1" in alive.error.message, alive.error


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def drifting() -> str:
    kept = Kept()
    logging.getLogger("zcomm").addHandler(kept)
    zcomm.zero.groups.copies.STEPS = 2
    with world() as (rank, _):
        zcomm.init(timeout=60)
        mesh = zcomm.ProcessMesh(tensor=2)
        model = zcomm.parallel.tensor(Net(0), mesh, {**PLAN, "embed": "replicate"})
        opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.01, mesh=mesh)
        for number in (0, rank, 0):  # the next step compares the weights of the last one
            assert not kept.messages
            loss_of(model, number).backward()
            opt.step()
            opt.zero_grad()
        opt.close()
        zcomm.shutdown()
    return "; ".join(kept.messages)


@pytest.mark.slow
def test_other_samples_of_ranks_along_the_axis_are_told(run_ranks: Run) -> None:
    first, _ = run_ranks(drifting, 2)
    assert "layers.0.norm.weight" in first and 'along the axis "tensor": give these ranks the same samples' in first
