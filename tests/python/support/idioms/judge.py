"""A verdict on an idiom: torch's numbers, an error that the table lists, or trouble.

Ranks make an Outcome of each row. The process of the test runs plain torch, once for all settings, and compares.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from idioms.run import IdiomRun, Setting
from idioms.table import Idiom

Named = dict[str, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run on one rank: weights and masters. With plain torch a note may be a list, of all ranks."""

    weights: list[Named] = field(default_factory=list)
    first: list[Named] = field(default_factory=list)
    notes: list[tuple[str, Any]] = field(default_factory=list)
    bits: int = 0  # a hash of weights and masters, which are the same on all ranks
    error: tuple[tuple[str, ...], str, str] | None = None  # kinds, message, trace


def outcome(idiom: Callable[[IdiomRun], None], run: IdiomRun) -> Outcome:
    try:
        idiom(run)
        weights = [{name: w.double().numpy() for name, w in of.items()} for of in run.finish()]
        first = 2 * [{name: w.double().numpy() for name, w in t.first.items()} for t in run.trained]
        names = 2 * [dict(t.model.named_parameters()) for t in run.trained]  # no buffers, which are each rank's own
        same = [w for of, params in zip(weights, names, strict=True) for name, w in of.items() if name in params]
        return Outcome(weights, first, run.notes, zlib.crc32(b"".join(w.astype(np.float32).tobytes() for w in same)))
    except Exception as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return Outcome(error=(kinds, str(error), traceback.format_exc()))


@functools.cache
def oracle(idiom: Callable[[IdiomRun], None], world_size: int, precision: str) -> list[Outcome]:
    """Return plain torch's outcome for each rank. It is the same one if the model has no buffers."""
    found: list[Outcome] = []
    for rank in range(world_size):
        run = IdiomRun(rank, world_size, precision=precision)
        plain = outcome(idiom, run)
        assert plain.error is None, f"{idiom.__name__} fails with plain torch\n{plain.error[2]}"
        found.append(plain)
        if not any(each for of in run.buffers.values() for each in of):
            return [plain] * world_size
    return found


def ours(idiom: Callable[[IdiomRun], None], comm: Any, setting: Setting, folder: str) -> Outcome:
    run = IdiomRun(comm.rank, comm.world_size, setting, comm, folder, setting.precision)
    print(setting.name, idiom.__name__, file=sys.stderr, flush=True)  # the last line of the log of a run that hangs
    try:
        return outcome(idiom, run)
    finally:
        run.close()


def difference(found: Outcome, plain: Outcome, rank: int, setting: Setting) -> str:
    """Return the first difference from torch beyond the tolerance; empty if there is none."""
    moved_part, own_part = setting.close
    for number, (mine, wanted) in enumerate(zip(found.weights, plain.weights, strict=True)):
        if missing := sorted(wanted.keys() - mine.keys()):
            return f"tensors {number}: full_state_dict() or full_param() lacks {missing}"
        for name, value in wanted.items():
            got = mine[name]
            if got.shape != value.shape:
                return f"{name}: shape {got.shape}, torch's is {value.shape}"
            moved = norm(value - plain.first[number].get(name, value))
            apart, limit = norm(got - value), moved_part * moved + own_part * norm(value) + 1e-7
            if not (apart <= limit):
                return f"{name}: {apart:.3g} away from torch's, which moved by {moved:.3g}"
    names = [name for name, _ in found.notes], [name for name, _ in plain.notes]
    if names[0] != names[1]:
        return f"the program noted {names[0]}, with torch {names[1]}"
    for (name, got), (_, each) in zip(found.notes, plain.notes, strict=True):
        value = each[rank] if isinstance(each, list) else each
        if got.shape != value.shape:
            return f"noted {name!r}: shape {got.shape}, torch's is {value.shape}"
        largest = abs(value[np.isfinite(value)]).max(initial=0.0)
        limit = moved_part * largest + 2e-6
        if not np.isclose(got, value, rtol=0, atol=limit, equal_nan=True).all():
            return f"noted {name!r}: {got.flatten()[:4].tolist()}, torch's is {value.flatten()[:4].tolist()}"
    return ""


def norm(value: np.ndarray) -> float:
    return float(np.sqrt(np.square(value).sum()))


def trouble(idiom: Idiom, setting: Setting, ranks: list[Outcome]) -> str:
    """Describe the difference from the table; empty if there is none. ranks: `ours` of each rank."""
    wanted = idiom.refusal(f"{len(ranks)}:{setting.name}")
    errors = [of.error for of in ranks if of.error is not None]
    if errors and len(errors) < len(ranks):
        return f"only {len(errors)} of {len(ranks)} ranks raised {errors[0][1]}\n{errors[0][2][-1500:]}"
    if not errors:
        plain = oracle(idiom.run, len(ranks), setting.precision)
        told = [difference(of, plain[rank], rank, setting) for rank, of in enumerate(ranks)]
        if any(told):
            return f"silently wrong: {told}"
        if len({of.bits for of in ranks}) > 1:
            return "ranks have different bits"
        return f"the table says that it is refused ({wanted.says!r}), but it is right" if wanted else ""
    text = f"{errors[0][0][0]}: {errors[0][1]}"
    if wanted is None:
        return f"raised {text}\n{errors[0][2][-1500:]}"
    good = all(wanted.kind in kinds and re.search(wanted.says, said) for kinds, said, _ in errors)
    return "" if good else f"refused otherwise than by {wanted.kind} {wanted.says!r}: {text}"
