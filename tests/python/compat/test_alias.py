"""`import deepspeed` finds zcomm, with submodules and metadata, also in child processes; an installed one is kept."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from places import ROOT
from programs import environment_of_no_job
from zcomm.cli.main import build_parser
from zcomm.compat.deepspeed import __version__, alias

# Prints which deepspeed the import system, metadata, import, and a child process find.
FINDS = """
import importlib.metadata, importlib.util, subprocess, sys
child = "import deepspeed; print(deepspeed.__name__)"
print(importlib.util.find_spec("deepspeed").origin)
print(importlib.metadata.version("deepspeed"))
import deepspeed
print(deepspeed.__name__)
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip())
print(sys.argv[1:])
"""
INSTALLED = "installed_deepspeed"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "finds.py"
    path.write_text(FINDS)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return a folder with another deepspeed installed."""
    package = tmp_path / "elsewhere" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__name__ = {INSTALLED!r}\n")
    info = package.with_name("deepspeed-0.18.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.0\n")
    return package.parent


def run(*command: str | Path, path: str | Path | None = None) -> subprocess.CompletedProcess[str]:
    env = environment_of_no_job()
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=60, env=env)


def finds(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


OURS = [str(Path(alias.folder(), "deepspeed", "__init__.py")), __version__, *["zcomm.compat.deepspeed"] * 2]


def test_a_script_and_its_children_find_zcomm(script: Path, other: Path) -> None:
    assert finds(run("-m", "zcomm.compat.deepspeed", script, "--x", path=other)) == [*OURS, "['--x']"]
    behind = os.pathsep.join([str(other), alias.folder()])  # as the distribution zcomm-deepspeed appends it
    assert finds(run("-m", "zcomm.compat.deepspeed", script, "--x", path=behind)) == [*OURS, "['--x']"]
    with_rank = run("-m", "zcomm.compat.deepspeed", "--local-rank", script, "--x", path=other)
    assert finds(with_rank)[-1] == "['--local_rank=0', '--x']"
    place = finds(run("-m", "zcomm.compat.deepspeed", "--path"))
    assert place == [alias.folder()]
    assert finds(run(script, path=place[0])) == [*OURS, "[]"]


def test_a_module_runs(script: Path, tmp_path: Path) -> None:
    assert finds(run("-m", "zcomm.compat.deepspeed", "-m", "finds", "-m", path=tmp_path)) == [*OURS, "['-m']"]


def test_zcomm_run_leaves_an_installed_one_where_nothing_is_asked(script: Path, other: Path) -> None:
    command = ("-m", "zcomm.cli.main", "run", "-n", "1", "--no-prefix")
    theirs = [str(other / "deepspeed" / "__init__.py"), "0.18.0", *[INSTALLED] * 2, "[]"]
    assert finds(run(*command, script)) == [*OURS, "[]"]
    assert finds(run(*command, script, path=other)) == theirs
    assert finds(run(*command, "--deepspeed", "installed", script, path=other)) == theirs
    assert finds(run(*command, "--deepspeed", "zcomm", script, path=other)) == [*OURS, "[]"]
    refused = run(*command, "--deepspeed", "installed", script)
    assert refused.returncode != 0 and "--deepspeed installed: no deepspeed is installed here" in refused.stderr


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("--deepspeed train.py --lr 3", "zcomm"),
        ("-n 2 --deepspeed -m train --lr 3", "zcomm"),
        ("--deepspeed installed train.py --lr 3", "installed"),
        ("--tee zcomm --deepspeed=installed train.py --lr 3", "installed"),
        ("--env a=--deepspeed --no-prefix --deepspeed zcomm train.py --lr 3", "zcomm"),
        ("train.py --deepspeed ds.json", None),
        ("-n 2 train.py --deepspeed", None),
    ],
)
def test_the_option_takes_no_script_for_its_value(words: str, chosen: str | None) -> None:
    found = build_parser().parse_args(["run", *words.split()])
    script = "train" if found.module else "train.py"
    assert (found.deepspeed, found.script) == (chosen, script)
    assert found.args == words.split()[words.split().index(script) + 1 :]


def test_the_alias_distribution_comes_after_what_is_installed(script: Path, other: Path, tmp_path: Path) -> None:
    place = str(ROOT / "packaging" / "zcomm-deepspeed")
    start = f"import site, sys\nsys.argv = ['']\nsite.addsitedir({place!r})\nexec(open({str(script)!r}).read())\n"
    # The child process has no .pth file, so it finds no deepspeed.
    assert finds(run("-c", start))[:3] == OURS[:3]
    assert finds(run("-c", start, path=other))[2] == INSTALLED


