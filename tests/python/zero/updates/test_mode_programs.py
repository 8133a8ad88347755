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
from torch.utils.checkpoint import checkpoint

import zcomm
from test_gradient_tiers import WIDTH, edits, locally, loss_of, nothing, overflows, plainly, twice
from test_gradient_tiers import Net as Tied
from tiers import long, slow
from update_grid import Run, bits_of, run_at
from zcomm.zero import full_grad, full_param
from zero_jobs import Case, digest, share_small_buckets

Act = Callable[[Any, Any, int], None]
BASE = Case(3, "nvme", 0.004)
BACKWARD = replace(BASE, gradients="nvme", update="backward")
FORWARD = replace(BACKWARD, update="forward")
STEPS = 6
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


class Recomputed(Tied):
    """Tied with a checkpoint around each block. shares: one block is used twice."""

    reentrant = shares = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *([self.blocks[1]] if self.shares else [])):
            y: Any = checkpoint(block, x, use_reentrant=self.reentrant)
            x = x + torch.tanh(y)
        return self.head(self.frozen(x) * self.scale)


class Reentrant(Recomputed):
    reentrant = True


class Shared(Reentrant):
    shares = True


def params_of(net: nn.Module) -> dict[str, nn.Parameter]:
    return dict(net.named_parameters())


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.requires_grad]


def plain(opt: Any, net: Any, number: int) -> None:
    loss_of(net, number).backward()
    end(opt)


def end(opt: Any, **options: bool) -> None:
    opt.updated.append(opt._parts.updates.pending)
    opt.step()
    opt.norms.append(None if opt.grad_norm is None else float(opt.grad_norm).hex())
    opt.zero_grad(**options)


def ends(act: Act) -> Act:
    """Return ``act`` with a rate that decays, and with step()."""

    def acts(opt: Any, net: Any, number: int) -> None:
        opt.param_groups[0]["lr"] = 0.01 / (1 + number)
        act(opt, net, number)
        end(opt)

    return acts


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
    end(opt, set_to_none=False)


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


# act, model, options
Program = tuple[Act, type[nn.Module], dict[str, Any]]
MODELS: dict[str, Program] = {
    "tied": (ends(plainly), Tied, {}),
    "bf16": (ends(plainly), Tied, {"precision": "bf16"}),
    "sgd": (ends(plainly), Tied, {"optimizer": "sgd"}),
    "recomputed": (ends(plainly), Recomputed, {}),
    "reentrant": (ends(plainly), Reentrant, {}),
    "prefetch": (ends(plainly), Reentrant, {"prefetch": 3}),
    "overflow": (ends(overflows), Tied, {}),
    "nothing": (ends(nothing), Tied, {}),
}
ACTS: list[Act] = [plain, used_later, depths, anomalies, averages, clamps, gathers, evaluates, penalty, second_order]
ACTS += [hooks, keeps_zeros, chosen_inputs, other_thread, loads, saves_behind, state_dicts, new_options, fails_early]
IN_FORWARD: list[Act] = [freezes, evaluates_before_step, reads_another, own_gradient, accumulates_locally, clips_later]
# programs that updates in backward can follow, and those that have updates in forward
PROGRAMS = MODELS | {act.__name__: (act, Net, {}) for act in ACTS + IN_FORWARD}


