"""Parts of `bench/coll.py`: operations, exact results, roofs, peers, one row, tables, and the goals' verdicts."""

from __future__ import annotations
