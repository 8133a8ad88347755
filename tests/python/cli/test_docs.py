"""Pages of the documentation that list the package's variables, options of commands, and errors."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import zcomm
from places import DOCS, ROOT
from zcomm import _core

COMMANDS = ROOT / "tools" / "docs" / "commands.py"


def test_every_variable_is_in_the_table() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "python" / "zcomm").rglob("*.py"))
    read = {*re.findall(r'\bZCOMM_[A-Z_]+\b(?=[`"=])', sources), *dict(_core.env_variables())}
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    table = set(re.findall(r"^\| `(ZCOMM_[A-Z_]+)` \|", page, re.MULTILINE))
    assert read <= table, f"not in docs/environment.md: {sorted(read - table)}"


def test_every_error_is_in_the_table() -> None:
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    own = [name for name in zcomm.__all__ if isinstance(getattr(zcomm, name), type)]
    own = [name for name in own if issubclass(getattr(zcomm, name), BaseException)]
    assert len(own) >= 3
    assert [name for name in own if f"| `zcomm.{name}`" not in page] == []


def commands() -> ModuleType:
    """Return the hook that writes the options of commands."""
    spec = importlib.util.spec_from_file_location("docs_commands", COMMANDS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_options_are_written_without_torch_and_the_core() -> None:
    without_packages = [sys.executable, "-I", "-S", str(COMMANDS)]
    done = subprocess.run(without_packages, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n".join(commands().lines()) + "\n"


def test_every_option_of_every_command_is_written() -> None:
    hook = commands()
    sections = dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", "\n".join(hook.lines()), re.DOTALL | re.MULTILINE))
    parsers = [parser for parser, _ in hook.parsers()]
    assert len(parsers) == len(sections) >= 12
    options = 0
    for parser in parsers:
        rows = re.findall(r"^\| (.*?) \| (.*) \|$", sections[parser.prog], re.MULTILINE)
        written = {each.replace("_", "-") for names, _ in rows for each in re.findall(r"`(-[^ `]*)", names)}
        for action in parser._actions:
            if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
                names = {name.replace("_", "-") for name in action.option_strings}
                assert names <= written, f"{parser.prog}: {names}"
                options += bool(action.option_strings)
        assert all(meaning for _, meaning in rows), f"{parser.prog}: an option without a meaning"
    assert options > 80
    assert hook.PLACE in (DOCS / hook.PAGE).read_text(encoding="utf-8")
