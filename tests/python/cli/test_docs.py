"""The documentation's table of environment variables holds every one that the package and the core read."""

from __future__ import annotations

import re

from places import DOCS, ROOT
from zcomm import _core


def test_every_variable_is_in_the_table() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "python" / "zcomm").rglob("*.py"))
    read = {*re.findall(r'\bZCOMM_[A-Z_]+\b(?=[`"=])', sources), *dict(_core.env_variables())}
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    table = set(re.findall(r"^\| `(ZCOMM_[A-Z_]+)` \|", page, re.MULTILINE))
    assert read <= table, f"not in docs/environment.md: {sorted(read - table)}"
