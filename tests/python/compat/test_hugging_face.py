"""Accelerate without a GPU: its state gets the job's backend in its constructor; a wrong count of ranks is an error.

tests/programs runs the package itself.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest

from zcomm.compat.deepspeed import comm, hugging_face
from zcomm.compat.deepspeed.launcher import runner


class Partial:
    """Accelerate's state: ``_shared_state`` is the __dict__ of each object."""

    _shared_state: ClassVar[dict[str, Any]] = {}


class Whole:
    _shared_state: ClassVar[dict[str, Any]] = {}


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> type[Partial]:
    module = ModuleType("accelerate.state")
    vars(module).update(PartialState=Partial, AcceleratorState=Whole)
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    monkeypatch.setattr(Partial, "_shared_state", {})
    monkeypatch.setattr(Whole, "_shared_state", {})
    return Partial


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, None),  # nothing is created
        ({"backend": None}, "zcomm"),  # during its constructor
        ({"backend": "nccl"}, "nccl"),
        ({"backend": None, "num_processes": 1}, None),  # complete: a process without a job
    ],
)
def test_a_backend_is_named_only_where_accelerate_has_none(
    state: type[Partial], before: dict[str, Any], after: str | None
) -> None:
    state._shared_state.update(before)
    comm.is_initialized()
    assert state._shared_state.get("backend") == after
    assert set(state._shared_state) == set(before)


def test_a_state_that_was_made_too_early_is_an_error(state: type[Partial]) -> None:
    hugging_face.check_ranks(2)  # Accelerate is imported, and does not train
    state._shared_state["num_processes"] = 1
    hugging_face.check_ranks(2)
    Whole._shared_state["distributed_type"] = "DistributedType.DEEPSPEED"
    with pytest.raises(RuntimeError, match="Accelerate has 1 process"):
        hugging_face.check_ranks(2)
    hugging_face.check_ranks(1)


def test_what_accelerate_launch_imports() -> None:
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    with pytest.raises(ValueError, match="--num_nodes 2: there is no hostfile"):
        runner.main(["--num_nodes", "2", __file__])
