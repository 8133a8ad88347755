"""Stage 3 by units: changes by a module to its own weights outside autograd count as with torch, or raise."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import simulated
import zcomm
from device_jobs import Job
from test_device_peers import DELAY_S, ranks, seeding
from zcomm.zero.sharded import address_checks

Run = Callable[..., list[Any]]
Act = Callable[[nn.Parameter], object]
SIZE = 64  # of a weight: more than a page


def by_storage(weight: nn.Parameter) -> None:
    torch.tensor([]).set_(weight.untyped_storage(), weight.storage_offset(), weight.shape)[0] = 0.5


def by_numpy_of_torch(weight: nn.Parameter) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an array that is read-only
        torch.from_numpy(weight.detach().numpy())


def out_of_data(weight: nn.Parameter) -> None:
    torch.add(weight.data, 1.0, out=weight.data)


# Changes of a weight in its own module's forward, before the weight is used.
CHANGES: dict[str, Act] = {
    "data": lambda weight: weight.data.__setitem__(0, 0.5),
    "detach": lambda weight: weight.detach()[1:].t().fill_(0.5),
    "data of detach": lambda weight: weight.detach().data.view(-1)[3:9].mul_(2),
    "out": out_of_data,
    "init": lambda weight: nn.init.constant_(weight.data, 0.01),
    "foreach": lambda weight: torch._foreach_mul_([weight.data, weight.detach()], 0.5),
    "all_reduce": lambda weight: zcomm.all_reduce(weight.data.mul_(0.5)),
    "address": lambda weight: ctypes.memset(weight.data_ptr(), 0, 64),
    "address of data": lambda weight: ctypes.memset(weight.data[1:].data_ptr(), 0, 64),
    "storage": by_storage,
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()).mul_(0.5),
}
BY_DATA = ("before", "after", "both")  # the use of the weight; with several ranks
SEVERAL = ("detach", "all_reduce", "address", "dlpack")  # tried on several ranks: one for each way to see it
ARRAYS: dict[str, Act] = {
    "numpy": lambda weight: weight.detach().numpy().__setitem__(0, 0.5),
    "of a view": lambda weight: weight.data.cpu().view(-1).numpy().fill(0.5),
    "asarray": lambda weight: np.asarray(weight.detach()[1:]).fill(0.5),
    "force": lambda weight: weight.numpy(force=True).fill(0.5),
}
READS: dict[str, Act] = {
    "values": lambda weight: (weight.data.norm(), weight.detach().clone(), weight.detach().tolist()),
    "array": lambda weight: float(weight.detach().numpy().sum()),
    "torch of an array": by_numpy_of_torch,
    "address": lambda weight: ctypes.string_at(weight.data_ptr(), 8),
}


class Layer(nn.Module):
    """Linear layer that calls ``act`` with its weight, and keeps the result. late: called after the use."""

    def __init__(self, act: Act, late: Act | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) * 0.1)
        self.act, self.late = act, late
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.act(self.weight)
        y = x @ self.weight.t()
        if self.late is not None:
            self.late(self.weight)
        return torch.tanh(y)


class Root(nn.Module):
    """A model with a weight of its own, which it uses last; the root unit keeps its memory until the step."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(SIZE))
        self.layers = nn.Sequential(*(Layer(act) for _ in range(3)))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.act(self.own)
        return self.layers(x) * self.own


def built(act: Act, folder: str, late: Act | None = None, root: bool = False) -> tuple[Any, Any]:
    """Make a model and its optimizer: torch's if there is no folder."""
    torch.manual_seed(0)
    model = Root(act) if root else nn.Sequential(*(Layer(act, late) for _ in range(4)))
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if folder:
        opt = zcomm.ZeroOptimizer(model, opt, stage=3, offload="nvme", nvme_path=folder, prefetch=0)
    return model, opt


def trained(act: Act, folder: str, compiled: bool = False, **how: Any) -> list[float]:
    model, opt = built(act, folder, **how)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    losses = []
    for step in range(3):
        loss = call(torch.full((2, SIZE), 0.1 * (step + 1))).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    if folder:
        opt.close()
    return losses


@pytest.fixture
def alone() -> Any:
    zcomm.init()
    yield
    zcomm.shutdown()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [*CHANGES, *READS])
def test_a_rank_that_is_alone_trains_as_with_torch(tmp_path: Path, name: str) -> None:
    act = {**CHANGES, **READS}[name]
    assert trained(act, str(tmp_path)) == pytest.approx(trained(act, ""), rel=1e-5)


@pytest.mark.usefixtures("alone")
def test_changes_of_a_weight_of_the_whole_model(tmp_path: Path) -> None:
    assert trained(CHANGES["data"], str(tmp_path), root=True) == pytest.approx(trained(CHANGES["data"], "", root=True))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["values", "data"])
