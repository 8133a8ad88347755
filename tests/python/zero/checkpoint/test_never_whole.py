"""Peak memory: no construction, load or save of an optimizer on a drive adds a whole tensor to the steady state."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import long
from zcomm.compat.deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
from zcomm.zero import assemble
from zcomm.zero.checkpoint.export import export
from zcomm.zero.checkpoint.whole_model import save_model

SIDE = 4096
TENSOR_NBYTES = 4 * SIDE * SIDE  # fp32
ALLOWED_NBYTES = TENSOR_NBYTES * 3 // 4  # 48 MiB: pieces, and malloc's arena for another thread


class Net(nn.Module):
    """One large tensor, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(64, SIDE)
        self.large = nn.Linear(SIDE, SIDE, bias=False)
        self.last = nn.Linear(SIDE, 8)


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def grown(call: Callable[[], Any], kept: bool = False) -> int:
    """Return the growth of this process's peak memory in ``call``. kept: relative to memory after it, if larger."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    if not kept:  # a limit, too: the kernel refuses one more whole tensor
        data = resident("VmData") + TENSOR_NBYTES
        resource.setrlimit(resource.RLIMIT_DATA, (data, limits[1]))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    return resident("VmHWM") - (max(before, resident("VmRSS")) if kept else before)


def measure(folder: str, precision: str) -> dict[str, int]:
    base, found = Path(folder), {}
    zcomm.init()
    torch.empty(1 << 20, device="meta").normal_()  # so that torch has loaded its modules for meta tensors
    with zcomm.zero.Init():
        Net()

    def build(name: str, model: Net) -> Any:
        original = assemble.start

        def started(*args: Any) -> None:
            found[name] = grown(lambda: original(*args), kept=True)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assemble, "start", started)
            return zcomm.ZeroOptimizer(model, stage=3, offload="nvme", nvme_path=base, precision=precision, bucket_mb=1)

    def init() -> None:
        nonlocal model
        with zcomm.zero.Init():
            model = Net()

    model = nn.Module()
    found["Init"] = grown(init)
    opt = build("construction", model)  # type: ignore[arg-type]
    opt.save(base / "first")  # so that the windows' pages exist
    found["save"] = grown(lambda: opt.save(base / "c"))
    found["save_model"] = grown(lambda: save_model(opt._live, base / "w.safetensors", True))
    found["load"] = grown(lambda: opt.load(base / "c"))
    found["load_weights"] = grown(lambda: zcomm.zero.load_weights(opt, base / "w.safetensors"))
    opt.save(base / "first", wait=False).wait()  # so that its thread's stack and arena exist
    found["background"] = grown(lambda: opt.save(base / "c", wait=False).wait())
    found["export"] = grown(lambda: export(base / "c", base / "e.safetensors", torch.bfloat16))
    found["zero_to_fp32"] = grown(lambda: convert(base, base / "fp32", safe_serialization=True, tag="c"))
    opt._close(keep_weights=False)
    del opt
    init()
    zcomm.zero.load_weights(model, base / "w.safetensors")
    opt = build("from a file", model)  # type: ignore[arg-type]
    opt._close(keep_weights=False)
    zcomm.shutdown()
    return found


@pytest.mark.slow
@pytest.mark.timeout_s(280)
@pytest.mark.parametrize("precision", [long("fp32"), "bf16"])
def test_no_tensor_is_whole_beside_the_steady_state(tmp_path: Path, precision: str) -> None:
    """Run in its own process, because a peak covers a process's whole life."""
    code = f"import json, test_never_whole as t; print(json.dumps(t.measure({str(tmp_path)!r}, {precision!r})))"
    path = [str(Path(__file__).parent), *sys.path]
    run = [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: nbytes >> 20 for name, nbytes in found.items() if nbytes > ALLOWED_NBYTES} == {}, found
    assert len(found) == 10
