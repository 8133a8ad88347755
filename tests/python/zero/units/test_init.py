"""zero.Init and load_weights: the bits of an ordinary construction, without the whole model in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zero_jobs import batch, digest, loss_of, small_gpt

Run = Callable[..., list[Any]]


class Awkward(nn.Module):
    """Constructors as users write them: ties, copies, slices, orthogonal and truncated starts, computed buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 48, padding_idx=3)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(48, 2, 64, dropout=0.0) for _ in range(2))
        self.copied = copy.deepcopy(self.blocks[0])
        self.conv = nn.Conv1d(48, 48, 3)
        self.scale = nn.Parameter(torch.ones(48, 48) * 0.5)
        self.free = nn.Parameter(torch.randn(48, 64, dtype=torch.float64).float())
        self.quarter = nn.Parameter(torch.full((48, 48), 0.25))
        self.register_buffer("mask", torch.tril(torch.ones(48, 48)))
        self.register_buffer("zeros", torch.zeros(48, 48))
        self.rates = [x.item() for x in torch.linspace(0, 1, 5)]
        self.head = nn.Linear(48, 40, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._start)
        nn.init.orthogonal_(self.quarter)
        with torch.no_grad():
            self.scale[3:5].uniform_(-1, 1, generator=torch.Generator().manual_seed(9))
            self.conv.weight.div_(self.conv.weight.norm())
            self.free.copy_(self.free.flip(0))
        self.after = torch.rand(3)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[module.padding_idx].zero_()


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": small_gpt, "awkward": Awkward}


def weights_of(opt: Any) -> dict[str, torch.Tensor]:
    return dict(opt.full_state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_as_an_ordinary_construction(name: str) -> None:
    torch.manual_seed(5)
    plain = MODELS[name]()
    plain_next = torch.rand(4)
    torch.manual_seed(5)
    with zcomm.zero.Init(min_count=64):
        model = MODELS[name]()
    assert torch.equal(torch.rand(4), plain_next), "the generator goes on as if the model were there"
    shapes = {n: p.shape for n, p in plain.named_parameters()}
    assert {n: p.shape for n, p in model.named_parameters()} == shapes
    large = [p for p in model.parameters() if p.numel() >= 64]
    assert len(large) > 8 and sum(p.is_meta for p in large) >= len(large) - 2
    for key, value in plain.named_buffers():
        assert torch.equal(dict(model.named_buffers())[key], value), key
    opt = zcomm.ZeroOptimizer(model, stage=3)
    found, wanted = weights_of(opt), plain.state_dict()
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert torch.equal(value, found[key]), key
    opt.close()
    zcomm.shutdown()


def train(folder: str, stage: int, offload: str | None, precision: str, init: bool) -> tuple[list[str], str]:
    comm = zcomm.init(timeout=60)
    with zcomm.zero.Init(enabled=init, min_count=64):
        model = small_gpt(seed=3 + comm.rank)
    opt = zcomm.ZeroOptimizer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=stage, offload=offload, nvme_path=folder,
        precision=precision, clip_norm=1.0, share_parameters=offload != "cpu",
    )  # fmt: skip
    losses = []
    for number in range(3):
        loss = loss_of(model, *batch(comm.rank, number))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
    weights = digest(weights_of(opt))
    opt.close()
    return losses, weights


def train_each(folder: str, precision: str) -> list[Any]:
    cases: list[tuple[int, str | None]] = [(0, None), (1, None), (3, None), (3, "cpu"), (3, "nvme")]
    return [train(folder, *case, precision, init) for case in cases for init in (False, True)]


@pytest.mark.parametrize(("world_size", "precision"), [slow(1, "fp32"), (2, "bf16"), slow(3, "fp32")])
def test_training_has_the_same_bits(run_ranks: Run, tmp_path: Path, world_size: int, precision: str) -> None:
    for results in run_ranks(train_each, world_size, str(tmp_path), precision):
        assert all(result == results[0] for result in results)


def test_frozen_parameters_come_too() -> None:
    with zcomm.zero.Init(min_count=64):
        model = small_gpt()
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    opt = zcomm.ZeroOptimizer(model, stage=3)
    for key, value in small_gpt().named_parameters():
        if key.startswith("blocks"):
            assert torch.equal(dict(model.named_parameters())[key], value), key
    opt.close()
    zcomm.shutdown()


