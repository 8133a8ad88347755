"""NoState, which is ``ZeroOptimizer.state``: empty, with errors for programs that expect tensors there."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

READ = "zcomm.zero.full_optim_state(param, key)"
SET = "zcomm.zero.set_full_optim_state(param, key, value)"


class NoState(defaultdict[Any, Any]):
    """An empty mapping. Raises: RuntimeError that names the call to use, for an entry, a change or ``clear``."""

    def __missing__(self, key: object) -> NoReturn:
        raise RuntimeError(
            f"optimizer.state is sharded and has no entry here: {READ} gives an array whole, {SET} replaces it, "
            "optimizer.state_dict() gives all"
        )

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise RuntimeError(f"optimizer.state is sharded and takes no entry: {SET} replaces an array")

    def clear(self) -> NoReturn:
        raise RuntimeError(f"optimizer.state is sharded, clear() would forget nothing: {SET} replaces an array")
