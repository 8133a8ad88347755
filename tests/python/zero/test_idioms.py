"""Idioms that programs use around an optimizer, under ZeroOptimizer: torch's numbers, or an error that the table lists.

idioms/ has the table. Any other result is silently wrong, and fails these tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from idioms import IDIOMS, Idiom
from idioms.judge import Verdict, verdict
from idioms.known import KNOWN
from idioms.run import Setting
from idioms.table import among

SETTINGS = [
    Setting("0", {"stage": 0}),
    Setting("1", {"stage": 1}),
    Setting("2", {"stage": 2}),
    Setting("2-cpu", {"stage": 2, "offload": "cpu"}),
    Setting("2-nvme", {"stage": 2, "offload": "nvme"}),
    Setting("3", {"stage": 3}),
    Setting("3-units", {"stage": 3, "share_parameters": False}),
    Setting("3-nvme", {"stage": 3, "offload": "nvme"}),
    Setting("2-bf16", {"stage": 2}, "bf16"),
    Setting("3-units-bf16", {"stage": 3, "share_parameters": False}, "bf16"),
    Setting("2-fp16", {"stage": 2}, "fp16"),
    Setting("3-units-fp16", {"stage": 3, "share_parameters": False}, "fp16"),
]
TIERS = [  # the other tiers of weights and state, only for two ranks
    Setting("0-cpu", {"stage": 0, "offload": "cpu"}),
    Setting("1-cpu", {"stage": 1, "offload": "cpu"}),
    Setting("1-nvme", {"stage": 1, "offload": "nvme"}),
    Setting("3-cpu", {"stage": 3, "offload": "cpu"}),
]
WORLDS = {1: SETTINGS, 2: SETTINGS + TIERS, 3: [s for s in SETTINGS if s.name in ("2", "3-units")]}
PLACES = [(world_size, setting.name) for world_size, of in WORLDS.items() for setting in of]
# Settings that run all idioms. Each other setting runs a third of them, neighbours other thirds.
WHOLE = {(1, "0"), (1, "3-nvme"), (2, "2"), (2, "2-cpu"), (2, "3"), (2, "3-units"), (2, "3-nvme")}


def chosen(setting: Setting, world_size: int) -> list[Idiom]:
    """Return the idioms of the setting, or a third of them. Worlds of three run those of worlds of two."""
    found = [i for i in IDIOMS if setting.precision in i.precisions and min(world_size, 2) in i.worlds]
    if (world_size, setting.name) in WHOLE or setting.precision != "fp32":
        return found
    return found[PLACES.index((world_size, setting.name)) % 3 :: 3]


def run_idioms(names: list[str], setting: Setting, folder: str) -> list[Verdict]:
    import torch

    import zcomm
    from torch_world import world

    torch.set_num_threads(1)
    table = {idiom.name: idiom for idiom in IDIOMS}
    with world(30.0):
        comm = zcomm.init(timeout=30)
        return [verdict(table[name].run, comm, setting, folder) for name in names]


def trouble(idiom: Idiom, place: str, verdicts: list[Verdict]) -> str:
    """Describe the difference from the table; empty if there is none."""
    kinds = {v.kind for v in verdicts}
    if len(kinds) > 1:
        return f"ranks differ: {[f'{v.kind} {v.text}' for v in verdicts]}"
    first, wanted = verdicts[0], idiom.refusal(place)
    if first.kind == "different":
        return f"silently wrong: {first.text}"
    if len({v.bits for v in verdicts}) > 1:
        return "ranks have different bits"
    if first.kind == "equal":
        return f"the table says that it is refused ({wanted.says!r}), but it is right" if wanted else ""
    if wanted is None:
        return f"raised {first.text}\n{first.trace[-1500:]}"
    good = all(wanted.kind in v.error_kinds and re.search(wanted.says, v.text) for v in verdicts)
    return "" if good else f"refused otherwise than by {wanted.kind} {wanted.says!r}: {first.text}"


QUICK = {(2, "3-units")}  # unit-wise shards on two ranks
SLOW = {(2, "3-nvme"), (2, "2-fp16"), (2, "3-units-bf16")}  # all others are left to test-long


def level(place: tuple[int, str]) -> tuple[Any, ...]:
    """Return the marks of a setting."""
    return () if place in QUICK else (pytest.mark.slow if place in SLOW else pytest.mark.long,)


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("world_size", "setting"),
    [
        pytest.param(n, setting, id=f"{n}-{setting.name}", marks=level((n, setting.name)))
        for n, of in WORLDS.items()
        for setting in of
    ],
)
def test_idioms(run_ranks: Callable[..., list[Any]], tmp_path: Path, world_size: int, setting: Setting) -> None:
    table = chosen(setting, world_size)
    per_rank = run_ranks(run_idioms, world_size, [i.name for i in table], setting, str(tmp_path), timeout_s=280)
    wrong, mended, place = [], [], f"{world_size}:{setting.name}"
    for number, idiom in enumerate(table):
        text = trouble(idiom, place, [verdicts[number] for verdicts in per_rank])
        known = among(place, KNOWN.get(idiom.name, set()))
        if text and not known:
            wrong.append(f"{idiom.name}: {text}")
        elif known and not text:
            mended.append(idiom.name)
    if wrong:
        pytest.fail(f"{len(wrong)} of {len(table)}:\n" + "\n".join(wrong), pytrace=False)
    assert not mended, f"right now, so to be taken out of KNOWN: {mended}"


def test_the_table() -> None:
    names = [idiom.name for idiom in IDIOMS]
    assert len(set(names)) == len(names) >= 48
    assert set(KNOWN) <= set(names)
