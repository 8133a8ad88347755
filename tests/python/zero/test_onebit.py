"""1-bit Adam: warm-up with the bits of AdamW, then a reference in plain torch with the ranks as rows."""

from __future__ import annotations

import math
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from onebit_jobs import DTYPES, FREEZE, average_rows, loss_at, network, run_steps, sample, values, zero
from thread_world import thread_world
from zcomm.comm.communicator import Communicator
from zcomm.zero.onebit.signs import Signed, average_signs, packed, part_of
from zero_jobs import digest

Run = Callable[..., list[Any]]


class Frozen:
    """1-bit Adam after the freeze, on fp32 masters, all ranks in one process."""

    def __init__(self, state: dict[str, tuple[torch.Tensor, ...]], ranks: int, steps: int, **options: Any) -> None:
        self.state = {name: [x.clone() for x in each] for name, each in state.items()}  # master, m, v
        self.errors = {
            name: ([torch.zeros(m.numel()) for _ in range(ranks)], torch.zeros(m.numel()))
            for name, (_, m, _) in state.items()
        }
        self.steps = self.frozen = steps
        self.options = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-8, **options}

    def step(self, grads: list[dict[str, torch.Tensor]]) -> None:
        o, self.steps = self.options, self.steps + 1
        b1, b2 = o["betas"]
        for name, (x, m, v) in self.state.items():
            rows = [(m * b1 + grad[name].reshape(m.shape) * (1 - b1)).view(-1) for grad in grads]
            m.view(-1).copy_(average_rows(rows, *self.errors[name], v.view(-1) != 0))
            root = v.double().sqrt().float() * (1 / math.sqrt(1 - b2**self.frozen)) + o["eps"]
            x.mul_(1 - o["lr"] * o["weight_decay"])
            x.sub_(m / root * (o["lr"] / (1 - b1**self.steps)))


def test_one_rank_encodes_nothing(world_of_one: None) -> None:
    value, mask = torch.randn(77), torch.rand(77) > 0.2
    for bits, wanted in ((None, value), (packed(mask), torch.where(mask, value, 0.0))):
        signed = Signed(value.clone(), torch.zeros(77), torch.zeros(77), bits)
        assert average_signs(zcomm.init(), [signed], "test") == 0
        assert torch.equal(signed.value, wanted) and not bool(signed.worker.any() or signed.server.any())


@pytest.mark.parametrize("ranks", [2, 3])
def test_signs_are_averaged_as_rows_and_lose_nothing(tmp_path: Path, ranks: int) -> None:
    counts = [1, 63, 64, 65, 1000, 4097]
    generator = torch.Generator().manual_seed(ranks)
    masks = [torch.rand(count, generator=generator) > 0.2 for count in counts]
    steps = [[[torch.randn(c, generator=generator) for c in counts] for _ in range(ranks)] for _ in range(3)]

    def body(joined: Any) -> list[list[Signed]]:
        comm, errors = Communicator(joined), []
        rank, found = comm.rank, []
        for count in counts:
            part = part_of(count, rank, ranks)
            errors.append((torch.zeros(count), torch.zeros(part.stop - part.start)))
        for step in steps:
            tensors = [
                Signed(value.clone(), worker, server, packed(mask) if number % 2 else None)
                for number, (value, (worker, server), mask) in enumerate(zip(step[rank], errors, masks, strict=True))
            ]
            average_signs(comm, tensors, "test")
            found.append([Signed(t.value, t.worker.clone(), t.server.clone()) for t in tensors])
        comm.close()
        return found

    every = thread_world(ranks, tmp_path, body)
    for number, count in enumerate(counts):
        mask = masks[number] if number % 2 else torch.ones(count, dtype=torch.bool)
        workers, server = [torch.zeros(count) for _ in range(ranks)], torch.zeros(count)
        for step, given in enumerate(steps):
            rows = [given[rank][number] for rank in range(ranks)]
            before = sum(torch.where(mask, r + w, 0.0) for r, w in zip(rows, workers, strict=True)) / ranks + server
            out = average_rows(rows, workers, server, mask)
            for rank in range(ranks):
                mine = every[rank][step][number]
                assert torch.equal(mine.value, out), (count, step, rank)
                assert torch.equal(mine.worker, workers[rank])
                assert torch.equal(mine.server, server[part_of(count, rank, ranks)])
            after = sum(workers) / ranks + server + out  # nothing is lost but roundings
            torch.testing.assert_close(after, torch.where(mask, before, 0.0), rtol=1e-6, atol=2e-6)


