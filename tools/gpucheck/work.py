"""Work of the parts that are not benches: build, import, tests, sanitizers. Each runs in the part's own process."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from gpucheck.parts import ROOT, Place
from gpucheck.runner import ROWS, SKIPPED

# Tests that use a GPU if there is one, by parts of their names. All tests of the device floor do.
_NAMES = ["cuda", "device", "stream_"]
_KERNELS = {"test_device": ["cuda", "machines"], "test_optim": ["cuda", "stream_"]}
# Files of tests/python, or tests in them ("FILE::TEST"), that have not run on a GPU. They run before all benches.
NEWEST = ["zero/device/test_gpu_newest.py", "device/test_gpu_programs.py"]
TRAINING, RANKS = "zero/device/test_gpu.py", "zero/device/test_gpu_ranks.py"  # long ones
LAST = "device/test_cuda_ipc.py"  # kills a rank that shares the GPU
_BUILD_TOOLS = {"scikit_build_core": "scikit-build-core>=0.11", "pybind11": "pybind11>=2.13"}
_PROGRAMS = {"cmake": "cmake>=3.24", "ninja": "ninja"}
_NEEDED = {"numpy": "numpy", "safetensors": "safetensors", "psutil": "psutil", "rich": "rich", "pynvml": "nvidia-ml-py"}


def row(**columns: Any) -> None:
    """Write one row of the result."""
    if ROWS in os.environ:
        with open(os.environ[ROWS], "a", encoding="utf-8") as stream:
            stream.write(json.dumps(columns) + "\n")


def skip(why: str) -> NoReturn:
    print(why)
    sys.exit(SKIPPED)


def call(command: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command and show its output as it comes; return exit code and output.

    Half a line is shown, too, so that a command that is killed at the limit has shown its last action.
    """
    print("$", " ".join(command), flush=True)
    said = []
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert isinstance(process.stdout, io.BufferedReader)
        while chunk := process.stdout.read1():
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            said.append(chunk)
    return process.returncode, b"".join(said).decode(errors="replace")


def cuda_program(name: str) -> str | None:
    """Return the path of a program of the CUDA toolkit, or None.

    It is in CUDA_HOME (or CUDA_PATH), else on the PATH, else, if neither variable is set, in /usr/local/cuda*.
    """
    given = [Path(os.environ[key]) / "bin" / name for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    usual = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    on_path = shutil.which(name)
    places = [*given, *([Path(on_path)] if on_path else []), *(home / "bin" / name for home in usual if not given)]
    return next((str(program) for program in places if program.exists()), None)


def build(place: Place) -> int:
    """Install this tree into ``site`` with pip.

    The C++ tests use the same build folder (``build_tests``); one that does not compile does not affect the others.
    """
    nvcc = cuda_program("nvcc")
    if nvcc is None:
        print("no nvcc: not in CUDA_HOME (or CUDA_PATH), nor on the PATH or in /usr/local/cuda")
        return 1
    place.site.mkdir(parents=True, exist_ok=True)
    tools = place.tools
    missing = [package for module, package in _BUILD_TOOLS.items() if importlib.util.find_spec(module) is None]
    missing += [package for program, package in _PROGRAMS.items() if shutil.which(program) is None]
    needed = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    for packages, target in ((missing, tools), (needed, place.site)):
        if packages and call([*pip, "--target", str(target), *packages])[0]:
            print(f"not here, and pip could not install them: {', '.join(packages)}")
            return 1
    where = ["--no-build-isolation", "--no-deps", "--upgrade", "--target", str(place.site)]
    how = ["-C", f"build-dir={place.cmake}", "-C", "build.targets=_core;testing_module"]
    how += ["-C", "cmake.define.ZCOMM_TESTING=ON"]  # the tests' recorder of devices, next to the package
    code, _ = call([*pip, "-v", *where, *how, "."], _build_env(place, nvcc))
    return code


def _build_env(place: Place, nvcc: str) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(place.tools / "bin"), str(Path(nvcc).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(place.tools), os.environ.get("PYTHONPATH", "")])),
        "CUDACXX": nvcc,
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("JOBS") or str(len(os.sched_getaffinity(0))),
        "CMAKE_ARGS": f"-DZCOMM_CUDA={os.environ.get('ZCOMM_CUDA', 'ON')} -DZCOMM_TESTS=ON "
        f"-DCMAKE_CUDA_ARCHITECTURES={os.environ.get('CUDAARCHS', 'native')}",
    }


