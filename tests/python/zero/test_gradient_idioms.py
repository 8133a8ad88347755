"""Uses of ``p.grad`` around a step, against torch: SGD with momentum on the mean of the ranks' gradients.

Each program of the table runs twice: on ZeroOptimizer in several places, and in one process. The latter computes all
ranks' gradients as DistributedDataParallel would leave them in ``p.grad``.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.zero import full_grad, set_full_grad

Run = Callable[..., list[Any]]
PLACES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2, "bucket_mb": 0.0005},
    {"stage": 3},
    {"stage": 3, "share_parameters": False, "bucket_mb": 0.0005},
    {"stage": 3, "offload": "nvme", "prefetch": 0},
]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Embedding(11, 9), nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3)
    )


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(0, 11, (6,), generator=generator)
    return model(tokens).float().square().sum()


class Ours:
    """ZeroOptimizer on this rank."""

    def __init__(self, model: nn.Module, opt: Any, rank: int) -> None:
        self.model, self.opt, self.rank = model, opt, rank

    def backward(self, number: int, factor: float = 1.0) -> None:
        (loss_of(self.model, self.rank, number) * factor).backward()

    def gradients(self, number: int) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss_of(self.model, self.rank, number), list(self.model.parameters())))


class Torch:
    """The oracle: all ranks in one process, with torch."""

    def __init__(self, model: nn.Module, opt: Any, world_size: int) -> None:
        self.model, self.opt, self.world_size = model, opt, world_size

    def backward(self, number: int, factor: float = 1.0) -> None:
        params = list(self.model.parameters())
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        locals_ = []
        for rank in range(self.world_size):
            (loss_of(self.model, rank, number) * factor).backward()
            locals_.append([param.grad for param in params])
            for param in params:
                param.grad = None
        for index, (param, old) in enumerate(zip(params, before, strict=True)):
            each = [grads[index] for grads in locals_ if grads[index] is not None]
            mean = sum(each) / self.world_size if each else None
            param.grad = mean if old is None else old if mean is None else old.add_(mean)

    def gradients(self, number: int) -> list[torch.Tensor]:
        params = list(self.model.parameters())
        each = [torch.autograd.grad(loss_of(self.model, rank, number), params) for rank in range(self.world_size)]
        return [sum(of_param) / self.world_size for of_param in zip(*each, strict=True)]


Program = Callable[[Any], None]
PROGRAMS: dict[str, Program] = {}


def program(body: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """Three steps of ``body(it, number)``."""

    def run(it: Any) -> None:
        for number in range(3):
            body(it, number)

    PROGRAMS[body.__name__] = run
    return body


def whole(body: Program) -> Program:
    PROGRAMS[body.__name__] = body
    return body


def end(it: Any) -> None:
    it.opt.step()
    it.opt.zero_grad()


@program
def plain(it: Any, number: int) -> None:
    it.backward(number)
    end(it)


@program
def manual_unscale(it: Any, number: int) -> None:
    it.backward(number, 128.0)
    for param in it.model.parameters():
        if param.grad is not None:
            param.grad.mul_(1 / 128.0)
    end(it)


@program
def unscale_by_tensor_and_division(it: Any, number: int) -> None:
    it.backward(number, 8.0)
    for param in it.model.parameters():
        param.grad /= torch.tensor(4.0)
        param.grad.data.div_(2.0)
    end(it)


@program
def masks(it: Any, number: int) -> None:
    it.backward(number)
    for at, param in enumerate(it.model.parameters()):
        mask = torch.rand(param.grad.shape, generator=torch.Generator().manual_seed(at)) < 0.5
        param.grad.mul_(mask) if at % 2 else param.grad.masked_fill_(mask, 0.25)
    end(it)


@program
def rows_and_columns(it: Any, number: int) -> None:
    it.backward(number)
    table, weight, bias, other, *_ = it.model.parameters()
    table.grad[0] = 0
    table.grad[3:7].mul_(2)
    table.grad[[1, 9]] = 0.5
    weight.grad[:, 2] *= 3
    weight.grad.t()[4].add_(1)
    weight.grad.view(-1)[::5].zero_()
    bias.grad[bias.grad > 0.1] = 0.1
    for part in other.grad.chunk(4):
        part.neg_()
    end(it)


@program
def clip_grad_norm(it: Any, number: int) -> None:
    it.backward(number)
    norm = torch.nn.utils.clip_grad_norm_(it.model.parameters(), 0.5)
    assert norm > 0.5
    end(it)


@program
def clip_grad_norm_foreach(it: Any, number: int) -> None:
    it.backward(number)
    for foreach in (True, False):
        torch.nn.utils.clip_grad_norm_(it.model.parameters(), 0.5, foreach=foreach, error_if_nonfinite=True)
    for kind in (1.0, 3.0, float("inf")):
        torch.nn.utils.clip_grad_norm_(it.model.parameters(), 0.4, norm_type=kind)
    end(it)


@program
def clip_grad_value(it: Any, number: int) -> None:
    it.backward(number)
    torch.nn.utils.clip_grad_value_(it.model.parameters(), 0.05, foreach=[None, True, False][number])
    end(it)


@program
def norms_one_by_one(it: Any, number: int) -> None:
    """Layer-wise clipping, as LARS and older recipes have it."""
    it.backward(number)
    for param in it.model.parameters():
        norm = param.grad.data.norm(2)
        assert torch.equal(norm, torch.norm(param.grad, 2)) and torch.equal(norm, torch.linalg.vector_norm(param.grad))
        if norm > 0.2:
            param.grad.mul_(0.2 / norm)
    end(it)


@program
def gradient_noise_and_decay(it: Any, number: int) -> None:
    it.backward(number)
    for at, param in enumerate(it.model.parameters()):
        noise = torch.randn(param.grad.shape, generator=torch.Generator().manual_seed(at))
        param.grad.add_(noise, alpha=0.01)
        param.grad.addcmul_(noise, noise, value=0.1)
        param.grad.lerp_(noise, 0.1).nan_to_num_(0.0)
    end(it)


@program
def signs(it: Any, number: int) -> None:
    it.backward(number)
    torch._foreach_sign_([param.grad for param in it.model.parameters()])
    torch._foreach_mul_([param.grad for param in it.model.parameters()], 0.1)
    torch._foreach_add_(
        [p.grad for p in it.model.parameters()], [torch.ones(p.grad.shape) for p in it.model.parameters()]
    )
    end(it)


@program
def centralisation(it: Any, number: int) -> None:
    """Values that need the whole gradient."""
    it.backward(number)
    for param in it.model.parameters():
        if param.grad.dim() > 1:
            param.grad.add_(-param.grad.mean(dim=1, keepdim=True))
    end(it)


@program
def a_new_tensor_from_the_old(it: Any, number: int) -> None:
    it.backward(number)
    for param in it.model.parameters():
        param.grad = param.grad * 0.5 + param.grad.clone().square()
    end(it)


@program
def out_argument(it: Any, number: int) -> None:
    it.backward(number)
    for param in it.model.parameters():
        torch.mul(param.grad, 0.5, out=param.grad)
    end(it)


@program
def checks_of_finiteness(it: Any, number: int) -> None:
    it.backward(number)
    grads = [param.grad for param in it.model.parameters() if param.grad is not None]
    assert len(grads) == 7 and all(torch.isfinite(grad).all() and not grad.isnan().any() for grad in grads)
    assert not any(torch.isinf(grad).any() for grad in grads)
    end(it)


@program
def assigned(it: Any, number: int) -> None:
    """torch.autograd.grad and a step, without any backward()."""
    for param, grad in zip(it.model.parameters(), it.gradients(number), strict=True):
        param.grad = grad
    end(it)


@program
def assigned_after_backward(it: Any, number: int) -> None:
    it.backward(number)
    other = it.gradients(number + 10)
    for param, grad in list(zip(it.model.parameters(), other, strict=True))[::2]:
        param.grad = grad
    end(it)


@program
def surgery(it: Any, number: int) -> None:
    """PCGrad: the second task's gradient without its part against the first one's."""
    first, second = it.gradients(number), it.gradients(number + 10)
    it.model.zero_grad()
    for param, a, b in zip(it.model.parameters(), first, second, strict=True):
        param.grad = a + b
    torch.nn.utils.clip_grad_norm_(it.model.parameters(), 1e4)
    end(it)


@whole
def a_buffer_of_its_own(it: Any) -> None:
    """Keep the same tensors in p.grad for ever, to which autograd adds."""
    for param in it.model.parameters():
        param.grad = torch.zeros(param.shape)
    buffers = [param.grad for param in it.model.parameters()]
    for number in range(3):
        it.backward(number)
        it.opt.step()
        it.opt.zero_grad(set_to_none=False)
        assert all(param.grad is buffer for param, buffer in zip(it.model.parameters(), buffers, strict=True))
        assert not any(buffer.any() for buffer in buffers)


@whole
def dropped(it: Any) -> None:
    for number in range(4):
        it.backward(number)
        if number in (1, 2):
            list(it.model.parameters())[1].grad = None
            list(it.model.parameters())[6].grad = None
        end(it)


@whole
def forgotten_by_the_model(it: Any) -> None:
    for number in range(3):
        it.model.zero_grad()
        it.backward(number)
        it.opt.step()
    it.model.zero_grad()
    it.opt.step()  # nothing
    it.backward(7)
    it.model.zero_grad(set_to_none=False)
    it.opt.step()  # momentum goes on


@whole
def zeroed_and_not_dropped(it: Any) -> None:
    for number in range(3):
        it.backward(number)
        it.opt.step()
        it.opt.zero_grad(set_to_none=False)
        assert all(param.grad is not None for param in it.model.parameters())
    it.opt.step()


@whole
def part_of_an_accumulation_dropped(it: Any) -> None:
    for number in range(3):
        it.backward(2 * number)
        list(it.model.parameters())[3].grad = None
        next(it.model.parameters()).grad.mul_(3.0)
        it.backward(2 * number + 1)
        end(it)


@whole
def autograd_grad_between_backward_and_step(it: Any) -> None:
    for number in range(3):
        it.backward(number)
        it.gradients(number + 20)
        assert all(param.grad is not None for param in it.model.parameters())
        it.backward(number + 30)
        end(it)


@whole
def steps_twice(it: Any) -> None:
    it.backward(0)
    it.opt.step()
    list(it.model.parameters())[1].grad.mul_(0.5)
    it.opt.step()
    it.opt.zero_grad()
    it.backward(1)
    end(it)


@whole
def hooks_of_the_program(it: Any) -> None:
    """Run hooks on this rank's gradient, as under DDP, whenever they were registered."""

    def clamp(param: torch.Tensor) -> None:
        param.grad.clamp_(-0.05, 0.05)

    for param in it.model.parameters():
        param.register_post_accumulate_grad_hook(clamp)
    for number in range(3):
        it.backward(number)
        end(it)


