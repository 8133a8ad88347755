"""A wheel of the same revision replaces the build; metadata and contents of the wheels are correct."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest

import zcomm
import zcomm_testing
from places import ROOT
from zcomm.compat.deepspeed import commands

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
WHEEL = f"dist/zcomm-0.1.0-{TAG}-{TAG}-manylinux_2_36_x86_64.whl"
BUILD = """
import os, sys
from scikit_build_core.build import build_wheel
print(os.path.join(sys.argv[1], build_wheel(sys.argv[1], {"wheel.cmake": "false"})))
"""


def git(checkout: Path, *words: str) -> str:
    """Run git; return its output."""
    name = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    done = subprocess.run(["git", *name, *words], cwd=checkout, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout of the Makefile and the files that it reads; dist/ has a wheel of its revision."""
    for name in ("Makefile", "CMakeLists.txt", "pyproject.toml", "tools/make_venv.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "source").write_text("one\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    (tmp_path / "dist").mkdir()
    (tmp_path / WHEEL).touch()
    (tmp_path / "dist/REVISION").write_text(git(tmp_path, "rev-parse", "HEAD"))
    return tmp_path


def installed_by_make_demo(checkout: Path) -> str:
    """Return the argument for zcomm of ``make demo``'s pip: a wheel, or the sources."""
    make = ["make", "-n", "demo", f"PYTHON={sys.executable}"]
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS", "VENV")  # from the make that runs the tests
    env = {name: value for name, value in os.environ.items() if name not in outer}
    done = subprocess.run(make, cwd=checkout, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    commands = [line.split() for line in done.stdout.splitlines()]
    assert any(words[-2:] == [".venv/bin/zcomm", "demo"] for words in commands), done.stdout
    (what,) = {words[-1].strip("'") for words in commands if "--no-deps" in words or "-e" in words}
    return what


def test_make_demo_takes_the_wheel_of_its_revision(checkout: Path) -> None:
    assert installed_by_make_demo(checkout) == WHEEL


def test_make_demo_takes_no_wheel_of_the_alias_or_of_another_python(checkout: Path) -> None:
    for name in ("zcomm_deepspeed-0.1.0-py3-none-any.whl", WHEEL.replace(TAG, "cp39").removeprefix("dist/")):
        (checkout / "dist" / name).touch()
    assert installed_by_make_demo(checkout) == WHEEL
    (checkout / WHEEL).unlink()
    assert installed_by_make_demo(checkout) == ".[demo,test]"


def commit(checkout: Path) -> None:
    """Make a revision after the wheel's one."""
    (checkout / "source").write_text("two\n")
    git(checkout, "commit", "-q", "-a", "-m", "two")


def edit(checkout: Path) -> None:
    """Change a file that git tracks."""
    (checkout / "source").write_text("two\n")


def build(checkout: Path) -> None:
    """Leave the stamp of a built zcomm."""
    (checkout / ".venv").mkdir()
    (checkout / ".venv/.zcomm").touch()


def forget(checkout: Path) -> None:
    """Remove the note of the wheel's revision."""
    (checkout / "dist/REVISION").unlink()


def leave_git(checkout: Path) -> None:
    """Make it a folder without git, so that the revision is an empty text."""
    shutil.rmtree(checkout / ".git")
    (checkout / "dist/REVISION").write_text("")


@pytest.mark.parametrize("change", [commit, edit, build, forget, leave_git])
def test_make_demo_builds_where_the_wheel_may_be_of_other_sources(
    checkout: Path, change: Callable[[Path], None]
) -> None:
    change(checkout)
    assert installed_by_make_demo(checkout) == ".[demo,test]"


@pytest.fixture
def wheel(tmp_path: Path) -> zipfile.ZipFile:
    """Build a wheel of only the Python part."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core makes the wheel")
    done = subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(done.stdout.splitlines()[-1])


def test_the_wheel_has_the_extra_deepspeed_and_its_entries(wheel: zipfile.ZipFile) -> None:
    (info,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    fields = Parser().parsestr(wheel.read(info).decode())
    needs = [line.replace("'", '"') for line in fields.get_all("Requires-Dist", [])]
    assert 'zcomm-deepspeed; extra == "deepspeed"' in needs
    assert {"deepspeed", "demo", "mpi"} <= set(fields.get_all("Provides-Extra", []))
    entries = ConfigParser()
    entries.read_string(wheel.read(info.replace("METADATA", "entry_points.txt")).decode())
    assert {name: dict(entries[name]) for name in entries.sections()} == {
        "console_scripts": {"zcomm": "zcomm.cli.main:main"},
        "torch.distributed.backends": {"zcomm": "zcomm.torch_backend:register"},
    }
    assert callable(importlib.import_module("zcomm.cli.main").main)


def test_the_wheel_has_all_that_the_package_has(wheel: zipfile.ZipFile) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("git says what the package has")
    tracked = git(ROOT, "ls-files", "python/zcomm").split()
    missing = {name.removeprefix("python/") for name in tracked} - set(wheel.namelist())
    assert tracked and not missing


def test_the_alias_distribution_has_the_command_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    place = ROOT / "packaging/zcomm-deepspeed"
    project = tomllib.loads((place / "pyproject.toml").read_text())
    others = {"dsr": "report"} | {f"ds_{name}": name for name in commands.COMMANDS}
    assert project["project"]["scripts"] == {
        "deepspeed": "_zcomm_deepspeed:deepspeed",
        **dict.fromkeys(others, "_zcomm_deepspeed:command"),
    }
    assert project["project"]["dependencies"] == ["zcomm"]
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert set(shipped) == {file.name for file in place.iterdir() if file.suffix in (".py", ".pth")}
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))  # the module adds a finder, or an entry to sys.path
    module = importlib.import_module("_zcomm_deepspeed")
    assert callable(module.deepspeed)
    ran: list[str] = []
    monkeypatch.setattr(commands, "run", ran.append)
    for name in others:
        monkeypatch.setattr(sys, "argv", [f"/usr/bin/{name}"])
        module.command()
    assert ran == list(others.values())


@pytest.mark.parametrize("module", [zcomm._core, zcomm_testing], ids=lambda module: module.__name__)
def test_an_extension_shows_its_entry_alone(module: ModuleType) -> None:
    """Some compilers link the C++ runtime statically; if its symbols mix with torch's, the process crashes."""
    said = subprocess.run(["nm", "-D", "--defined-only", "-P", str(module.__file__)], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert [line.split()[0] for line in said.stdout.splitlines()] == [f"PyInit_{module.__name__.split('.')[-1]}"]
