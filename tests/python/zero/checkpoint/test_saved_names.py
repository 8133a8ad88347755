"""Names in checkpoints are the names of state_dict(), whatever wraps a module; each wrapping loads the others'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zcomm
from tiers import slow
from zcomm.compat.deepspeed.utils import zero_to_fp32
from zcomm.zero.checkpoint import read_manifest, whole_model
from zcomm.zero.registry import open_parts
from zcomm.zero.saved_names import matched

Run = Callable[..., list[Any]]
OF_TORCH = "_checkpoint_wrapped_module"


class Counting(nn.Module):
    """A module with extra state, a buffer, tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.tied, self.still = nn.Linear(4, 4, bias=False), nn.Linear(4, 4).requires_grad_(False)
        self.tied.weight = self.inner.weight
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.still(self.tied(self.norm(self.inner(x))))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def plain(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), Counting())


def wrapped(seed: int) -> nn.Sequential:
    model = plain(seed)
    model[1] = checkpoint_wrapper(model[1])
    return model


def compiled(seed: int) -> nn.Sequential:
    model = plain(seed)
    model[0] = torch.compile(model[0], backend="eager")
    model[1] = checkpoint_wrapper(model[1])
    return model


class Parallel(nn.Module):
    """Names like DistributedDataParallel's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Overriding(Parallel):
    """Names like TRL's heads: a state_dict() without the attribute."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "plain": plain,
    "wrapped": wrapped,
    "compiled": compiled,
    "parallel": lambda seed: Parallel(wrapped(seed)),
    "overriding": lambda seed: Overriding(plain(seed)),
}


def optimizer_of(model: nn.Module, stage: int) -> Any:
    return zcomm.ZeroOptimizer(model, "adamw", lr=0.1, stage=stage, share_parameters=False)


def train(opt: Any, model: nn.Module) -> None:
    opt.backward(model(torch.arange(8.0).view(2, 4)).square().sum())
    opt.step()


def values(opt: Any) -> list[Any]:
    """Return all learned values, without names."""
    state = opt.state_dict()["state"]
    tensors = [*opt.full_state_dict().values(), *(t for number in state for t in state[number].values())]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in tensors]


def each_loads_the_others(folder: str, stage: int) -> None:
    found = {}
    for kind in ("plain", "wrapped", "parallel", "overriding"):  # a compiled model is trained like a wrapped one
        model = MODELS[kind](1)
        opt = optimizer_of(model, stage)
        train(opt, model)
        opt.save(f"{folder}/{kind}")
        whole_model.save_model(open_parts(opt), Path(folder) / f"{kind}.safetensors", wait=True)
        names = sorted(model.state_dict())
        assert sorted(opt.full_state_dict()) == names, kind
        saved = read_manifest(Path(folder) / kind)
        assert sorted(saved.names()) == names, kind
        assert {piece.name for piece in opt.iter_state()} == ({*saved.weights} if zcomm.rank() == 0 else set())
        found[kind] = values(opt)
        opt.close()
    for kind, make in MODELS.items():
        for other in found:
            model = make(5)
            opt = optimizer_of(model, stage)
            assert values(opt) != found[other]
            opt.load(f"{folder}/{other}")
            assert values(opt) == found[other], (kind, other)
            opt.close()
        opt = optimizer_of(make(5), stage)
        zcomm.zero.load_weights(opt, f"{folder}/plain.safetensors")
        wanted = [tensor.tolist() for tensor in load_file(f"{folder}/plain.safetensors").values()]
        state = [value.tolist() for value in opt.full_state_dict().values() if isinstance(value, torch.Tensor)]
        assert all(each in state for each in wanted), kind
        opt.close()


@pytest.mark.parametrize("stage", [slow(1), 3])
def test_each_wrapping_loads_what_the_others_saved(run_ranks: Run, tmp_path: Path, stage: int) -> None:
    run_ranks(each_loads_the_others, 2, str(tmp_path), stage)


