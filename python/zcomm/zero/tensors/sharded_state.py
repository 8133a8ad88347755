"""ShardedState: ``state`` of a ZeroOptimizer, and of the torch optimizer that was given to it.

Its keys are torch's: the parameters that have taken a step. The arrays are sharded, so each value is a ShardedEntry,
which raises when the program reads it. Changes raise, too. Each error names the call to use instead. One change does
nothing: a program that moves "the state" to a device, as Lightning's Trainer does, writes the same entries back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any, NoReturn

import torch

from zcomm.zero.parts import TrainState

_INSTEAD = (
    "zcomm.zero.full_optim_state(param, key) gives an array whole, zcomm.zero.set_full_optim_state(param, key, value) "
    'replaces it, optimizer.state_dict() gives all, optimizer.load_state_dict(optimizer.state_dict() | {"state": {}}) '
    "forgets all"
)


def refuse(what: str) -> NoReturn:
    """Raise RuntimeError for a call that would find no arrays."""
    raise RuntimeError(f"{what}: the optimizer's state is sharded, and has no arrays here: {_INSTEAD}")


class ShardedEntry:
    """State of one parameter, which is sharded over the ranks. It has identity; all else raises RuntimeError.

    It is no Mapping, so programs that treat states by their kind leave it as it is.
    """

    __slots__ = ()

    def _refuse(self, *args: object, **values: object) -> NoReturn:
        refuse("optimizer.state[param]")

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = __bool__ = _refuse
    __reduce_ex__ = __copy__ = __deepcopy__ = _refuse
    get = keys = items = values = copy = pop = popitem = setdefault = update = clear = _refuse

    def __repr__(self) -> str:
        return f"<state of a parameter, which is sharded: {_INSTEAD}>"


class ShardedState(defaultdict[Any, Any]):
    """The state of the optimizer with the options and counters ``train``.

    index_of: numbers of the parameters, by id(). Raises: RuntimeError, for any access to an array.
    """

    def __init__(self, train: TrainState, index_of: dict[int, int]) -> None:
        super().__init__()
        self._train, self._index_of = train, index_of
        self._entry = ShardedEntry()  # of all: its parameter's arrays cannot be reached through it

    def _stepped(self) -> list[torch.Tensor]:
        """List the parameters that have taken a step."""
        train, groups = self._train, self._train.param_groups
        params = [param for group in groups for param in group["params"]]
        return [p for p in params if id(p) in self._index_of and train.counters.steps(self._index_of[id(p)], groups)]

    def __bool__(self) -> bool:
        """Return True after the first step, as torch's. torch.distributed.checkpoint runs a step if it is False."""
        return any(group.get("step") for group in self._train.param_groups)

    # --- keys: as torch's -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._stepped())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stepped())

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self._stepped())

    def __contains__(self, key: object) -> bool:
        return any(param is key for param in self._stepped())

    def keys(self) -> Any:
        """Return the parameters that have taken a step."""
        return KeysView(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (not self and dict.__eq__(self, other) is True)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return f"<state of {len(self)} parameters, which is sharded: {_INSTEAD}>"

    # --- values: entries without arrays -----------------------------------------------------------------------

    def __missing__(self, key: object) -> ShardedEntry:
        if key not in self:
            refuse("optimizer.state[param]")  # torch's would make an empty entry
        return self._entry

    def get(self, key: object, default: Any = None) -> Any:
        """Return ``default`` for a parameter that has taken no step."""
        return self._entry if key in self else default

    def items(self) -> Any:
        """Return pairs of parameter and ShardedEntry."""
        return ItemsView(self)

    def values(self) -> Any:
        """Return a ShardedEntry for each parameter that has taken a step."""
        return ValuesView(self)

    # --- copies: empty ones, before the first step ------------------------------------------------------------

    def _empty(self, what: str) -> dict[Any, Any]:
        if self:
            refuse(f"optimizer.state.{what}")
        return {}

    def copy(self) -> Any:
        """Return an empty dict before the first step."""
        return defaultdict(dict, self._empty("copy()"))

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._empty("__reduce__()")
        return defaultdict, (dict,)

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    # --- changes: none ----------------------------------------------------------------------------------------

    def __setitem__(self, key: object, value: object) -> None:
        if value is not self._entry or key not in self:
            refuse("optimizer.state[param] = ...")

    def __delitem__(self, key: object) -> NoReturn:
        refuse("del optimizer.state[param]")

    def __ior__(self, other: Any) -> NoReturn:
        refuse("optimizer.state |= ...")

    def clear(self) -> NoReturn:
        refuse("optimizer.state.clear()")

    def pop(self, *args: Any) -> NoReturn:
        refuse("optimizer.state.pop()")

    def popitem(self) -> NoReturn:
        refuse("optimizer.state.popitem()")

    def setdefault(self, *args: Any) -> NoReturn:
        refuse("optimizer.state.setdefault()")

    def update(self, *args: Any, **values: Any) -> NoReturn:
        refuse("optimizer.state.update()")
