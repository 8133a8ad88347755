"""ZeroOptimizer(compression=): gradients that travel encoded, with error feedback.

The oracle encodes each rank's gradient of each parameter, because a codec's block lies in one parameter. It adds the
decoded ones in rank order, and steps with them in a world of one. Every stage, tier and size must have its bits.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import zcomm
from tiers import slow
from zcomm import Compression
from zcomm.comm.codec import ERROR_DTYPES
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.memory.plan import Settings, plan_memory
from zero_jobs import batch, digest, last_losses, loss_of, share_small_buckets, small_gpt

Run = Callable[..., list[Any]]
STEPS = 3
INT4 = Compression(gradients="int4", keep=0.25)


class Through:
    """decode(encode(value + error)), of flat tensors by key; a world of one encodes as any."""

    def __init__(self, comm: zcomm.Communicator, compression: Compression) -> None:
        self.comm, self.compression = comm, compression
        self.errors: dict[Any, torch.Tensor] = {}

    def __call__(self, key: Any, value: torch.Tensor) -> torch.Tensor:
        flat = value.reshape(-1).contiguous()
        dtype = ERROR_DTYPES[self.compression.error_dtype]
        error = self.errors.setdefault(key, self.comm.codec_errors(flat, "all_gather", dtype))
        codec, keep = self.compression.gradient_codec, self.compression.keep
        found = self.comm.all_gather(flat, codec=codec, error=error, keep=keep)
        assert isinstance(found, torch.Tensor)
        return found.view(value.shape)


def total_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for each in tensors[1:]:
        total = total + each
    return total


def reference(
    groups: Sequence[Sequence[int]], compression: Compression, accum: int, hpz: bool = False
) -> dict[str, Any]:
    """Train on one rank with the gradients of all. groups: shard groups, in order. hpz: sums across groups stay with
    the rank that updates them, so they are not encoded again."""
    comm = zcomm.init(timeout=60)
    alone = comm.split(comm.rank)
    assert alone is not None
    through = Through(alone, compression)
    inside = len(groups) == 1 or compression.hops == "all"
    model = small_gpt()
    opt = zcomm.ZeroOptimizer(model, lr=3e-3, stage=1, comm=alone)
    params, norms = list(model.parameters()), []
    for step in range(STEPS):
        sums = [[torch.zeros(p.shape) for _ in groups] for p in params]
        means = [torch.zeros(p.shape) for p in params]
        for micro in range(accum):
            of_ranks = [
                torch.autograd.grad(loss_of(model, *batch(rank, step * accum + micro)), params)
                for rank in range(comm.world_size)
            ]
            for index, grads in enumerate(zip(*of_ranks, strict=True)):
                for number, group in enumerate(groups):
                    here = [through((index, rank), grads[rank]) if inside else grads[rank] for rank in group]
                    sums[index][number] += total_of(here)
                if len(groups) == 1:
                    means[index] += sums[index][0] / comm.world_size
                    sums[index][0].zero_()
        for index, param in enumerate(params):
            if len(groups) > 1:
                decoded = [through((index, "worker", number), sum_) for number, sum_ in enumerate(sums[index])]
                total = total_of(decoded)
                means[index] = (total if hpz else through((index, "server"), total)) / comm.world_size
            param.grad = means[index] / accum
        opt.step()
        opt.zero_grad()
        norms.append(float(opt.grad_norm or 0).hex())
    result = {"norms": norms, "weights": digest(opt.full_state_dict())}
    opt.close()
    alone.close()
    return result


def train(mesh: Any, folder: str, accum: int = 1, **arguments: Any) -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    share_small_buckets()
    model = small_gpt(seed=3 + comm.rank)
    opt = zcomm.ZeroOptimizer(model, lr=3e-3, mesh=mesh, grad_accum=accum, nvme_path=folder, **arguments)
    norms = []
    for number in range(STEPS * accum):
        loss_of(model, *batch(comm.rank, number)).backward()
        opt.step()
        opt.zero_grad()
        if (number + 1) % accum == 0:
            norms.append(float(opt.grad_norm or 0).hex())
    result = {"norms": norms, "weights": digest(opt.full_state_dict())}
    opt.close()
    return result


CASES: list[dict[str, Any]] = [
    {"stage": 2, "bucket_mb": 0.02},
    {"stage": 3, "share_parameters": False, "bucket_mb": 0.05},
    {"stage": 3, "offload": zcomm.Offload("nvme", "nvme", gradients="nvme"), "bucket_mb": 0.02},
    {"stage": 0},
    {"stage": 1, "overlap": False, "bucket_mb": 0.03},
    {"stage": 3, "offload": zcomm.Offload("nvme", "nvme", gradients="nvme", update="backward"), "bucket_mb": 0.02},
    {"stage": 3, "hpz": True, "bucket_mb": 0.02},
    {"stage": 3, "hpz": True, "bucket_mb": 0.03, "overlap": False, "offload": zcomm.Offload("nvme")},
]


def compare(sizes: dict[str, int] | None, cases: Sequence[int], given: Compression, accum: int, folder: str) -> None:
    comm = zcomm.init(timeout=60)
    mesh = None if sizes is None else zcomm.ProcessMesh(**sizes)
    groups = [list(range(comm.world_size))] if mesh is None else mesh.groups("shard")
    wanted = reference(groups, given, accum, any(CASES[case].get("hpz") for case in cases))
    for case in cases:
        found = train(mesh, folder, accum, compression=given, **CASES[case])
        assert found == wanted, f"rank {comm.rank}: {CASES[case]}"


@pytest.mark.parametrize(
    ("sizes", "cases", "given", "accum"),
    [
        (None, [0, 2], INT4, 1),
        ({"replicate": 2, "shard": 2}, [0, 2], Compression(gradients="int8"), 2),
        (None, [0], Compression(gradients="int4", rotate=32, error_dtype="int8"), 1),
        (None, [0, 2], Compression(gradients="int4", keep=0.25, error_tier="nvme"), 1),
        ({"replicate": 2, "shard": 2}, [0], Compression(gradients="int8", error_dtype="int8", error_tier="nvme"), 2),
        slow({"replicate": 2, "shard": 2}, [6, 7], Compression(gradients="int4", error_tier="nvme"), 2),
        slow(None, [1, 5], Compression(gradients="int4", error_dtype="int8", error_tier="nvme"), 1),
        slow({"replicate": 2, "shard": 2}, [1, 4], Compression(gradients="int4", hops="all", error_tier="nvme"), 1),
        ({"replicate": 2, "shard": 2}, [6, 7], Compression(gradients="int4", keep=0.25, error_dtype="int8"), 2),
        slow({"replicate": 2, "shard": 2}, [6, 7], Compression(gradients="int4", hops="all"), 1),
        slow(None, [1, 3, 4, 5], INT4, 1),
        slow(None, [0, 1], Compression(gradients="fp8"), 2),
        slow(
            {"replicate": 2, "shard": 2},
            [1, 3],
            Compression(gradients="int4", hops="all", rotate=32, error_dtype="int8"),
            1,
        ),
    ],
)
def test_the_bits_are_those_of_encoded_gradients(
    sizes: dict[str, int] | None, cases: list[int], given: Compression, accum: int, run_ranks: Run, tmp_path: Any
) -> None:
    run_ranks(compare, 2 if sizes is None else 4, sizes, cases, given, accum, str(tmp_path))


class Weights:
    """The weights that passes compute with, of exact ones by key, once for each step."""

    def __init__(self, comm: zcomm.Communicator, compression: Compression) -> None:
        self.comm, self.compression = comm, compression
        self.bases: dict[Any, torch.Tensor] = {}

    def __call__(self, key: Any, weights: torch.Tensor) -> torch.Tensor:
        flat, codec = weights.detach().reshape(-1), self.compression.weights
        if not self.compression.differences:
            found = self.comm.all_gather(flat, codec=codec)
            assert isinstance(found, torch.Tensor)
            return found.view(weights.shape)
        if key in self.bases:
            self.comm.all_gather(flat, out=self.bases[key], codec=codec, differences=True)
        else:
            self.bases[key] = flat.clone()
        return self.bases[key].view(weights.shape)


def reference_of_weights(own: Compression) -> dict[str, Any]:
    """Train with the gradients of decoded weights, which a world of one steps exactly."""
    comm = zcomm.init(timeout=60)
    alone = comm.split(comm.rank)
    assert alone is not None
    through, decoded = Through(alone, own), Weights(alone, own)
    model, twin = small_gpt(), small_gpt()
    opt = zcomm.ZeroOptimizer(model, lr=3e-3, stage=1, comm=alone)
    params, twins, norms = list(model.parameters()), list(twin.parameters()), []
    for step in range(STEPS):
        with torch.no_grad():
            for index, (param, coded) in enumerate(zip(params, twins, strict=True)):
                coded.copy_(decoded(index, param))
        of_ranks = [torch.autograd.grad(loss_of(twin, *batch(rank, step)), twins) for rank in range(comm.world_size)]
        for index, (param, grads) in enumerate(zip(params, zip(*of_ranks, strict=True), strict=True)):
            sent = grads if own.gradients is None else [through((index, r), g) for r, g in enumerate(grads)]
            param.grad = total_of(sent) / comm.world_size
        opt.step()
        opt.zero_grad()
        norms.append(float(opt.grad_norm or 0).hex())
    result = {"norms": norms, "weights": digest(opt.full_state_dict())}
    opt.close()
    alone.close()
    return result


WEIGHT_CASES: list[dict[str, Any]] = [
    {"bucket_mb": 0.02},
    {"bucket_mb": 0.05, "offload": zcomm.Offload("nvme", "nvme", update="forward")},
    {"bucket_mb": 0.02, "offload": zcomm.Offload("nvme", "nvme", update="step"), "prefetch": 2},
    {"prefetch": 0, "units": zcomm.zero.Units(max_bytes=49152)},
    {"bucket_mb": 0.02, "offload": zcomm.Offload("nvme", "nvme", gradients="nvme", update="backward")},
]


WEIGHTS = (
    Compression(weights="int8"),
    Compression(weights="int8", gradients="int4"),
    Compression(weights="int4", differences=True),
    Compression(weights="int8", differences=True, gradients="int4", rotate=32),
)


def compare_weights(cases: Sequence[int], folder: str) -> None:
    comm = zcomm.init(timeout=60)
    for given in WEIGHTS:
        wanted = reference_of_weights(given)
        for case in cases:
            found = train(None, folder, compression=given, stage=3, share_parameters=False, **WEIGHT_CASES[case])
            assert found == wanted, f"rank {comm.rank}: {given} {WEIGHT_CASES[case]}"


@pytest.mark.parametrize("cases", [[0, 1], slow([2, 3, 4])])
def test_passes_use_decoded_weights_and_updates_exact_ones(cases: list[int], run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(compare_weights, 2, cases, str(tmp_path))


def look_inside(seen: list[torch.Tensor], param: torch.Tensor, *call: Any) -> None:
    seen.append(param.detach().clone())


def looks() -> None:
    """Check that reads of weights between passes see exact ones, also between forward and backward, and change none."""
    comm = zcomm.init(timeout=60)
    finals = []
    for looking in (False, True):
        model = small_gpt(seed=3)
        opt = zcomm.ZeroOptimizer(
            model, lr=3e-3, stage=3, share_parameters=False, compression=Compression(weights="int8")
        )
        param = next(p for p in model.parameters() if p.dim() == 2)
        seen: list[torch.Tensor] = []
        block = next(m for m in model.modules() if any(p is param for p in m.parameters(recurse=False)))
        block.register_forward_pre_hook(partial(look_inside, seen, param))
        for number in range(2):
            loss = loss_of(model, *batch(comm.rank, number))
            if looking:
                exact = zcomm.zero.full_param(param)
                assert torch.equal(model.state_dict()[opt_name(model, param)], exact)
                assert not torch.equal(seen[-1], exact)
                assert (seen[-1] - exact).abs().max() < 0.01
                with zcomm.zero.GatheredParameters([param]):
                    assert torch.equal(param.detach(), exact)
                assert float(param.norm()) == float(exact.norm())
            loss.backward()
            opt.step()
            opt.zero_grad()
        finals.append(digest(opt.full_state_dict()))
        opt.close()
    assert finals[0] == finals[1]


DIFFERENCES = Compression(weights="int4", differences=True)


def rewrites(folder: str) -> None:
    """Check that weights travel exactly after a load or an edit, and equal on all ranks after steps."""
    comm = zcomm.init(timeout=60)
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(3)))
    opt = zcomm.ZeroOptimizer(
        model, lr=0.01, stage=3, share_parameters=False, compression=DIFFERENCES, units=zcomm.zero.Units(max_bytes=9999)
    )
    seen: list[torch.Tensor] = []
    model[1].register_forward_pre_hook(partial(look_inside, seen, model[1].weight))

    def step() -> None:
        model(torch.randn(4, 48, generator=torch.Generator().manual_seed(comm.rank))).square().sum().backward()
        opt.step()
        opt.zero_grad()

    def passes() -> bool:
        """Make a step; return whether its forward had the exact weights. Equal on all ranks in any case."""
        exact = zcomm.zero.full_param(model[1].weight)
        step()
        everywhere = comm.all_gather(seen[-1].reshape(-1))
        assert all(torch.equal(each, seen[-1].reshape(-1)) for each in everywhere.split(48 * 48))
        assert (seen[-1] - exact).abs().max() <= 0.01 / 7
        return torch.equal(seen[-1], exact)

    assert passes() and not passes()
    opt.save(folder)
    assert not passes()
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    assert passes() and not passes()
    zcomm.zero.set_full_param(model[1].weight, torch.ones(48, 48))
    assert passes() and not passes()
    opt.load(folder)
    assert passes() and not passes()
    model.load_state_dict({name: torch.full(p.shape, 0.5) for name, p in model.named_parameters()})
    assert passes() and not passes()
    with zcomm.zero.GatheredParameters([model[1].weight], modifier_rank=1), torch.no_grad():
        model[1].weight.fill_(3.0 + comm.rank)
    assert passes() and bool((seen[-1] == 4.0).all()) and not passes()
    opt.close()


def test_differences_restart_after_loads_and_edits(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(rewrites, 2, str(tmp_path / "saved"))


def once_in_a_step() -> None:
    """Check by count that differences travel once in a step of several passes, and frozen weights once in all."""
    comm = zcomm.init(timeout=60)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    model[2].weight.requires_grad_(False)
    opt = zcomm.ZeroOptimizer(
        model,
        lr=0.01,
        stage=3,
        share_parameters=False,
        compression=DIFFERENCES,
        grad_accum=2,
        units=zcomm.zero.Units(blocks=[torch.nn.Linear]),
        prefetch=0,
    )
    gather, moved = opt._parts.store.gather, []
    for _ in range(6):
        model(torch.randn(4, 64)).square().sum().backward()
        opt.step()
        opt.zero_grad()
        moved.append(gather.moved_nbytes)
    exact, coded = 4 * 64 * 64, zcomm.Codec("int4").encoded_nbytes(32 * 64) * comm.world_size
    assert moved == [4 * exact, 4 * exact, *(4 * exact + 3 * coded * n for n in (1, 1, 2, 2))]
    assert opt.memory()["device"]["bases"] == 4 * exact
    opt.close()


def test_differences_travel_once_in_a_step(run_ranks: Run) -> None:
    run_ranks(once_in_a_step, 2)


def opt_name(model: torch.nn.Module, param: torch.nn.Parameter) -> str:
    return next(name for name, each in model.named_parameters() if each is param)


def test_looks_at_weights_are_exact(run_ranks: Run) -> None:
    run_ranks(looks, 2)


def shared_weights() -> list[Any]:
    """Return whether the weights of ranks that share memory are those of no compression, and the warning."""
    comm, records = zcomm.init(timeout=60), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zcomm").addHandler(handler)
    found = []
    for given in (None, Compression(weights="int8")):
        model = small_gpt()
        opt = zcomm.ZeroOptimizer(model, lr=3e-3, stage=3, compression=given)
        loss_of(model, *batch(comm.rank, 0)).backward()
        opt.step()
        found.append(digest(opt.full_state_dict()))
        opt.close()
    return [found[0] == found[1], [text for text in records if "all are exact" in text]]


def test_shared_weights_are_exact_and_say_so(run_ranks: Run) -> None:
    first, second = run_ranks(shared_weights, 2)
    assert first[0] and second[0] and len(first[1]) == 1 and not second[1]


def memory_and_plan(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(replicate=2, shard=2)
    cases: list[tuple[Any, Compression]] = [(None, INT4), (mesh, Compression(gradients="int8")), (None, DIFFERENCES)]
    cases += [(each, Compression(gradients="int8", error_dtype="int8")) for each in (None, mesh)]
    cases += [(each, Compression(gradients="int8", error_dtype="int8", error_tier="nvme")) for each in (None, mesh)]
    for mesh, given in cases:
        model, stage = small_gpt(), 3 if given.differences else 2
        shared = not given.differences
        opt = zcomm.ZeroOptimizer(
            model, stage=stage, bucket_mb=0.05, mesh=mesh, compression=given, share_parameters=shared, nvme_path=folder
        )
        tier = "nvme" if given.error_tier == "nvme" else "device"
        if given.differences:
            size = (comm.world_size, opt.precision, TileForm(opt.rule.arrays, torch.float32, torch.float32), 0.05, 1)
            settings = Settings(3, opt.offload, *size, zcomm.zero.Units(), False, compression=given)
            assert plan_memory(small_gpt(), settings).memory == opt.memory()
            assert opt.memory()["device"]["bases"] > 4 * sum(p.numel() for p in model.parameters())
            opt.close()
            continue
        memory = opt.memory()
        loss_of(model, *batch(comm.rank, 0)).backward()
        assert opt.memory()[tier]["errors"] == memory[tier]["errors"] > 0
        assert sum(each["errors"] for each in memory.values()) == memory[tier]["errors"]
        form = TileForm(opt.rule.arrays, torch.float32, torch.float32)
        size = (2 if mesh else comm.world_size, opt.precision, form, 0.05, 1, zcomm.zero.Units(), mesh is None)
        settings = Settings(2, opt.offload, *size, hops=mesh is not None, compression=given, across=2 if mesh else 1)
        planned = plan_memory(small_gpt(), settings).memory
        if comm.rank < 2 or mesh is None:  # the first group has most
            assert planned[tier]["errors"] == memory[tier]["errors"]
            assert planned["cpu"] == memory["cpu"]
        assert planned["device"]["gradients"] == memory["device"]["gradients"]
        assert opt.compression == given
        opt.close()


def test_errors_are_counted_and_planned(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(memory_and_plan, 4, str(tmp_path))


def of_a_faulty_drive(folder: str) -> None:
    """Fail reads and writes of errors on rank 1: all ranks raise in a step, and go on with errors of zero."""
    comm = zcomm.init(timeout=60)
    model = small_gpt()
    given = Compression(gradients="int4", error_tier="nvme", reset_steps=50)
    with pytest.raises(ValueError, match="error_tier='nvme' needs nvme_path"):
        zcomm.ZeroOptimizer(model, stage=2, compression=given)
    opt = zcomm.ZeroOptimizer(model, lr=3e-3, stage=2, bucket_mb=0.02, compression=given, nvme_path=folder)
    swap, raised = opt._parts.swap, 0
    for number in range(9):
        if comm.rank == 1 and number in (2, 6):
            name = "write" if number == 2 else "read"
            original = getattr(type(swap), name)

            def fail(key: str, *arguments: Any, original: Any = original, name: str = name) -> Any:
                if "errors" in key:
                    delattr(swap, name)
                    raise OSError(errno.EIO, "a fault of rank 1")
                return original(swap, key, *arguments)

            setattr(swap, name, fail)
        loss_of(model, *batch(comm.rank, number)).backward()
        try:
            opt.step()
        except (OSError, RuntimeError) as error:
            assert "a fault of rank 1" in str(error) and "restart at zero" in str(error), error
            raised += 1
        opt.zero_grad()
    assert raised == 2
    everywhere = comm.all_gather(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert isinstance(everywhere, torch.Tensor)
    assert torch.equal(*everywhere.view(2, -1))
    opt.close()


def test_errors_on_a_faulty_drive(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(of_a_faulty_drive, 2, str(tmp_path))


def scaled(folder: str) -> None:
    """Check that errors follow the loss scale: fp16 with a scale for each step has the weights of one scale."""
    comm = zcomm.init(timeout=60)
    small = Compression(gradients="int4", keep=0.25, error_dtype="int8")
    for given in (INT4, small, replace(small, error_tier="nvme")):
        _scaled(comm, given, folder)


def _scaled(comm: Any, given: Compression, folder: str) -> None:
    found = []
    for changes in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            model.weight.mul_(1e-3)
        opt = zcomm.ZeroOptimizer(
            model, "sgd", lr=0.5, stage=2, precision="fp16", loss_scale=1024.0, compression=given, nvme_path=folder
        )
        for step in range(4):
            if changes:
                opt.loss_scaler.scale = 1024.0 * 2**step
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + comm.rank)).half()
            opt.backward(model(x).float().square().mean())
            opt.step()
            opt.zero_grad()
        found.append(model.weight.detach().clone())
        opt.close()
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-6)


def overflow_skips_everywhere() -> None:
    """Check that all ranks see an infinite gradient of one rank, although it travels encoded, and go on."""
    comm = zcomm.init(timeout=60)
    model = torch.nn.Linear(64, 8)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, skip_nonfinite=True, compression=Compression(gradients="int8"))
    for step in range(3):
        loss = model(torch.ones(2, 64)).sum()
        (loss * float("inf") if step == 1 and comm.rank == 1 else loss).backward()
        opt.step()
        opt.zero_grad()
    assert opt.skipped_steps == 1 and bool(torch.isfinite(model.weight).all())
    opt.close()


def resets(folder: str) -> None:
    """Check that with reset_steps=1 each step forgets the residues: two steps of one gradient are equal."""
    for reset, equal, tier in ((1, True, "cpu"), (None, False, "cpu"), (1, True, "nvme"), (None, False, "nvme")):
        model = torch.nn.Linear(64, 8, bias=False)
        given = Compression(gradients="int4", reset_steps=reset, error_tier=tier)  # type: ignore[arg-type]
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.25, compression=given, nvme_path=folder)
        moved = []
        for _ in range(2):
            before = model.weight.detach().clone()
            (model(torch.linspace(0.1, 1.0, 64)).sum()).backward()
            opt.step()
            opt.zero_grad()
            moved.append(before - model.weight.detach())
        assert torch.allclose(moved[0], moved[1], atol=1e-6) == equal
        opt.close()


def refusals() -> None:
    comm = zcomm.init(timeout=60)
    model = torch.nn.Linear(8, 8)

    def make(given: Any, **more: Any) -> None:
        zcomm.ZeroOptimizer(model, compression=given, **more).close()

    with pytest.raises(TypeError, match=r"pass a zcomm\.Compression"):
        make("int8")
    with pytest.raises(ValueError, match="stage=2 keeps whole weights"):
        make(Compression(weights="int8"))
    with pytest.raises(ValueError, match="give hops='all'"):
        make(Compression(weights="int8"), stage=3, mesh=zcomm.ProcessMesh(replicate=2))
    with pytest.raises(ValueError, match="sends moments as signs"):
        make(INT4, optimizer="onebit_adam", stage=0)
    with pytest.raises(ValueError, match=r"compression is .*int8.*, not .*int4|int4.*, not .*int8"):
        make(INT4 if comm.rank else Compression(gradients="int8"))
    make(INT4)


def small_things(folder: str) -> None:
    scaled(folder)
    overflow_skips_everywhere()
    resets(folder)
    refusals()


def test_scales_overflow_resets_and_refusals(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(small_things, 2, str(tmp_path))


def test_a_world_of_one_is_exact(world_of_one: None) -> None:
    found = []
    for given in (None, INT4):
        model = small_gpt()
        opt = zcomm.ZeroOptimizer(model, stage=3, compression=given)
        loss_of(model, *batch(0, 0)).backward()
        opt.step()
        found.append(digest(opt.full_state_dict()))
        assert "errors" not in opt.memory()["device"]
        opt.close()
    assert found[0] == found[1]


CURVES: list[tuple[int, Compression | None, float]] = [  # and the largest difference from the first
    (2, None, 0.0),
    (2, Compression(gradients="int8"), 0.01),
    (3, Compression(weights="int8", gradients="int4"), 0.02),
]


def curves(steps: int) -> list[float]:
    """Return the mean of the last losses of the demo's model, for each of CURVES."""
    zcomm.init(backend="tcp", timeout=60)  # on which weights travel
    torch.set_num_threads(1)
    found = []
    for stage, given, _ in CURVES:
        model, rate = small_gpt(), 3e-3
        opt = zcomm.ZeroOptimizer(
            model, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, clip_norm=1.0, stage=stage, compression=given
        )
        found.append(last_losses(model, opt, rate, steps))
        opt.close()
    return found


@pytest.mark.slow
def test_losses_are_near_those_of_exact_collectives(run_ranks: Run) -> None:
    plain, *coded = found = run_ranks(curves, 2, 400)[0]
    assert plain < 1.0, found  # from ln(256); the language has 0.65 for each token
    for loss, (_, given, most) in zip(coded, CURVES[1:], strict=True):
        assert 0 < abs(loss - plain) < most, (given, found)
