"""``zcomm run --memory``: a host's limit, divided by its ranks, reaches optimizers of programs that set none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from programs import environment_of_no_job
from tiers import long, slow

_TRAINS = """
import sys, torch
if sys.argv[1] == "deepspeed":
    import deepspeed as library
else:
    import zcomm as library
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
drive = {"device": "nvme", "nvme_path": sys.argv[2]}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
}
engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(2):
    engine.backward(engine(torch.ones(1, 1024, dtype=torch.bfloat16)).float().square().sum())
    engine.step()
print(library.__name__, engine.optimizer.offload.gradients)
"""


def trains(folder: Path, library: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "trains.py"
    script.write_text(_TRAINS)
    command = [sys.executable, "-m", "zcomm.cli.main", "run", "-n", "2", "--no-prefix", *options]
    return subprocess.run(
        [*command, str(script), library, str(folder)],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment_of_no_job(),
        check=False,
    )


@pytest.mark.timeout_s(400)
@pytest.mark.parametrize("library", [slow("zcomm"), long("deepspeed")])
def test_the_limit_of_a_run_reaches_the_optimizer(tmp_path: Path, library: str) -> None:
    free = trains(tmp_path, library)
    assert free.returncode == 0, free.stderr
    assert free.stdout.count(f"{library} None") == 2, "without a limit sums of gradients are in RAM"
    refused = trains(tmp_path, library, "--memory", "2MiB")
    assert refused.returncode == 1
    assert "(1.0 MiB on each rank) is too small" in refused.stderr, refused.stderr
    assert "(a rank has ZCOMM_MEMORY='2MiB' of its host / 2 ranks)" in refused.stderr
    least = int(refused.stderr.split("; memory='")[1].split("MiB")[0])
    tight = trains(tmp_path, library, "--memory", f"{2 * (least + 6)}MiB")  # 16 MiB of sums on a rank have no room
    assert tight.returncode == 0, tight.stderr
    assert tight.stdout.count(f"{library} nvme") == 2 and "has held" not in tight.stderr
