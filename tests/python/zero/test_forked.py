"""Forked children of a process that trains: they end, and their parent goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from programs import Program
from tiers import slow

PROGRAM = """
import os, sys, threading, time
import torch, zcomm
from torch import nn

what, folder = sys.argv[1:]

def child(call=lambda: None):
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except RuntimeError as error:
            print("child:", error, flush=True)
        sys.exit(0)
    until = time.monotonic() + 20
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            sys.exit("the child hangs")
        time.sleep(0.02)

if what == "init":
    def join():
        try:
            zcomm.init(timeout=6, rank=0, world_size=2, init_method=f"file://{folder}/nowhere")
        except TimeoutError:
            print("no rank came", flush=True)
    joining = threading.Thread(target=join)
    joining.start()
    time.sleep(1)
    child()
    child(lambda: zcomm.init())
    child(lambda: zcomm.shutdown())
    joining.join()
elif what == "save":
    import zcomm.zero.files.durable as durable
    go, sync = threading.Event(), os.fsync
    os.fsync = lambda file: (go.wait(60), sync(file))
    model = nn.Linear(10, 10)
    opt = zcomm.ZeroOptimizer(model, "adamw", stage=1)
    task = opt.save(f"{folder}/checkpoint", wait=False)
    child()
    child(task.wait)
    go.set()
    task.wait()
    opt.load(f"{folder}/checkpoint")
else:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    place = "nvme" if what == "units" else zcomm.Offload("nvme", "nvme", gradients="nvme", update=what)
    opt = zcomm.ZeroOptimizer(model, "adamw", stage=3, offload=place, nvme_path=folder, share_parameters=False)
    def step():
        model(torch.ones(1, 64)).sum().backward()
        opt.step()
        opt.zero_grad()
    step()
    step()  # with an update that waits for a forward, or of backward
    for call in (lambda: model(torch.ones(1, 64)), lambda: None, opt.close, zcomm.shutdown):
        child(call)
    step()
    opt.close()
print("parent: fine")
"""


@pytest.mark.parametrize("what", ["init", slow("save"), slow("units"), slow("forward"), "backward"])
def test_a_forked_child_ends(start_program: Callable[..., Program], tmp_path: Path, what: str) -> None:
    program = start_program(PROGRAM, what, tmp_path)
    output, errors = program.communicate(timeout_s=110)
    assert program.returncode == 0 and "parent: fine" in output, output + errors
    assert "Exception ignored" not in errors, errors
    if what == "init":
        assert "no rank came" in output
    else:
        assert "only the parent" in output, output
