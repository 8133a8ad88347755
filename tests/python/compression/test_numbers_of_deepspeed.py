"""Compressed models train and are cleaned with DeepSpeed's numbers, to the bit.

Needs ZCOMM_TEST_DEEPSPEED=PYTHON, a Python with DeepSpeed. If that lacks ``deepspeed.compression`` (the wheel of 0.19.8
does), put a checkout of DeepSpeed on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from places import LIBRARIES
from zcomm.compat.deepspeed import alias

PYTHON = os.environ.get("ZCOMM_TEST_DEEPSPEED")


def numbers(python: str, *folders: str) -> Any:
    script = LIBRARIES / "deepspeed_compression.py"
    done = subprocess.run([python, script, *folders], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("NUMBERS ")]
    return json.loads(line.removeprefix("NUMBERS "))


@pytest.mark.skipif(PYTHON is None, reason="ZCOMM_TEST_DEEPSPEED=PYTHON names a Python that has DeepSpeed")
def test_losses_and_cleaned_outputs_are_deepspeeds() -> None:
    own, theirs = numbers(sys.executable, alias.folder()), numbers(str(PYTHON))
    assert len(own) == 12 and own == theirs