@whole
def freezing(it: Any) -> None:
    for number in range(6):
        for param in it.model[1].parameters():
            param.requires_grad_(number not in (2, 3))
        it.model[0].requires_grad_(number < 4)
        it.backward(number)
        end(it)


ASSIGN = {
    "assigned", "assigned_after_backward", "surgery", "a_buffer_of_its_own", "a_new_tensor_from_the_old",
    "unscale_by_tensor_and_division",
}  # fmt: skip
SLOW = {"momentum": 0.9, "lr": 0.01, "weight_decay": 0.1}


def by_torch(name: str, world_size: int) -> dict[str, torch.Tensor]:
    model = network()
    it = Torch(model, torch.optim.SGD(model.parameters(), **SLOW), world_size)
    PROGRAMS[name](it)
    return {key: value.detach() for key, value in model.named_parameters()}


def run_programs(folder: str, names: list[str]) -> list[str]:
    comm = zcomm.init(timeout=60)
    wrong = []
    for name in names:
        wanted = by_torch(name, comm.world_size)
        for place in PLACES:
            model = network()
            opt = zcomm.ZeroOptimizer(model, "sgd", nvme_path=folder, **SLOW, **place)
            if name in ASSIGN and model[1].bias.shape != (33,):  # torch compares the shapes, and raises
                opt.close()
                continue
            PROGRAMS[name](Ours(model, opt, comm.rank))
            got = opt.full_state_dict()
            opt.close()
            for key, value in wanted.items():
                if not torch.allclose(got[key], value, rtol=2e-4, atol=2e-6):
                    wrong.append(f"{name} {place} {key}: {float((got[key] - value).abs().max()):.3g}")
    return wrong


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_each_idiom_is_as_in_torch(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for wrong in run_ranks(run_programs, world_size, str(tmp_path), list(PROGRAMS), timeout_s=280):
        assert not wrong


# --- freezing -------------------------------------------------------------------------------------------------

RULES: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
    ("nadam", torch.optim.NAdam, {"lr": 0.01}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1}),
]


