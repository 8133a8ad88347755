"""tools/check_callbacks.py finds callables that are plugged into other objects, and no others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import check_callbacks

FOUND = [
    "other.act = lambda: None",
    "other.act = self.method",
    "other.part.act, other.name = self.method, 1",
    "other.act = partial(function, 1)",
    "other.act = function if self.ready else None",
    "setattr(other, 'act', self.method)",
]
LEFT = [
    "self.act = self.method",
    "other.name = self.name",
    "other.act = self.size",
    "other.owner = self",
    "call(self.method)",
]
SOURCE = """
def function(): ...
class One:
    @property
    def size(self): ...
    def method(self): ...
    def run(self, other):
        {}
"""


@pytest.mark.parametrize(("line", "count"), [*((line, 1) for line in FOUND), *((line, 0) for line in LEFT)])
def test_what_is_found(line: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(SOURCE.format(line))
    assert len(list(check_callbacks.findings(tmp_path / "one.py"))) == count


def test_an_entry_without_its_assignment_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "python/zcomm").mkdir(parents=True)
    (tmp_path / "python/zcomm/one.py").write_text(SOURCE.format(FOUND[0]))
    monkeypatch.setattr(check_callbacks, "ALLOWED", {"python/zcomm/one.py: other.act"})
    assert check_callbacks.main(tmp_path) == 0
    monkeypatch.setattr(check_callbacks, "ALLOWED", {"python/zcomm/one.py: gone.act"})
    assert check_callbacks.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "python/zcomm/one.py:8: a callable is assigned to other.act: give it to a constructor",
        "tools/check_callbacks.py: python/zcomm/one.py: gone.act is allowed, and not there any more",
    ]
