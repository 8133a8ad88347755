"""Modules that are rows of a table: found, imported, listed and pickled like modules with files."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import zcomm.compat.deepspeed as deepspeed
from programs import environment_of_no_job
from zcomm.compat.deepspeed import modules, table

PLACE = Path(deepspeed.__file__).parent


def file_of(row: str) -> Path | None:
    place = PLACE.joinpath(*row.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.exists()), None)


def test_a_row_hides_no_file() -> None:
    rows = {*table.NAMES, *table.CONSTANTS} - {""}
    packages = {"checkpoint", "linear", "utils", "runtime.zero", "compression"}  # which have no such names
    assert {row for row in rows if file_of(row)} == packages
    partly = {"checkpoint", "module_inject", "compression.basic_layer", "compression.helper"}  # with refused names, too
    assert {row for row in table.REFUSED if row and file_of(row)} == partly


@pytest.mark.parametrize("row", sorted(modules.made()))
def test_a_module_of_a_row_is_a_module(row: str) -> None:
    name = f"{modules.OWN}.{row}"
    spec = importlib.util.find_spec(name)
    module = importlib.import_module(name)
    assert spec is not None and module.__spec__ is not None
    assert (module.__name__, module.__spec__.name, spec.name) == (name, name, name)
    assert module.__doc__ and (module.__package__ == name) == hasattr(module, "__path__")
    if row in {*table.NAMES, *table.CONSTANTS}:
        star: dict[str, object] = {}
        exec(f"from {name} import *", star)
        assert set(module.__all__) <= set(star) and set(module.__all__) <= {*dir(module), *star}
    with pytest.raises(AttributeError, match="no_such"):
        _ = module.no_such
    with pytest.raises(ImportError):
        exec(f"from {name} import no_such")


def test_walking_the_package_finds_files_and_rows() -> None:
    walked = {found.name for found in pkgutil.walk_packages(deepspeed.__path__, f"{modules.OWN}.")}
    assert walked >= {f"{modules.OWN}.{row}" for row in modules.made()}
    assert f"{modules.OWN}.runtime.zero.partition_parameters" in walked and f"{modules.OWN}.launcher.runner" in walked


def test_names_are_pickled_by_name_and_found_under_both() -> None:
    from zcomm.compat.deepspeed.ops.adam import DeepSpeedCPUAdam
    from zcomm.compat.deepspeed.runtime.zero.config import ZeroStageEnum

    for value in (DeepSpeedCPUAdam, ZeroStageEnum.weights):
        assert pickle.loads(pickle.dumps(value)) is value
    for name in ("DeepSpeedCPUAdam", "FusedAdam"):  # by the row's module
        text = f"c{modules.OWN}.ops.adam\n{name}\n.".encode()
        assert pickle.loads(text) is getattr(importlib.import_module(f"{modules.OWN}.ops.adam"), name)


def test_a_value_that_a_program_sets_in_a_rows_module_wins_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from zcomm.compat.deepspeed import optimizers
    from zcomm.compat.deepspeed.ops.adam import cpu_adam

    monkeypatch.setattr(optimizers, "DeepSpeedCPUAdam", "everywhere")
    assert cpu_adam.DeepSpeedCPUAdam == "everywhere"
    monkeypatch.setattr(cpu_adam, "DeepSpeedCPUAdam", "here")
    assert (cpu_adam.DeepSpeedCPUAdam, optimizers.DeepSpeedCPUAdam) == ("here", "everywhere")


def test_modules_of_rows_have_the_name_deepspeed_too() -> None:
    program = (
        "import pkgutil, importlib.util, deepspeed\n"
        "import deepspeed.ops.adam.cpu_adam as one, zcomm.compat.deepspeed.ops.adam.cpu_adam as other\n"
        "from deepspeed.runtime.zero.config import DeepSpeedZeroConfig\n"
        "from deepspeed.ops.adam import *\n"
        "assert one is other and deepspeed.ops.adam.cpu_adam is one and one.DeepSpeedCPUAdam is DeepSpeedCPUAdam\n"
        "assert importlib.util.find_spec('deepspeed.runtime.fp16.fused_optimizer') is not None\n"
        "walked = {found.name for found in pkgutil.walk_packages(deepspeed.__path__, 'deepspeed.')}\n"
        "assert {'deepspeed.ops.adam.cpu_adam', 'deepspeed.pipe', 'deepspeed.utils.logging'} <= walked\n"
        "print(FusedAdam.__name__)\n"
    )
    command = [sys.executable, "-c", f"from zcomm.compat.deepspeed import install\ninstall()\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment_of_no_job())
    assert done.stdout.strip() == "FusedAdam", done.stderr
