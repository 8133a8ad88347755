"""Seconds of a step by lane, out of a trace file of ``zcomm.profile``, or of torch.profiler with ``torch_profiler``.

A step reaches from the end of one optimizer step to the end of the next, so the file needs two of them or more. Lanes:
- compute: kernels. down, up: copies from the GPU to the host, and back. Only torch's profiler sees these three.
- host memory: updates on the host; sums of gradients are not in it. drive: reads and writes of the swap file.
- step: all of it.
Format: see trace.py; torch.profiler writes the same, with the categories kernel and gpu_memcpy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zcomm.profiling.trace import common, length, united

_PREFIX = "zcomm compute: "  # of zcomm's ranges in torch's trace
_COPIES = {"DtoH": "down", "HtoD": "up"}
_TORCH = ("kernel", "gpu_memcpy", "user_annotation")  # categories of its trace, which is one rank's


def measured_lanes(path: Path) -> dict[str, float]:
    """Return the mean seconds of a step, by lane; lanes of which the trace has nothing are missing.

    Raises: OSError; ValueError for a file that is no trace of two optimizer steps.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
        spans = list(_spans(events))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no trace of zcomm.profile or torch.profiler ({error!r})") from error
    ends = sorted(end for lane, _, end in spans if lane == "step")
    if len(ends) < 2:
        raise ValueError(f"{path} has {len(ends)} optimizer steps of zcomm: profile two or more, after two others")
    whole, steps = [(ends[0], ends[-1])], len(ends) - 1
    found = {"step": length(whole) / steps / 1e9}
    for lane in dict.fromkeys(lane for lane, _, _ in spans if lane != "step"):
        covered = united((begin, end) for each, begin, end in spans if each == lane)
        found[lane] = length(common(covered, whole)) / steps / 1e9
    return found


def _spans(events: Iterable[dict[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """Yield lane, begin and end of rank 0's spans, in nanoseconds. Lane "step": an optimizer step."""
    open_since: dict[Any, int] = {}
    for event in events:
        kind, category, name = event.get("ph"), event.get("cat"), str(event.get("name"))
        if kind not in ("X", "b", "e"):
            continue
        begin = round(1e3 * event["ts"])
        if kind == "X":
            lane = _lane(category, name)
            if lane and (category in _TORCH or event["pid"] == 0):
                yield lane, begin, begin + round(1e3 * event["dur"])
        elif category == "swap" and event["pid"] == 0:
            number = event["id2"]["local"]
            if kind == "b":
                open_since[number] = begin
            else:
                yield "drive", open_since.pop(number), begin


def _lane(category: Any, name: str) -> str:
    """Return the lane of a complete event, "" without one."""
    if category == "kernel":
        return "compute"
    if category == "gpu_memcpy":
        return next((lane for word, lane in _COPIES.items() if word in name), "")
    if category == "compute" or (category == "user_annotation" and name.startswith(_PREFIX)):
        name = name.removeprefix(_PREFIX)
        if name.startswith("optimizer step"):
            return "step"
        return "memory bus" if name == "update" else ""
    return ""
