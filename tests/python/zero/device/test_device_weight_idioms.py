"""The table of idioms on a (simulated) device: the rows that use weights, in stage 3, with torch's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simulated
import zcomm
from device_jobs import mixed_state, mixed_weights
from idioms import IDIOMS
from idioms.judge import Verdict, oracle, trouble, verdict
from idioms.run import Setting
from idioms.table import EDITS, WEIGHTS
from test_device_peers import DELAY_S, ranks
from tiers import long
from zcomm.zero import Offload

pytestmark = pytest.mark.slow

SEEDED = {"initialised_again", "initialised_by_each_function"}  # by torch's generator, which all threads share
ROWS = [idiom for idiom in IDIOMS if idiom.places in (EDITS, WEIGHTS) and idiom.name not in SEEDED]
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
        plain = [oracle(idiom.run, rank, world_size, "fp32") for rank in range(world_size)]
        folder = tmp_path / idiom.name
        folder.mkdir()

        def body(comm: zcomm.Communicator, row: Any = idiom, plain: Any = plain, folder: Path = folder) -> Verdict:
            return verdict(row.run, comm, setting, str(folder), plain[comm.rank])

        text = trouble(idiom, f"{world_size}:{setting.name}", ranks(world_size, folder, body))
        wrong += [f"{idiom.name}: {text}"] if text else []
    assert not wrong, "\n".join(wrong)