def gradual_unfreezing(it: Any, first: int, last: int) -> None:
    """Layers thaw one after the other; one is frozen again for a while. torch counts steps by parameter."""
    for number in range(first, last):
        for at, layer in enumerate((5, 3, 1, 0)):
            it.model[layer].requires_grad_(number >= 2 * at and not (layer == 5 and number in (3, 4)))
        it.backward(number)
        end(it)


def unfreeze(folder: str) -> list[str]:
    comm = zcomm.init(timeout=60)
    wrong = []
    for name, kind, options in RULES:
        plain = network()
        it = Torch(plain, kind(plain.parameters(), **options), comm.world_size)
        gradual_unfreezing(it, 0, 8)
        for place in PLACES:
            model = network()
            opt = zcomm.ZeroOptimizer(model, kind, nvme_path=folder, **options, **place)
            gradual_unfreezing(Ours(model, opt, comm.rank), 0, 5)
            opt.save(f"{folder}/{name}")
            state = opt.state_dict()
            opt.close()
            for way in ("load", "load_state_dict"):
                model = network()
                opt = zcomm.ZeroOptimizer(model, kind, nvme_path=folder, **options, **place)
                opt.load(f"{folder}/{name}", optimizer=way == "load")
                if way == "load_state_dict":
                    opt.load_state_dict(state)
                gradual_unfreezing(Ours(model, opt, comm.rank), 5, 8)
                got = opt.full_state_dict()
                opt.close()
                for key, value in plain.named_parameters():
                    if not torch.allclose(got[key], value.detach(), rtol=2e-4, atol=2e-6):
                        wrong.append(f"{name} {way} {place} {key}: {float((got[key] - value).abs().max()):.3g}")
    return wrong


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_layers_that_thaw_are_trained_as_in_torch(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for wrong in run_ranks(unfreeze, world_size, str(tmp_path), timeout_s=280):
        assert not wrong


def test_a_parameter_frozen_at_construction_is_not_trained_in_silence() -> None:
    model = network()
    model[1].requires_grad_(False)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2)
    it = Ours(model, opt, 0)
    it.backward(0)
    end(it)
    model[1].requires_grad_(True)
    opt.step()  # no gradient has reached it
    it.backward(1)
    with pytest.raises(RuntimeError, match=r"parameter 1\.weight requires a gradient now, but was frozen"):
        opt.step()
    opt.close()
    zcomm.shutdown()


