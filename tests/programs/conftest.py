"""Real programs of other libraries on zcomm, unmodified: the packages of requirements.txt, on two ranks.

A script of scripts/ trains in one process by its library only, which is the reference. With ``deepspeed=`` it trains
on two ranks, half the batch on each. `zcomm run` starts them: `import deepspeed` finds zcomm.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from running import SCRIPTS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a missing package."""
    for item in items:
        for marker in item.iter_markers("needs"):
            for package in marker.args:
                if importlib.util.find_spec(package) is None:
                    item.add_marker(pytest.mark.skip(reason=f"{package} is not installed (requirements.txt)"))


@pytest.fixture
def folder(tmp_path: Path, pretrained: Path) -> Path:
    """Return the test's folder, with a small Llama and a tokenizer in ``model``."""
    (tmp_path / "model").symlink_to(pretrained)
    return tmp_path


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the model."""
    place = tmp_path_factory.mktemp("pretrained") / "model"
    subprocess.run([sys.executable, str(SCRIPTS / "tiny.py"), str(place)], check=True, capture_output=True)
    return place