def build_tests(place: Place) -> int:
    """Build the C++ tests; one that does not compile is left out, and 1 is returned. One part at a time builds."""
    env = _build_env(place, cuda_program("nvcc") or "nvcc")
    cmake = shutil.which("cmake", path=env["PATH"]) or "cmake"
    place.work.mkdir(parents=True, exist_ok=True)
    with (place.work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _ = call([cmake, "--build", str(place.cmake), "--", "-k", "0"], env)
    return 1 if code else 0


def see(place: Place) -> int:
    """Check that zcomm and torch both see a device, and show the doctor's findings."""
    place.scratch.mkdir(parents=True, exist_ok=True)
    program = (
        "import json, torch, zcomm; from zcomm import _core as c; print('SEEN', json.dumps([zcomm.__file__, "
        "c.cuda_info(), c.cuda_available(), torch.__version__, torch.version.cuda, torch.cuda.is_available(), "
        "torch.cuda.get_device_name(0) if torch.cuda.is_available() else '']))"
    )
    code, said = call([sys.executable, "-c", program])
    if code:
        return code
    seen = next(line.removeprefix("SEEN ") for line in said.splitlines() if line.startswith("SEEN "))
    where, info, ours, torch, torch_cuda, theirs, name = json.loads(seen)
    if not Path(where).is_relative_to(place.site):
        print(
            f"{where} is imported, and not what was built here: another zcomm is installed (editable?) in this Python"
        )
        return 1
    row(table="Versions", zcomm=info, **{"zcomm sees it": ours}, torch=torch, **{"torch's CUDA": torch_cuda}, gpu=name)
    call([sys.executable, "-m", "zcomm.cli", "doctor", "--dir", str(place.scratch)])
    if not (ours and theirs):
        print(f"zcomm ({info}) sees a device: {ours}; torch ({torch}) sees one: {theirs}")
        return 1
    return 0


def programs(place: Place) -> list[Path]:
    return sorted(path for path in (place.cmake / "tests/cpp").glob("test_*") if os.access(path, os.X_OK))


def cpp_tests(place: Place) -> int:
    """Run all tests of the device floor, and the other floors' tests that use a GPU."""
    worst = build_tests(place)
    if not (found := programs(place)):
        print(f"no test programs in {place.cmake}/tests/cpp")
        return 1
    for program in found:
        chosen = [] if program.name == "test_device" else _NAMES
        code, said = call([str(program), *chosen])
        counts = re.search(r"(\d+) passed, (\d+) failed", said)
        if counts is not None and code == 2 and counts[1] == counts[2] == "0":
            continue  # this floor has no such test
        passed, failed = counts.groups() if counts else ("?", f"ended with {code}")
        row(table="C++ tests", program=program.name, passed=passed, failed=failed)
        worst = max(worst, 1 if code else 0)
    return worst


def marked() -> list[str]:
    """Return the files of tests/python that have tests marked gpu: the others are not imported, which takes time."""
    tests = ROOT / "tests/python"
    files = sorted(tests.rglob("test_*.py"))
    return [str(f.relative_to(tests)) for f in files if "pytest.mark.gpu" in f.read_text(encoding="utf-8")]


def others() -> list[str]:
    """Return the marked files without a separate part; LAST is the last of them."""
    found = [name for name in marked() if name not in (TRAINING, RANKS, *NEWEST)]
    return sorted(found, key=lambda name: name == LAST)


def python_tests(place: Place, files: Sequence[str]) -> int:
    """Run those marked gpu in ``files`` of tests/python."""
    if importlib.util.find_spec("pytest") is None or not files:
        skip("pytest is not installed" if files else "no test is named")
    wanted = [f"tests/python/{name}" for name in files]
    # A hook of autograd that hangs never comes back to pytest's alarm, but all threads' stacks are shown.
    words = ["-v", "--durations=15", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=40"]
    words += ["-o", "faulthandler_exit_on_timeout=false"]  # the project's setting would end all other tests, too
    tests = ROOT / "tests/python"
    folders = [str(tests / "support"), *sorted({str(file.parent) for file in tests.rglob("test_*.py")})]
    # The machine's own plugins are not needed; tests find each other's helpers without the project's settings, too.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    code, said = call([sys.executable, "-m", "pytest", *wanted, "-m", "gpu", *words, *_without_settings()], env)
    lines = [line for line in said.splitlines() if line.strip()]
    row(table="Python tests", summary=lines[-1] if lines else "")
    if code == 5:
        skip("no Python test is marked gpu")
    if code == 0 and not re.search(r"\d+ passed", said):
        print("not one test ran: see why they were skipped")
        return 1
    return code


def _without_settings() -> list[str]:
    """Return arguments without pyproject's settings for a pytest before 9, which would refuse them."""
    version = metadata.version("pytest")
    if int(version.split(".")[0]) >= 9:
        return []
    print(f"pytest {version} does not know the project's settings: it runs without them")
    return ["-c", os.devnull, "--rootdir", "tests/python", "-W", "ignore::pytest.PytestUnknownMarkWarning"]


def sanitize(place: Place, tool: str) -> int:
    """Run the kernels' tests; return 1 for a finding, and for a program that gave no summary."""
    program = cuda_program("compute-sanitizer")
    if program is None:
        skip("no compute-sanitizer (it is in the CUDA toolkit)")
    worst = build_tests(place)
    for name, chosen in _KERNELS.items():
        test = place.cmake / "tests/cpp" / name
        few = {**os.environ, "ZCOMM_TEST_FEW": "1"}  # each launch costs 10 to 50 times as much
        code, said = call([program, "--tool", tool, "--error-exitcode", "86", str(test), *chosen], few)
        if "device not supported" in said.lower():
            skip("compute-sanitizer does not support the device here (seen under gVisor)")
        if "0 passed, 0 failed" in said:
            continue  # no such test
        summary = "; ".join(re.findall(r"(?:ERROR|RACECHECK|LEAK) SUMMARY: (.*)", said))
        row(table="compute-sanitizer", tool=tool, program=name, summary=summary or f"ended with {code}")
        worst = max(worst, 0 if code == 0 and summary else 1)
    return worst


WORK: dict[str, Callable[[Place], int]] = {
    "build": build,
    "import": see,
    "python-newest": lambda place: python_tests(place, NEWEST),
    "cpp-tests": cpp_tests,
    "python-training": lambda place: python_tests(place, [TRAINING]),
    "python-ranks": lambda place: python_tests(place, [RANKS]),
    "python-tests": lambda place: python_tests(place, others()),
    "memcheck": lambda place: sanitize(place, "memcheck"),
    "racecheck": lambda place: sanitize(place, "racecheck"),
}


def about() -> dict[str, Any]:
    """Describe the machine without importing torch or zcomm."""
    import platform
    import time

    asked = "name,driver_version,memory.total"
    line = _output(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]).splitlines()
    name, driver, memory = [*line[0].split(", "), "", "", ""][:3] if line else ("", "", "")
    cpu = [
        text.partition(":")[2].strip() for text in _read("/proc/cpuinfo").splitlines() if text.startswith("model name")
    ]
    nvcc = cuda_program("nvcc")
    versions = {each.metadata["Name"]: each.version for each in metadata.distributions() if each.metadata["Name"]}
    nccl = [version for package, version in versions.items() if package.startswith("nvidia-nccl")]
    return {
        "gpu": f"{len(line)} x {name}, {memory}" if line else "",
        "driver": driver,
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": versions.get("torch", ""),
        "deepspeed": versions.get("deepspeed", ""),
        "nccl": nccl[0] if nccl else "",
        "cuda": next(iter(re.findall(r"release ([\d.]+)", _output([nvcc, "--version"]))), "") if nvcc else "",
        "revision": revision(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


# Sources that are built and tested. bench/ is not among them, so a run may resume after a bench was mended.
SOURCES = ("src", "include", "python", "tests", "cmake", "CMakeLists.txt", "pyproject.toml")


def revision(root: Path = ROOT) -> str:
    """Return git's revision, if there is a repository, and a hash of the sources.

    The hash distinguishes trees without git, too, and two dirty trees.
    """
    total = hashlib.sha256()
    for top in map(root.joinpath, SOURCES):
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            known = not path.is_dir() and "__pycache__" not in path.parts and path.suffix not in (".so", ".pyc")
            if known and path.is_file():
                name, text = str(path.relative_to(root)).encode(), path.read_bytes()
                total.update(b"%d %d " % (len(name), len(text)) + name + text)
    said = _output(["git", "-C", str(root), "describe", "--always", "--dirty"]).strip()
    return f"{said or 'no git'}, sources {total.hexdigest()[:12]}"


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