def test_changes_after_the_use_raise_in_backward(tmp_path: Path, name: str) -> None:
    """torch's check of tensors that autograd has saved raises."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained({**CHANGES, **READS}[name], str(tmp_path), late=CHANGES["data"])


@pytest.mark.usefixtures("alone")
def test_changes_by_address_on_a_device_raise_at_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_checks, "PAIRS", 3)  # fewer than uses in a step
    plain = {name: trained(READS[name], "") for name in ("address", "values")}
    simulated.play()
    try:
        for name in ("address", "address of data", "storage", "dlpack"):
            with pytest.raises(RuntimeError, match=r"0.weight.* written to by address .* while the module ran"):
                trained(CHANGES[name], str(tmp_path))
        for name, wanted in plain.items():
            assert trained(READS[name], str(tmp_path)) == pytest.approx(wanted, rel=1e-5)
    finally:
        simulated.stop()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_read_only(tmp_path: Path, name: str) -> None:
    """Arrays are read-only, because no version counter counts writes to them."""
    with pytest.raises(ValueError, match="read-only"):
        trained(ARRAYS[name], str(tmp_path))


@pytest.mark.usefixtures("alone")
def test_ordinary_training_compares_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks on saved tensors ask for addresses, too."""

    def refuse(checks: address_checks.AddressChecks, weight: torch.Tensor) -> int:
        raise AssertionError("a weight was read")

    def scaled(weight: nn.Parameter) -> torch.Tensor:
        return (weight * weight.detach() * weight.data[0]).sum()

    monkeypatch.setattr(address_checks.AddressChecks, "begin", refuse)
    trained(scaled, str(tmp_path))
    with pytest.raises(AssertionError, match="a weight was read"):
        trained(CHANGES["address"], str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["data", "detach", "data of detach", "out", "init", "all_reduce", "address", *ARRAYS])
def test_compiled_modules_too(tmp_path: Path, name: str) -> None:
    """An array that the compiler traces is a tensor: writes to it count."""
    torch._dynamo.reset()
    act = {**CHANGES, **ARRAYS}[name]
    try:
        losses = trained(act, str(tmp_path), compiled=True)
    except ValueError as error:
        assert name in ARRAYS and "read-only" in str(error)
    else:
        assert losses == pytest.approx(trained(act, ""), rel=1e-5)


def changes(folder: str) -> dict[str, str]:
    """Return the error of each change; ``torch.distributed``'s on top."""
    zcomm.init(timeout=8)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    acts = {name: CHANGES[name] for name in SEVERAL} | {"broadcast": lambda weight: dist.broadcast(weight.data, 0)}
    cases = {name: (READS["values"] if name == "after" else CHANGES["data"]) for name in BY_DATA} | acts
    told = {}
    for name, act in cases.items():
        try:
            trained(act, folder, late=CHANGES["data"] if name in ("after", "both") else None)
            told[name] = ""
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return told


def test_changes_raise_on_several_ranks(run_ranks: Run, tmp_path: Path) -> None:
    """Ranks of one host share the memory: one that comes late may find the other's bytes there, and lose that rank."""
    told = run_ranks(changes, 2, str(tmp_path))
    assert all(len(texts) == len(BY_DATA) + len(SEVERAL) + 1 for texts in told)
    for name in told[0]:
        texts = [texts[name] for texts in told]
        seen = [text.startswith("RuntimeError: 0.weight was changed while its module ran") for text in texts]
        assert all(seen) if name in BY_DATA else any(seen)
        assert all(ok or text.startswith("PeerLost") for ok, text in zip(seen, texts, strict=True)), texts


KEPT: dict[str, Act] = {
    "data": lambda weight: weight.data,
    "detach": lambda weight: weight.detach(),
    "a view": lambda weight: weight.detach().view(-1)[5:9],
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", KEPT)
def test_what_outlives_its_forward_raises(tmp_path: Path, name: str) -> None:
    model, opt = built(KEPT[name], str(tmp_path))
    model(torch.ones(2, SIZE)).sum().backward()
    opt.step()
    for layer in model:
        for use in (torch.norm, lambda kept: kept.mul_(2), lambda kept: kept.numpy(), torch.clone):
            with pytest.raises(RuntimeError, match=r"\d.weight: this tensor is its .data or .detach\(\) of a forward"):
                use(layer.kept)
    opt.close()


@pytest.mark.usefixtures("alone")
def test_views_that_outlive_their_forward_read_nan(tmp_path: Path) -> None:
    """A view that autograd knows, as ``weight.t()``, is an ordinary tensor."""
    model, opt = built(lambda weight: (weight.t(), weight.detach().numpy()), str(tmp_path))
    model(torch.ones(2, SIZE)).sum().backward()
    opt.step()
    for layer in model:
        view, array = layer.kept
        assert view.isnan().all() and np.isnan(array).all()
    loss = model(torch.ones(2, SIZE)).sum()
    assert loss.isfinite()
    opt.close()


@pytest.mark.usefixtures("alone")
def test_writing_between_passes_raises_where_the_memory_is_there(tmp_path: Path) -> None:
    """Such a change would act on the gathered copy, and be lost at the step."""
    model, opt = built(lambda weight: weight.data if weight.dim() == 1 else None, str(tmp_path), root=True)
    loss = model(torch.ones(SIZE)).sum()
    assert float(model.kept.sum()) == SIZE
    with pytest.raises(RuntimeError, match=r"own: .* would be lost"):
        model.kept.mul_(2)
    loss.backward()
    opt.close()


def keeps(folder: Path, comm: zcomm.Communicator) -> str:
    with seeding:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(KEPT["data"]) for _ in range(4)))
    place = Job(3, "cpu", bucket_mb=0.02).place(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = zcomm.ZeroOptimizer(model, sgd, stage=3, offload=place, bucket_mb=0.02, comm=comm)
    model(torch.ones(2, SIZE)).sum().backward()
    opt.step()
    try:
        model[0].kept.norm()
    except RuntimeError as error:
        return str(error)
    finally:
        opt.close()
    return ""


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_outlives_its_forward_raises_on_devices(tmp_path: Path, world_size: int) -> None:
    """Another unit is in that place by then."""
    simulated.play(DELAY_S, joins=True)
    for text in ranks(world_size, tmp_path, lambda comm: keeps(tmp_path, comm)):
        assert text.startswith("0.weight: this tensor is its .data or .detach() of a forward"), text
