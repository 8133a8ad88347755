"""Folders of the source tree that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BENCH, DOCS, EXAMPLES = ROOT / "bench", ROOT / "docs", ROOT / "examples"
LIBRARIES = Path(__file__).resolve().parent / "libraries"  # scripts of other libraries
