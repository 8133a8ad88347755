"""A verdict on an idiom: torch's numbers, an error, or numbers that differ without a word; and the table's opinion."""

from __future__ import annotations

import copy
import re
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from idioms.run import IdiomRun, Setting
from idioms.table import Idiom


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run."""

    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    first: list[dict[str, torch.Tensor]] = field(default_factory=list)
    notes: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    error: tuple[tuple[str, ...], str, str] | None = None  # kinds, message, trace


def outcome(idiom: Callable[[IdiomRun], None], run: IdiomRun) -> Outcome:
    try:
        idiom(run)
        weights = run.finish()
        first = [{n: w.float() for n, w in t.first.items()} for t in run.trained]
        return Outcome(copy.deepcopy(weights), first, run.notes)
    except Exception as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return Outcome(error=(kinds, str(error), traceback.format_exc()))


def difference(ours: Outcome, plain: Outcome, setting: Setting) -> str:
    """Return the first difference from torch beyond the tolerance; empty if there is none."""
    moved_part, own_part = setting.close
    for number, (mine, wanted) in enumerate(zip(ours.weights, plain.weights, strict=True)):
        if missing := sorted(wanted.keys() - mine.keys()):
            return f"model {number}: full_state_dict() lacks {missing}"
        for name, value in wanted.items():
            got = mine[name].double()
            if got.shape != value.shape:
                return f"{name}: shape {tuple(got.shape)}, torch's is {tuple(value.shape)}"
            moved = (value.double() - plain.first[number].get(name, value).double()).norm()
            apart, limit = (got - value.double()).norm(), moved_part * moved + own_part * value.double().norm() + 1e-7
            if not (apart <= limit):
                return f"{name}: {float(apart):.3g} away from torch's, which moved by {float(moved):.3g}"
    names = [name for name, _ in ours.notes], [name for name, _ in plain.notes]
    if names[0] != names[1]:
        return f"the program noted {names[0]}, with torch {names[1]}"
    for (name, got), (_, value) in zip(ours.notes, plain.notes, strict=True):
        if got.shape != value.shape:
            return f"noted {name!r}: shape {tuple(got.shape)}, torch's is {tuple(value.shape)}"
        limit = (4 * moved_part if setting.precision == "fp32" else moved_part) * float(value.abs().max()) + 1e-6
        if value.numel() and not bool(
            ((got == value) | ((got - value).abs() <= limit)).all() or (got.isnan().all() and value.isnan().all())
        ):
            return f"noted {name!r}: {got.flatten()[:4].tolist()}, torch's is {value.flatten()[:4].tolist()}"
    return ""


@dataclass(frozen=True)
class Verdict:
    """Verdict on one idiom on one rank: `kind` is equal, error or different."""

    kind: str
    text: str = ""
    error_kinds: tuple[str, ...] = ()
    bits: int = 0  # a hash of the weights, which are the same on all ranks
    trace: str = ""


def oracle(idiom: Callable[[IdiomRun], None], rank: int, world_size: int, precision: str) -> Outcome:
    plain = outcome(idiom, IdiomRun(rank, world_size, precision=precision))
    assert plain.error is None, f"{idiom.__name__} fails with plain torch\n{plain.error[2]}"
    return plain


def verdict(
    idiom: Callable[[IdiomRun], None], comm: Any, setting: Setting, folder: str, plain: Outcome | None = None
) -> Verdict:
    """Run it on a communicator of its own, so that damage ends with it. plain: from `oracle`."""
    plain = plain or oracle(idiom, comm.rank, comm.world_size, setting.precision)
    part = comm.duplicate()
    run = IdiomRun(comm.rank, comm.world_size, setting, part, folder, setting.precision)
    print(setting.name, idiom.__name__, file=sys.stderr, flush=True)  # the last line of the log of a run that hangs
    try:
        ours = outcome(idiom, run)
        if ours.error is not None:
            kinds, message, trace = ours.error
            return Verdict("error", f"{kinds[0]}: {message}", kinds, trace=trace)
        text = difference(ours, plain, setting)
        names = zip(ours.weights, plain.weights, strict=True)  # without buffers, which are each rank's own
        same = [mine[name] for mine, wanted in names for name in wanted if name in mine]
        masters = [value for name, value in ours.notes if name.startswith("master of ")]
        bits = zlib.crc32(b"".join(w.float().numpy().tobytes() for w in same + masters))
        return Verdict("different" if text else "equal", text, bits=bits)
    finally:
        run.close()
        part.close()


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