def test_a_model_on_the_meta_device() -> None:
    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)
            nn.init.zeros_(module.bias)

    for init in (None, start):
        plain = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40))
        with pytest.raises(ValueError, match=r"0\.weight is on the meta device and has no value to come"):
            zcomm.ZeroOptimizer(model, stage=3)
        torch.manual_seed(1)
        zcomm.zero.Init(model, init=init)
        torch.manual_seed(1)
        for module in plain.modules():
            (init or (lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None))(module)
        opt = zcomm.ZeroOptimizer(model, stage=3)
        for key, value in plain.state_dict().items():
            if init is None or "1." not in key:
                assert torch.equal(model.state_dict()[key], value), key
        opt.close()
    zcomm.shutdown()


def test_values_that_are_there_stay() -> None:
    class Resetting(nn.Sequential):
        def reset_parameters(self) -> None:
            for module in self:
                module.reset_parameters()

    for partly in (False, True):
        model = Resetting(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40))
        nn.init.constant_(model[1].running_mean, 3.0)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        if partly:
            model[2].to_empty(device="meta")
        zcomm.zero.Init(module=model)
        opt = zcomm.ZeroOptimizer(model, stage=3)
        after = opt.full_state_dict()
        assert [key for key in before if not torch.equal(after[key], before[key])] == ["2.weight", "2.bias"] * partly
        assert after["2.weight"].abs().max() > 0.1, "started, not zeros"
        opt.close()
    zcomm.shutdown()


def test_a_model_converted_afterwards() -> None:
    weights = []
    for enabled in (False, True):
        torch.manual_seed(4)
        with zcomm.zero.Init(enabled=enabled):
            model = nn.Sequential(nn.Linear(40, 40)).to(torch.float64)
        model.to(torch.bfloat16)
        opt = zcomm.ZeroOptimizer(model, stage=2)
        weights.append(zcomm.zero.full_param(model[0].weight))
        opt.close()
    assert torch.equal(weights[0], weights[1]) and weights[0].any()
    zcomm.shutdown()


