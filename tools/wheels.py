"""Build zcomm's wheels into dist/, check them, and note the revision that they are of.

``make wheel`` runs it. There is one wheel per CPython (``--python 3.10 3.11 ...``), and one of the alias distribution
zcomm-deepspeed. A CPython that is not installed is named and left out. Each is built from a copy of what git has, so a
file that is not committed is in none. auditwheel says which glibc a wheel needs and gives it its manylinux tag.

The C++ runtime is linked into the extension, as the compiler's is newer than that of the oldest system served.
All is compiled again for another Python: scikit-build-core clears a build folder of another build environment.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
LARGEST_NBYTES = 20 * 2**20
CUDA_CODE = "80-real;90-real;100"  # the last one's PTX serves later GPUs
CUDA = "ON" if shutil.which(os.environ.get("CUDACXX", "nvcc")) else "AUTO"  # also on a machine without a GPU


def main() -> int:
    """Build and check all wheels; return 0, or 1 if one is too large or none could be built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="VERSION", help="of CPython (default: all)")
    versions = parser.parse_args().python
    DIST.mkdir(exist_ok=True)
    for old in (*DIST.glob("zcomm*.whl"), DIST / "REVISION"):
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="zcomm-wheel-") as folder:
        source = _copy_of_revision(Path(folder))
        built = []
        for version in versions:
            python = _python(version)
            if python is None:
                print(f"python{version}: not installed here, left out", flush=True)
                continue
            began = time.monotonic()
            wheel = _build(python, source, Path(folder) / f"raw-{version}")
            print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {time.monotonic() - began:.0f} s", flush=True)
            built.append(wheel)
        if not built:
            print("no wheel was built: none of these Pythons is installed", file=sys.stderr)
            return 1
        _pip(sys.executable, "wheel", "--no-deps", "-w", str(DIST), str(source / "packaging/zcomm-deepspeed"))
    large = [wheel.name for wheel in built if wheel.stat().st_size > LARGEST_NBYTES]
    if large:
        print(f"larger than {LARGEST_NBYTES >> 20} MiB: {', '.join(large)}", file=sys.stderr)
        return 1
    (DIST / "REVISION").write_text(_git("rev-parse", "HEAD") + "\n")
    return 0


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()


def _copy_of_revision(folder: Path) -> Path:
    """Copy the files of HEAD into ``folder``, and return the copy's path."""
    source = folder / "source"
    source.mkdir()
    archive = folder / "source.tar"
    _git("archive", "--format=tar", f"--output={archive}", "HEAD")
    shutil.unpack_archive(archive, source, "tar", **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    if _git("status", "--porcelain", "--untracked-files=no"):
        print("note: changes that are not committed are in no wheel", flush=True)
    return source


def _python(version: str) -> str | None:
    """Return the interpreter of ``version``, if it runs."""
    name = f"python{version}"
    found = shutil.which(name)
    if found is None or subprocess.run([found, "--version"], capture_output=True).returncode != 0:
        return None
    return found


def _pip(python: str, *words: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", *words, "-q"]
    subprocess.run(command, check=True, env={"CUDAARCHS": CUDA_CODE, "ZCOMM_CUDA": CUDA} | os.environ)


def _build(python: str, source: Path, raw: Path) -> Path:
    """Build the wheel of one Python and put it into dist/ under its manylinux tag. Raises: CalledProcessError."""
    settings = [f"build-dir={ROOT / 'build/wheel'}", "cmake.define.ZCOMM_STATIC_RUNTIME=ON"]
    words = [f"--config-settings={setting}" for setting in settings]
    _pip(python, "wheel", "--no-deps", "-w", str(raw), *words, str(source))
    (wheel,) = raw.glob("zcomm-*.whl")
    repaired = raw / "repaired"
    audit = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(repaired), str(wheel)]
    subprocess.run(audit, check=True, capture_output=True)
    (wheel,) = repaired.glob("zcomm-*.whl")
    return Path(shutil.move(wheel, DIST / wheel.name))


if __name__ == "__main__":
    sys.exit(main())
