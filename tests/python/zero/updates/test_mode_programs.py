"""Programs around a step, with updates in backward if possible: the bits of step(), or a named error.

Hooks that read and edit, freezing, evaluation, graphs that are kept, gradients of the program, two losses, buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from test_backward_step import BACKWARD, BASE, STEPS
from test_gradient_tiers import WIDTH, loss_of
from tiers import long
from zcomm.zero import full_param
from zero_jobs import Case, digest, share_small_buckets

Run = Callable[..., list[Any]]
Act = Callable[[Any, "Net", int], None]
FORWARD = replace(BACKWARD, update="forward")
LATE = 4  # the step that is unlike those that were watched


class Keeps(torch.autograd.Function):
    """A product that keeps the weight itself in its context, so that no hook on saved tensors sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x.detach(), weight.detach()
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.weight, grad.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class KeepingLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Keeps.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y + self.bias


class Net(nn.Module):
    """Blocks of which the first ``depth`` are used, one that is used where ``rarely``, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        kinds = [nn.Linear, nn.Linear, nn.Linear, KeepingLinear, nn.Linear, nn.Linear]
        self.blocks = nn.ModuleList(kind(WIDTH, WIDTH) for kind in kinds)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.rarely, self.depth = False, 6

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks[: self.depth]:
            x = x + torch.tanh(block(x))
        x = x + self.rare(x) if self.rarely else x
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return self.head(self.frozen(x))


def params_of(net: nn.Module) -> dict[str, nn.Parameter]:
    return dict(net.named_parameters())


def plain(opt: Any, net: Net, number: int) -> None:
    loss_of(net, number).backward()
    end(opt)


def end(opt: Any) -> None:
    opt.updated.append(opt._parts.updates.pending)
    opt.step()
    opt.zero_grad()


def freezes(opt: Any, net: Net, number: int) -> None:
    net.blocks[1].requires_grad_(number != LATE)
    plain(opt, net, number)


def used_later(opt: Any, net: Net, number: int) -> None:
    net.rarely = number >= 3
    plain(opt, net, number)


def depths(opt: Any, net: Net, number: int) -> None:
    net.depth = 3 + number % 4
    plain(opt, net, number)


def anomalies(opt: Any, net: Net, number: int) -> None:
    with torch.autograd.set_detect_anomaly(True):
        plain(opt, net, number)


def averages(opt: Any, net: Net, number: int) -> None:
    plain(opt, net, number)
    opt.found.append({name: full_param(param).clone() for name, param in net.named_parameters()})


def clamps(opt: Any, net: Net, number: int) -> None:
    plain(opt, net, number)
    for param in net.blocks[2].parameters():
        param.data.clamp_(-0.05, 0.05)


def gathers(opt: Any, net: Net, number: int) -> None:
    with zcomm.zero.GatheredParameters(net):
        plain(opt, net, number)
    with zcomm.zero.GatheredParameters(net.blocks[4], modifier_rank=0), torch.no_grad():
        net.blocks[4].weight.mul_(0.9)


def evaluate(opt: Any, net: Net) -> None:
    net.eval()
    with torch.no_grad():
        opt.found.append({"loss": loss_of(net, 100).reshape(1)})
    net.train()


def evaluates(opt: Any, net: Net, number: int) -> None:
    plain(opt, net, number)
    evaluate(opt, net)


def evaluates_before_step(opt: Any, net: Net, number: int) -> None:
    loss_of(net, number).backward()
    evaluate(opt, net)
    end(opt)


def penalty(opt: Any, net: Net, number: int) -> None:
    x = net.embed(torch.arange(8).view(1, 8))
    (slope,) = torch.autograd.grad(net.blocks[0](x).square().sum(), x, create_graph=True)
    (loss_of(net, number) + slope.square().mean()).backward()
    end(opt)


def second_order(opt: Any, net: Net, number: int) -> None:
    loss_of(net, number).backward(create_graph=True)
    end(opt)


def hooks(opt: Any, net: Net, number: int) -> None:
    """Hooks scale gradients, and read the weight that they are of."""

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    if number == 1:
        for name, param in net.named_parameters():
            if param.requires_grad and "blocks.2" not in name:
                param.register_hook(lambda grad, param=param: grad + 0.01 * param.detach())
                param.register_post_accumulate_grad_hook(halve)
    plain(opt, net, number)


def reads_another(opt: Any, net: Net, number: int) -> None:
    """Read, in a hook, a weight that has all its gradients."""
    if number == 0:
        early, late = params_of(net)["blocks.5.weight"], params_of(net)["blocks.1.weight"]
        late.register_hook(lambda grad: grad + 0.01 * early.detach().sum())
    plain(opt, net, number)


def own_gradient(opt: Any, net: Net, number: int) -> None:
    """Backward adds to a tensor of the program."""
    if number == LATE:
        params_of(net)["blocks.3.weight"].grad = torch.full((WIDTH, WIDTH), 0.1)
    plain(opt, net, number)


def accumulates_locally(opt: Any, net: Net, number: int) -> None:
    if number == LATE:
        with opt.no_sync():
            loss_of(net, number + 100).backward()
    plain(opt, net, number)


def keeps_zeros(opt: Any, net: Net, number: int) -> None:
    if number != 3:
        loss_of(net, number).backward()
    opt.updated.append(opt._parts.updates.pending)
    opt.step()
    opt.zero_grad(set_to_none=False)


def chosen_inputs(opt: Any, net: Net, number: int) -> None:
    params = params_of(net)
    loss_of(net, number).backward(inputs=[params["blocks.4.weight"], params["head.weight"]])
    end(opt)


def other_thread(opt: Any, net: Net, number: int) -> None:
    loss = loss_of(net, number)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    end(opt)


def loads(opt: Any, net: Net, number: int) -> None:
    plain(opt, net, number)
    if number == 3:
        kept = {name: value.clone() for name, value in net.state_dict().items()}
        plain(opt, net, number + 50)
        net.load_state_dict(kept)


def saves_behind(opt: Any, net: Net, number: int) -> None:
    plain(opt, net, number)
    opt.save(f"{opt.folder}/{number % 2}", wait=False)
    if number == LATE:
        plain(opt, net, number + 50)
        opt.load(f"{opt.folder}/{number % 2}")


def state_dicts(opt: Any, net: Net, number: int) -> None:
    plain(opt, net, number)
    state = opt.state_dict()
    if number == 3:
        plain(opt, net, number + 50)
        opt.load_state_dict(state)


def new_options(opt: Any, net: Net, number: int) -> None:
    opt.param_groups[0]["weight_decay"] = 0.1 * number
    plain(opt, net, number)
    opt.param_groups[0]["lr"] *= 0.7


def clips_later(opt: Any, net: Net, number: int) -> None:
    opt.clip_norm = 0.1 if number >= LATE else None
    plain(opt, net, number)


def fails_early(opt: Any, net: Net, number: int) -> None:
    """End a pass with an error before it has reached a parameter, and a forward between its blocks."""

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    if number >= 3:
        y = net.head(torch.ones(1, WIDTH))
        y.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            y.sum().backward()
        zcomm.barrier()
        opt.zero_grad()
        handle = net.blocks[2].register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            loss_of(net, number)
        handle.remove()
    plain(opt, net, number)


# programs that updates in backward can follow, and those that have updates in forward
IN_BACKWARD: dict[str, Act] = {
    "plain": plain,
    "used later": used_later,
    "depths": depths,
    "anomalies": anomalies,
    "averages": averages,
    "clamps": clamps,
    "gathers": gathers,
    "evaluates": evaluates,
    "penalty": penalty,
    "second order": second_order,
    "hooks": hooks,
    "keeps zeros": keeps_zeros,
    "chosen inputs": chosen_inputs,
    "other thread": other_thread,
    "loads": loads,
    "saves behind": saves_behind,
    "state dicts": state_dicts,
    "new options": new_options,
    "fails early": fails_early,
}
IN_FORWARD: dict[str, Act] = {
    "freezes": freezes,
    "evaluates before step": evaluates_before_step,
    "reads another": reads_another,
    "own gradient": own_gradient,
    "accumulates locally": accumulates_locally,
    "clips later": clips_later,
}


def build(case: Case, folder: str) -> tuple[Net, Any]:
    torch.manual_seed(3)
    net = Net()
    opt: Any = zcomm.ZeroOptimizer(net, nvme_path=folder, lr=1e-2, **case.arguments())
    opt.found, opt.updated, opt.folder = [], [], folder
    return net, opt


def bits(opt: Any) -> str:
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    return digest({**arrays, **{name: value.reshape(-1) for name, value in opt.full_state_dict().items()}})


def train(case: Case, act: Act, folder: str) -> tuple[Any, list[bool]]:
    net, opt = build(case, folder)
    for number in range(STEPS):
        act(opt, net, number)
    result = bits(opt), [digest(each) for each in opt.found], opt.step_count, float(opt.grad_norm).hex()
    opt.close()
    return result, opt.updated


def train_all(folder: str) -> dict[str, Any]:
    share_small_buckets()
    zcomm.init(timeout=30)
    return {
        name: [train(each, act, f"{folder}/{each.update}") for each in (BASE, case)]
        for case, scenes in ((BACKWARD, IN_BACKWARD), (FORWARD, IN_FORWARD))
        for name, act in scenes.items()
    }


def check(found: dict[str, Any]) -> None:
    for name, ((wanted, _), (result, updated)) in found.items():
        assert result == wanted, name
        assert updated[-1] == (name in IN_BACKWARD) and not any(updated[:2]), f"{name}: {updated}"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [long(1), 2])
def test_the_bits_of_updates_in_step(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(train_all, world_size, str(tmp_path)):
        check(found)


# --- calls that no watched step made ----------------------------------------------------------------------------------


def two_losses(opt: Any, net: Net) -> None:
    loss_of(net, LATE).backward()
    loss_of(net, LATE + 100).backward()


def kept_graph(opt: Any, net: Net) -> None:
    loss = loss_of(net, LATE)
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


def two_graphs(opt: Any, net: Net) -> None:
    one, other = loss_of(net, LATE), loss_of(net, LATE + 100)
    one.backward()
    other.backward()


def asks_for_a_slope(opt: Any, net: Net) -> None:
    other = loss_of(net, LATE + 100)
    loss_of(net, LATE).backward()
    torch.autograd.grad(other, [net.norm.weight])


def no_step(opt: Any, net: Net) -> None:
    loss_of(net, LATE).backward()
    opt.zero_grad()


def clips_by_hand(opt: Any, net: Net) -> None:
    loss_of(net, LATE).backward()
    nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 0.1)


def leaves_open(opt: Any, net: Net) -> None:
    with zcomm.zero.GatheredParameters(net, modifier_rank=0):
        loss_of(net, LATE).backward()


def half_way_through_the_state(opt: Any, net: Net) -> None:
    pieces = opt.iter_state()
    next(pieces, None)
    loss_of(net, LATE).backward()
    for _ in pieces:
        pass


def hook_reads(opt: Any, net: Net) -> None:
    early, late = params_of(net)["blocks.5.weight"], params_of(net)["blocks.1.weight"]
    opt.hook = late.register_hook(lambda grad: grad + 0.01 * early.detach().sum())
    loss_of(net, LATE).backward()


def hook_edits(opt: Any, net: Net) -> None:
    early, late = params_of(net)["blocks.5.weight"], params_of(net)["blocks.1.weight"]

    def edit(grad: torch.Tensor) -> None:
        early.data.mul_(0.5)

    opt.hook = late.register_hook(edit)
    loss_of(net, LATE).backward()


def hook_drops(opt: Any, net: Net) -> None:
    def drop(param: torch.Tensor) -> None:
        param.grad = None

    opt.hook = params_of(net)["blocks.3.weight"].register_post_accumulate_grad_hook(drop)
    loss_of(net, LATE).backward()
    opt.step()


def without_sync(opt: Any, net: Net) -> None:
    one, other = loss_of(net, LATE), loss_of(net, LATE + 100)
    one.backward()
    with opt.no_sync():
        other.backward()
    opt.step()


# act, and the error; "": one that asks for step(), which then ends the step as if nothing had been
SURPRISES: dict[str, tuple[Callable[[Any, Net], None], str]] = {
    "two losses": (two_losses, ""),
    "kept graph": (kept_graph, ""),
    "two graphs": (two_graphs, ""),
    "asks for a slope": (asks_for_a_slope, ""),
    "no step": (no_step, ""),
    "clips by hand": (clips_by_hand, ""),
    "leaves open": (leaves_open, ""),
    "half way through the state": (half_way_through_the_state, ""),
    "hook reads": (hook_reads, "backward uses unit blocks.5 again"),
    "hook edits": (hook_edits, r"call step\(\) first"),
    "hook drops": (hook_drops, "p.grad was dropped"),
    "without sync": (without_sync, "backward uses unit|p.grad was dropped"),
}


def surprised(folder: str) -> None:
    share_small_buckets()
    comm = zcomm.init(timeout=30)
    net, opt = build(BACKWARD, folder)
    net.norm.eval()  # each forward would change its buffers
    for number in range(LATE):
        plain(opt, net, number)
    opt.save(f"{folder}/saved")
    plain(opt, net, LATE)
    wanted = bits(opt)
    for name, (act, error) in SURPRISES.items():
        if act is half_way_through_the_state and comm.world_size > 1:
            continue  # the other ranks feed the iterator, to the end
        opt.load(f"{folder}/saved")
        opt.hook = None
        with pytest.raises(RuntimeError, match=error or r"call step\(\) first"):
            act(opt, net)
            pytest.fail(f"{name} does not raise")
        comm.barrier()
        if opt.hook is not None:
            opt.hook.remove()
        if error:
            for call in (opt.step, opt.zero_grad, opt.state_dict, lambda: opt.save(f"{folder}/never")):
                with pytest.raises(RuntimeError, match="load a checkpoint"):
                    call()
            opt.load(f"{folder}/saved")
            plain(opt, net, LATE)
        else:
            end(opt)
        assert bits(opt) == wanted, name
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_surprises_have_names(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(surprised, world_size, str(tmp_path))


def prevented(folder: str) -> None:
    """Make calls that update="backward" does not support: they raise before any change."""
    share_small_buckets()
    zcomm.init(timeout=30)
    net, opt = build(BACKWARD, folder)
    net.norm.eval()
    for number in range(3):
        plain(opt, net, number)
    block, wanted = params_of(net)["blocks.3.weight"], bits(opt)
    for prepare, undo, error in (
        (lambda: block.requires_grad_(False), lambda: block.requires_grad_(True), "blocks.3.weight is frozen now"),
        (lambda: setattr(block, "grad", torch.ones(WIDTH, WIDTH)), opt.zero_grad, "p.grad of blocks.3.weight is"),
        (
            lambda: net.frozen.requires_grad_(True),
            lambda: net.frozen.requires_grad_(False),
            "frozen.weight, which was frozen, requires a gradient",
        ),
    ):
        prepare()
        with pytest.raises(RuntimeError, match=error):
            loss_of(net, 3).backward()
        undo()
        opt.zero_grad()
        assert bits(opt) == wanted, error
    for number in range(3, 5):
        plain(opt, net, number)
    assert opt.updated[-1]
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_prevented_changes_nothing(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(prevented, world_size, str(tmp_path))
