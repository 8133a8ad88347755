"""A store that loses the key of a rank: an error names the cause, and the rank does not wait forever."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from zcomm.bootstrap import deadlines
from zcomm.bootstrap.meeting import Meeting


@pytest.mark.parametrize("warns", [True, False], ids=["at the warning", "at the deadline"])
def test_a_removed_file_is_named(monkeypatch: pytest.MonkeyPatch, warns: bool) -> None:
    monkeypatch.setattr(deadlines, "WARN_S", 0.2 if warns else 60.0)
    store = dist.HashStore()

    class Removed(Meeting):
        def _look_for_lost(self) -> None:  # as if another rank had removed the file and made it again
            store.delete_key("rank0")

    meeting = Removed(store, 0, 2, time.monotonic() + (60 if warns else 1), "the group's store", 1.0)
    with pytest.raises(RuntimeError, match="the group's store has lost the key that rank 0 wrote: an earlier group"):
        meeting.arrive({})