def build(case: Case, folder: str, kind: type[nn.Module] = Net, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    net, options = kind(), {"optimizer": "adamw", "lr": 1e-2, "nvme_path": folder, **case.arguments(), **options}
    opt: Any = zcomm.ZeroOptimizer(net, options.pop("optimizer"), **options)
    opt.found, opt.updated, opt.norms, opt.folder = [], [], [], folder
    return net, opt


def train(case: Case, name: str, folder: str) -> tuple[Any, list[bool]]:
    act, kind, options = PROGRAMS[name]
    net, opt = build(case, folder, kind, **options)
    for number in range(STEPS):
        act(opt, net, number)
    result = bits_of(opt), [digest(each) for each in opt.found], opt.step_count, opt.norms, opt.nonfinite
    opt.close()
    return result, opt.updated


def train_all(names: list[str], folder: str) -> dict[str, Any]:
    share_small_buckets()
    zcomm.init(timeout=30)
    late = {name: FORWARD if PROGRAMS[name][0] in IN_FORWARD else BACKWARD for name in names}
    return {name: [train(case, name, f"{folder}/{case.update}") for case in (BASE, late[name])] for name in names}


GROUPS = {"models": list(MODELS), "acts": [name for name in PROGRAMS if name not in MODELS]}


@pytest.mark.parametrize(
    ("place", "world_size", "group"),
    [
        ("host", 2, "models"),
        long("host", 1, "models"),
        slow("host", 2, "acts"),
        long("host", 1, "acts"),
        long("device", 1, "acts"),
        long("device", 2, "acts"),
    ],
)
def test_the_bits_of_updates_in_step(run_ranks: Run, tmp_path: Path, place: str, world_size: int, group: str) -> None:
    for found in run_at(place, world_size, run_ranks, train_all, GROUPS[group], str(tmp_path)):
        for name, ((wanted, _), (result, updated)) in found.items():
            assert result == wanted, name
            assert not any(updated[:2]), f"{name}: these steps are watched"
            assert updated[-1] == (PROGRAMS[name][0] not in IN_FORWARD), f"{name}: {updated}"


# --- calls that no watched step made ----------------------------------------------------------------------------------


def kept_graph(opt: Any, net: Any) -> None:
    loss = loss_of(net, LATE)
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


def two_graphs(opt: Any, net: Any) -> None:
    one, other = loss_of(net, LATE), loss_of(net, LATE + 100)
    one.backward()
    other.backward()


def asks_for_a_slope(opt: Any, net: Any) -> None:
    other = loss_of(net, LATE + 100)
    loss_of(net, LATE).backward()
    torch.autograd.grad(other, [net.norm.weight])


def leaves_open(opt: Any, net: Any) -> None:
    with zcomm.zero.GatheredParameters(net, modifier_rank=0):
        loss_of(net, LATE).backward()


def half_way_through_the_state(opt: Any, net: Any) -> None:
    pieces = opt.iter_state()
    next(pieces, None)
    loss_of(net, LATE).backward()
    for _ in pieces:
        pass


def hook_reads(opt: Any, net: Any) -> None:
    early, late = params_of(net)["blocks.5.weight"], params_of(net)["blocks.1.weight"]
    opt.hook = late.register_hook(lambda grad: grad + 0.01 * early.detach().sum())
    loss_of(net, LATE).backward()


def hook_edits(opt: Any, net: Any) -> None:
    early, late = params_of(net)["blocks.5.weight"], params_of(net)["blocks.1.weight"]

    def edit(grad: torch.Tensor) -> None:
        early.data.mul_(0.5)

    opt.hook = late.register_hook(edit)
    loss_of(net, LATE).backward()


def hook_drops(opt: Any, net: Any) -> None:
    def drop(param: torch.Tensor) -> None:
        param.grad = None

    opt.hook = params_of(net)["blocks.3.weight"].register_post_accumulate_grad_hook(drop)
    loss_of(net, LATE).backward()
    opt.step()


def without_sync(opt: Any, net: Any) -> None:
    one, other = loss_of(net, LATE), loss_of(net, LATE + 100)
    one.backward()
    with opt.no_sync():
        other.backward()
    opt.step()


def gathered(net: Any) -> None:
    with zcomm.zero.GatheredParameters(net.blocks[1].weight, modifier_rank=0), torch.no_grad():
        net.blocks[1].weight.mul_(0.5)


def set_rate(opt: Any) -> None:
    opt.param_groups[0]["lr"] = 0.5


Surprise = tuple[Callable[[Any, Any], Any], str]


def after(call: Callable[[Any, Any], Any], error: str = "") -> Surprise:
    """Return a call between backward and step(). error: of step(), which does not accept it."""

    def act(opt: Any, net: Any) -> None:
        loss_of(net, LATE).backward()
        assert opt._parts.updates.pending
        call(opt, net)
        if error:
            opt.step()

    return act, error


def after_step(call: Callable[[Any, Any], Any]) -> Surprise:
    """Return a call after step(), for which backward has used the gradients."""

    def act(opt: Any, net: Any) -> None:
        loss_of(net, LATE).backward()
        opt.step()
        call(opt, net)

    return act, "used the gradients up"


# Act and error. "": one that asks for step(), which then ends the step as if nothing had been.
SURPRISES: dict[str, Surprise] = {
    "two losses": after(lambda opt, net: loss_of(net, LATE + 100).backward()),
    "kept graph": (kept_graph, ""),
    "two graphs": (two_graphs, ""),
    "asks for a slope": (asks_for_a_slope, ""),
    "leaves open": (leaves_open, ""),
    "half way through the state": (half_way_through_the_state, ""),
    "hook reads": (hook_reads, "backward uses unit blocks.5 again"),
    "hook edits": (hook_edits, r"call step\(\) first"),
    "hook drops": (hook_drops, "p.grad was dropped"),
    "without sync": (without_sync, "backward uses unit|p.grad was dropped"),
    "forward": after(lambda opt, net: loss_of(net, 1)),
    "part": after(lambda opt, net: net.blocks[0](torch.ones(1, WIDTH))),
    "zero_grad": after(lambda opt, net: opt.zero_grad()),
    "save": after(lambda opt, net: opt.save(f"{opt.folder}/never")),
    "save, no wait": after(lambda opt, net: opt.save(f"{opt.folder}/never", wait=False)),
    "load": after(lambda opt, net: opt.load(f"{opt.folder}/saved")),
    "load_state_dict": after(lambda opt, net: opt.load_state_dict({})),
    "state_dict": after(lambda opt, net: opt.state_dict()),
    "full_state_dict": after(lambda opt, net: opt.full_state_dict()),
    "model.state_dict": after(lambda opt, net: {k: v.clone() for k, v in net.state_dict().items()}),
    "full_param": after(lambda opt, net: full_param(net.norm.weight)),
    "full_grad": after(lambda opt, net: full_grad(net.norm.weight)),
    "norm": after(lambda opt, net: net.norm.weight.grad.norm()),
    "clips by hand": after(lambda opt, net: nn.utils.clip_grad_norm_(trained(net), 0.1)),
    "scaled": after(lambda opt, net: net.norm.weight.grad.mul_(0.5)),
    "edit": after(lambda opt, net: net.blocks[3].weight.data.mul_(0.5)),
    "gathered": after(lambda opt, net: gathered(net)),
    "rate": after(lambda opt, net: set_rate(opt), "after backward"),
    "grad": after(lambda opt, net: setattr(net.norm.weight, "grad", None), "after backward"),
    "clip": after(lambda opt, net: setattr(opt, "clip_norm", 1.0), "after backward"),
    "steps again": after_step(lambda opt, net: opt.step()),
    "runs again": after_step(lambda opt, net: loss_of(net, LATE + 1).backward()),
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
    wanted = bits_of(opt)
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
        if not error:
            end(opt)
        elif "used" in error:
            opt.zero_grad()
        else:
            opt.clip_norm = None
            for call in (opt.step, opt.zero_grad, opt.state_dict, lambda: opt.save(f"{folder}/never")):
                with pytest.raises(RuntimeError, match="load a checkpoint"):
                    call()
            opt.load(f"{folder}/saved")
            plain(opt, net, LATE)
        assert bits_of(opt) == wanted, name
    plain(opt, net, LATE + 1)
    opt.close()


@pytest.mark.parametrize(("place", "world_size"), [long("host", 1), ("host", 2), slow("device", 2), long("device", 1)])
def test_surprises_have_names(run_ranks: Run, tmp_path: Path, place: str, world_size: int) -> None:
    run_at(place, world_size, run_ranks, surprised, str(tmp_path))


# --- calls that raise before any change -------------------------------------------------------------------------------


def backward(opt: Any, net: Any, number: int) -> None:
    loss_of(net, number).backward()
    pytest.fail("backward does not raise")


def no_change(net: Any, on: bool) -> None:
    pass


def freezes_one(net: Any, on: bool) -> None:
    net.blocks[3].weight.requires_grad_(not on)


def thaws_one(net: Any, on: bool) -> None:
    net.frozen.requires_grad_(on)


def has_a_gradient(net: Any, on: bool) -> None:
    if on:
        net.blocks[3].weight.grad = torch.ones(WIDTH, WIDTH)


AGAIN = r"(reached|uses unit) blocks\.1.* (twice|again).*: nothing has been changed; give update='forward'"
# Model, number of the step, a change of the model, which is taken back, act, and error.
PREVENTED: list[tuple[type[nn.Module], int, Callable[[Any, bool], None], Act, str]] = [
    (Tied, 0, no_change, twice, "several backward passes|accumulated"),
    (Tied, 0, no_change, locally, "no_sync"),
    (Tied, 0, no_change, edits, "p.grad"),
    (Shared, 0, no_change, plain, AGAIN),
    (Net, 3, freezes_one, backward, "blocks.3.weight is frozen now"),
    (Net, 3, has_a_gradient, backward, "p.grad of blocks.3.weight is"),
    (Net, 3, thaws_one, backward, "frozen.weight, which was frozen, requires a gradient"),
]


def prevented(folder: str) -> None:
    """Make calls that update="backward" does not support."""
    share_small_buckets()
    zcomm.init(timeout=30)
    for kind, late, change, act, error in PREVENTED:
        net, opt = build(BACKWARD, folder, kind)
        net.eval()  # otherwise each forward would change its buffers
        for number in range(late):
            plain(opt, net, number)
        wanted = bits_of(opt)
        change(net, True)
        with pytest.raises(RuntimeError, match=error):
            act(opt, net, late)
            opt.step()
        change(net, False)
        opt.zero_grad()
        assert bits_of(opt) == wanted, error
        if late:
            for number in range(late, late + 2):
                plain(opt, net, number)
            assert opt.updated[-1]
        opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_prevented_changes_nothing(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(prevented, world_size, str(tmp_path))
