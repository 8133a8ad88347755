"""Monitors: the events of each writer, only on rank 0; packages that are missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from zcomm.config import load
from zcomm.monitor import Monitors

EVENTS = [("Train/Samples/lr", 0.5, 8), ("Train/Samples/train loss", 2.0, 8)]


def monitors(rank: int = 0, **sections: object) -> Monitors:
    return Monitors(load(sections), rank)


def test_csv_files(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    writer = monitors(csv_monitor=section)
    writer.write_events(EVENTS)
    writer.write_events([("Train/Samples/lr", 0.25, 16)])
    writer.close()
    writer.write_events(EVENTS)  # closed, so it writes nothing
    files = {path.name: path.read_text().splitlines() for path in (tmp_path / "job").iterdir()}
    assert files == {
        "Train_Samples_lr.csv": ["step,lr", "8,0.5", "16,0.25"],
        "Train_Samples_train_loss.csv": ["step,train loss", "8,2.0"],
    }


def test_other_ranks_write_nothing_and_import_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "comet_ml", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    sections = {name: {"enabled": True} for name in ("tensorboard", "wandb", "csv_monitor", "comet")}
    other = monitors(1, **sections)
    other.write_events(EVENTS)
    assert other.enabled and other.writers == [] and list(tmp_path.iterdir()) == []
    assert not monitors().enabled


@pytest.mark.parametrize(
    ("section", "module", "package"),
    [("wandb",) * 3, ("comet", "comet_ml", "comet_ml"), ("tensorboard", "torch.utils.tensorboard", "tensorboard")],
)
def test_a_missing_package_is_named(section: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f'the section "{section}" .* needs the package {package}.*pip install'):
        monitors(**{section: {"enabled": True}})


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> Mock:
    module = Mock(spec=ModuleType(name))
    for call in ("init", "log", "start", "SummaryWriter"):
        setattr(module, call, Mock())
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_wandb_is_given_the_run_and_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = stand_in("wandb", monkeypatch)
    writer = monitors(wandb={"enabled": True, "group": "g", "team": "t", "project": "p"})
    wandb.init.assert_called_once_with(project="p", group="g", entity="t")
    writer.write_events(EVENTS)
    assert [(call.args, call.kwargs) for call in wandb.log.call_args_list] == [
        (({name: value},), {"step": step}) for name, value, step in EVENTS
    ]


def test_comet_is_given_the_experiment_and_an_event_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    comet = stand_in("comet_ml", monkeypatch)
    named = {"api_key": "k", "project": "p", "workspace": "w", "experiment_key": "e", "mode": "create", "online": True}
    section = {"enabled": True, "samples_log_interval": 10, "experiment_name": "n", **named}
    writer = monitors(comet=section)
    comet.start.assert_called_once_with(**named)
    comet.start.return_value.set_name.assert_called_once_with("n")
    for samples in (8, 16, 18, 20, 28):
        writer.write_events([("lr", 1.0, samples)])
    logged = comet.start.return_value.log_metric.call_args_list
    assert [call.kwargs["step"] for call in logged] == [8, 18, 28]


def test_tensorboard_is_given_the_folder_and_the_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = stand_in("torch.utils.tensorboard", monkeypatch)
    writer = monitors(tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    board.SummaryWriter.assert_called_once_with(log_dir=str(tmp_path / "job"))
    writer.write_events(EVENTS)
    assert [call.args for call in board.SummaryWriter.return_value.add_scalar.call_args_list] == EVENTS
    writer.close()
    board.SummaryWriter.return_value.close.assert_called_once_with()


def test_tensorboard_files_can_be_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = monitors(tensorboard={"enabled": True, "output_path": str(tmp_path)})
    writer.write_events(EVENTS)
    writer.close()
    found = EventAccumulator(str(tmp_path / "DeepSpeedJobName"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("Train/Samples/lr")] == [(8, 0.5)]