# --- without sync ---------------------------------------------------------------------------------------------


def sums_of_many_passes(folder: str) -> list[tuple[str, float]]:
    """Return the relative error of 8 micro-steps' mean, of which 6 are local, against float64 sums of the same
    gradients."""
    comm = zcomm.init(timeout=60)
    found = []
    for place in PLACES:
        for precision in ("fp32", "bf16", "fp16"):
            model = network()
            opt = zcomm.ZeroOptimizer(
                model, "sgd", lr=0.1, grad_accum=8, nvme_path=folder, precision=precision, communication_dtype="fp32",
                loss_scale=8.0 if precision == "fp16" else None, **place,
            )  # fmt: skip
            exact = [torch.zeros(p.shape, dtype=torch.float64) for p in network().parameters()]

            def count(param: nn.Parameter, sum_: torch.Tensor, scale: float = opt.loss_scale) -> None:
                def add(grad: torch.Tensor) -> None:
                    sum_.add_(grad.double() / scale)

                param.register_hook(add)

            for param, sum_ in zip(model.parameters(), exact, strict=True):
                count(param, sum_)
            for number in range(8):
                opt.boundary = False
                if number in (3, 7):
                    opt.backward(loss_of(model, comm.rank, number))
                else:
                    with opt.no_sync():
                        opt.backward(loss_of(model, comm.rank, number))
            for param, sum_ in zip(model.parameters(), exact, strict=True):
                comm.all_reduce(sum_)
                wanted = sum_ / (8 * comm.world_size)
                error = float((full_grad(param).double() - wanted).norm() / wanted.norm())
                found.append((f"{precision} {place}", error))
            opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_accumulated_gradients_are_exact(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(sums_of_many_passes, world_size, str(tmp_path)):
        for place, error in found:
            assert error < 1e-6, place


def local_sums() -> None:
    comm = zcomm.init(timeout=60)
    for place in PLACES[1:4]:
        model, mine = network(), network()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, **place)
        it = Ours(model, opt, comm.rank)
        with opt.no_sync():
            for number in range(2):
                it.backward(number)
                loss_of(mine, comm.rank, number).backward()
            for param, own in zip(model.parameters(), mine.parameters(), strict=True):
                torch.testing.assert_close(full_grad(param), own.grad)
                torch.testing.assert_close(param.grad.norm(), own.grad.norm())
                param.grad.clamp_(-0.1, 0.1)
                own.grad.clamp_(-0.1, 0.1)
        it.backward(2)
        loss_of(mine, comm.rank, 2).backward()
        for param, own in zip(model.parameters(), mine.parameters(), strict=True):
            mean = own.grad.clone()
            comm.all_reduce(mean, "avg")
            torch.testing.assert_close(full_grad(param), mean)
        opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_local_sum_can_be_read_and_changed(run_ranks: Run, world_size: int) -> None:
    run_ranks(local_sums, world_size)


