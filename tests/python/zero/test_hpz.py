"""hpZ: copies of the weights in each shard group, gradients and state divided among all ranks; the bits are HSDP's.

test_hsdp.py compares those with an oracle. Here every run is compared with the same run of HSDP, or of plain stage 3.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zcomm
from test_hsdp import bits_of, looked_at, train
from tiers import slow
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.memory.plan import Settings, plan_memory
from zcomm.zero.optim_state.ram import RamState
from zcomm.zero.params.weights_across import WeightsAcross
from zcomm.zero.parts import Parts
from zero_jobs import batch, digest, loss_of, share_small_buckets, small_gpt

Run = Callable[..., list[Any]]
SHARDS = {"replicate": 2, "shard": 2}
CASES: list[dict[str, Any]] = [
    {"bucket_mb": 0.02},
    {"bucket_mb": 0.02, "overlap": False, "clip_norm": 0.3, "accum": 2},
    {"bucket_mb": 0.02, "offload": zcomm.Offload("nvme"), "accum": 3},
    {"precision": "bf16", "offload": "cpu", "bucket_mb": 0.02},
    {"optimizer": "lamb", "bucket_mb": 0.02},
    {"optimizer": "adamw", "state_dtype": "8bit", "precision": "bf16"},
]


def compare(folder: str, cases: list[int], sizes: dict[str, int]) -> None:
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(**sizes)
    for case in (CASES[number] for number in cases):
        wanted = train(mesh, folder, stage=3, **case)
        assert train(mesh, folder, stage=3, hpz=True, **case) == wanted, f"rank {comm.rank}: {case}"


@pytest.mark.parametrize(
    ("cases", "sizes"),
    [([0, 1, 2, 4], SHARDS), slow([3, 5], SHARDS), slow([0, 1, 2], {"shard": 2, "replicate": 3})],
)
def test_bits_are_those_of_copies_of_state(
    cases: list[int], sizes: dict[str, int], run_ranks: Run, tmp_path: Any
) -> None:
    run_ranks(compare, sizes["replicate"] * sizes["shard"], str(tmp_path), cases, sizes)


def on_two_hosts(folder: str) -> None:
    os.environ["ZCOMM_HOST_ID"] = f"host {int(os.environ['RANK']) // 2}"
    comm = zcomm.init(timeout=60)
    assert comm.backend == "hierarchical"
    mesh = zcomm.ProcessMesh(**SHARDS)
    assert train(mesh, folder, stage=3, hpz=True) == train(None, folder, stage=3)
    with pytest.raises(NotImplementedError, match="one host each, and share_parameters=True"):
        zcomm.ZeroOptimizer(small_gpt(), stage=3, mesh=zcomm.ProcessMesh(shard=2, replicate=2), hpz=True)


def test_bits_are_those_of_stage_3_on_two_hosts(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(on_two_hosts, 4, str(tmp_path))


def freeze(model: torch.nn.Module) -> torch.nn.Parameter:
    """Freeze one matrix, and return it."""
    matrices = [param for param in model.parameters() if param.dim() == 2]
    return matrices[2].requires_grad_(False)


def around(folder: str) -> None:
    """Read and change all that a program can see, edit weights (frozen ones, too), save and load."""
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(**SHARDS)
    case: dict[str, Any] = {"stage": 3, "bucket_mb": 0.02}
    assert looked_at(folder, {**case, "hpz": True}, SHARDS) == looked_at(folder, case, {"shard": 4})
    share_small_buckets()

    def run(**arguments: Any) -> tuple[str, list[str]]:
        model, seen = small_gpt(), []
        frozen = freeze(model)
        opt = zcomm.ZeroOptimizer(model, lr=3e-3, grad_accum=2, mesh=mesh, **case, **arguments)
        for number in range(6):
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.0 + 2.0**-7)  # between passes, also of one step
            loss = loss_of(model, *batch(comm.rank, number))
            loss.backward()
            if number == 2:
                param = next(p for p in model.parameters() if p.requires_grad)
                assert param.grad is not None
                seen.append(digest({"": param.grad.clone()}))  # the mean, before the last pass
            if number == 4:
                for param in list(model.parameters())[::3]:
                    param.grad = None  # of the first pass, which the other groups' pieces forget, too
            opt.step()
            opt.zero_grad()
            seen.append(digest({"": frozen.detach()}) + loss.item().hex())
        for number in range(2):
            with opt.no_sync():
                loss_of(model, *batch(comm.rank, number)).backward()
        opt.boundary = True
        loss_of(model, *batch(comm.rank, 7)).backward()
        opt.step()
        opt.zero_grad()
        opt.save(f"{folder}/{arguments}").wait()
        wanted = bits_of(opt)
        opt.close()
        for again in ({"mesh": mesh, **arguments}, {}):
            model = small_gpt(seed=9)
            freeze(model)
            opt = zcomm.ZeroOptimizer(model, lr=3e-3, **case, **again)
            opt.load(f"{folder}/{arguments}")
            assert bits_of(opt) == wanted
            seen.append(digest(dict(model.state_dict())))
            opt.close()
        return wanted, seen

    assert run(hpz=True) == run()


def test_programs_see_whole_tensors(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(around, 4, str(tmp_path))


INT8 = zcomm.Compression(weights="int8")


def encoded(folder: str, cases: list[int]) -> None:
    """Compare with units of the same mesh with encoded gathers: a block of a codec crosses no piece."""
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(**SHARDS)
    gathers = zcomm.Compression(weights="int8", hops="all")
    for case in (CASES[number] for number in cases):
        wanted = train(mesh, folder, stage=3, share_parameters=False, compression=gathers, **case)
        found = train(mesh, folder, stage=3, hpz=True, compression=INT8, **case)
        assert found == wanted, f"rank {comm.rank}: {case}"
        assert found != train(mesh, folder, stage=3, **case)


@pytest.mark.parametrize("cases", [[0, 1, 3], slow([2, 4, 5])])
def test_encoded_copies_are_encoded_gathers(cases: list[int], run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(encoded, 4, str(tmp_path), cases)


def through(comm: zcomm.Communicator, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` as a codec sends it."""
    flat = torch.nn.functional.pad(value.reshape(-1), (0, -value.numel() % 256))
    comm.all_gather(flat, out=(sent := torch.empty_like(flat)), codec="int8")
    return sent[: value.numel()].view(value.shape)


