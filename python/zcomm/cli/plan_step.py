"""The lanes of one planned step on a GPU: a table, next to the seconds of a measured trace, and a timeline."""

from __future__ import annotations

from pathlib import Path

from zcomm.cli.plan_table import UNKNOWN, print_table, seconds
from zcomm.cli.sizes import shown
from zcomm.launch.errors import UserError
from zcomm.planning.lanes import LANES, GpuStep, Rates
from zcomm.planning.timeline import timeline


def show_step(step: GpuStep, rates: Rates, measured: Path | None, file: Path | None) -> None:
    """Print bytes, rate and seconds of each lane, the bound and the step. measured: a trace, for its seconds. file: for
    the timeline. Raises: UserError."""
    found = {} if measured is None else _measured(measured)
    times = None if step.missing else step.times()
    whole = step.whole
    moved = {"down": whole.down, "up": whole.up, "memory bus": whole.host, "drive": whole.read + whole.written}
    per_s: dict[str, tuple[float | None, ...]] = {
        "compute": (rates.flops,),
        "down": (rates.down_bps,),
        "up": (rates.up_bps,),
    }
    per_s |= {"memory bus": (rates.host_bps,), "drive": rates.drive_bps or ()}
    rows = [_row(lane, step.lanes[lane], found, moved.get(lane, 0), _rate(lane, per_s[lane])) for lane in LANES]
    if times is not None:
        rows += [_row("last bucket", times.last_s, found), _row("bound", times.bound_s, found)]
    rows.append(_row("step", times.step_s if times else None, found))
    print()
    print_table(rows if found else [{key: row[key] for key in row if key != "measured"} for row in rows])
    if times is None:
        print(f"not known here: {step.missing}")
    else:
        print(f"bound: {times.limit} is the longest lane; the last bucket follows, with any policy of updates")
        print(f"step: update={step.update!r} runs concurrently with {seconds(times.window_s)} of computing")
    if found:
        print("measured: means of a step; the memory bus only has updates, not sums of gradients")
    if file is not None:
        _write(file, step)


def _row(
    lane: str, planned: float | None, found: dict[str, float], moved: float = 0, rate: str = UNKNOWN
) -> dict[str, str]:
    columns = {"lane": lane, "bytes": shown(moved) if moved else UNKNOWN, "rate": rate, "planned": seconds(planned)}
    return {**columns, "measured": seconds(found.get(lane))}


def _rate(lane: str, rates: tuple[float | None, ...]) -> str:
    unit, scale = ("TFLOP/s", 1e12) if lane == "compute" else ("GB/s", 1e9)
    known = [f"{rate / scale:.3g}" for rate in rates if rate is not None]
    return f"{', '.join(known)} {unit}" if known else UNKNOWN


def _measured(path: Path) -> dict[str, float]:
    from zcomm.profiling.measured import measured_lanes

    try:
        return measured_lanes(path)
    except OSError as error:
        raise UserError(f"--measured {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--measured: {error}") from error


def _write(path: Path, step: GpuStep) -> None:
    """Write the planned work of a step as a trace of one rank."""
    from zcomm.profiling.recorder import write_events
    from zcomm.profiling.trace import Trace

    trace = Trace(LANES)
    trace.origin = 0
    try:
        for work in timeline(step):
            trace.add(work.lane, work.name, round(1e9 * work.begin), round(1e9 * work.end))
        write_events(path, trace.events(0))
    except ValueError as error:
        raise UserError(f"--timeline: {error}") from error
    except OSError as error:
        raise UserError(f"--timeline {path}: {error.strerror}") from error
    print(f"timeline of a planned step: {path}, for https://ui.perfetto.dev")
