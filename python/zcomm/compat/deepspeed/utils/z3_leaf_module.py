"""``deepspeed.utils.z3_leaf_module``: the names of leaf_modules.py.

Importing it makes ``deepspeed.utils.z3_leaf_module`` this module in place of the function, so the module can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch import nn

from zcomm.compat.deepspeed.utils.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]


class _Callable(ModuleType):
    """A module that is called as the function of its name."""

    def __call__(self, module: nn.Module) -> bool:
        return z3_leaf_module(module)


sys.modules[__name__].__class__ = _Callable
