"""The check of language finds each kind of bad line, and accepts good lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import check_language
import commit_subjects
import counted_words

PERSON, NONE = "wh" + "o", "no" + "body"  # split, because the check reads this file, too
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
    assert check_language.main(tmp_path) == 1
    assert capsys.readouterr().out.startswith(f"{name}:{line}: ")


def test_good_lines_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in GOOD.items():
        write(tmp_path, name, text)
    assert check_language.main(tmp_path) == 0
    assert capsys.readouterr().out == ""


WORDS = " ".join(["word"] * 24)  # with one more, a sentence of 25


SHORT = WORDS[:-5]
SHORT_SENTENCES = {
    "stop": f"Return {WORDS}. Return {WORDS}.",
    "paragraph": f"Return {WORDS}\n\n{WORDS}",
    "list": f"Return {WORDS}\n* {WORDS}\n- {WORDS}",
    "fields": f"Return {WORDS}.\n\nnext: {SHORT}\na_b: {SHORT}. fp16 {SHORT}.",
    "table": f"{WORDS}:\n  one    {WORDS}\n  two    {WORDS}",
    "usage": f"Run.\n\n  bench/a.py {WORDS}\n  python3 a.py {SHORT}\n  mpirun {WORDS}\n  zcomm run {SHORT}\n\nMore.",
    "heading": f"Return.\n\n[Note: a heading] Return {WORDS}.",
}


@pytest.mark.parametrize("kind", SHORT_SENTENCES)
def test_sentences_end_at_stops_and_in_lists_and_tables(kind: str, tmp_path: Path) -> None:
    write(tmp_path, "python/a.py", f'"""{SHORT_SENTENCES[kind]}\n"""\n')
    assert list(check_language.check(tmp_path)) == []


@pytest.mark.parametrize("joint", [" ", "; ", ": ", ", ", "\n", "\n  ", ", as [Note: x] has it, ", "\npython3 "])
def test_a_long_sentence_fails(joint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "python/a.py", f'def f():\n    """Return {WORDS}{joint}word."""\n')
    assert check_language.main(tmp_path) == 1
    found = capsys.readouterr().out
    assert found.startswith("python/a.py:2: ") and "Return word word word word word ..." in found
    assert len(found.splitlines()) == 1


WHAT, WHERE, NEXT_TO, ONLY, ALSO = "wh" + "at", "wh" + "ere", "be" + "side", "al" + "one", "so " + "is"
COUNTED = {
    "noun": ("docs/a.md", f"It returns {WHAT} is pending.\n", "text"),
    "condition": ("docs/a.md", f"It raises {WHERE} the drive is full.\n", "text"),
    "archaic": ("README.md", f"zcomm {NEXT_TO} torch.\n", "text"),
    "also": ("src/net/a.cpp", f"int x;  // and {ALSO} y\n", "text"),
    "docstring": ("python/zcomm/a.py", f'"""Words {ONLY}."""\n', "text"),
    "comment": ("python/zcomm/a.py", f"x = 1  # {WHAT} is left\n", "text"),
    "command": ("docs/a.md", f"```sh\nls  # {WHAT} is left\n```\n", "text"),
    "error": ("python/zcomm/a.py", f"raise ValueError(f'{{x}}: {WHAT} is left')\n", "messages"),
    "error of the core": ("src/net/a.cpp", f'throw Error("{WHAT} is left");\n', "messages"),
}
UNCOUNTED = {
    "question": ("docs/a.md", f"{WHAT.capitalize()} does\na rank hold?\n"),
    "place": ("docs/a.md", f"The folder {WHERE} it lies, and it says {WHERE}.\n"),
    "code on a page": ("docs/a.md", f"`torch.{WHERE}` and\n```python\n{WHERE}(x)\n```\n"),
    "code": ("python/zcomm/a.py", f"{WHERE} = {{'{WHAT}': f'value {{{WHAT}}}'}}\n"),
    "exception": ("src/net/a.cpp", f"log(error.{WHAT}());\n"),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_a_breach_over_the_budget_fails_and_a_fall_lowers_it(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, text, prose = COUNTED[kind]
    write(tmp_path, "tools/language_counts.json", '{"messages": {}, "text": {}}')
    write(tmp_path, name, text)
    assert check_language.main(tmp_path) == 1
    assert f" in {prose}, at most 0" in capsys.readouterr().out
    counts = counted_words.count(check_language.breaches(tmp_path))
    counted_words.write(tmp_path, counts)
    assert check_language.main(tmp_path) == 0
    write(tmp_path, name, "\n")
    assert check_language.main(tmp_path) == 0 and "--update" in capsys.readouterr().out
    assert check_language.main(tmp_path, update=True) == 0
    assert counted_words.read(tmp_path) == {"messages": {}, "text": {}}


@pytest.mark.parametrize("kind", UNCOUNTED)
def test_questions_places_and_code_are_not_counted(kind: str, tmp_path: Path) -> None:
    write(tmp_path, *UNCOUNTED[kind])
    assert list(check_language.breaches(tmp_path)) == []


@pytest.mark.parametrize("subject", ["zero: poison ranks", "coll, net: embed a page", 'Revert "a b"', "ci: pass -j 2"])
def test_a_subject_is_an_imperative(subject: str) -> None:
    assert commit_subjects.fault_of(subject) is None


@pytest.mark.parametrize(
    "subject",
    ["zero: " + "w" * 67, "Poison ranks", "zero: poisons ranks", "zero: a rank", "zero: Pad", "zero: pad it."],
)
def test_another_subject_has_a_fault(subject: str) -> None:
    assert commit_subjects.fault_of(subject)


def test_subjects_of_a_shallow_clone_are_checked_and_an_export_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_subjects, "FROM", 0)
    assert list(commit_subjects.check(tmp_path)) == []
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    for subject in ("zero: poisons ranks", "zero: poison ranks", "zero: a rank"):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", subject], check=True)
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{tmp_path}", str(shallow)], check=True)
    assert len(list(commit_subjects.check(tmp_path))) == 2
    assert [line.rpartition(": ")[2] for line in commit_subjects.check(shallow)] == ["a rank"]
    (tmp_path / "export").mkdir()
    assert list(commit_subjects.check(tmp_path / "export")) == []
