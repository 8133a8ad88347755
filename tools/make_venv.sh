#!/bin/sh
# make_venv.sh DIR [PYTHON]: a virtual environment with pip, as a plain user, on a Debian or Ubuntu as it comes.
#
# Debian ships python3 without ensurepip (package python3-venv), so four ways are tried in turn: venv itself,
# virtualenv, the system's pip, and pip's own bootstrap script. Nothing is written outside of DIR.
set -eu

dir=$1
python=${2:-python3}

fail() {
  echo "make_venv: $1" >&2
  exit 1
}
has_pip() { "$dir/bin/python" -m pip --version >/dev/null 2>&1; }

command -v "$python" >/dev/null 2>&1 || fail "no '$python' found. On Debian or Ubuntu: sudo apt install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$("$python" --version) is too old; zcomm needs Python >= 3.10 (choose another by: make PYTHON=/path/to/python3)"
has_pip && exit 0

rm -rf "$dir"
if "$python" -c 'import ensurepip' 2>/dev/null && "$python" -m venv "$dir" && has_pip; then exit 0; fi
rm -rf "$dir"
if "$python" -m virtualenv "$dir" >/dev/null 2>&1 && has_pip; then exit 0; fi
rm -rf "$dir"
"$python" -m venv --without-pip "$dir" || fail "'$python -m venv' does not work. On Debian or Ubuntu: sudo apt install python3-venv"
if "$python" -m pip --python "$dir/bin/python" install -q pip >/dev/null 2>&1 && has_pip; then exit 0; fi
echo "make_venv: python3-venv is not installed; fetching pip from bootstrap.pypa.io" >&2
"$dir/bin/python" - <<'PY' && has_pip && exit 0
import pathlib, runpy, sys, tempfile, urllib.request

with tempfile.TemporaryDirectory() as folder:
    script = pathlib.Path(folder, "get-pip.py")
    script.write_bytes(urllib.request.urlopen("https://bootstrap.pypa.io/get-pip.py", timeout=60).read())
    sys.argv = [str(script), "-q"]
    runpy.run_path(str(script), run_name="__main__")
PY
rm -rf "$dir"
fail "pip could not be had. On Debian or Ubuntu: sudo apt install python3-venv"
