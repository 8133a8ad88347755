"""DeepSpeedExamples' pipeline, `train.py -p 2`, unmodified. Its folder is in the variable DEEPSPEED_EXAMPLES.

torchvision is a stand-in (stand_ins/), because the example needs images of a data set that it downloads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from running import FOREIGN

EXAMPLES = os.environ.get("DEEPSPEED_EXAMPLES", "")
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "steps_per_print": 5,
}


@pytest.mark.slow
@pytest.mark.skipif(not EXAMPLES, reason="DEEPSPEED_EXAMPLES names no checkout of DeepSpeedExamples")
def test_the_pipeline_example_trains(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    paths = [str(Path(__file__).parent / "stand_ins"), *filter(None, [environment.get("PYTHONPATH", "")])]
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    script = Path(EXAMPLES, "training", "pipeline_parallelism", "train.py")
    command = [sys.executable, "-m", "zcomm.cli.main", "run", "-n", "2", "--no-prefix", str(script), "-p", "2"]
    command += ["--steps=30", f"--deepspeed_config={tmp_path / 'config.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines() if "loss " in line]
    assert len(losses) == 6 and losses[-1] < losses[0], done.stdout
