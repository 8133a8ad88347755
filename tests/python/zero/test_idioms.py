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
ONE_BUCKET = {"bucket_mb": 25.0}
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
NAMED = [  # only for the rows that name them; all parameters are in one bucket
    Setting("0-fp16", {"stage": 0, **ONE_BUCKET}, "fp16"),
    Setting("1-fp16", {"stage": 1, **ONE_BUCKET}, "fp16"),
    Setting("2-private", {"stage": 2, "share_parameters": False, **ONE_BUCKET}),
    Setting("3-bf16", {"stage": 3, **ONE_BUCKET}, "bf16"),
    Setting("3-nvme-late", {**NVME, "prefetch": 0, **ONE_BUCKET}, sharded=True),
    Setting("3-units-nvme", {**UNITS, "offload": "nvme", **ONE_BUCKET}, sharded=True),
]
WORLDS = {1: SETTINGS, 2: SETTINGS + TIERS, 3: [s for s in SETTINGS if s.name in ("2", "3-units")]}
PLACES = [(world_size, setting.name) for world_size, of in WORLDS.items() for setting in of]
# Places of all rows. Each other place has a third of them, neighbours other thirds.
WHOLE = {(1, "0"), (1, "3-nvme"), (2, "2"), (2, "2-cpu"), (2, "3"), (2, "3-units"), (2, "3-nvme")}
LEVELS: dict[str, Any] = {"fast": (), "slow": pytest.mark.slow, "long": pytest.mark.long}
# Places with these beginnings are one test, except in `make test-long`.
TOGETHER = ("1:", "2:3-units", "2:3-nvme", "2:", "3:")
Table = list[tuple[Setting, list[str]]]  # settings, and names of their rows


def level_of(number: int, idiom: Idiom, world_size: int, setting: Setting) -> str | None:
    place, at = f"{world_size}:{setting.name}", (world_size, setting.name)
    if setting.precision not in idiom.precisions:
        return None
    if place in idiom.places.fast:
        return "fast"
    if place in idiom.places.slow:
        return "slow"
    third = at in PLACES and (number - PLACES.index(at)) % 3 == 0
    return "long" if third or at in WHOLE or (at in PLACES and setting.precision != "fp32") else None


def cases() -> Iterator[Any]:
    """Yield size of the world and table of each test."""
    for level, marks in LEVELS.items():
        found: dict[str, tuple[int, Table]] = {}
        for world_size, settings in WORLDS.items():
            for setting in settings + NAMED:
                place = f"{world_size}:{setting.name}"
                name = place if level == "long" else next(each for each in TOGETHER if place.startswith(each))
                numbered = enumerate(IDIOMS)
                rows = [idiom.name for n, idiom in numbered if level_of(n, idiom, world_size, setting) == level]
                if rows:
                    found.setdefault(name, (world_size, []))[1].append((setting, rows))
        yield from (pytest.param(*case, id=f"{level}-{name}", marks=marks) for name, case in found.items())


def run_idioms(table: Table, folder: str) -> list[list[Outcome]]:
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


def troubles(table: Table, ranks: list[list[list[Outcome]]]) -> list[str]:
    rows = {idiom.name: idiom for idiom in IDIOMS}
    wrong = []
    for at, (setting, names) in enumerate(table):
        for number, name in enumerate(names):
            text = trouble(rows[name], setting, [found[at][number] for found in ranks])
            wrong += [f"{setting.name}, {name}: {text}"] if text else []
    return wrong


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(("world_size", "table"), list(cases()))
def test_idioms(run_ranks: Run, tmp_path: Path, world_size: int, table: Table) -> None:
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
    assert len(set(names)) == len(names) >= 150
    places = {f"{world_size}:{setting.name}" for world_size, of in WORLDS.items() for setting in of + NAMED}
    for idiom in IDIOMS:
        assert {*idiom.places.fast, *idiom.places.slow} <= places, idiom.name
        assert all(any(among(place, (each,)) for place in places) for r in idiom.refusals for each in r.where)