def test_a_checkpoint_with_names_of_the_wrapper(tmp_path: Path) -> None:
    """Older versions saved parameters by their paths, and left out the buffers that the path hides."""
    model = wrapped(1)
    opt = optimizer_of(model, 1)
    train(opt, model)
    opt.save(tmp_path)
    learned, weights = values(opt), opt.full_state_dict()
    opt.close()
    manifest = read_manifest(tmp_path)
    longer = {name: name.replace("1.", f"1.{OF_TORCH}.", 1) for name in manifest.names() if name.startswith("1.")}
    manifest.renamed(longer).write(tmp_path)
    for make in (plain, wrapped):
        opt = optimizer_of(make(5), 1)
        opt.load(tmp_path)
        assert values(opt) == learned
        opt.close()
        filled = zero_to_fp32.load_state_dict_from_zero_checkpoint(make(5), tmp_path).state_dict()
        assert filled.pop("1._extra_state") == weights.pop("1._extra_state", {"calls": 2})
        assert all(torch.equal(filled[name], weights[name]) for name in weights) and filled.keys() == weights.keys()
    zcomm.shutdown()


class Averaged(nn.Module):
    """Its hooks save an additional tensor under another name, and rename the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.ema = nn.Parameter(torch.ones(3, 3)), torch.zeros(3)
        self._register_state_dict_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ema += 1
        return x @ self.weight

    @staticmethod
    def _add(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")
        state[f"{prefix}average"] = module.ema.clone()
        state[f"{prefix}note"] = "a word"

    @staticmethod
    def _take(module: Any, state: Any, prefix: str, *others: Any) -> None:
        state.pop(f"{prefix}note", None)
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        module.ema = state.pop(f"{prefix}average")


def hooks_add(folder: str) -> None:
    for stage in (1, 3):
        model = nn.Sequential(Averaged(), nn.Linear(3, 1))
        opt = optimizer_of(model, stage)
        opt.backward(model(torch.ones(2, 3)).sum())
        opt.step()
        opt.save(f"{folder}/{stage}")
        whole = opt.full_state_dict()
        assert list(whole) == list(model.state_dict()) and whole["0.note"] == "a word"
        assert torch.equal(model.state_dict()["0.kernel"], whole["0.kernel"]), "whole, also under another name"
        assert whole["0.average"].tolist() == [1, 1, 1]
        assert sorted(read_manifest(Path(folder) / str(stage)).weights) == sorted({*whole} - {"0.note"})
        fresh = nn.Sequential(Averaged(), nn.Linear(3, 1))
        fresh.load_state_dict(whole)
        assert torch.equal(fresh[0].weight, whole["0.kernel"]) and fresh[0].ema.tolist() == [1, 1, 1]
        opt.close()
        again = nn.Sequential(Averaged(), nn.Linear(3, 1))
        opt = optimizer_of(again, stage)
        opt.load(f"{folder}/{stage}")
        assert torch.equal(opt.full_state_dict()["0.kernel"], whole["0.kernel"])
        assert again[0].ema.tolist() == [1, 1, 1], "its own hook has taken it"
        opt.close()


def test_keys_that_hooks_add_and_rename(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(hooks_add, 2, str(tmp_path))


def test_engines_leave_out_frozen_parameters_of_wrapped_blocks() -> None:
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = zcomm.initialize(model=wrapped(1), config=config)
    for state in (
        engine.module_state_dict(exclude_frozen_parameters=True),
        engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True),
    ):
        assert "1.inner.weight" in state and not [name for name in state if "still" in name]
    engine.destroy()
    zcomm.shutdown()


def test_names_match_only_if_one_fits() -> None:
    assert matched(["a._orig_mod.w", "b"], ["a.w", "b"]) == {"a._orig_mod.w": "a.w"}
    assert matched(["module.a", "module.b"], ["a", "b"]) == {"module.a": "a", "module.b": "b"}
    assert matched(["a", "b"], ["module.a", "module.b"]) == {"a": "module.a", "b": "module.b"}
    assert matched(["module.a", "b"], ["a", "b"]) == {}
    assert matched([f"a.{OF_TORCH}.w", "a._orig_mod.w"], ["a.w"]) == {}
    assert matched([f"a.{OF_TORCH}.w", "a.w"], ["a.w"]) == {}
    assert matched(["path.w"], ["name"], {"path.w": "name"}) == {"path.w": "name"}
