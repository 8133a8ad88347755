"""Growth of processes and folders from episode to episode."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from soaking.rank import Footprint

WARM = 6  # episodes after which a process has made its one-time allocations
MEMORY_MB = 24.0  # permitted growth from middle to end, because allocators do not free everything
FOREIGN = ("pymp-", "torchinductor_")  # of multiprocessing and torch, which live as long as their processes


def files_left(folder: Path) -> list[str]:
    """List forbidden remains of an episode: swap folders, half checkpoints."""
    return sorted(
        str(path.relative_to(folder))
        for pattern in ("*zcomm-swap-*", "*.saving-*", "*.tmp*")
        for path in folder.rglob(pattern)
    )


def outside(temporary: Path) -> set[str]:
    """List names of possible remains in /dev/shm, and in the ranks' folder for temporary files."""
    shm = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "zcomm" in name}
    own = temporary / f"zcomm-{os.getuid()}"
    paths = {*temporary.iterdir(), *(own.iterdir() if own.exists() else ())} - {own, own / "pages"}  # of `zcomm top`
    return shm | {str(path) for path in paths if not path.name.startswith(FOREIGN)}


@dataclass
class Growth:
    """Footprints of each process that lives for many episodes."""

    seen: dict[int, list[Footprint]] = field(default_factory=dict)  # by process id

    def add(self, pid: int, footprint: Footprint | None) -> None:
        if footprint is not None:
            self.seen.setdefault(pid, []).append(footprint)

    def last(self, pids: list[int]) -> str:
        """Return descriptors and memory of the first of these processes that has been seen."""
        prints = next((self.seen[pid] for pid in pids if pid in self.seen), [])
        return f", {prints[-1].descriptors} descriptors, {prints[-1].resident_mb:.0f} MB" if prints else ""

    def verdicts(self) -> list[str]:
        """Name each grown resource in a line."""
        found = []
        for pid, prints in self.seen.items():
            if len(prints) < 2 * WARM:
                continue
            early, late = prints[WARM : WARM + WARM // 2], prints[-WARM // 2 :]
            for name, room in (("descriptors", 2), ("threads", 2)):
                before, after = (min(getattr(p, name) for p in part) for part in (early, late))
                if after > before + room:
                    found.append(f"process {pid}: {name} grew from {before} to {after} in {len(prints)} episodes")
            middle = len(prints) // 2
            before_mb = min(p.resident_mb for p in prints[middle - 2 : middle + 2])
            after_mb = min(p.resident_mb for p in prints[-4:])
            if after_mb > before_mb + MEMORY_MB:
                found.append(
                    f"process {pid}: memory grew from {before_mb:.0f} to {after_mb:.0f} MB in {middle} episodes"
                )
        return found

    def table(self) -> list[str]:
        """Return the first, middle and last footprint of each process."""
        rows = []
        for pid, prints in self.seen.items():
            if len(prints) > 2:
                shown = [prints[0], prints[len(prints) // 2], prints[-1]]
                cells = " ".join(f"{p.descriptors:>5} {p.threads:>4} {p.resident_mb:>7.1f}" for p in shown)
                rows.append(f"  {pid:>8} {len(prints):>9} {cells}")
        return rows
