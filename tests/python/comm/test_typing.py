"""The package's types as mypy sees them in a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import zcomm

PROGRAM = """
from __future__ import annotations

from typing import assert_type

import torch
from torch import nn

import zcomm

comm = zcomm.init(timeout=30)
assert_type(comm, zcomm.Communicator)
assert_type(zcomm.all_reduce(torch.ones(2), op="avg"), None)
work = zcomm.all_reduce(torch.ones(2), async_op=True, name="a name")
assert_type(work, zcomm.Work)
work.wait()
assert_type(zcomm.all_reduce(torch.ones(2), torch.distributed.ReduceOp.SUM), None)
assert_type(zcomm.recv(torch.ones(2), 0), int)
assert_type(zcomm.recv(torch.ones(2), 0, async_op=True).source, int)
assert_type(zcomm.empty(2, 3, dtype=torch.float16), torch.Tensor)
precision = zcomm.Precision("bf16", communication_dtype=torch.float32, skip_nonfinite=True)
opt = zcomm.ZeroOptimizer(nn.Linear(2, 2), torch.optim.AdamW, stage=3, precision=precision, lr=1e-3)
assert_type(opt.memory()["cpu"]["optimizer"], int)
zcomm.all_reduce(torch.ones(2), nmae="typo")
zcomm.all_reduce(3.0)
zcomm.no_such_name
"""


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(zcomm.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
@pytest.mark.timeout_s(300)
def test_a_program_that_mypy_checks(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed (pip install zcomm[dev])")
    (tmp_path / "program.py").write_text(PROGRAM.lstrip())
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "program.py"]
    environment = {"MYPYPATH": str(Path(zcomm.__file__).parent.parent), "PATH": "", "HOME": str(tmp_path)}
    out = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    found = [line.partition(": error: ")[2] for line in out.stdout.splitlines() if ": error: " in line]
    assert len(found) >= 3, out.stdout + out.stderr
    assert found[0].startswith('Unexpected keyword argument "nmae" for overloaded function "all_reduce"')
    assert found[-2].startswith('No overload variant of "all_reduce" matches argument type "float"')
    assert found[-1].startswith('Module has no attribute "no_such_name"')
    numbers = {line.split(":")[1] for line in out.stdout.splitlines() if ": error: " in line}
    assert len(numbers) == 3, out.stdout
