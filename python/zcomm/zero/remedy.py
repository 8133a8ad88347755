"""Addition to the error of a collective call: which calls all ranks make, and as often."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zcomm._core import CollectiveMismatch, PeerLost
from zcomm.zero.parts import TrainState


@contextlib.contextmanager
def with_remedy(call: str, train: TrainState) -> Iterator[None]:
    """Add to an error that ends the block, a part of ``call``, which calls all ranks must make alike.

    Other errors, and errors of ranks that died, are not changed.
    """
    try:
        yield
    except (CollectiveMismatch, TimeoutError) as error:
        _add(error, f"({call} is called by all ranks)")
        raise
    except PeerLost as error:
        if " left " in str(error):
            _add(
                error,
                f"(this rank is in {call} after {train.step_count} optimizer steps: have all ranks equally many "
                f"batches, and do they all call {call}?)",
            )
        raise


def _add(error: BaseException, words: str) -> None:
    if error.args and isinstance(error.args[0], str) and words not in error.args[0]:
        error.args = (f"{error.args[0]} {words}", *error.args[1:])