# --- ZeroOptimizer ------------------------------------------------------------------------------------------------


def warm_up(precision: str, accum: int) -> dict[str, Any]:
    """Train by "adamw" and by "onebit_adam" up to the freeze, and three more steps."""
    comm = zcomm.init(timeout=60)
    found: dict[str, Any] = {}
    more = {"precision": precision, "grad_accum": accum, "loss_scale": 64.0 if precision == "fp16" else None}
    for name in ("adamw", "onebit_adam"):
        model = network(DTYPES[precision])
        opt = zero(model, name, **more)
        run_steps(opt, model, range(FREEZE), comm.rank, accum)
        state = {
            n: tuple(zcomm.zero.full_optim_state(p, key) for key in ("exp_avg", "exp_avg_sq"))
            for n, p in model.named_parameters()
        }
        masters = {n: zcomm.zero.full_param(p) for n, p in model.named_parameters()}
        found[name] = (
            digest(values(model)),
            digest({f"{n}{i}": x for n, each in state.items() for i, x in enumerate(each)}),
        )
        if name == "adamw":
            opt.close()
    frozen = Frozen({n: (masters[n], *state[n]) for n in state}, comm.world_size, FREEZE)
    for step in range(FREEZE, FREEZE + 3):
        grads = []
        for rank in range(comm.world_size):
            other = network(DTYPES[precision])
            other.load_state_dict(values(model))
            total = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in other.named_parameters()}
            for micro in range(accum):
                (loss_at(other, accum * step + micro, rank) * opt.loss_scale).backward()
                for n, p in other.named_parameters():
                    total[n] += p.grad.float()
                    p.grad = None
            grads.append({n: x * (1 / (accum * opt.loss_scale)) for n, x in total.items()})
        frozen.step(grads)
        run_steps(opt, model, [step], comm.rank, accum)
    found["frozen"] = [
        torch.equal(zcomm.zero.full_param(p), frozen.state[n][0])
        and torch.equal(zcomm.zero.full_optim_state(p, "exp_avg"), frozen.state[n][1])
        for n, p in model.named_parameters()
    ]
    found["distance"] = max(
        float((zcomm.zero.full_param(p) - frozen.state[n][0]).abs().max()) for n, p in model.named_parameters()
    )
    found["weights"] = digest(values(model))
    found["memory"] = opt.memory()["device"]
    opt.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "precision", "accum"), [(2, "fp32", 1), (3, "fp32", 2), (2, "bf16", 2), (3, "fp16", 1)]
)
def test_the_bits_are_adams_and_then_the_references(run_ranks: Run, ranks: int, precision: str, accum: int) -> None:
    every = run_ranks(warm_up, ranks, precision, accum)
    for found in every:
        assert found["adamw"] == found["onebit_adam"]
        assert all(found["frozen"]), found["distance"]
        assert found["weights"] == every[0]["weights"]
        assert found["memory"]["errors"] > 0


