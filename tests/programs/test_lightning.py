"""Lightning Fabric with ZcommStrategy: losses, norms and rates of one process; a checkpoint restores the state."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import Result, run
from tiers import slow

pytestmark = pytest.mark.needs("lightning")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Result:
    (result,) = run("fabric", tmp_path_factory.mktemp("one"), "--batch", 8, ranks=0)
    return result


@pytest.mark.parametrize(("stage", "tier"), [slow(0, "none"), slow(2, "cpu"), slow(3, "none"), (3, "nvme")])
def test_fabric(one_process: Result, tmp_path: Path, stage: int, tier: str) -> None:
    for result in run("fabric", tmp_path, "--stage", stage, "--tier", tier):
        assert (result["world"], result["step"], result["rest"]) == (2, 3, [])
        for name in ("losses", "norms", "rate", "final", "back"):
            assert result[name] == pytest.approx(one_process[name], rel=1e-5), name
    assert one_process["back"] != one_process["final"]
    assert (tmp_path / "fabric" / "manifest.json").exists()
