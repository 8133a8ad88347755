"""TRL with deepspeed=: SFT and DPO have the losses of one process, GRPO the weights of DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import Result, run
from tiers import slow

pytestmark = pytest.mark.needs("trl", "transformers", "accelerate", "datasets")


@pytest.mark.parametrize(("what", "stage", "tier"), [slow("sft", 2, "cpu"), ("sft", 3, "none"), ("dpo", 3, "cpu")])
def test_losses_are_those_of_one_process(folder: Path, what: str, stage: int, tier: str) -> None:
    (wanted,) = run("trl_train", folder, what, "--batch", 4, ranks=0)
    for result in run("trl_train", folder, what, "--batch", 2, "--stage", stage, "--tier", tier):
        for name in ("losses", "norms"):
            assert result[name] == pytest.approx(wanted[name], rel=1e-5), name


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory, pretrained: Path) -> list[Result]:
    """Return the results of GRPO on two ranks with torch's DistributedDataParallel."""
    folder = tmp_path_factory.mktemp("ddp")
    (folder / "model").symlink_to(pretrained)
    return run("trl_train", folder, "grpo", "--batch", 4)


@pytest.mark.parametrize(
    ("stage", "tier", "how"),
    [(3, "nvme", []), slow(3, "nvme", ["--unit-by-unit"]), slow(3, "none", []), slow(0, "none", [])],
)
def test_grpo_generates_and_learns_as_with_ddp(
    folder: Path, by_ddp: list[Result], stage: int, tier: str, how: list[str]
) -> None:
    found = run("trl_train", folder, "grpo", "--batch", 4, "--stage", stage, "--tier", tier, *how)
    assert all(reward > 0 for reward in by_ddp[0]["rewards"])
    for one, other in zip(by_ddp, found, strict=True):
        assert one["rewards"] == other["rewards"]
        for name in ("losses", "norms", "kl"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
        for name, values in one["weights"].items():
            assert other["weights"][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
