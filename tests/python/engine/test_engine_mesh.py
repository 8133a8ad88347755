"""Engine on a mesh: which ranks read which samples, batch sizes, the sum of gradients, and errors of wrong meshes."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcomm
from zcomm.config import load, resolve_batch

Run = Callable[..., list[Any]]
SAMPLES, TOKENS = 8, 6
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}
CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": ADAMW}
KEYS = ["data_parallel_size", "sequence_parallel_size"]


class Net(nn.Module):
    """A loss that is a sum over tokens, of which ranks along "sequence" take parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 1))

    def forward(self, x: torch.Tensor, part: int = 0, parts: int = 1) -> torch.Tensor:
        mine = x[:, part * TOKENS // parts : (part + 1) * TOKENS // parts]
        return self.layers(mine).square().sum() / (x.shape[0] * TOKENS)


def data() -> torch.Tensor:
    return torch.randn(SAMPLES, TOKENS, 5, generator=torch.Generator().manual_seed(5))


def trained(config: dict[str, Any], **given: Any) -> tuple[Any, ...]:
    """Train two steps; return facts, the indices of samples that this rank has read, and the weights."""
    model, x = Net(), data()
    numbered = [(number, x[number]) for number in range(SAMPLES)]
    engine, _, loader, _ = zcomm.initialize(model=model, config=config, training_data=numbered, **given)
    assert loader is not None
    ranks, seen = engine.ranks, []
    part = 0 if ranks.mesh is None or ranks.sequence == 1 else engine.mesh.ranks("sequence").index(engine.global_rank)
    for _epoch in range(2):
        for number, samples in loader:
            seen += number.tolist()
            engine.backward(engine(samples, part, ranks.sequence))
            engine.step()
    facts = (engine.dp_world_size, ranks.rank, engine.sequence_parallel_size, engine.train_batch_size())
    norm, counted = engine.get_global_grad_norm(), (engine.global_steps, engine.global_samples)
    other = engine.deepspeed_io(numbered, route="eval")
    plain = [number.tolist() for number, _ in other]
    engine.set_train_batch_size(2 * 3 * ranks.size)
    steps = engine.gradient_accumulation_steps()
    weights = torch.cat([param.detach().flatten() for param in model.parameters()])
    engine.destroy()
    return facts, seen, norm, counted, plain, steps, weights


def plain_world(op: str) -> tuple[Any, ...]:
    zcomm.init(timeout=60)
    return trained({**CONFIG, "gradient_allreduce_op": op})


def sequence_world() -> dict[str, tuple[Any, ...]]:
    zcomm.init(timeout=60)
    stages = {stage: {**CONFIG, "zero_optimization": {"stage": stage}} for stage in (0, 3)}
    keys = {**CONFIG, "sequence_parallel_size": 2}
    found = {
        "mesh_param": trained(stages[0], mesh_param=(2, 2)),
        "keys": trained({**keys, "data_parallel_size": 2}),
        "stage 3": trained(stages[3], mesh=zcomm.ProcessMesh(data=2, sequence=2)),
        "sum": trained({**CONFIG, "gradient_allreduce_op": "sum"}, mesh=zcomm.ProcessMesh(dp=2, sp=2)),
    }
    found["first"] = trained(stages[0], mesh=zcomm.ProcessMesh(sequence=2, data=2))
    return found


def test_ranks_of_a_sequence_train_as_one(run_ranks: Run) -> None:
    wanted = {op: run_ranks(plain_world, 2, op) for op in ("mean", "sum")}
    for rank, by_source in enumerate(run_ranks(sequence_world, 4)):
        for source, (facts, seen, norm, counted, plain, steps, weights) in by_source.items():
            of_data = rank % 2 if source == "first" else rank // 2
            as_plain = wanted["sum" if source == "sum" else "mean"][of_data]
            assert facts == (2, of_data, 2, 8), source
            assert (seen, counted, plain, steps) == (as_plain[1], as_plain[3], as_plain[4], as_plain[5]), source
            assert norm == pytest.approx(as_plain[2], rel=1e-6), source
            torch.testing.assert_close(weights, as_plain[6], rtol=1e-6, atol=1e-7)


def mpu_of(axes: dict[str, dist.ProcessGroup]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{f"get_{axis}_group": lambda group=group: group for axis, group in axes.items()})


def in_deepspeed() -> Any:
    """Return the groups of deepspeed.utils.groups behind each kind of mesh, and behind none."""
    import zcomm.compat.deepspeed as deepspeed
    from zcomm.compat.deepspeed.runtime.config import DeepSpeedConfig
    from zcomm.compat.deepspeed.utils import groups

    deepspeed.init_distributed(timeout=60)

    def told(config: dict[str, Any], **given: Any) -> Any:
        engine = deepspeed.initialize(model=Net(), config=config, **given)[0]
        sizes = (
            groups._get_data_parallel_world_size(),
            groups._get_data_parallel_rank(),
            groups._get_sequence_parallel_world_size(),
            groups._get_sequence_parallel_rank(),
            groups._get_sequence_data_parallel_world_size(),
        )
        named = {"data": groups._get_data_parallel_group(), "all": groups._get_sequence_data_parallel_group()}
        if sizes[2] > 1:
            named["sequence"] = groups._get_sequence_parallel_group()
        assert groups._get_data_parallel_group_ranks() == dist.get_process_group_ranks(named["data"])
        total = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(total, group=named["data"])
        same = engine.data_parallel_group is named["data"] if engine.mpu is not None or sizes[2] == 1 else None
        engine.destroy()
        return sizes, {name: dist.get_process_group_ranks(group) for name, group in named.items()}, total.item(), same

    box = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "sequence_parallel"))
    mpu = mpu_of({axis: box.get_group(axis) for axis in ("data_parallel", "sequence_parallel")})
    found = {
        "mesh_param": told(CONFIG, mesh_param=(2, 2)),
        "keys": told({**CONFIG, "sequence_parallel_size": 2}),
        "mpu": told(CONFIG, mpu=mpu),
        "device mesh": told(CONFIG, mesh=box),
    }
    config = DeepSpeedConfig({**CONFIG, "train_batch_size": 8}, mesh_device=box)
    assert (config.world_size, config.train_batch_size) == (2, 8)
    assert DeepSpeedConfig({**CONFIG, "sequence_parallel_size": 2}).train_batch_size == 8
    plain = told(CONFIG)
    dist.destroy_process_group()
    return found, plain


