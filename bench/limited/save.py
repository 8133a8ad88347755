"""Save, load and export within a limit on memory: seconds, peak and bytes of each phase, and the bits.

  bench/limit.py save --dir /mnt/nvme                                  (1B parameters, AdamW: 28 GB of the drive)
  bench/limit.py save --dir /mnt/nvme --sizes 3B --rule adamw-8bit     (54 GB)

Two runs, one after the other. The first takes its steps, saves, and takes one step more. The second begins with other
weights; it loads into an optimizer of its own, takes that one step, and exports the weights.

MiB are VmHWM of the rank that has most, anew in each phase. "read" and "written" are GB of the drive by all ranks, as
the kernel counts them: a page that is cached is not read again. From the first step on the kernel refuses private
memory beyond the limit, less the slots, which are shared memory (RLIMIT_DATA). "digest" reads all weights and state.
#wrong: digests of weights, masters and state that differ after load, or after the step that follows. Losses of that
step that differ. Exported tensors that are not the weights ("export" reads them, too).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import launch
from harness.program import make_parser, parse_size
from harness.record import JsonLines, command_line, machine
from limited import decoder, ranks
from limited.depth import add_model_arguments, check
from limited.ranks import Failed
from limited.training import layers_for

_TABLE = "Save, load and export within a limit on memory"
_UNTOUCHED_NBYTES = 128 << 20  # of stacks and arenas
_PIECE_NBYTES = 1 << 20
Digests = dict[str, str]


@dataclass(frozen=True)
class Job:
    """A run of the demo's decoder, all on the drive. folder: there. saved: checkpoint. resumes: load it, else save."""

    layers: int
    width: int
    context: int
    steps: int
    limit_nbytes: int
    rule: str
    folder: str
    saved: str
    resumes: bool


def differ(one: Digests, other: Digests) -> int:
    """Return the number of names with digests that differ, or that only one side has."""
    return sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())


