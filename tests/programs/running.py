"""Runs one script of scripts/: on ranks that `zcomm run` starts, or in one process by its library only.

A script prints "RESULT {...}" once per rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
FOREIGN = ("RANK", "WORLD", "LOCAL", "MASTER", "ACCELERATE", "ZCOMM_INIT", "ZCOMM_JOB", "TORCHELASTIC")
Result = dict[str, Any]


def run(name: str, folder: Path, *arguments: str | int, ranks: int = 2) -> list[Result]:
    """Run script ``name`` in ``folder``; return its results by rank. ranks=0: one process, without a launcher."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    launcher = ["-m", "zcomm.cli.main", "run", "-n", str(ranks), "--no-prefix"] if ranks else []
    command = [sys.executable, *launcher, str(SCRIPTS / f"{name}.py"), str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT {" in line]
    results = sorted((json.JSONDecoder().raw_decode(line)[0] for line in lines), key=lambda result: result["rank"])
    assert [result["rank"] for result in results] == list(range(max(1, ranks)))
    return results
