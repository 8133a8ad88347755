"""deepspeed.comm's own names: results of torch.distributed's collectives, and a clear error for a missing log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def on_a_rank() -> dict[str, Any]:
    from zcomm.compat.deepspeed import comm

    comm.init_distributed()
    rank, size = comm.get_rank(), comm.get_world_size()
    reduced = torch.full((2,), rank + 1.0)
    comm.inference_all_reduce(reduced)
    gathered = torch.zeros(2 * size)
    assert comm.has_all_gather_into_tensor() and comm.has_reduce_scatter_tensor()
    comm.allgather_fn(gathered, torch.full((2,), float(rank)))
    scattered = torch.zeros(1)
    comm.reduce_scatter_fn(scattered, torch.arange(float(size)) + rank)
    outs = [torch.zeros(size), torch.zeros(2 * size)]
    comm.all_gather_coalesced(outs, [torch.tensor([1.0 + rank]), torch.tensor([5.0 + rank, 6.0])], async_op=True).wait()
    mesh = comm.initialize_mesh_device((1, size), ("outer", "inner"))
    assert comm.get_world_size(comm.get_world_group()) == size and mesh.size() == size
    pair = comm.new_group([1])
    found = {
        "reduced": reduced.tolist(),
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "outs": [out.tolist() for out in outs],
        "ranks": [comm.get_all_ranks_from_group(), comm.get_all_ranks_from_group(pair) if rank == 1 else [1]],
        "mesh": mesh.get_local_rank("inner"),
    }
    comm.destroy_process_group()
    return found


def test_collectives(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, found in enumerate(run_ranks(on_a_rank, 2)):
        assert found["reduced"] == [3.0, 3.0] and found["gathered"] == [0.0, 0.0, 1.0, 1.0]
        assert found["scattered"] == [2.0 * rank + 1.0]
        assert found["outs"] == [[1.0, 2.0], [5.0, 6.0, 6.0, 6.0]]
        assert found["ranks"] == [[0, 1], [1]] and found["mesh"] == rank


def test_before_the_job() -> None:
    from zcomm.compat.deepspeed import comm

    with pytest.raises(RuntimeError, match=r"call deepspeed\.init_distributed"):
        comm.init_deepspeed_backend("nccl")
    with pytest.raises(ValueError, match="0 outputs for 1 inputs"):
        comm.all_gather_coalesced([], [torch.ones(1)])
    with pytest.raises(ValueError):
        comm.get_world_group()
    comm.configure(deepspeed_config={"comms_logger": {"enabled": True}})


def test_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    from zcomm.compat.deepspeed import comm

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(comm.importlib, "import_module", missing)
    for ask in (comm.log_summary, comm.reset_log, comm.has_comm_data, lambda: comm.configure(prof_all=True)):
        with pytest.raises(NotImplementedError, match="keeps no log of collectives"):
            ask()
    with pytest.raises(NotImplementedError, match=r"configure\(enabled=True\) is not available"):
        comm.configure(enabled=True)


def initialize_alone() -> tuple[int, list[float]]:
    import zcomm.compat.deepspeed as deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
    total = torch.ones(2)
    torch.distributed.all_reduce(total)
    rank = torch.distributed.get_rank()
    deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0].destroy()  # the group is created once
    engine.destroy()
    deepspeed.dist.destroy_process_group()
    return rank, total.tolist()


def test_initialize_makes_the_default_group(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(initialize_alone, 2) == [(0, [2.0, 2.0]), (1, [2.0, 2.0])]


def joined_by_arguments(folder: str) -> list[bool]:
    import os

    import zcomm
    import zcomm.compat.deepspeed as deepspeed

    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    zcomm.init(rank=rank, world_size=2, init_method=f"file://{folder}/meeting")
    found = []
    for required in (False, None):
        engine, *_ = deepspeed.initialize(
            model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1}, dist_init_required=required
        )
        found.append(torch.distributed.is_initialized())
        engine.destroy()
    zcomm.shutdown()
    return found


def test_no_default_group_of_one_beside_a_job_of_two(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert run_ranks(joined_by_arguments, 2, str(tmp_path)) == [[False, False]] * 2
