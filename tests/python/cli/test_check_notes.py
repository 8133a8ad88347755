"""The check of notes finds names that are defined twice, names that are not defined, and no others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import check_notes

DEFINITIONS = {
    "src/a.hpp": "// A: a part.\n//\n// [Note: life] step() runs it.\n/// One more. [Note: doorbell]\n/// A byte.\n",
    "python/a.py": '"""A part.\n\n[Note: two words] ``x`` is kept. [Note: end] Then\nit ends.\n"""\n',
}
CITES = {
    "life": "x = 1  # see [Note: life]\n",
    "doorbell": "# ([Note:\n# doorbell])\n",
    "two words": "# as in [Note: two\n# words], too\n",
    "end": "# [Note: end] in a.py\n",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_name_that_is_defined_once_may_be_cited(tmp_path: Path) -> None:
    write(tmp_path, {**DEFINITIONS, **{f"tests/{number}.py": text for number, text in enumerate(CITES.values())}})
    assert check_notes.findings(tmp_path) == []


@pytest.mark.parametrize("name", CITES)
def test_a_name_without_a_definition_is_found(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"tests/a.py": CITES[name]})
    assert check_notes.findings(tmp_path) == [f"tests/a.py:1: [Note: {name}] is defined nowhere"]


def test_a_second_definition_is_found(tmp_path: Path) -> None:
    write(tmp_path, {**DEFINITIONS, "src/b.hpp": "//\n// [Note: life] Blocks move.\n"})
    assert check_notes.findings(tmp_path) == ["src/b.hpp:2: [Note: life] is defined in src/a.hpp:3 already"]