def compare(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> int:
    """Return #wrong of both runs."""
    bad = sum(differ(first[0][key], second[0][key]) for key in ("saved", "stepped"))
    bad += sum(one["loss"] != other["loss"] for one, other in zip(first, second, strict=True))
    weights = {name: digest for name, digest in first[0]["saved"].items() if name.endswith(" weight")}
    return bad + (not weights) + differ(second[0]["exported"], weights)


def rows_of(found: list[list[dict[str, Any]]], job: Job, wrong: int) -> list[dict[str, Any]]:
    """Return a row for each phase of both runs."""
    rows = []
    for number, run in enumerate(found):
        for phases in zip(*(each["phases"] for each in run), strict=True):
            row: dict[str, Any] = {"table": _TABLE, "kind": "save", "params": run[0]["numel"], "layers": job.layers}
            row |= {"rule": job.rule, "ranks": len(run), "limit_nbytes": job.limit_nbytes, "run": number + 1}
            row |= {"phase": phases[0]["name"], "seconds": max(each["seconds"] for each in phases)}
            row["peak_nbytes"] = max(each["peak_nbytes"] for each in phases)
            row |= {key: sum(each[key] for each in phases) for key in ("read_nbytes", "written_nbytes")}
            row |= {"wall_nbytes": run[0]["wall_nbytes"], "kept": row["peak_nbytes"] <= job.limit_nbytes}
            rows.append(row | {"wrong": wrong})
    return rows


def measure(job: Job, world_size: int, timeout_s: float) -> list[dict[str, Any]]:
    """Run both jobs, and remove their files. Raises: Failed."""
    found = []
    with tempfile.TemporaryDirectory(prefix="zcomm-limit-", dir=job.folder) as folder:
        for resumes in (False, True):
            here = asdict(job) | {"folder": folder, "saved": f"{folder}/saved", "resumes": resumes}
            found.append(ranks.run(__file__, here, world_size, timeout_s))
    return rows_of(found, job, compare(*found))


def main(words: Sequence[str]) -> int:
    parser = make_parser("bench/limit.py save", __doc__)
    add_model_arguments(parser, "1B")
    parser.set_defaults(width=2048)
    parser.add_argument("--limit", type=parse_size, default="1G", help="on memory, of each rank (1G)")
    parser.add_argument("--rule", default="adamw", help="optimizer (adamw)")
    arguments: argparse.Namespace = parser.parse_args(words)
    check(parser, arguments)
    launch.use_project_python()
    lines = JsonLines(arguments.json, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    print("#  params rule         limit  phase           s    MiB  read, GB  written  #wrong")
    bad = 0
    for numel in arguments.numels:
        layers, folder = layers_for(numel, arguments.width), str(arguments.dir.resolve())
        job = Job(
            layers,
            arguments.width,
            arguments.context,
            arguments.steps,
            arguments.limit,
            arguments.rule,
            folder,
            "",
            False,
        )
        try:
            rows = measure(job, arguments.ranks, arguments.timeout)
        except Failed as failed:
            print(failed, file=sys.stderr)
            return 1
        for row in rows:
            lines.write(row)
            print(
                f"  {row['params'] / 1e6:>6.0f}M {row['rule']:<12} {row['limit_nbytes'] >> 20:>5}  {row['phase']:<12} "
                f"{row['seconds']:>5.1f} {row['peak_nbytes'] >> 20:>6} {row['read_nbytes'] / 1e9:>9.2f} "
                f"{row['written_nbytes'] / 1e9:>8.2f} {row['wrong']:>7}{'' if row['kept'] else '  above the limit'}",
                flush=True,
            )
            bad += row["wrong"] + (not row["kept"])
    return 1 if bad else 0


# --- a rank ---------------------------------------------------------------------------------------------------------


def _train(job: Job) -> dict[str, Any]:
    import torch

    import zcomm

    torch.set_num_threads(1)
    torch.manual_seed(2 if job.resumes else 1)
    comm, phase = zcomm.init(), ranks.Phases()
    found: dict[str, Any] = {"rank": comm.rank}
    with phase("construct"):
        model, optimizer = decoder.make(job.layers, job.width, job.folder, job.rule, job.limit_nbytes)
    found["numel"] = sum(weight.numel() for weight in model.parameters())
    wall = job.limit_nbytes - optimizer.memory()["cpu"]["slots"] + _UNTOUCHED_NBYTES
    resource.setrlimit(resource.RLIMIT_DATA, (wall, wall))  # it counts mapped memory, touched or not
    found["wall_nbytes"] = wall

    def step(number: int) -> str:
        with phase(f"step {number}"):
            return decoder.step(model, optimizer, job.context, number, comm.rank)

    if job.resumes:
        with phase("load"):
            optimizer.load(job.saved)
    else:
        for number in range(1, job.steps + 1):
            step(number)
        with phase("save"):
            optimizer.save(job.saved)
    with phase("digest"):
        found["saved"] = _digests(optimizer)
    found["loss"] = step(job.steps + 1)
    found["stepped"] = _digests(optimizer)
    with phase("close"):
        optimizer.close()
    if job.resumes:
        with phase("export"):
            found["exported"] = _export(job) if comm.rank == 0 else {}
    zcomm.shutdown()
    found["phases"] = [asdict(each) for each in phase.found]
    return found


def _export(job: Job) -> Digests:
    """Export the weights, and read the file; return digests of its tensors."""
    from zcomm.zero.checkpoint.export import export

    out, found = Path(job.saved).with_name("weights.safetensors"), {}
    export(Path(job.saved), out)
    with out.open("rb") as file:  # by pieces: a mapping of the file would count for the kernel's wall
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        for name, entry in header.items():
            if name != "__metadata__":
                digest, (first, last) = hashlib.sha256(), entry["data_offsets"]
                file.seek(begin + first)
                for left in range(last - first, 0, -_PIECE_NBYTES):
                    digest.update(file.read(min(left, _PIECE_NBYTES)))
                found[f"{name} weight"] = digest.hexdigest()
    return found


def _digests(optimizer: Any) -> Digests:
    """Return digests of all weights, masters and state by their names; none on ranks other than 0. Collective."""
    import torch

    found: dict[str, Any] = {}
    for piece in optimizer.iter_state():
        for key, values in piece.values.items():
            digest = found.setdefault(f"{piece.name} {key}", hashlib.sha256())
            digest.update(values.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return {name: digest.hexdigest() for name, digest in found.items()}


if __name__ == "__main__":
    ranks.say(_train(Job(**json.loads(sys.argv[1]))))