def test_the_command_deepspeed_is_that_of_an_installed_one(script: Path, other: Path) -> None:
    place = str(ROOT / "packaging" / "zcomm-deepspeed")
    start = f"import site, sys\nsys.argv[1:] = ['--num_gpus', '1', {str(script)!r}, '--lr', '1']\n"
    start += f"site.addsitedir({place!r})\nimport _zcomm_deepspeed\n_zcomm_deepspeed.deepspeed()\n"
    lines = finds(run("-c", start))
    assert [line.removeprefix("[0] ") for line in lines] == [*OURS, "['--local_rank=0', '--lr', '1']"]
    wrong = run("-c", start.replace("--num_gpus", "--num_nodes").replace("'1'", "'2'", 1))
    assert wrong.returncode == 2 and wrong.stderr.startswith("deepspeed: error: --num_nodes 2: there is no hostfile")
    assert len(wrong.stderr.splitlines()) == 1
    (other / "deepspeed" / "launcher").mkdir()
    (other / "deepspeed" / "launcher" / "__init__.py").write_text("")
    (other / "deepspeed" / "launcher" / "runner.py").write_text("def main(): print('theirs')\n")
    (other / "deepspeed" / "__init__.py").write_text("")
    assert finds(run("-c", start, path=other)) == ["theirs"]


def test_the_alias_distribution_finds_a_zcomm_whose_place_comes_later_on_the_path(
    script: Path, other: Path, tmp_path: Path
) -> None:
    """The alias is in a virtual environment, and zcomm in the system's packages."""
    late = tmp_path / "late"
    late.mkdir()
    (late / "zcomm").symlink_to(ROOT / "python" / "zcomm")
    place = str(ROOT / "packaging" / "zcomm-deepspeed")
    start = (
        "import site, sys\nsys.argv = ['']\n"
        "def has_zcomm(place):\n    import os\n    return os.path.isdir(os.path.join(place or '.', 'zcomm'))\n"
        "sys.path[:] = [one for one in sys.path if not has_zcomm(one)]\n"
        "sys.meta_path[:] = [one for one in sys.meta_path if not type(one).__module__.startswith('_')]\n"
        f"site.addsitedir({place!r})\nsys.path.append({str(late)!r})\nexec(open({str(script)!r}).read())\n"
    )
    lines = finds(run("-c", start))
    assert lines[1:3] == OURS[1:3] and lines[0].endswith("site/deepspeed/__init__.py")
    assert finds(run("-c", start, path=other))[1:3] == ["0.18.0", INSTALLED]
    version_first = "import importlib.metadata as m\nassert m.version('deepspeed') != ''\n"
    assert finds(run("-c", start.replace("exec(", f"{version_first}exec(")))[2] == OURS[2]


def test_one_module_has_two_names(script: Path) -> None:
    script.write_text(
        "import deepspeed.ops.adam as one, zcomm.compat.deepspeed.ops.adam as other, importlib.util, deepspeed\n"
        "assert one is other and deepspeed.ops.adam is one and one.__spec__.name == other.__name__\n"
        "assert importlib.util.find_spec('deepspeed.utils') is not None\n"
        "assert importlib.util.find_spec('deepspeed.no_such') is None\n"
        "try:\n    import deepspeed.no_such\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    assert finds(run("-m", "zcomm.compat.deepspeed", script)) == ["No module named 'deepspeed.no_such'"]


def test_install_after_another_one_was_imported_is_an_error(other: Path) -> None:
    program = "import deepspeed\nfrom zcomm.compat.deepspeed import install\ninstall()"
    done = run("-c", program, path=other)
    assert "is imported already: call zcomm.compat.deepspeed.install() before" in done.stderr


def test_install_twice_in_a_notebook(script: Path) -> None:
    program = f"from zcomm.compat.deepspeed import install\ninstall(); install()\nexec(open({str(script)!r}).read())"
    assert finds(run("-c", program)) == [*OURS, "[]"]


def test_the_metadata_has_the_version_of_the_names() -> None:
    (info,) = Path(alias.folder()).glob("*.egg-info")
    assert info.name == "deepspeed.egg-info"  # a version in its name would let pip remove the folder
    assert f"Version: {__version__}\n" in (info / "PKG-INFO").read_text()
    found = importlib.metadata.Distribution.at(info)
    assert (found.read_text("top_level.txt") or "").split() == ["deepspeed"]  # packages_distributions() reads it


@pytest.mark.slow
def test_pip_installs_a_deepspeed_beside_the_alias(tmp_path: Path) -> None:
    """pip finds the alias's metadata and removes it first: it lists no files, so zcomm's files are kept."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True, timeout=100)
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    ours = packages / "zcomm" / "compat" / "site"
    shutil.copytree(alias.folder(), ours)
    (packages / "alias.pth").write_text(f"{ours}\n")
    name, info = "deepspeed-0.18.0-py3-none-any.whl", "deepspeed-0.18.0.dist-info"
    files = {
        "deepspeed/__init__.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.18.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for file, content in {**files, f"{info}/RECORD": "".join(f"{file},,\n" for file in files)}.items():
            wheel.writestr(file, content)

    def pip(*words: str) -> str:
        env = {key: value for key, value in environment_of_no_job().items() if key != "PYTHONPATH"}
        command = [str(python), "-m", "pip", "--disable-pip-version-check", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    before = sorted(ours.rglob("*"))
    assert f"Version: {__version__}" in pip("show", "deepspeed")
    pip("install", "--no-deps", "--no-index", str(tmp_path / name))
    assert "Version: 0.18.0" in pip("show", "deepspeed") and (packages / "deepspeed").is_dir()
    pip("uninstall", "-y", "deepspeed")
    assert f"Version: {__version__}" in pip("show", "deepspeed")
    assert "No files were found to uninstall" in pip("uninstall", "-y", "deepspeed")
    assert sorted(ours.rglob("*")) == before