def test_groups_of_deepspeed(run_ranks: Run) -> None:
    for rank, (found, plain) in enumerate(run_ranks(in_deepspeed, 4)):
        data, sequence = divmod(rank, 2)
        ranks = {"data": [sequence, 2 + sequence], "all": [0, 1, 2, 3], "sequence": [2 * data, 2 * data + 1]}
        for source, (sizes, groups, total, same) in found.items():
            assert sizes == (2, data, 2, sequence, 4), source
            assert groups == ranks and total == 4 + 2 * sequence, source
            assert same is (True if source == "mpu" else None)
        assert plain == ((4, rank, 1, 0, 4), {"data": [0, 1, 2, 3], "all": [0, 1, 2, 3]}, 10.0, True)


def mics(size: int, stage: int = 3) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "mics_shard_size": size}}


def copies_world() -> Any:
    """Return results on meshes with copies of shards, and with another library's tensor-parallel ranks."""
    import zcomm.compat.deepspeed as deepspeed
    from zcomm.compat.deepspeed.utils import groups

    deepspeed.init_distributed(timeout=60)
    stage_3 = {**CONFIG, "zero_optimization": {"stage": 3}}
    copies = zcomm.ProcessMesh(replicate=2, shard=2)
    found = {
        "plain": trained(stage_3),
        "mesh": trained(stage_3, mesh=copies),
        "mics": trained({**CONFIG, **mics(2)}),
        "hpz": trained({**CONFIG, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}),
        "sum": trained({**stage_3, "gradient_allreduce_op": "sum"}, mesh=copies),
        "plain sum": trained({**stage_3, "gradient_allreduce_op": "sum"}),
        "sequences": trained({**CONFIG, **mics(2), "sequence_parallel_size": 2}),
        "plain sequences": trained({**stage_3, "sequence_parallel_size": 2}),
    }
    with deepspeed.zero.MiCS_Init(config_dict_or_path={**CONFIG, **mics(2)}):
        net = Net()
    engine = deepspeed.initialize(model=net, config={**CONFIG, **mics(2)})[0]
    assert engine.mesh is not None and engine.mesh.ranks("shard") in ((0, 1), (2, 3))
    assert engine.optimizer.memory()["device"]["parameters"] == found_nbytes(Net()) // 2
    engine.destroy()
    with pytest.raises(ValueError, match=r"MiCS_Init\(\) needs a configuration with zero_optimization.mics_shard_size"):
        deepspeed.zero.MiCS_Init(config=stage_3)
    box = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    mpu = mpu_of({"data_parallel": box.get_group("data"), "tensor_model_parallel": box.get_group("tensor")})
    engine = deepspeed.initialize(model=Net(), config=CONFIG, mpu=mpu)[0]
    tensor = (engine.dp_world_size, engine.mp_world_size, engine.seq_dp_world_size, engine.ranks.rank)
    tensor += (groups.get_model_parallel_world_size(), groups.get_tensor_model_parallel_rank())
    tensor += (groups._get_sequence_data_parallel_rank(), groups.get_tensor_model_parallel_src_rank())
    assert groups.get_tensor_model_parallel_group() is box.get_group("tensor")
    assert groups._get_sequence_data_parallel_group() is box.get_group("data")
    engine.destroy()
    dist.destroy_process_group()
    return found, tensor


