"""The check of language finds each kind of bad line, and nothing in a good one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import check_language

PERSON, NONE = "wh" + "o", "no" + "body"  # in parts: the check reads this file, too
BAD = {
    "comment": ("python/a.py", f"x = 1  # {NONE} reads it\n", 1),
    "message": ("python/a.py", f"\n\nraise ValueError('{PERSON} calls this?')\n", 3),
    "name": ("src/a.cpp", f"int {NONE} = 0;\n", 1),
    "capital": ("include/a.hpp", f"/// {PERSON.capitalize()} waits here is woken.\n", 1),
    "phrase": ("bench/a", "#!/usr/bin/env python3\n# the row says" + " so\n", 2),
    "passive": ("docs/a.md", "The rank is" + " said to be lost.\n", 1),
    "page": ("docs/a.md", f"a rank {PERSON}se devices are full\n", 1),
    "reader in code": ("python/a.py", f"# readers {PERSON} know\n", 1),
    "function": ("tools/a.py", 'def f():\n    """What it returns."""\n', 2),
    "class": ("python/a.py", 'class A:\n    """Of a bucket: its parts."""\n', 2),
    "property": ("python/a.py", "class A:\n    @property\n" + '    def f(self):\n        """Where it is."""\n', 4),
    "module": ("tests/a.py", '"""Whether it works."""\n', 1),
    "program": ("bench/a", '#!/usr/bin/env python3\n"""That it works."""\n', 2),
}
GOOD = {
    "python/a.py": '"""Whatever is there; thisness."""\n\n\ndef f():\n    """Return what it was."""\n',
    "docs/a.md": f"This page is for readers {PERSON}se script runs, and users {PERSON} train.\n",
    "bench/a": "#!/bin/sh\n# no Python\n",
    "docs/a.png": NONE,
}


def write(root: Path, name: str, text: str) -> None:
    """Write a file of the tree."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_fails_with_its_place(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, text, line = BAD[kind]
    write(tmp_path, name, text)
    assert check_language.main(tmp_path, allowed=0) == 1
    assert capsys.readouterr().out.startswith(f"{name}:{line}: ")


def test_good_lines_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in GOOD.items():
        write(tmp_path, name, text)
    assert check_language.main(tmp_path, allowed=0) == 0
    assert capsys.readouterr().out == ""


def test_more_long_sentences_than_allowed_fail(tmp_path: Path) -> None:
    words = " ".join(["word"] * 24)
    write(tmp_path, "python/a.py", f'"""Return {words}. Return {words}.\n\n* Return {words}\n* {words}."""\n')
    short = words[:-5]
    write(tmp_path, "python/c.py", f'"""Return {short}.\n\nnext: {short}\na_b: {short}. fp16 {short}."""\n')
    assert check_language.check(tmp_path) == ([], [])
    write(tmp_path, "python/b.py", f'def f():\n    """Return {words}\n    word."""\n')
    assert [(path.name, line) for path, line, _ in check_language.check(tmp_path)[1]] == [("b.py", 2)]
    assert check_language.main(tmp_path, allowed=0) == 1 and check_language.main(tmp_path, allowed=1) == 0
