"""transformers' Trainer with deepspeed=: losses, norms and evaluations of one process; saved, resumed, and reloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from running import Result, run
from tiers import slow

pytestmark = pytest.mark.needs("transformers", "accelerate")
SETTINGS = [slow(2, "none"), (2, "cpu"), slow(3, "none"), (3, "nvme")]


@pytest.fixture(scope="module")
def one_process(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    place = tmp_path_factory.mktemp("one")
    (place / "model").symlink_to(pretrained)
    (result,) = run("trainer", place, "--batch", 4, ranks=0)
    return result


@pytest.mark.parametrize(("stage", "tier"), SETTINGS)
def test_trainer(one_process: Result, folder: Path, stage: int, tier: str) -> None:
    results = run("trainer", folder, "--batch", 2, "--stage", stage, "--tier", tier)
    for result in results:
        assert result["world"] == 2
        for name in ("losses", "norms", "evaluations", "final"):
            assert result[name] == pytest.approx(one_process[name], rel=1e-5), name
        assert Path(result["best"]).name == "checkpoint-8"
    assert results[0]["reloaded"] == pytest.approx(results[0]["final"], rel=1e-5)


@pytest.mark.parametrize(("stage", "tier"), [slow(2, "none"), (3, "nvme")])
def test_trainer_resumes(one_process: Result, folder: Path, stage: int, tier: str) -> None:
    setting = ("--batch", 2, "--stage", stage, "--tier", tier)
    run("trainer", folder, *setting, "--steps", 4)
    shutil.rmtree(folder / "saved")
    for result in run("trainer", folder, *setting, "--resume"):
        assert result["losses"] == pytest.approx(one_process["losses"], rel=1e-5)
        assert result["final"] == pytest.approx(one_process["final"], rel=1e-5)