def sent_bytes() -> int:
    """Return the bytes that the TCP sockets of this process have sent."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
        except OSError:  # of the listing itself
            continue
        with socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family == socket.AF_INET and copy.type == socket.SOCK_STREAM:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
                total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


def counted() -> list[int]:
    """Return the bytes that each step sends."""
    comm = zcomm.init(backend="tcp", timeout=60)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    opt = zcomm.ZeroOptimizer(model, "onebit_adam", stage=0, freeze_step=2, lr=1e-3)
    found = []
    for _ in range(7):
        comm.barrier()
        before = sent_bytes()
        opt.backward(model(torch.randn(2, 512) + comm.rank).square().mean())
        opt.step()
        opt.zero_grad()
        comm.barrier()
        found.append(sent_bytes() - before)
    moved = opt._parts.replicas.moved_nbytes
    opt.close()
    return [*found, moved]


def test_a_step_sends_a_32nd_of_the_bytes(run_ranks: Run) -> None:
    count = 2 * 512 * 512
    for _, warm, _, *frozen, moved in run_ranks(counted, 2):
        assert 4 * count <= warm < 4.1 * count, "half of gradients and weights"
        assert min(frozen) < 4.3 * count / 32, "a step may also count bytes that the kernel has sent late or again"
        assert moved == pytest.approx(5 * count / 4, rel=0.01), "five steps of two encodings"


# --- programs around it -------------------------------------------------------------------------------------------


def prepared(steps: int = FREEZE + 2, precision: str = "fp32", **options: Any) -> tuple[nn.Sequential, Any]:
    comm = zcomm.init(timeout=60)
    model = network(DTYPES[precision])
    opt = zero(model, precision=precision, **options)
    run_steps(opt, model, range(steps), comm.rank)
    return model, opt


def weights_after(opt: Any, model: nn.Module, step: int, edit: Callable[[], None] = lambda: None) -> str:
    opt.backward(loss_at(model, step, zcomm.init().rank))
    edit()
    opt.step()
    opt.zero_grad()
    return digest(values(model))


def not_finite(precision: str) -> list[Any]:
    """Let one rank have a gradient that is not finite: all skip."""
    dynamic = zcomm.zero.LossScale(hysteresis=1) if precision == "fp16" else None
    model, opt = prepared(precision=precision, skip_nonfinite=True, loss_scale=dynamic)
    before, state = digest(values(model)), zcomm.zero.full_optim_state(model[0].weight, "exp_avg")
    rank, scale = zcomm.init().rank, opt.loss_scale
    opt.backward(loss_at(model, 50, rank) * (math.inf if rank == 1 else 1.0))
    opt.step()
    opt.zero_grad()
    same = torch.equal(state, zcomm.zero.full_optim_state(model[0].weight, "exp_avg"))
    found = [opt.overflow, opt.skipped_steps, same, digest(values(model)) == before, opt.nonfinite.parameter]
    found += [opt.loss_scale < scale if precision == "fp16" else True, weights_after(opt, model, 51)]
    opt.close()
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_on_all(run_ranks: Run, precision: str) -> None:
    every = run_ranks(not_finite, 2, precision)
    for found in every:
        assert found[:6] == [True, 1, True, True, "0.weight", True] and found[6] == every[0][6]


def gradients_of_a_program() -> dict[str, Any]:
    """Read, change, drop and assign ``p.grad``, and leave parameters out."""
    model, opt = prepared()
    rank, found = zcomm.init().rank, {}
    own = network()
    own.load_state_dict(values(model))
    loss_at(own, 20, rank).backward()
    opt.backward(loss_at(model, 20, rank))
    found["local"] = all(
        torch.equal(p.grad + 0, q.grad) for p, q in zip(model.parameters(), own.parameters(), strict=True)
    )
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    found["norm"] = norm == pytest.approx(float(nn.utils.clip_grad_norm_(own.parameters(), 0.1)))
    opt.step()
    squares = torch.tensor([min(norm, 0.1) ** 2])
    zcomm.all_reduce(squares, "avg")
    found["mean square"] = opt.grad_norm == pytest.approx(float(squares.sqrt()), rel=1e-4)
    opt.zero_grad()

    def drop(ranks: Sequence[int]) -> Callable[[], None]:
        def edit() -> None:
            if rank in ranks:
                model[2].bias.grad = None

        return edit

    bias = model[2].bias.detach().clone()
    found["dropped"] = [weights_after(opt, model, 21, drop((0, 1)))]
    found["skips"] = torch.equal(bias, model[2].bias)
    try:
        weights_after(opt, model, 22, drop((1,)))
    except RuntimeError as error:
        found["refused"] = str(error)
    opt.zero_grad()

    def assign() -> None:
        model[2].bias.grad = torch.full((7,), float(rank))

    found["assigned"] = [weights_after(opt, model, 23, assign)]

    # One rank's loss does not reach the last layer: its gradient counts as zero there.
    opt.backward(loss_at(model, 24, rank) if rank == 0 else model[0](sample(24, rank)[0]).square().mean())
    opt.step()
    opt.zero_grad()
    found["unreached"] = [digest(values(model))]

    # Accumulation by hand, inside of no_sync() and without it.
    with opt.no_sync():
        opt.backward(loss_at(model, 25, rank))
    opt.backward(loss_at(model, 26, rank))
    opt.step()
    found["summed"] = [digest(values(model))]
    opt.step()  # without zero_grad(): the same gradients again
    opt.zero_grad(set_to_none=False)
    found["zeros"] = float(model[0].weight.grad.abs().sum()) == 0.0
    opt.step()  # by momentum
    found["again"] = [digest(values(model))]
    opt.close()
    return found


def test_programs_see_the_gradients_of_their_rank(run_ranks: Run) -> None:
    every = run_ranks(gradients_of_a_program, 2)
    for found in every:
        assert found["local"] and found["norm"] and found["mean square"] and found["skips"] and found["zeros"]
        assert "p.grad of 2.bias is the optimizer's on rank 0, None on rank 1" in found["refused"]
        for key, value in found.items():
            if isinstance(value, list):
                assert value == every[0][key], key


def edited(precision: str) -> dict[str, Any]:
    """Edit weights and state between steps, on all ranks or on one."""
    model, opt = prepared(precision=precision)
    rank, found = zcomm.init().rank, {}
    with torch.no_grad():
        if rank == 1:
            model[0].weight.mul_(0.5)
    found["one rank"] = weights_after(opt, model, 30)
    model[0].weight.data = torch.ones_like(model[0].weight)
    found["replaced"] = weights_after(opt, model, 31)
    found["near 1"] = float((model[0].weight.float() - 1).abs().max()) < 0.2
    moment = torch.full_like(model[2].weight, 3.0, dtype=torch.float32)
    zcomm.zero.set_full_optim_state(model[2].weight, moment, "exp_avg")
    zcomm.zero.set_full_param(model[2].weight, torch.ones(7, 30))
    found["set"] = weights_after(opt, model, 32)
    found["moved"] = bool((model[2].weight.float() < 1).all())
    opt._micro_steps._step.check_steps = 1
    if rank == 1:
        model[0].weight.data.mul_(0.5)  # torch does not count it
    found["uncounted"] = weights_after(opt, model, 33)
    found["check"] = weights_after(opt, model, 34)
    opt.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_ranks_keep_equal_weights_whatever_a_program_edits(run_ranks: Run, precision: str) -> None:
    first, second = run_ranks(edited, 2, precision)
    assert first == second and first["near 1"] and first["moved"]


def no_zero_grad_at_the_freeze() -> list[str]:
    """Accumulate over the step at which gradients become local: the sum of before is averaged, as it was used."""
    comm = zcomm.init(timeout=60)
    model = network()
    opt = zero(model)
    for step in range(FREEZE + 2):
        opt.backward(loss_at(model, step, comm.rank))
        opt.step()
        if step not in (FREEZE - 1, FREEZE):
            opt.zero_grad()
    found = digest(values(model))
    opt.close()
    return [found]


def test_gradients_of_before_the_freeze_may_be_left(run_ranks: Run) -> None:
    first, second = run_ranks(no_zero_grad_at_the_freeze, 2)
    assert first == second


def saved(folder: str, precision: str) -> dict[str, Any]:
    model, opt = prepared(precision=precision)
    opt.save(folder)
    found = {"weights": digest(values(model)), "before": _state(opt, model)}
    opt.load(folder)  # errors begin at zero, as in another program
    run_steps(opt, model, range(20, 23), zcomm.init().rank)
    found["after"] = digest(values(model))
    torch_state = opt.state_dict()
    opt.load_state_dict(torch_state)
    found["state"] = _state(opt, model) == digest(
        {f"{n}{k}": torch_state["state"][i][k] for i, (n, _) in enumerate(model.named_parameters()) for k in KEYS}
    )
    opt.close()
    return found


KEYS = ("exp_avg", "exp_avg_sq")


def _state(opt: Any, model: nn.Module) -> str:
    return digest({f"{n}{k}": zcomm.zero.full_optim_state(p, k) for n, p in model.named_parameters() for k in KEYS})


def loaded(folder: str, precision: str) -> dict[str, Any]:
    zcomm.init(timeout=60)
    model = network(DTYPES[precision])
    opt = zero(model, precision=precision)
    opt.load(folder)
    found = {"weights": digest(values(model)), "before": _state(opt, model)}
    run_steps(opt, model, range(20, 23), zcomm.init().rank)
    found["after"] = digest(values(model))
    opt.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_of_after_the_freeze_loads_at_any_world_size(
    run_ranks: Run, tmp_path: Path, precision: str
) -> None:
    first = run_ranks(saved, 2, str(tmp_path / "c"), precision)
    assert all(found == first[0] and found["state"] for found in first)
    for ranks in (1, 2, 3):
        every = run_ranks(loaded, ranks, str(tmp_path / "c"), precision)
        assert all(found == every[0] for found in every)
        assert (every[0]["weights"], every[0]["before"]) == (first[0]["weights"], first[0]["before"])
        assert (every[0]["after"] == first[0]["after"]) == (ranks == 2)


def unscaled() -> str:
    model, opt = prepared(precision="fp16", loss_scale=8.0)
    loss_at(model, 30, zcomm.init().rank).backward()
    try:
        opt.step()
    except RuntimeError as error:
        return str(error)
    finally:
        opt.close()
    return ""


def test_a_loss_that_is_not_scaled_is_an_error(run_ranks: Run) -> None:
    assert all("opt.backward(loss) instead" in words for words in run_ranks(unscaled, 2))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stage": 1}, "onebit_adam: stage=1: its ranks exchange moments"),
    ({"stage": 3}, "onebit_adam: stage=3"),
    ({"offload": "cpu"}, "onebit_adam: offload=Offload"),
    ({"memory": "4GiB"}, "onebit_adam: memory='4GiB'"),
    ({"freeze_step": 0}, "freeze_step=0 must be a whole number, at least 1"),
    ({"freeze_step": 1.5}, "freeze_step=1.5 must be"),
    ({"freeze": 3}, "no argument 'freeze'; did you mean 'freeze_step'"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=str)
def test_options_that_it_cannot_have(world_of_one: None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        zcomm.ZeroOptimizer(network(), "onebit_adam", **{"stage": 0, **options})


def in_a_mesh() -> str:
    zcomm.init(timeout=60)
    try:
        zcomm.ZeroOptimizer(network(), "onebit_adam", stage=0, mesh=zcomm.ProcessMesh(replicate=2, shard=1))
    except ValueError as error:
        return str(error)
    return ""


def test_a_mesh_is_refused(run_ranks: Run) -> None:
    assert all("onebit_adam: mesh=" in words for words in run_ranks(in_a_mesh, 2))


def test_groups_have_one_freeze_step(world_of_one: None) -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "freeze_step": 3}, {"params": model[2].parameters()}]
    with pytest.raises(ValueError, match="several freeze_step"):
        zcomm.ZeroOptimizer(groups, "onebit_adam", stage=0)


def test_the_class_holds_options(world_of_one: None) -> None:
    model = network()
    adam = zcomm.optim.OnebitAdam(model.parameters(), lr=0.02, freeze_step=4, bias_correction=False, cuda_aware=True)
    with pytest.raises(RuntimeError, match=r"OnebitAdam.step\(\): .* give it to zcomm.ZeroOptimizer"):
        adam.step()
    opt = zcomm.ZeroOptimizer(model, adam, stage=0)
    run_steps(opt, model, range(6), 0)
    assert opt.param_groups[0]["step"] == 6 and opt._parts.reducer.stays_local
    opt.close()


def test_parameters_without_second_moment_are_named(world_of_one: None, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    model[2].bias.requires_grad_(True)
    opt = zero(model, freeze_step=2)
    for step in range(4):
        model[2].bias.grad = None
        loss = model[0](sample(step, 0)[0]).square().mean() + model[2].weight.square().mean()
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
    assert "the second moment of 2.bias is zero at the freeze" in caplog.text
    opt.close()