def exact_and_seen(folder: str, precision: str) -> None:
    """Check that the model has decoded weights, and whole tensors, checkpoints and edits are exact."""
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(**SHARDS)
    single = comm.split(comm.rank)
    assert single is not None
    case: dict[str, Any] = {"stage": 3, "lr": 3e-3, "precision": precision, "mesh": mesh, "bucket_mb": 0.02}
    share_small_buckets()
    freeze(model := small_gpt())
    opt = zcomm.ZeroOptimizer(model, hpz=True, compression=INT8, **case)
    name, param = next((n, p) for n, p in model.named_parameters() if p.dim() == 2)

    def step(number: int) -> None:
        opt.backward(loss_of(model, *batch(comm.rank, number)))
        opt.step()
        opt.zero_grad()

    def check() -> torch.Tensor:
        exact = opt.full_state_dict()
        for each, weight in model.named_parameters():
            assert torch.equal(weight.detach(), through(single, exact[each].to(weight.dtype))), each
        with zcomm.zero.GatheredParameters([param]):
            assert torch.equal(param.detach(), exact[name])
        with opt.gathered():
            assert all(torch.equal(weight, exact[each].to(weight.dtype)) for each, weight in model.named_parameters())
        return exact[name]

    for number in range(2):
        step(number)
        exact = check()
        assert not torch.equal(exact, param.detach())
    before, moved = opt._parts.store.moved_nbytes, opt._parts.geometry.every
    with zcomm.zero.GatheredParameters([param], modifier_rank=0):
        pass  # changes nothing
    assert torch.equal(check(), exact)
    pieces = [zcomm.Codec("int8").encoded_nbytes(bucket.shard_count) for bucket in moved]
    assert opt._parts.store.moved_nbytes - before == 2 * sum(pieces)
    model.load_state_dict({each: value.clone() for each, value in model.state_dict().items()})
    opt.save(f"{folder}/saved").wait()  # the same values are no edit
    seen = param.detach().clone()
    param.data[1:].mul_(3.0)
    wanted = torch.where(param.detach() == seen, exact, param.detach())  # zeros were not changed
    assert torch.equal(opt.full_state_dict()[name], wanted)  # before a step takes it
    zcomm.zero.set_full_param(next(model.parameters()), zcomm.zero.full_param(next(model.parameters())))
    assert torch.equal(check(), wanted)
    opt.load(f"{folder}/saved")
    assert torch.equal(check(), exact)
    step(2)
    final = bits_of(opt)
    opt.load(f"{folder}/saved")
    step(2)
    assert bits_of(opt) == final
    opt.close()
    freeze(model := small_gpt(seed=9))
    plain = zcomm.ZeroOptimizer(model, **{**case, "mesh": None})
    plain.load(f"{folder}/saved")
    assert torch.equal(plain.full_state_dict()[name], exact)
    plain.close()
    single.close()