class Given(nn.Module):
    """The constructor assigns other ``.data``: computed, deferred and shared, of other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = nn.Parameter(torch.rand(40, 40))
        self.computed.data = (self.computed.data + 1).data
        self.computed.data.mul_(2.0)
        self.wide = nn.Parameter(torch.empty(0))
        self.wide.data = torch.rand(40, 40)
        self.moved = nn.Parameter(torch.zeros(40, 40), requires_grad=False)
        self.moved.data = torch.rand(40, 30, dtype=torch.float64)
        self.shared = nn.Parameter(torch.zeros(40, 40))
        source = torch.arange(1600.0).view(40, 40)
        self.shared.data = source
        source.neg_()


@pytest.mark.parametrize("nested", [False, True])
def test_data_given_inside_of_init(nested: bool) -> None:
    torch.manual_seed(6)
    plain = Given()
    torch.manual_seed(6)
    with zcomm.zero.Init(min_count=64), zcomm.zero.Init(enabled=nested, min_count=64):
        model = Given()
    assert model.wide.is_meta
    with zcomm.zero.GatheredParameters(model):
        for key, value in plain.named_parameters():
            assert torch.equal(model.get_parameter(key), value), key
    opt = zcomm.ZeroOptimizer(model, stage=3)
    after = opt.full_state_dict()
    assert all(torch.equal(after[key].float(), value.float()) for key, value in plain.named_parameters())
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("engine", [False, True])
def test_an_optimizer_that_is_built_inside_ends_init(nested: bool, engine: bool) -> None:
    found = []
    for enabled in (False, True):
        torch.manual_seed(4)
        with zcomm.zero.Init(enabled=enabled, min_count=64):
            with zcomm.zero.Init(enabled=enabled and nested, min_count=64):
                model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
                if not nested:
                    nn.init.constant_(model[1].weight, 0.25)
            config = {"train_batch_size": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3}}
            opt: Any = zcomm.initialize(model=model, config=config)[1] if engine else None
            opt = opt or zcomm.ZeroOptimizer(model, "sgd", lr=1e-3, stage=3)
            x = torch.linspace(-1, 1, 120).view(3, 40)
            assert not x.is_meta and not torch.zeros(80).is_meta
            opt.backward(model(x).square().mean())
            opt.step()
        found.append(digest(weights_of(opt)))
        opt.close()
    assert found[0] == found[1]
    zcomm.shutdown()


def test_changes_of_data_after_init_are_errors() -> None:
    """torch counts no changes through .data."""
    for change in (
        lambda weight: weight.data.normal_(),
        lambda weight: weight.data.mul_(2.0),
        lambda weight: weight.data[3].zero_(),
        lambda weight: setattr(weight, "data", weight.data * 2.0),
    ):
        with zcomm.zero.Init(min_count=64):
            model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        assert isinstance(model[1].weight, nn.Parameter) and model[1].weight.data.shape == (40, 40)
        with pytest.raises(ValueError, match=r"after zcomm\.zero\.Init\(\) had ended, but it has no memory"):
            change(model[1].weight)
            zcomm.ZeroOptimizer(model)
    with zcomm.zero.Init(min_count=64):
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    kept = [param.data for param in model.parameters()]  # reading is no change
    opt = zcomm.ZeroOptimizer(model)
    assert all(type(param) is nn.Parameter for param in model.parameters()) and len(kept) == 4
    opt.close()
    zcomm.shutdown()


def test_changes_after_init_are_errors() -> None:
    with zcomm.zero.Init(min_count=64):
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    nn.init.zeros_(model[1].weight)
    with pytest.raises(ValueError, match=r"1\.weight was changed after zcomm\.zero\.Init\(\) had ended"):
        zcomm.ZeroOptimizer(model, stage=2)
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device .*build the model inside"):
        zcomm.ZeroOptimizer(nn.Sequential(nn.Linear(40, 40, device="meta")), stage=2)
    with pytest.raises(ValueError, match="min_count=0"):
        zcomm.zero.Init(min_count=0)
    zcomm.shutdown()


# --- load_weights ---------------------------------------------------------------------------------------------------


def write_files(folder: Path, model: nn.Module, parts: int, dtype: torch.dtype = torch.float32) -> None:
    """Write files as transformers' save_pretrained does: parts with an index, each tied weight once."""
    import json

    from safetensors.torch import save_file

    tensors = {name: value.detach().to(dtype).contiguous() for name, value in model.named_parameters()}
    tensors.update({name: value for name, value in model.named_buffers() if name in model.state_dict()})
    names = sorted(tensors)
    if parts == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for part in range(parts):
        file = f"model-{part:05d}-of-{parts:05d}.safetensors"
        save_file({name: tensors[name] for name in names[part::parts]}, folder / file)
        weight_map.update(dict.fromkeys(names[part::parts], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load_each(folder: str, swap: str) -> list[tuple[str, str]]:
    comm = zcomm.init(timeout=60)
    results = []
    for stage, offload, precision in ((0, None, "fp32"), (2, "cpu", "bf16"), (3, None, "fp32"), (3, "nvme", "bf16")):
        for before in (True, False):
            with zcomm.zero.Init(min_count=64):
                model = small_gpt(seed=comm.rank)
            if before:
                zcomm.zero.load_weights(model, folder)
            opt = zcomm.ZeroOptimizer(
                model, stage=stage, offload=offload, nvme_path=swap, precision=precision, bucket_mb=0.02
            )
            if not before:
                zcomm.zero.load_weights(opt, folder)
            masters = digest({n: zcomm.zero.full_param(p) for n, p in model.named_parameters()})
            opt.close()
            results.append((precision, masters))
    return results


@pytest.mark.parametrize(("world_size", "parts"), [slow(1, 1), (2, 3), slow(3, 1)])
def test_weights_go_straight_into_shards(run_ranks: Run, tmp_path: Path, world_size: int, parts: int) -> None:
    files = tmp_path / "files"
    files.mkdir()
    source = small_gpt(seed=77)
    write_files(files, source, parts)
    want = digest({n: p.detach() for n, p in source.named_parameters()})
    for results in run_ranks(load_each, world_size, str(files), str(tmp_path)):
        assert [masters for _, masters in results] == [want] * 8


def read_little(folder: str) -> tuple[int, int]:
    import zcomm.zero.files.tensor_file as files
    import zcomm.zero.tensors.load as weights

    comm = zcomm.init(timeout=60)
    read = 0
    original = files.read_part

    def counted(*args: Any) -> torch.Tensor:
        nonlocal read
        part = original(*args)
        read += part.nbytes
        return part

    weights.read_part = files.read_part = counted
    with zcomm.zero.Init(min_count=64):
        model = small_gpt(seed=comm.rank)
    zcomm.zero.load_weights(model, folder)
    opt = zcomm.ZeroOptimizer(model, stage=3)
    first, read = read, 0
    zcomm.zero.load_weights(opt, folder)
    opt.close()
    return first, read


def test_each_rank_reads_its_own_part(run_ranks: Run, tmp_path: Path) -> None:
    source = small_gpt(seed=77)
    write_files(tmp_path, source, 2)
    whole = sum(p.nbytes for p in source.parameters())
    small = sum(p.nbytes for p in source.parameters() if p.numel() < 64)
    for read in zip(*run_ranks(read_little, 3, str(tmp_path)), strict=True):
        assert whole <= sum(read) <= whole + 3 * small
        assert max(read) <= whole / 3 + small + 3 * 4096


def test_files_of_another_model_are_named(tmp_path: Path) -> None:
    write_files(tmp_path, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 1)), 1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pattern = (
        r"another model; not in the file: 2\.0\.weight, 2\.0\.bias; not in the model: 2\.bias, 2\.weight; "
        r"other shapes: 1\.weight: \(8, 4\) there, \(6, 4\) here, 1\.bias: \(8,\) there, \(6,\) here"
    )
    opt = zcomm.ZeroOptimizer(model, stage=1)
    for target in (model, opt):
        with pytest.raises(ValueError, match=pattern):
            zcomm.zero.load_weights(target, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        zcomm.zero.load_weights(opt, tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ValueError, match="is not a valid safetensors file"):
        zcomm.zero.load_weights(opt, tmp_path)
    opt.close()
    zcomm.shutdown()


def test_names_can_be_changed_and_a_cut_file_is_an_error(tmp_path: Path) -> None:
    source = nn.Linear(40, 40)
    write_files(tmp_path, nn.ModuleDict({"old": source, "other": nn.Linear(2, 2)}), 1)
    with zcomm.zero.Init():
        model = nn.Sequential(nn.Linear(40, 40))

    def rename(name: str) -> str | None:
        return None if name.startswith("other") else name.replace("old", "0")

    zcomm.zero.load_weights(model, tmp_path / "model.safetensors", rename=rename)
    opt = zcomm.ZeroOptimizer(model, stage=3)
    assert torch.equal(opt.full_state_dict()["0.weight"], source.weight)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match=r"model\.safetensors"):
        zcomm.zero.load_weights(opt, tmp_path, rename=rename)
    opt.close()
    zcomm.shutdown()


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    model = small_gpt(seed=8)
    opt = zcomm.ZeroOptimizer(model, stage=1)
    opt.save(tmp_path / "saved")
    want = digest(weights_of(opt))
    opt.close()
    with zcomm.zero.Init():
        model = small_gpt()
    zcomm.zero.load_weights(model, tmp_path / "saved")
    opt = zcomm.ZeroOptimizer(model, stage=3)
    assert digest(weights_of(opt)) == want
    opt.close()
    zcomm.shutdown()


# --- memory ---------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(32))  # 128 MiB
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear) else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def peak(folder: str, init: bool, load: str | None) -> tuple[int, int]:
    """Return the growth of this process's memory until a step was complete, and the model's size."""

    def resident(key: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

    zcomm.init(timeout=60)
    small = nn.Sequential(nn.Linear(8, 8))
    opt = zcomm.ZeroOptimizer(small, "sgd", stage=3, offload="nvme", nvme_path=folder)
    small(torch.ones(1, 8)).sum().backward()
    opt.step()
    opt.close()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from this point
    before = resident("VmHWM")
    with zcomm.zero.Init(enabled=init):
        model = Wide()
    if load is not None:
        zcomm.zero.load_weights(model, load)
    offload = zcomm.Offload(optimizer="nvme", params="nvme")
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=3, offload=offload, nvme_path=folder, bucket_mb=4, prefetch=0)
    grown = resident("VmHWM") - before
    total = sum(place.count for place in opt._live.geometry.places) * 4
    opt.close()
    return grown, total


def test_the_model_never_exists_whole(run_ranks: Run, tmp_path: Path) -> None:
    for init in (False, True):
        for grown, whole in run_ranks(peak, 2, str(tmp_path), init, None):
            if init:  # gradient shards (a half), slots and windows remain
                assert grown < 0.85 * whole, f"{grown / 2**20:.0f} MiB of {whole / 2**20:.0f}"
            else:
                assert grown > whole, "the measure sees a model that exists"
