"""Folders of the source tree that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BENCH, DOCS, EXAMPLES = ROOT / "bench", ROOT / "docs", ROOT / "examples"
SUPPORT = Path(__file__).resolve().parent
