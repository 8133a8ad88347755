"""The Markdown page of a run: parts with their states, then a table for each kind of row. Pure.

A row is a flat JSON object with "table" (its heading); its other keys are columns, in order of appearance. Numbers are
shown rounded; "goal" and "share" (or the column that "judged" names) make a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def page_of(about: Record, parts: Mapping[str, Record]) -> str:
    lines = [f"# GPU check, {str(about.get('time', ''))[:10]}", "", _machine(about), ""]
    lines += ["| part | | seconds | |", "|---|---|---|---|"]
    for name, record in parts.items():
        seconds = record.get("seconds", "")
        state = record["state"] if record["state"] in ("passed", "skipped") else f"**{record['state']}**"
        lines.append(f"| {name}: {record.get('title', '')} | {state} | {seconds} | {_cell(record.get('reason', ''))} |")
    tables: dict[str, list[Record]] = {}
    for record in parts.values():
        for row in record.get("rows", ()):
            tables.setdefault(str(row.get("table", "rows")), []).append(row)
    for title, rows in tables.items():
        lines += ["", f"## {title}", "", *_table(rows)]
    return "\n".join(lines) + "\n"


def _machine(about: Record) -> str:
    known = ("gpu", "driver", "cpu", "cores", "memory", "kernel", "python", "torch", "cuda", "nccl", "revision")
    return "; ".join(f"{key} {_cell(about[key])}" for key in known if about.get(key)) + ". Written by `make gpu-check`."


def _table(rows: Sequence[Record]) -> Iterator[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in ("table", "judged", "kind")))
    judged = any("goal" in row for row in rows)
    yield f"| {' | '.join([*columns, *(['verdict'] if judged else [])])} |"
    yield "|" + "---|" * (len(columns) + judged)
    for row in rows:
        cells = [_cell(row.get(column, "")) for column in columns]
        yield f"| {' | '.join([*cells, *([verdict(row)] if judged else [])])} |"


def verdict(row: Record) -> str:
    """Return "holds" if the judged number (share, or the column that "judged" names) reaches the goal."""
    value, goal = row.get(str(row.get("judged", "share"))), row.get("goal")
    if not isinstance(value, (int, float)) or not isinstance(goal, (int, float)):
        return ""
    return "holds" if value >= goal else "**misses**"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.3f}"
    return str(value).replace("|", "/").replace("\n", " ")
