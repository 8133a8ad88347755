"""Starter of the ranks of one variant of bench/one_gpu_ranks: `ranks.py PROGRAM ARGUMENTS...`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import launch


def main() -> int:
    program, *words = sys.argv[1:]
    sys.argv = [program, *words]  # what start_ranks runs again
    world = int(words[words.index("-np") + 1]) if "-np" in words else 2
    limit = float(words[words.index("--timeout") + 1]) if "--timeout" in words else 40.0
    return launch.start_ranks(world, limit)


if __name__ == "__main__":
    sys.exit(main())