@pytest.mark.parametrize("precision", ["bf16", slow("fp32"), slow("fp16")])
def test_encoded_copies_have_exact_pieces(precision: str, run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(exact_and_seen, 4, str(tmp_path), precision)


def drift() -> None:
    """Edit a frozen weight on one rank only, and compare at the second step, as at each hundredth."""
    comm, mesh = zcomm.init(timeout=30), zcomm.ProcessMesh(**SHARDS)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 30))
    model[0].weight.requires_grad_(False)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, mesh=mesh, stage=3, hpz=True)
    zcomm.zero.groups.copies.STEPS = 2
    for step in range(3):
        if step == 1 and comm.rank == 2:
            model[0].weight.add_(1.0)
        model(torch.ones(1, 30)).sum().backward()
        if step < 2:
            opt.step()
        else:
            with pytest.raises(RuntimeError, match=r"the copies of 0.weight on ranks 0, 2 are not equal: a program"):
                opt.step()
        opt.zero_grad()
    zcomm.zero.groups.copies.STEPS = 100
    opt.close()


def test_frozen_weights_that_drift_apart_are_named(run_ranks: Run) -> None:
    run_ranks(drift, 4)


def behind(folder: str) -> None:
    """Log updates and gathers of a step; let an update of rank 2 fail in the middle, and repair that by a load."""
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(**SHARDS)
    share_small_buckets()
    opt = zcomm.ZeroOptimizer(model := small_gpt(), lr=3e-3, mesh=mesh, stage=3, hpz=True, bucket_mb=0.02)
    seen: list[tuple[str, int]] = []
    step_tile, start = RamState._step_tile, WeightsAcross.start

    def update(state: Any, shard: Any, *arguments: Any) -> None:
        seen.append(("update", shard.bucket))
        if comm.rank == 2 and number == 2 and len(seen) > 4:
            raise OSError(errno.EIO, "a fault of rank 2")
        step_tile(state, shard, *arguments)

    def gather(across: Any, bucket: Any, *parts: torch.Tensor) -> None:
        seen.append(("gather", bucket.index))
        start(across, bucket, *parts)

    RamState._step_tile, WeightsAcross.start = update, gather  # type: ignore[method-assign]
    for number in range(3):
        seen.clear()
        loss_of(model, *batch(comm.rank, number)).backward()
        if number < 2:
            opt.step()
            buckets = [bucket for kind, bucket in seen if kind == "update"]
            assert len(buckets) > 3
            assert seen == [(kind, bucket) for bucket in buckets for kind in ("update", "gather")]
        else:
            opt.save(f"{folder}/good").wait()
            wanted = bits_of(opt)
            with pytest.raises(OSError, match="a fault of rank 2"):
                opt.step()
            assert [bucket for kind, bucket in seen if kind == "gather"] == buckets[::-1], "also those behind the fault"
            with pytest.raises(RuntimeError, match="ended a step"):
                opt.step()
        opt.zero_grad()
    RamState._step_tile, WeightsAcross.start = step_tile, start  # type: ignore[method-assign]
    opt.load(f"{folder}/good")
    assert bits_of(opt) == wanted
    loss_of(model, *batch(comm.rank, 2)).backward()
    opt.step()
    opt.zero_grad()
    loss_of(model, *batch(comm.rank, 3)).backward()
    if comm.rank == 2:
        Parts.grow_state = no_memory  # type: ignore[method-assign]
    with pytest.raises((MemoryError, RuntimeError), match="no memory on rank 2"):
        opt.step()
    opt.close()


