"""Losses, weights and state with a limit on memory, beside those of a run without one.

  bench/limit.py bits --dir /mnt/nvme                          (100M and 300M)
  bench/limit.py bits --dir /mnt/nvme --sizes 20M --ranks 2

Units of the run without a limit are split as those of the run with one; its sums of gradients are in RAM. "tight" is
the smallest limit that works; "wide" is 1.5 times it, and told of the activations, so that what is left holds weights.
#wrong: losses, and digests of all weights and state, that differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness import launch
from harness.program import listed, make_parser
from harness.record import JsonLines, command_line, machine
from limited.depth import add_model_arguments, check, refused, training_of
from limited.ranks import Failed
from limited.training import Found, Training, run

_TABLE = "Bits with a limit on memory"
_LEEWAY_MIB = 8
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.5},
    "accum": {"accum": 2},
    "fp16": {"precision": "fp16"},
    "all": {"clip": 0.5, "accum": 2, "precision": "fp16"},
}


def wrong(one: list[Found], other: list[Found]) -> int:
    """Return the number of losses and digests that differ."""
    pairs = [(x, y) for a, b in zip(one, other, strict=True) for x, y in zip(a.losses, b.losses, strict=True)]
    return sum(x != y for x, y in [*pairs, (one[0].digest, other[0].digest)])


def compare(training: Training, timeout_s: float) -> list[dict[str, Any]]:
    """Run with a tight limit, with a wide one, and twice without. Raises: Failed."""
    training = replace(training, hashed=True)
    least = refused(training, 1, timeout_s)[0] + _LEEWAY_MIB
    rows, splits = [], {}
    for name, mib, told in (("tight", least, False), ("wide", least * 3 // 2, True)):
        found = run(replace(training, limit=f"{mib}MiB", told=told, gradients=None), timeout_s)
        split = found[0].max_bytes
        if split not in splits:
            splits[split] = run(replace(training, max_bytes=split, gradients=None), timeout_s)
        peak, free = (max(max(each.peaks.values()) for each in runs) for runs in (found, splits[split]))
        row = {"table": _TABLE, "kind": "bits", "limit": name, "limit_nbytes": mib << 20, "peak_nbytes": peak}
        row |= {"params": found[0].numel, "ranks": len(found), "max_bytes": split, "peak_without_nbytes": free}
        row |= {"losses": len(found[0].losses) * len(found), "digest": found[0].digest}
        rows.append(row | {"wrong": wrong(found, splits[split]), "kept": peak <= mib << 20})
    return rows


def main(words: Sequence[str]) -> int:
    parser = make_parser("bench/limit.py bits", __doc__)
    add_model_arguments(parser, "100M,300M")
    parser.add_argument("--cases", default=",".join(CASES), help=f"by commas ({','.join(CASES)})")
    arguments = parser.parse_args(words)
    check(parser, arguments)
    names = listed(parser, "--cases", arguments.cases, list(CASES))
    launch.use_project_python()
    lines = JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    print("#  params case   limit    MiB   peak  peak without  units, MiB  losses  #wrong")
    bad = 0
    for numel in arguments.numels:
        for name in names:
            try:
                rows = compare(replace(training_of(arguments, numel), **CASES[name]), arguments.timeout)
            except Failed as failed:
                print(failed, file=sys.stderr)
                return 1
            for row in rows:
                lines.write(row | {"case": name})
                split = "-" if row["max_bytes"] is None else row["max_bytes"] >> 20
                print(
                    f"  {row['params'] / 1e6:>6.0f}M {name:<6} {row['limit']:<5} {row['limit_nbytes'] >> 20:>6} "
                    f"{row['peak_nbytes'] >> 20:>6} {row['peak_without_nbytes'] >> 20:>13} {split:>11} "
                    f"{row['losses']:>7} {row['wrong']:>7}{'' if row['kept'] else '  above the limit'}",
                    flush=True,
                )
                bad += row["wrong"] + (not row["kept"])
    return 1 if bad else 0