# --- grad_accum -----------------------------------------------------------------------------------------------


def test_one_step_for_several_micro_steps_says_how_to_write_it() -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, grad_accum=4, stage=2)
    it = Ours(model, opt, 0)
    with pytest.raises(RuntimeError, match=r"step\(\) after 4 backward passes with grad_accum=4: either call step"):
        for number in range(4):
            it.backward(number)
            if number % 4 == 3:
                opt.step()
    opt.zero_grad()
    for number in range(8):
        with opt.no_sync() if number % 4 < 3 else torch.enable_grad():
            it.backward(number)
        end(it)
    assert opt.step_count == 2
    with opt.no_sync():
        it.backward(8)
    it.backward(9)
    with pytest.raises(RuntimeError, match="after 2 backward passes"):
        opt.step()
    opt.close()
    zcomm.shutdown()


# --- refused --------------------------------------------------------------------------------------------------


def test_what_a_stand_in_cannot_do_says_what_to_use(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2)
    it = Ours(model, opt, 0)
    it.backward(0)
    grad = model[1].weight.grad
    assert "gradient of 1.weight, shape (33, 9)" in repr(grad) and grad.dtype == torch.float32 and not grad.is_sparse
    assert torch.zeros_like(grad).shape == grad.shape and not caplog.records
    calls: list[Any] = [lambda: pickle.dumps(grad), lambda: grad.view(torch.int32)]
    calls.append(lambda: grad.map2_(grad, grad, lambda x, y, z: x))
    for refused in (grad.data_ptr, grad.untyped_storage, *calls):
        with pytest.raises(RuntimeError, match="full_grad"):
            refused()
    with caplog.at_level(logging.WARNING, "zcomm"):
        whole = grad.clone()
        assert type(whole) is torch.Tensor and torch.equal(whole, full_grad(model[1].weight))
        assert torch.equal(torch.from_numpy(grad.numpy()), whole) and torch.equal(copy.deepcopy(grad), whole)
        assert float(grad[2, 3]) == float(whole[2, 3]) and grad.tolist() == whole.tolist()
    assert ["zcomm.zero.full_grad(p)" in record.message for record in caplog.records] == [True], "once"
    set_full_grad(model[1].weight, torch.ones(33, 9))
    assert torch.equal(grad.full_tensor(), torch.ones(33, 9))
    model[3].weight.grad = model[1].weight.grad[:17, :].expand(17, 9).repeat(1, 4)[:, :33]
    opt.step()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match=r"gradient of 1.weight has been forgotten by zero_grad"):
        grad.mul_(2)
    it.backward(1)
    kept = model[1].weight.grad
    with pytest.raises(RuntimeError, match="has been forgotten"):
        model[1].weight.grad = grad
        opt.step()
    model[1].weight.grad = kept
    told: list[str] = []

    def edits_another(_: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=r"is being reduced: use it after backward") as error:
            kept.mul_(2)
        told.append(str(error.value))

    handle = model[3].weight.register_hook(edits_another)
    it.backward(2)
    handle.remove()
    assert told
    opt.step()
    opt.close()
    with pytest.raises(RuntimeError, match="closed"):
        kept.norm()
    zcomm.shutdown()


