"""Idioms that programs use around an optimizer, under ZeroOptimizer: torch's numbers, or an error that the table lists.

support/idioms has the table, and the places of its rows in `make test` and `make test-slow`. All other results are
silently wrong, and fail these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from idioms import IDIOMS, Idiom
from idioms.judge import Outcome, ours, trouble
from idioms.run import Setting
from idioms.table import EDITS, among
from tiers import long
from torch_world import world
from zcomm.zero import Offload

Run = Callable[..., list[Any]]
UNITS: dict[str, Any] = {"stage": 3, "share_parameters": False}
NVME: dict[str, Any] = {"stage": 3, "offload": "nvme"}
SETTINGS = [
    Setting("0", {"stage": 0}),
    Setting("1", {"stage": 1}),
    Setting("2", {"stage": 2}),
    Setting("2-cpu", {"stage": 2, "offload": "cpu"}),
    Setting("2-nvme", {"stage": 2, "offload": "nvme"}),
    Setting("3", {"stage": 3}),
    Setting("3-units", UNITS, sharded=True),
    Setting("3-nvme", NVME, sharded=True),
    Setting("2-bf16", {"stage": 2}, "bf16"),
    Setting("3-units-bf16", UNITS, "bf16", sharded=True),
    Setting("2-fp16", {"stage": 2}, "fp16"),
    Setting("3-units-fp16", UNITS, "fp16", sharded=True),
]
TIERS = [  # the other tiers of weights and state, only for two ranks
    Setting("0-cpu", {"stage": 0, "offload": "cpu"}),
    Setting("1-cpu", {"stage": 1, "offload": "cpu"}),
    Setting("1-nvme", {"stage": 1, "offload": "nvme"}),
    Setting("3-cpu", {"stage": 3, "offload": "cpu"}),
]
NAMED = [  # only for the rows that name them
    Setting("0-fp16", {"stage": 0}, "fp16"),
    Setting("1-fp16", {"stage": 1}, "fp16"),
    Setting("2-private", {"stage": 2, "share_parameters": False}),
    Setting("3-bf16", {"stage": 3}, "bf16"),
    Setting("3-nvme-late", {**NVME, "prefetch": 0}, sharded=True),
    Setting("3-units-nvme", {**UNITS, "offload": "nvme"}, sharded=True),
]
WORLDS = {1: SETTINGS, 2: SETTINGS + TIERS, 3: [s for s in SETTINGS if s.name in ("2", "3-units")]}
PLACES = [(world_size, setting.name) for world_size, of in WORLDS.items() for setting in of]
# Places of all rows. Each other place has a third of them, neighbours other thirds.
WHOLE = {(1, "0"), (1, "3-nvme"), (2, "2"), (2, "2-cpu"), (2, "3"), (2, "3-units"), (2, "3-nvme")}
LEVELS: dict[str, Any] = {"fast": (), "slow": pytest.mark.slow, "long": pytest.mark.long}


def rows(level: str, world_size: int, setting: Setting) -> list[Idiom]:
    """Return the rows that a level runs at a place. Worlds of three run rows of worlds of two."""
    place, at = f"{world_size}:{setting.name}", (world_size, setting.name)
    found = [i for i in IDIOMS if setting.precision in i.precisions and min(world_size, 2) in i.worlds]
    if level != "long":
        taken = [i for i in found if among(place, i.places.fast)]
        return taken if level == "fast" else [i for i in found if among(place, i.places.slow) and i not in taken]
    if at in PLACES and at not in WHOLE and setting.precision == "fp32":
        found = found[PLACES.index(at) % 3 :: 3]
    return [i for i in found if at in PLACES and not among(place, i.places.fast + i.places.slow)]


TOGETHER = ["1:*", "2:3-units*", "2:3-nvme*", "2:*", "3:*"]  # places of `make test` and of `make test-slow`


def cases() -> Iterator[Any]:
    """Yield level, size of the world, and settings with their rows."""
    for level, marks in LEVELS.items():
        found: dict[str, tuple[int, list[Any]]] = {}
        for world_size, settings in WORLDS.items():
            for setting in settings + NAMED:
                place = f"{world_size}:{setting.name}"
                name = place if level == "long" else next(each for each in TOGETHER if among(place, (each,)))
                if names := [idiom.name for idiom in rows(level, world_size, setting)]:
                    found.setdefault(name, (world_size, []))[1].append((setting, names))
        for name, (world_size, table) in found.items():
            yield pytest.param(world_size, table, id=f"{level}-{name}", marks=marks)


def run_idioms(table: list[tuple[Setting, list[str]]], folder: str) -> list[list[Outcome]]:
    """Return the outcomes of the rows in each setting. After an error the ranks have a new communicator."""
    runs = {idiom.name: idiom.run for idiom in IDIOMS}
    found: list[list[Outcome]] = []
    with world(30.0):
        comm = zcomm.init(timeout=30)
        part = comm.duplicate()
        for setting, names in table:
            found.append([])
            for name in names:
                found[-1].append(ours(runs[name], part, setting, folder))
                errors = torch.tensor([float(found[-1][-1].error is not None)])
                comm.all_reduce(errors)
                if errors.any():
                    part.close()
                    part = comm.duplicate()
        part.close()
    return found


def troubles(table: list[tuple[Setting, list[str]]], ranks: list[list[list[Outcome]]]) -> list[str]:
    rows = {idiom.name: idiom for idiom in IDIOMS}
    wrong = []
    for at, (setting, names) in enumerate(table):
        for number, name in enumerate(names):
            text = trouble(rows[name], setting, [found[at][number] for found in ranks])
            wrong += [f"{setting.name}, {name}: {text}"] if text else []
    return wrong


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(("world_size", "table"), list(cases()))
def test_idioms(run_ranks: Run, tmp_path: Path, world_size: int, table: list[tuple[Setting, list[str]]]) -> None:
    wrong = troubles(table, run_ranks(run_idioms, world_size, table, str(tmp_path), timeout_s=280))
    if wrong:
        pytest.fail(f"{len(wrong)} of {sum(len(names) for _, names in table)}:\n" + "\n".join(wrong), pytrace=False)


ALL_TIERS = [s for s in SETTINGS + TIERS if s.name in ("0", "2-cpu", "2-nvme", "3", "3-units", "3-cpu", "3-nvme")]
ALL_TIERS += [
    Setting("1-private", {"stage": 1, "share_parameters": False}),
    Setting("3-late", {**NVME, "offload": Offload("nvme", "nvme", gradients="nvme", update="forward")}, sharded=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", long("fp16")])
@pytest.mark.parametrize("world_size", [long(1), 2])
def test_bits_after_edits_are_those_of_every_stage_and_tier(
    run_ranks: Run, tmp_path: Path, world_size: int, precision: str
) -> None:
    edits = [idiom.name for idiom in IDIOMS if idiom.places == EDITS]
    table = [(replace(setting, precision=precision), edits) for setting in ALL_TIERS]
    per_rank = run_ranks(run_idioms, world_size, table, str(tmp_path))
    assert troubles(table, per_rank) == []
    for number, name in enumerate(edits):
        assert len({of_setting[number].bits for found in per_rank for of_setting in found}) == 1, name


def test_the_table() -> None:
    names = [idiom.name for idiom in IDIOMS]
    assert len(set(names)) == len(names) >= 120
    for level, place in [("fast", "2:3-units"), ("slow", "1:3-units"), ("fast", "1:3-units-nvme")]:
        patterns = [getattr(idiom.places, level) for idiom in IDIOMS]
        assert any(among(place, each) for each in patterns)
