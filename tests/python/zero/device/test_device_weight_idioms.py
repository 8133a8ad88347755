"""The table of idioms on a (simulated) device: the rows for sharded weights, with torch's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simulated
import zcomm
from device_jobs import mixed_state, mixed_weights
from idioms import IDIOMS
from idioms.judge import Outcome, ours, trouble
from idioms.run import Setting
from test_device_peers import DELAY_S, ranks
from tiers import long
from zcomm.zero import Offload

pytestmark = pytest.mark.slow

SEEDED = {"initialised_again", "initialised_by_each_function"}  # by torch's generator, which all threads share
ROWS = [idiom for idiom in IDIOMS if "1:3-units-nvme" in idiom.places.fast and idiom.name not in SEEDED]
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"offload": Offload("cpu", "cpu"), "bucket_mb": 25.0},
    "cpu-private": {"offload": Offload("cpu", "cpu"), "share_parameters": False},
    "nvme": {"offload": Offload("nvme", "nvme")},
    "device": {"offload": Offload(None, None)},
    "mixed": {"offload": Offload(mixed_state, mixed_weights)},
}
IN_PAIRS = [("mixed", 2) if name == "mixed" else long(name, 2) for name in TIERS]


@pytest.mark.timeout_s(240)
@pytest.mark.parametrize(("name", "world_size"), [("cpu", 1), long("mixed", 1), *IN_PAIRS])
def test_idioms_are_as_with_torch(name: str, world_size: int, tmp_path: Path) -> None:
    setting = Setting(f"device-{name}", {"stage": 3, **TIERS[name]}, sharded=True)
    simulated.play(DELAY_S, joins=True)
    wrong = []
    for idiom in ROWS:
        folder = tmp_path / idiom.name
        folder.mkdir()

        def body(comm: zcomm.Communicator, row: Any = idiom, folder: Path = folder) -> Outcome:
            return ours(row.run, comm, setting, str(folder))

        text = trouble(idiom, setting, ranks(world_size, folder, body))
        wrong += [f"{idiom.name}: {text}"] if text else []
    assert not wrong, "\n".join(wrong)