def differ(kind: str) -> None:
    comm = zcomm.init(timeout=60)
    model = network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2)
    if kind == "frozen" and comm.rank == 1:
        model[3].weight.requires_grad_(False)
    Ours(model, opt, comm.rank).backward(0)
    if kind == "dropped" and comm.rank == 1:
        model[3].weight.grad = None
    if kind == "assigned" and comm.rank == 1:
        model[3].weight.grad = torch.ones(17, 33)
    words = {"dropped": "None", "frozen": "None", "assigned": "set by the program"}[kind]
    with pytest.raises(RuntimeError, match=rf"3\.weight is the optimizer's on rank 0, {words} on rank 1"):
        opt.step()
    opt.close()


@pytest.mark.parametrize("kind", ["dropped", "assigned", "frozen"])
def test_ranks_that_differ_are_told(run_ranks: Run, kind: str) -> None:
    run_ranks(differ, 2, kind)


def nothing_on_one_rank() -> None:
    """Step with gradients on only some of the ranks: the weights remain equal."""
    comm = zcomm.init(timeout=60)
    model = network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=1.0, stage=2)
    before = [param.detach().clone() for param in model.parameters()]
    opt.step()
    assert opt.step_count == 0
    for number in range(4):
        if number % 2 == comm.rank:
            for param in model.parameters():
                param.grad = torch.full(param.shape, 2.0)
        opt.step()
        opt.zero_grad()
    assert opt.step_count == 4
    for param, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param, old - 4.0)
    opt.close()


def test_a_rank_without_gradients_counts_as_zero(run_ranks: Run) -> None:
    run_ranks(nothing_on_one_rank, 2)


def scaled_by_torch() -> None:
    """torch.amp.GradScaler around ZeroOptimizer; one rank's overflow is all ranks'."""
    comm = zcomm.init(timeout=60)
    model, plain = network(), network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2)
    torch_opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100) for _ in range(2))
    it, reference = Ours(model, opt, comm.rank), Torch(plain, torch_opt, comm.world_size)
    for number in range(4):
        bad = float("inf") if number == 2 and comm.rank == comm.world_size - 1 else 1.0
        it.backward(number, float(ours.scale(torch.ones(()))) * bad)
        reference.backward(number, float(theirs.scale(torch.ones(()))) * (float("inf") if number == 2 else 1.0))
        for scaler, optimizer, net in ((ours, opt, model), (theirs, torch_opt, plain)):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert ours.get_scale() == theirs.get_scale() == 32.0
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradscaler(run_ranks: Run, world_size: int) -> None:
    run_ranks(scaled_by_torch, world_size)


def assigned_in_16_bits(precision: str) -> None:
    """Use an assigned gradient as it is, whatever loss scale and grad_accum are."""
    comm = zcomm.init(timeout=60)
    for place in PLACES[:3]:
        model = network()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.5, precision=precision, grad_accum=2, **place)
        before = {key: value.float() for key, value in opt.full_state_dict().items()}
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.full_like(param, comm.rank + 1.0)
            opt.step()
        after = opt.full_state_dict()
        mean = sum(range(1, comm.world_size + 1)) / comm.world_size
        for key, value in before.items():
            torch.testing.assert_close(after[key].float(), value - 0.5 * mean, rtol=1e-2, atol=1e-2)
        opt.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_assigned_gradients_are_used_as_they_are(run_ranks: Run, precision: str) -> None:
    run_ranks(assigned_in_16_bits, 2, precision)
