"""The pages of docs/migrate that need other libraries: their programs, run by the commands of the page.

tests/python/cli/test_doc_commands.py runs the other pages.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from running import FOREIGN
from tiers import slow
from zcomm.compat.deepspeed import alias

PAGES = Path(__file__).parents[2] / "docs" / "migrate"
NEEDS = {"accelerate": ("accelerate",), "trainer": ("transformers", "accelerate"), "trl": ("trl", "datasets")}
MODULES = {
    "python": [],
    "zcomm": ["-m", "zcomm.cli.main"],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli"],
}


def write_files(page: str, folder: Path) -> None:
    """Write the page's programs (each named by its title) into ``folder``."""
    for name, text in re.findall(r'```python title="([\w.]+)"\n(.*?)```', page, re.DOTALL):
        (folder / name).write_text(text)


def commands(page: str) -> list[list[str]]:
    """Return the page's commands, started by this Python."""
    found = []
    for block in re.findall(r"<!-- needs: other libraries -->\n```sh\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line)
            found.append([sys.executable, *MODULES[words[0]], *words[1:]])
    return found


def test_all_pages_are_here() -> None:
    assert set(NEEDS) == {path.stem for path in PAGES.glob("*.md") if "needs: other libraries" in path.read_text()}


@pytest.mark.parametrize("name", [slow(name) for name in NEEDS])
def test_page(name: str, tmp_path: Path) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    page = (PAGES / f"{name}.md").read_text()
    write_files(page, tmp_path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    losses = []
    for command in commands(page):
        paths = environment.get("PYTHONPATH", "")  # zcomm run requires no path
        more = {"PYTHONPATH": alias.with_folder(paths)} if MODULES["accelerate"][-1] in command else {}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=200, env=environment | more, cwd=tmp_path
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        losses.append(float(re.findall(r"last loss ([0-9.]+)", done.stdout)[-1]))
    assert len(losses) >= 2
