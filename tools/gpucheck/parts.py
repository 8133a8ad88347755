"""Parts of the check of a GPU, the most important first: they fit into the first nine minutes; --resume continues.

Tests and sanitizers run concurrently if there are enough cores; benches run one at a time.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpucheck.runner import ROWS, Part

CORES = 8  # of a machine on which tests run at once
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Place:
    """Folders of a check.

    site: zcomm's installation for the check, outside the machine's Python. cmake: the build folder of the preset
    "cuda". scratch: a folder on the drive.
    """

    site: Path = ROOT / "build/gpu-check/site"
    cmake: Path = ROOT / "build/cuda"
    scratch: Path = ROOT / "build/gpu-check/scratch"


def all_parts(place: Place) -> list[Part]:
    """Return every part; all but the first need the build."""
    path = os.pathsep.join(filter(None, [str(place.site), os.environ.get("PYTHONPATH", "")]))
    env = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def work(name: str, title: str, budget_s: float, least_s: float = 15.0, beside: bool = False) -> Part:
        command = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--do", name]
        return Part(name, title, budget_s, command, least_s, ("build",), None, env, beside)

    at_once = len(os.sched_getaffinity(0)) >= CORES

    def tests(name: str, title: str, budget_s: float) -> Part:
        return work(name, title, budget_s, beside=at_once)

    def bench(name: str, title: str, budget_s: float, program: str, *words: str, least_s: float = 20.0) -> Part:
        # the rows' file is known only when the part runs
        line = f'exec "$0" "$@" --json "${ROWS}"'
        command = ["bash", "-c", line, sys.executable, str(ROOT / "bench" / program), *words]
        return Part(name, title, budget_s, command, least_s, ("build",), None, env)

    swap = ("--nvme-path", str(place.scratch))
    # DeepSpeed compiles its operations at first use, so it is not in the part with zcomm's own figures. If it is not
    # installed, a request for it costs nothing, and the page has the reason.
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    beside = "zcomm-cpu,fsdp2" if deepspeed else "zcomm-cpu,fsdp2,deepspeed-cpu"
    swapped = "zcomm-nvme" if deepspeed else "zcomm-nvme,deepspeed-nvme"
    build = work("build", "zcomm and its C++ tests, with CUDA for this GPU", 200, least_s=60)
    return [
        Part(build.name, build.title, build.budget_s, build.command, 60, (), place.site / "zcomm", {}),
        work("import", "zcomm and torch see the GPU; what doctor says", 40),
        tests("cpp-tests", "C++ tests of the device, and of all floors what uses it", 180),
        tests("python-training", "Python tests of training on the GPU", 240),
        tests("python-tests", "all other Python tests marked gpu", 240),
        tests("python-ranks", "Python tests of training by ranks that share the GPU", 240),
        tests("memcheck", "compute-sanitizer memcheck on the kernels' tests", 180),
        tests("racecheck", "compute-sanitizer racecheck on the kernels' tests", 180),
        bench("pinned-copy", "pinned copies, alone and while the CPU's Adam runs", 75, "offload.py", "copies"),
        bench("ranks-2", "2 ranks on one GPU beside the device copy and NCCL", 50, "coll.py", "one-gpu", "-np", "2"),
        bench(
            "offload-1b",
            "offloaded training of 1B",
            100,
            *("offload.py", "train", "--model", "1b", "--variants", beside, "--seconds", "35"),
        ),
        bench(
            "offload-1b-behind",
            "1B with the step behind the next forward, and timelines",
            100,
            *("offload.py", "train", "--model", "1b", "--variants", "zcomm-cpu,zcomm-cpu-behind", "--inner", "4"),
            *("--rounds", "3", "--seconds", "30", "--profile", str(place.site.parent / "profile-1b.json")),
        ),
        bench("ranks-4", "4 ranks on one GPU", 50, "coll.py", "one-gpu", "-np", "4"),
        bench(
            "offload-7b",
            "offloaded training of 7B",
            300,
            *("offload.py", "train", "--model", "7b", "--variants", "zcomm-cpu", "--rounds", "3", "--seconds", "45"),
            least_s=150,
        ),
        bench(
            "offload-7b-peers",
            "the same by FSDP2 and DeepSpeed",
            240,
            *("offload.py", "train", "--model", "7b", "--variants", "fsdp2,deepspeed-cpu", "--rounds", "3"),
            least_s=100,
        ),
        bench(
            "offload-nvme",
            "1B with its state on the drive",
            120,
            *("offload.py", "train", "--model", "1b", "--variants", swapped, "--rounds", "3", *swap),
            least_s=60,
        ),
        *(
            bench(
                f"offload-1b-deepspeed-{tier}",
                f"1B beside DeepSpeed with {tier}",
                240,
                *("offload.py", "train", "--model", "1b", "--rounds", "3", *swap),
                *("--variants", f"zcomm-{tier},deepspeed-{tier}"),
                least_s=120,
            )
            for tier in ("cpu", "nvme")
            if deepspeed
        ),
        bench(
            "ranks-2-private",
            "2 ranks on one GPU, tensors of torch's own",
            30,
            *("coll.py", "one-gpu", "-np", "2", "--variants", "zcomm-private", "--sizes", "64M,256M"),
        ),
        bench("largest", "the largest model that trains", 300, "offload.py", "train", "--largest", *swap, least_s=120),
        bench(
            "largest-limits",
            "the largest model within a limit on the host's memory",
            500,
            *("largest", "--dir", str(place.scratch), "--limits", "1G,2G", "--most", "1e9"),
            *("--max-seconds", "120", "--variants", "zcomm,fsdp2"),
            least_s=200,
        ),
        work("cpp-all", "all C++ tests of the CUDA build", 120, least_s=60),
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
