"""Parts of the check of a GPU, the most important first: as many as fit into nine minutes; --resume continues.

Tests and sanitizers run concurrently if there are enough cores; benches run one at a time.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpucheck.runner import MARGIN, ROWS, Part

CORES = 8  # of a machine on which tests run at once
ROOT = Path(__file__).resolve().parents[2]
WORK_FOLDER = Path.home() / ".cache/zcomm-gpu-check"


@dataclass(frozen=True)
class Place:
    """Folders of a check, outside the tree: a tree that is copied to the machine again does not replace a build.

    site: zcomm's installation for the check, outside the machine's Python. tools: build tools that the machine lacks.
    cmake: the build folder. scratch: a folder on the drive. last: the result of the last run on this machine.
    """

    work: Path = WORK_FOLDER

    @property
    def site(self) -> Path:
        return self.work / "site"

    @property
    def tools(self) -> Path:
        return self.work / "tools"

    @property
    def cmake(self) -> Path:
        return self.work / "cmake"

    @property
    def scratch(self) -> Path:
        return self.work / "scratch"

    @property
    def last(self) -> Path:
        return self.work / "last.json"


def all_parts(place: Place, took: Mapping[str, float] | None = None, out: Path | None = None) -> list[Part]:
    """Return every part; all but the first need the build. took: seconds of the last run. out: for timelines."""
    path = os.pathsep.join(filter(None, [str(place.site), os.environ.get("PYTHONPATH", "")]))
    env = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    known = took or {}

    def budget_s(name: str, default_s: float) -> float:
        return MARGIN * known[name] if name in known else default_s

    def work(name: str, title: str, default_s: float, beside: bool = False) -> Part:
        command = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--work", str(place.work), "--do", name]
        return Part(name, title, budget_s(name, default_s), command, ("build",), None, env, beside)

    at_once = len(os.sched_getaffinity(0)) >= CORES

    def tests(name: str, title: str, default_s: float) -> Part:
        return work(name, title, default_s, beside=at_once)

    def bench(name: str, title: str, default_s: float, program: str, *words: str) -> Part:
        # the rows' file is known only when the part runs
        line = f'exec "$0" "$@" --json "${ROWS}"'
        command = ["bash", "-c", line, sys.executable, str(ROOT / "bench" / program), *words]
        return Part(name, title, budget_s(name, default_s), command, ("build",), None, env)

    def cells(name: str, model: str, accums: str, default_s: float, updates: str = "auto,backward,sums") -> Part:
        words = ["offload.py", "cells", "--model", model, "--accums", accums, "--updates", updates]
        if updates != "backward":  # a lent machine gives back eight files
            words += ["--timelines", str((out or place.work) / f"timelines-{name}.zip")]
        title = f"{model}: weights on the GPU, then within 24 GiB; micro-batches {accums}; updates {updates}"
        return bench(f"cells-{name}", title, default_s, *words)

    def peers(name: str, model: str, variants: str, default_s: float) -> Part:
        words = ["offload.py", "train", "--model", model, "--variants", variants, "--batch", "16", "--accum", "1"]
        return bench(f"peers-{name}", f"{model} by {variants}", default_s, *words, "--rounds", "3", "--seconds", "30")

    swap = ("--nvme-path", str(place.scratch))
    # If DeepSpeed is not installed, a request for it next to another variant costs nothing: the page has the reason.
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    build = work("build", "zcomm for this GPU", 200)
    return [
        Part(build.name, build.title, build.budget_s, build.command, (), place.site / "zcomm", {}),
        work("import", "zcomm and torch see the GPU; results of doctor", 40),
        work("python-newest", "Python tests that have not run on a GPU", 40),
        cells("1b", "1b", "1,2", 90),
        cells("3b", "3b", "1", 120),
        cells("7b", "7b", "1", 200, "auto"),
        cells("3b-accum", "3b", "2", 130),
        cells("7b-backward", "7b", "1", 120, "backward"),
        cells("7b-accum", "7b", "2", 200, "sums"),
        peers("1b", "1b", "fsdp2,deepspeed-cpu", 120),
        peers("3b-fsdp2", "3b", "fsdp2", 150),
        *([peers("3b-deepspeed", "3b", "deepspeed-cpu", 150)] if deepspeed else []),
        tests("cpp-tests", "C++ tests of the device, and tests of all floors that use it", 180),
        tests("python-training", "Python tests of training on the GPU", 240),
        tests("python-tests", "all other Python tests marked gpu", 240),
        tests("python-ranks", "Python tests of training by ranks that share the GPU", 240),
        tests("memcheck", "compute-sanitizer memcheck on the kernels' tests", 180),
        tests("racecheck", "compute-sanitizer racecheck on the kernels' tests", 180),
        bench("pinned-copy", "pinned copies, without and with the CPU's Adam", 75, "offload.py", "copies"),
        bench("ranks-2", "2 ranks on one GPU, the device copy and NCCL", 50, "coll.py", "one-gpu", "-np", "2"),
        bench("ranks-4", "4 ranks on one GPU", 50, "coll.py", "one-gpu", "-np", "4"),
        bench(
            "offload-nvme",
            "1B with its state on the drive",
            120,
            *("offload.py", "train", "--model", "1b", "--rounds", "3", *swap, "--variants", "zcomm-nvme"),
        ),
        bench("largest", "the largest model that trains", 300, "offload.py", "train", "--largest", *swap),
        bench(
            "largest-limits",
            "the largest model within a limit on the host's memory",
            500,
            *("largest", "--dir", str(place.scratch), "--limits", "1G,2G", "--most", "1e9"),
            *("--max-seconds", "120", "--variants", "zcomm,fsdp2"),
        ),
    ]


def chosen(parts: Sequence[Part], names: str | None) -> list[Part]:
    """Return the parts named, by commas, and the parts that they need. Raises: ValueError."""
    if names is None:
        return list(parts)
    known = {part.name: part for part in parts}
    wanted = [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"--part {', '.join(unknown)}: there are {', '.join(known)}")
    needed = {need for name in wanted for need in known[name].needs}
    return [part for part in parts if part.name in needed or part.name in wanted]