def no_memory(*arguments: Any) -> None:
    raise MemoryError("no memory on rank 2")


def test_new_weights_follow_their_update(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(behind, 4, str(tmp_path))


def bytes_and_errors(folder: str) -> None:
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(**SHARDS)
    form = TileForm(("exp_avg", "exp_avg_sq"), torch.bfloat16, torch.float32)
    given: dict[str, Any] = {"bucket_mb": 0.02, "prefetch": 1, "units": zcomm.zero.Units()}
    kind = zcomm.Precision("bf16")
    planned = plan_memory(small_gpt(), Settings(3, zcomm.Offload(), 2, kind, form, hops=True, groups=2, **given))
    opt = zcomm.ZeroOptimizer(model := small_gpt(), mesh=mesh, stage=3, precision=kind, hpz=True, **given)
    loss_of(model, *batch(comm.rank, 0)).backward()
    opt.step()
    assert opt.memory() == planned.memory, f"{opt.memory()} {planned.memory}"
    count = sum(bucket.count for bucket in opt._live.geometry.every)
    held = opt.memory()["device"]
    assert (held["parameters"], held["gradients"], held["optimizer"]) == (2 * count / 2, 4 * count / 2, 10 * count / 4)
    opt.close()
    encoded = zcomm.Compression(gradients="int8")
    limit: dict[str, Any] = {"hops": True, "groups": 2, "across": 2, "compression": encoded}
    planned = plan_memory(small_gpt(), Settings(3, zcomm.Offload(), 2, kind, form, **limit, **given))
    opt = zcomm.ZeroOptimizer(
        model := small_gpt(), mesh=mesh, stage=3, precision=kind, hpz=True, compression=encoded, memory="9GiB", **given
    )
    loss_of(model, *batch(comm.rank, 0)).backward()
    opt.step()
    assert opt.memory() == planned.memory, f"{opt.memory()} {planned.memory}"
    opt.close()
    planned = plan_memory(
        small_gpt(), Settings(3, zcomm.Offload(), 2, kind, form, **{**limit, "compression": INT8}, **given)
    )
    opt = zcomm.ZeroOptimizer(small_gpt(), mesh=mesh, stage=3, precision=kind, hpz=True, compression=INT8, **given)
    assert opt.memory() == planned.memory, f"{opt.memory()} {planned.memory}"
    assert opt.memory()["device"]["parameters"] > held["parameters"] * 1.5 - 4096
    opt.close()
    apart = zcomm.Compression(weights="int8", differences=True)
    for text, arguments in (
        ("differences of weights with hpz=True", {"mesh": mesh, "compression": apart}),
        ("needs stage=3, not 2", {"stage": 2, "mesh": mesh}),
        ("with mesh=shard=4: copies of the weights need an axis 'replicate'", {"mesh": zcomm.ProcessMesh(shard=4)}),
        ("share_parameters=True", {"mesh": mesh, "share_parameters": False}),
        ("with weights or sums of gradients on a drive", {"mesh": mesh, "offload": zcomm.Offload(gradients="nvme")}),
        ("is too small for this model", {"mesh": mesh, "memory": "9MiB"}),
        ("hpz=2 must be True or False", {"mesh": mesh, "hpz": 2}),
        ("needs whole matrices", {"mesh": mesh, "model": torch.nn.Linear(64, 64, bias=False), "optimizer": "muon"}),
        ("hpz", {"mesh": mesh, "hpz": comm.rank < 3}),
    ):
        with pytest.raises((ValueError, NotImplementedError)) as found:
            common = {"model": small_gpt(), "stage": 3, "hpz": True, "nvme_path": folder}
            zcomm.ZeroOptimizer(**{**common, **arguments})
        assert text in str(found.value), found.value


def test_bytes_and_errors(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(bytes_and_errors, 4, str(tmp_path))
