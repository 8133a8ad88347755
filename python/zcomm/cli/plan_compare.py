"""`zcomm plan --compare`: measured against planned bytes and seconds of a demo run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from zcomm.cli.plan_table import print_table, seconds
from zcomm.cli.sizes import shown
from zcomm.launch.errors import UserError

_FIRST = 3  # steps until slots, order of units and caches are in steady state


def compare(path: Path) -> int:
    """Print both tables."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        (summary,) = [record for record in records if record.get("kind") == "summary"]
    except (OSError, ValueError) as error:
        raise UserError(f"--compare {path}: not the metrics.jsonl of a run that ended ({error})") from error
    print_table(_memory(summary))
    stats = summary["stats"]
    for what in ("read", "written"):
        if stats.get(f"swap_{what}_nbytes"):
            print(f"swap {what}: {shown(stats[f'swap_{what}_nbytes'])} in {summary['train_s']:.1f} s of training")
    configs = [record for record in records if record.get("kind") == "config"]
    steps = [record for record in records if record.get("kind") == "step"][_FIRST:]
    if configs and steps:
        _times(configs[0], steps)
    return 0


def _memory(summary: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for tier, purposes in summary["memory"].items():
        for purpose, measured in purposes.items():
            planned = summary["formula"].get(tier, {}).get(purpose, 0)
            if measured or planned:
                off = _off(planned, measured)
                rows.append(
                    {"tier": tier, "what": purpose, "planned": shown(planned), "measured": shown(measured), "off": off}
                )
    return rows


def _times(config: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    """Print medians of the steps; a run's compute is all time except waiting, so it includes the update."""
    import torch

    from zcomm.cli.plan import drive_bps
    from zcomm.demo.model import make_model
    from zcomm.machine import speeds
    from zcomm.planning import estimate, step_time, work_of
    from zcomm.zero.options import as_precision

    if config.get("device", "cpu") != "cpu":
        print("time per step is not planned for a GPU")
        return
    known = speeds.load(config["world_size"])
    if known is None:
        print("time per step is not planned here: zcomm doctor --calibrate measures this machine")
        return
    with torch.device("meta"):
        shape = (config[name] for name in ("layers", "heads", "width", "context"))
        model = make_model(config.get("model", "gpt"), *shape)
        model.to(as_precision(config["precision"]).dtype)
        batch = torch.zeros(config["batch"], config["context"], dtype=torch.int64)
        work = work_of(model, batch, batch)
    accum, bucket_mb = config["accum"], config["bucket_mb"]
    found = estimate(
        model,
        config["stage"],
        config["offload"],
        config["world_size"],
        config["precision"],
        bucket_mb=bucket_mb,
        accumulation=accum,
        inputs=(batch, batch),
    )
    drive = drive_bps(Path((config["nvme_path"] or ["."])[0]))
    time = step_time(found, known, work, config["precision"], accum, drive)
    if time is None or time.compute_s is None:
        print("time per step is not planned here: zcomm doctor --calibrate --dir DIR measures the drive")
        return
    rows = []
    for name, words, planned in (
        ("compute_s", "compute and update", time.compute_s + time.update_s),
        ("comm_s", "communication", time.communication_s),
        ("swap_s", "swap", time.swap_s),
        ("step_s", "step", time.step_s),
    ):
        measured = statistics.median(step[name] for step in steps)
        if planned:
            off = _off(planned, measured)
            rows.append({"per step": words, "planned": seconds(planned), "measured": seconds(measured), "off": off})
    print()
    print_table(rows)
    print("measured: medians of rank 0; its communication and swap are waiting times, without the hidden part")


def _off(planned: float | None, measured: float) -> str:
    return f"{100 * (measured - planned) / planned:+.1f} %" if planned else "-"