def found_nbytes(model: nn.Module) -> int:
    """Return the bytes of parameters, each padded to a multiple of 64 elements, and all to a multiple of 128."""
    count = sum(-(-param.numel() // 64) * 64 for param in model.parameters())
    return -(-count // 128) * 128 * 4


def test_copies_of_shards(run_ranks: Run) -> None:
    for rank, (found, tensor) in enumerate(run_ranks(copies_world, 4)):
        assert torch.equal(found["mesh"][6], found["mics"][6]) and torch.equal(found["mesh"][6], found["hpz"][6])
        for name, plain in (
            ("mesh", "plain"),
            ("sum", "plain sum"),
            ("mics", "plain"),
            ("hpz", "plain"),
            ("sequences", "plain sequences"),
        ):
            assert found[name][:2] == found[plain][:2] and found[name][3:6] == found[plain][3:6], name
            assert found[name][2] == pytest.approx(found[plain][2], rel=1e-6), name
            torch.testing.assert_close(found[name][6], found[plain][6], rtol=1e-6, atol=1e-7)
        assert found["mesh"][0] == (4, rank, 1, 16) and found["sequences"][0] == (2, rank // 2, 2, 8)
        data, along = divmod(rank, 2)
        assert tensor == (2, 2, 2, data, 2, along, data, 2 * data)


def wrong_meshes() -> list[str]:
    comm = zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(data=2)

    other = zcomm.ProcessMesh(sequence=2)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"mesh_param": (2, 2)}),
        ({}, {"mesh_param": 2}),
        ({}, {"mesh": mesh, "mesh_param": (2, 1)}),
        ({}, {"mesh": mesh, "mpu": object()}),
        ({}, {"mesh": (2, 1)}),
        ({}, {"mesh": other if comm.rank else mesh}),
        ({}, {"mesh": mesh} if comm.rank else {}),
        ({}, {"mesh_param": (1, 2) if comm.rank else (2, 1)}),
        ({}, {"mesh": zcomm.ProcessMesh(rows=2)}),
        ({"sequence_parallel_size": 3}, {}),
        ({"data_parallel_size": 1}, {}),
        ({"sequence_parallel_size": 2}, {"mesh": mesh}),
        ({"sequence_parallel_size": 1 + comm.rank}, {}),
        (mics(2, 0), {}),
        (mics(3), {}),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 1, "zero_hpz_partition_size": 2}}, {}),
        (mics(1), {"mesh_param": (1, 2)}),
        (mics(1), {"mesh": zcomm.ProcessMesh(shard=2)}),
        ({"train_batch_size": 3, "sequence_parallel_size": 2, "gradient_accumulation_steps": 2}, {}),
    ]
    said = []
    for keys, given in cases:
        base = {"optimizer": ADAMW} if "train_batch_size" in keys else CONFIG
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            zcomm.initialize(model=Net(), config={**base, **keys}, **given)
        said.append(str(caught.value))
    engine = zcomm.initialize(model=Net(), config=CONFIG, mesh=other)[0]
    with pytest.raises(RuntimeError, match=r'use engine.mesh.comm\("data"\)'):
        _ = engine.data_parallel_group
    engine.destroy()
    return said


