"""examples/finetune.py in a folder with model and text, on the ranks: ``finetune.py FOLDER [options]``."""

from __future__ import annotations

import hashlib
import os
import runpy
import sys
from pathlib import Path

from tiny import report

SCRIPT = Path(__file__).parents[3] / "examples" / "finetune.py"

os.chdir(sys.argv[1])
sys.argv = [str(SCRIPT), "model", "text", *sys.argv[2:]]
ended = runpy.run_path(str(SCRIPT), run_name="__main__")
weights = hashlib.sha256()
for name, tensor in sorted(ended["opt"].full_state_dict().items()):
    weights.update(name.encode() + tensor.float().numpy().tobytes())
report(
    rank=ended["comm"].rank,
    seen=ended["x"].tolist(),
    loss=ended["loss"].item(),
    mean=ended["mean"].item(),
    weights=weights.hexdigest(),
)
