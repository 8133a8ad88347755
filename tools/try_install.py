#!/usr/bin/env python3
"""Try `pip install .` of this checkout, without CUDA code, on the oldest and the newest CPython that can be had.

Each is tried in a fresh virtual environment: torch, the package, `import zcomm` outside of the checkout, and two ranks
that train one step. An interpreter counts if it runs, and if pip finds torch for it. If the torch of .venv is without
CUDA, exactly that torch must be found, so that no run of CI loads several GB. The tool prints each version that it
leaves out.

Usage: tools/try_install.py [--python VERSION_OR_PATH ...]. TORCH_INDEX: pip's index for torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
BUILD = ROOT / "build/install"  # the core's objects serve all versions; only the bindings are compiled for each
TRAIN = """
import torch, zcomm
comm = zcomm.init()
model = torch.nn.Linear(64, 64)
opt = zcomm.ZeroOptimizer(model, "adamw", lr=1e-3, stage=2)
model(torch.ones(4, 64)).square().mean().backward()
opt.step()
print(f"rank {comm.rank} of {comm.world_size}: one step, norm {opt.grad_norm is None or float(opt.grad_norm) > 0}")
opt.close()
"""


def interpreters(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield version and path of each interpreter that runs: on the PATH, or among pyenv's."""
    for name in names:
        root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        own = shutil.which(name if "/" in name else f"python{name}")
        for path in (own, *map(str, sorted(root.glob(f"versions/{name}.*/bin/python3")))):
            if path and subprocess.run([path, "-c", "import ssl, venv"], capture_output=True).returncode == 0:
                yield name, path
                break
        else:
            print(f"python{name}: not on this machine", flush=True)


def torch_of_project() -> list[str]:
    """Return pip's words for torch. A torch without CUDA in .venv is asked for by its version."""
    index = os.environ.get("TORCH_INDEX")
    if index:
        return ["--index-url", index, "torch>=2.6"]
    found = subprocess.run(
        [ROOT / ".venv/bin/python", "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
    ).stdout.strip()
    return [f"torch=={found}" if found.endswith("+cpu") else "torch>=2.6"]


def pip(python: Path, *words: str, check: bool = True) -> bool:
    """Run pip. Raises: CalledProcessError if ``check``."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *words]
    return subprocess.run(command, check=check, capture_output=not check, cwd=ROOT).returncode == 0


def environment(version: str, path: str, folder: Path) -> Path | None:
    """Create an environment with torch; return its interpreter, or None if the version has no torch."""
    venv = folder / version.replace("/", "_")
    subprocess.run([ROOT / "tools/make_venv.sh", venv, path], check=True)
    words = torch_of_project()
    if pip(venv / "bin/python", *words, check=False):
        return venv / "bin/python"
    print(f"python{version}: no {words[-1]} for it: not tried", flush=True)
    shutil.rmtree(venv)
    return None


def attempt(version: str, python: Path, folder: Path) -> None:
    """Install the checkout and use it. Raises: CalledProcessError."""
    begin = time.monotonic()
    pip(python, f"--config-settings=build-dir={BUILD}", "--config-settings=cmake.define.ZCOMM_CUDA=OFF", str(ROOT))
    script = folder / "train.py"
    script.write_text(TRAIN)
    words = "import zcomm; print(zcomm.__version__, zcomm.__file__)"
    subprocess.run([python, "-c", words], check=True, cwd=folder)
    subprocess.run([python.parent / "zcomm", "run", "-n", "2", script], check=True, cwd=folder)
    print(f"python{version}: pip install . works ({time.monotonic() - begin:.0f} s)", flush=True)


def main() -> int:
    """Try the oldest and the newest; return 0, or 1 if none can be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", metavar="VERSION_OR_PATH", help="try exactly these")
    given = parser.parse_args().python
    found = list(interpreters(given or list(VERSIONS)))
    with tempfile.TemporaryDirectory(prefix="zcomm-install-") as name:
        folder = Path(name)
        tried: list[str] = []
        for order in (found,) if given else (found, found[::-1]):
            for version, path in order:
                if version in tried:
                    break
                python = environment(version, path, folder)
                if python is not None:
                    attempt(version, python, folder)
                    tried.append(version)
                    if not given:
                        break
    if len(tried) < 2:
        print(f"only {len(tried)} version of Python could be tried: {', '.join(tried) or 'none'}")
    return 0 if tried else 1


if __name__ == "__main__":
    sys.exit(main())
