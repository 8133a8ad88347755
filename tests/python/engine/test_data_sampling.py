"""Samples by difficulty: index files, allowed samples by hand, ranks, resumes, analyzer, refusals."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zcomm
from zcomm.engine.data_sampling.analyzer import DataAnalyzer
from zcomm.engine.data_sampling.indexed_dataset import MMapIndexedDataset, find_fit_int_dtype, write_arrays
from zcomm.engine.data_sampling.sampler import DeepSpeedDataSampler

Run = Callable[..., list[Any]]
COUNT = 40
LENGTHS = [(7 * number) % 11 + 1 for number in range(COUNT)]  # 1 to 11
LINEAR = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 1}}


class Words(TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.arange(COUNT), torch.tensor(LENGTHS))


def analyze(folder: Path, name: str = "length", **more: Any) -> Path:
    arguments: dict[str, Any] = {
        "metric_names": [name],
        "metric_functions": [lambda batch: batch[1]],
        "metric_types": ["single_value_per_sample"],
        "metric_dtypes": [torch.int64],
        "batch_size": 3,
        "save_path": str(folder),
    }
    workers = more.pop("num_workers", 1)
    made = [DataAnalyzer(Words(), num_workers=workers, worker_id=n, **arguments | more) for n in range(workers)]
    for each in made:
        each.run_map()
    made[0].run_reduce()
    return folder / name / name


def metric(path: Path, **more: Any) -> dict[str, Any]:
    files = {"index_to_sample_path": f"{path}_index_to_sample", "index_to_metric_path": f"{path}_index_to_metric"}
    return {**files, "min_difficulty": 3, "max_difficulty": 11, **LINEAR, **more}


def section(metrics: dict[str, Any], epochs: int = 1000) -> dict[str, Any]:
    curriculum = {"enabled": True, "curriculum_metrics": metrics}
    sampling = {"enabled": True, "num_epochs": epochs, "curriculum_learning": curriculum}
    return {"enabled": True, "seed": 7, "data_sampling": sampling}


def sampler(metrics: dict[str, Any], rank: int = 0, size: int = 1, accum: int = 2, **more: Any) -> DeepSpeedDataSampler:
    return DeepSpeedDataSampler(section(metrics, **more), COUNT, 3, rank, size, None, accum, rank)


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (3, 2)])
def test_analyzer_by_hand(tmp_path: Path, workers: int, threads: int) -> None:
    path = analyze(tmp_path, num_workers=workers, num_threads=threads)
    values = sorted(set(LENGTHS))
    rows = MMapIndexedDataset(f"{path}_index_to_sample")
    assert [row.tolist() for row in rows] == [[n for n in range(COUNT) if LENGTHS[n] == value] for value in values]
    assert [int(row[0]) for row in MMapIndexedDataset(f"{path}_index_to_metric")] == values
    assert [int(row[0]) for row in MMapIndexedDataset(f"{path}_sample_to_metric")] == LENGTHS
    merged = MMapIndexedDataset(f"{path}_index_to_sample_percentile_merged")
    assert np.concatenate(merged[:]).tolist() == sorted(range(COUNT), key=LENGTHS.__getitem__)


def test_analyzer_adds_up(tmp_path: Path) -> None:
    def histogram(batch: Any) -> torch.Tensor:
        return torch.bincount(batch[1], minlength=12)

    path = analyze(
        tmp_path, metric_types=["accumulate_value_over_samples"], metric_functions=[histogram], num_workers=2
    )
    assert MMapIndexedDataset(f"{path}_metric_value")[0].tolist() == np.bincount(LENGTHS, minlength=12).tolist()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"metric_names": ["../x"]}, "must be a plain name"),
        ({"metric_dtypes": [torch.float32]}, "is not one of whole numbers"),
        ({"metric_functions": [lambda batch: batch[1].int()]}, "returned torch.int32, not"),
        ({"metric_functions": [lambda batch: batch[1][:1]]}, "gave 1 values for 3 samples"),
        ({"metric_types": ["other"]}, "valid values are"),
    ],
)
def test_analyzer_refuses(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        analyze(tmp_path, **more)
    with pytest.raises(NotImplementedError):
        analyze(tmp_path, custom_reduce=print)


def test_index_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    arrays = [np.array([1, 2, 65535]), np.array([], np.int64), np.array([7])]
    write_arrays(path, arrays, np.uint16)
    read = pickle.loads(pickle.dumps(MMapIndexedDataset(path)))
    assert [each.tolist() for each in read] == [[1, 2, 65535], [], [7]] and read.dtype == np.uint16
    assert read.get(0, 1, 1).tolist() == [2] and [len(each) for each in read[0:2]] == [3, 0]
    assert read.sizes.tolist() == [3, 0, 1] and read.doc_idx.tolist() == [0, 3]
    index = path.with_suffix(".idx").read_bytes()
    assert index.startswith(b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x06" + (3).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="does not fit into uint8"):
        write_arrays(tmp_path / "b", [np.array([256])], np.uint8)
    for broken, text in (
        (b"x" + index[1:], "not an index"),
        (index[:-1], "do not hold 3 arrays"),
        (index[:34] + (9).to_bytes(4, "little") + index[38:], "lie outside"),
        (index[:46] + (-4).to_bytes(8, "little", signed=True) + index[54:], "lie outside"),
    ):
        path.with_suffix(".idx").write_bytes(broken)
        with pytest.raises(ValueError, match=text):
            MMapIndexedDataset(path)
    assert [find_fit_int_dtype(*pair) for pair in ((0, 255), (0, 256), (-1, 127), (-1, 128))] == [
        np.uint8,
        np.uint16,
        np.int8,
        np.int16,
    ]


def test_samples_of_each_step_are_allowed_and_all_are_seen(tmp_path: Path) -> None:
    chosen = sampler({"length": metric(analyze(tmp_path))})
    batches = iter(chosen)
    seen: set[int] = set()
    for step in range(1, 30):
        batch = next(batches) + next(batches)
        allowed = min(11, 3 + step)  # by the schedule: floor(step / 8 * 8 + 3)
        assert chosen.current_difficulties == {"length": allowed}
        assert len(batch) == 6 and max(LENGTHS[number] for number in batch) <= allowed
        seen.update(batch)
    assert seen == set(range(COUNT))
    counts = np.bincount([number for _ in range(400) for number in next(batches)], minlength=COUNT)
    assert counts.min() > 0.6 * counts.mean() and counts.max() < 1.5 * counts.mean()  # as often as each other


def test_percentiles(tmp_path: Path) -> None:
    path = analyze(tmp_path)
    merged = {"index_to_sample_path": f"{path}_index_to_sample_percentile_merged", "difficulty_type": "percentile"}
    of_ten = {"min_difficulty": 2, "max_difficulty": 10, **LINEAR}
    chosen = sampler({"length": {**of_ten, **merged}})
    easiest = sorted(range(COUNT), key=LENGTHS.__getitem__)
    for step in range(1, 10):
        chosen.get_next_global_batch()
        assert set(chosen.batch) <= set(easiest[: COUNT // 10 * min(10, 2 + step)])


def test_two_metrics_and_one_cluster(tmp_path: Path) -> None:
    path = analyze(tmp_path)
    odd = analyze(tmp_path, "odd", metric_functions=[lambda batch: batch[0] % 2])
    fixed = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1, 2], "max_step": [5]}}
    late = {"schedule_type": "custom", "min_difficulty": 1, "max_difficulty": 2}
    metrics = {
        "length": metric(path),
        "odd": metric(odd, **late),
        "all": {"clustering_type": "single_cluster", "min_difficulty": 1, "max_difficulty": 2, **fixed},
    }
    chosen = sampler(metrics)
    with pytest.raises(RuntimeError, match="set_custom_get_difficulty"):
        chosen.get_next_global_batch()
    chosen = sampler(metrics)
    with pytest.raises(ValueError, match="has no metric 'x'"):
        chosen.set_custom_curriculum_learning_schedule({"x": abs})
    chosen.set_custom_curriculum_learning_schedule({"odd": lambda step: int(step > 3)})
    for step in range(1, 8):
        chosen.get_next_global_batch()
        assert all(LENGTHS[n] <= 3 + step and (n % 2 == 0 or step > 3) for n in chosen.batch)
    assert chosen.state_dict()["current_difficulties"] == {"length": 10, "odd": 1, "all": 2}


def test_a_state_continues_at_other_ranks(tmp_path: Path) -> None:
    metrics = {"length": metric(analyze(tmp_path))}
    one = sampler(metrics)
    batches = iter(one)
    for _ in range(7):  # in the middle of a global batch
        next(batches)
    state = one.state_dict()
    rest = [next(batches) for _ in range(5)]
    two = sampler(metrics)
    two.load_state_dict(state)
    assert [batch for batch, _ in zip(two, rest, strict=False)] == rest
    parts = [sampler(metrics, rank, 3) for rank in range(3)]
    for part in parts:
        part.load_state_dict({**state, "batch": []})
    one = sampler(metrics, accum=6)
    one.load_state_dict({**state, "batch": []})
    whole = iter(one)
    for _, *row in zip(range(3), *map(iter, parts), strict=False):
        assert [number for part in row for number in part] == next(whole) + next(whole) + next(whole)
    for wrong, text in (
        ({}, "not complete"),
        ({**state, "batch": [COUNT]}, "another data set"),
        ({**state, "clusters": [{**state["clusters"][0], "size": 1}]}, "other index files"),
    ):
        with pytest.raises(ValueError, match=text):
            two.load_state_dict(wrong)


def test_the_end(tmp_path: Path) -> None:
    found = list(sampler({"length": metric(analyze(tmp_path))}, epochs=2))
    assert sum(map(len, found)) >= 2 * COUNT > sum(map(len, found[:-1]))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"min_difficulty": None}, r'curriculum_metrics.length.min_difficulty" is missing'),
        ({"schedule_config": {}}, r"total_curriculum_step\" is missing"),
        ({"difficulty_type": "rank"}, "must be one of value, percentile"),
        ({"x": 1}, "unknown key"),
        ({"index_to_metric_path": None}, 'index_to_metric_path" is missing'),
        (
            {"min_difficulty": 0, "schedule_config": {"total_curriculum_step": 800, "difficulty_step": 1}},
            "no sample is",
        ),
    ],
)
def test_errors(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sampler({"length": metric(analyze(tmp_path), **more)}).get_next_global_batch()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.float().view(-1, 1)).square().mean() / 1e4


def train(folder: str, path: str) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "data_efficiency": section({"length": metric(Path(path))}),
    }

    def start() -> Any:
        return zcomm.initialize(model=Model(), config=config, training_data=Words())[0]

    def run(engine: Any, count: int) -> list[Any]:
        found = []
        for _, (numbers, _) in zip(range(count), engine.training_dataloader, strict=False):
            engine.backward(engine(numbers))
            engine.step()
            found.append(numbers.tolist())
        return found

    engine = start()
    told: list[int] = []
    engine.set_data_post_process_func(lambda batch, state: (told.append(state["curriculum_step"]), batch)[1])
    first = run(engine, 6)
    engine.save_checkpoint(folder)
    rest = run(engine, 4)
    engine.destroy()
    engine = start()
    engine.load_checkpoint(folder)
    again = run(engine, 4)
    engine.destroy()
    return {"samples": first, "resumed": again == rest, "told": told[:6]}


def test_engine(run_ranks: Run, tmp_path: Path) -> None:
    path = analyze(tmp_path)
    first, second = run_ranks(train, 2, str(tmp_path / "checkpoint"), str(path))
    assert first["resumed"] and second["resumed"] and first["told"] == [1, 1, 2, 2, 3, 3]
    for number, (ours, theirs) in enumerate(zip(first["samples"], second["samples"], strict=True)):
        assert len(ours) == len(theirs) == 2
        assert max(LENGTHS[n] for n in ours + theirs) <= 3 + number // 2 + 1
    assert first["samples"] != second["samples"]


def differ(path: str) -> str:
    rank = zcomm.init().rank
    files = metric(Path(path)) if rank else metric(Path(f"{path}_missing"))
    config = {"train_micro_batch_size_per_gpu": 2, "data_efficiency": section({"length": files})}
    with pytest.raises(OSError, match=r"missing_index_to_sample|curriculum") as caught:
        zcomm.initialize(model=Model(), config=config, training_data=Words())
    return str(caught.value)


def test_a_file_that_one_rank_lacks(run_ranks: Run, tmp_path: Path) -> None:
    first, second = run_ranks(differ, 2, str(analyze(tmp_path)))
    assert "No such file" in first and "rank 0" in second and "reading the index files" in second


def test_analyzer_files_are_for_their_owner(tmp_path: Path) -> None:
    path = analyze(tmp_path / "deep")
    for folder in (tmp_path / "deep", path.parent, path.parent / "worker0_thread0"):
        assert folder.stat().st_mode & 0o777 == 0o700, folder


def test_an_empty_data_set_has_no_metrics(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the data set has no samples"):
        DataAnalyzer([], save_path=str(tmp_path))


def test_an_offset_that_overflows_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", [np.arange(4)], np.int64)
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[-24:-16] = (2**63 - 1).to_bytes(8, "little")  # the array's offset; two documents follow
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(ValueError, match="arrays lie outside of"):
        MMapIndexedDataset(tmp_path / "a")