def test_errors_are_the_same_on_all_ranks(run_ranks: Run) -> None:
    said, other = run_ranks(wrong_meshes, 2)
    assert said == other
    for text, words in zip(
        said,
        [
            "data=2 x sequence=2",
            "mesh_param=2: expected a pair (data_parallel_size, sequence_parallel_size)",
            "mesh= and mesh_param= were given on rank 0: give one of them",
            "mesh= and mpu= were given on rank 0: give one of them",
            "mesh=(2, 1): expected a zcomm.ProcessMesh or torch's DeviceMesh",
            "rank 0 gives mesh=data=2 of ranks 0, 1, but rank 1 gives mesh=sequence=2 of ranks 0, 1; give the same",
            "rank 0 gives no mesh, but rank 1 gives mesh=data=2",
            "rank 0 has data=2 x sequence=1, but rank 1 has data=1 x sequence=2",
            "axis 'rows' of rows=2 is not one of data, replicate, shard, expert_data, expert, sequence, tensor, pipe",
            '"sequence_parallel_size": 3: data_parallel_size x sequence_parallel_size must be the 2 ranks of the job',
            '"data_parallel_size": 1: data_parallel_size x sequence_parallel_size must be the 2 ranks',
            '"sequence_parallel_size" is 2, but the ranks are data=2; leave the key out',
            "of rank 0 has data_parallel_size=None, sequence_parallel_size=1, mics_shard_size=-1, zero_hpz_partiti",
            '"zero_optimization.mics_shard_size" is 2, which needs "stage": 3, not 0',
            '"zero_optimization.mics_shard_size" is 3, which does not divide the 2 ranks',
            'mics_shard_size" and "zero_optimization.zero_hpz_partition_size" are both set: give one of them',
            'shard_size" is 1, but the ranks are data=1 x sequence=2: a shard group has all ranks of sequences, a',
            '"zero_optimization.mics_shard_size" is 1, but the ranks are shard=2; leave the key out',
            '"train_batch_size": 3 cannot be divided by "gradient_accumulation_steps" x data_parallel_size = 2 x 1 = 2',
        ],
        strict=True,
    ):
        assert words in text


def test_one_rank_has_no_mesh_to_give(world_of_one: None) -> None:
    engine = zcomm.initialize(model=Net(), config={**CONFIG, "data_parallel_size": 1}, mesh_param=(1, 1))[0]
    assert (engine.dp_world_size, engine.sequence_parallel_size, engine.mpu) == (1, 1, None)
    assert engine.train_batch_size() == resolve_batch(load(CONFIG), 1).train
    engine.destroy()
