"""``set_z3_leaf_modules`` and related functions: marks on modules that stage 3 shall gather as one unit.

DeepSpeed's ``utils`` has a function of this module's name, so that the module can be called as the function.

``initialize`` turns each outermost marked module into a unit (``zcomm.zero.Units(leaf=)``), unless it lies in a larger
one. So ranks may run different modules inside it. A later mark has no effect, which is logged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from torch import nn

from zcomm.zero.registry import open_optimizers, open_parts, train_of

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
ClassOrName = type[nn.Module] | str


def z3_leaf_module(model: nn.Module) -> bool:
    """Return True if the module is marked."""
    return bool(vars(model).get("_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return True if the parameter is of a marked module."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark the module, or remove the mark."""
    vars(model)["_z3_leaf"] = flag
    sharded = (open_parts(owner).index_of for owner in open_optimizers() if train_of(owner).stage == 3)
    mine = {id(param) for param in model.parameters()}
    if any(not mine.isdisjoint(index_of) for index_of in sharded):
        logging.getLogger("zcomm").warning(
            "set_z3_leaf_module(%s, %s) has no effect after initialize(), which has chosen the units: call it before",
            type(model).__name__,
            flag,
        )


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[ClassOrName], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes (or names of classes). Raises: ValueError if there are none."""
    return _mark(model, leaf_module_classes, raise_if_not_found, flag=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[ClassOrName], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of these classes. Raises: ValueError if there are no such modules."""
    return _mark(model, leaf_module_classes, raise_if_not_found, flag=False)


def _mark(model: nn.Module, classes: Sequence[ClassOrName], raise_if_not_found: bool, *, flag: bool) -> list[nn.Module]:
    if not all(isinstance(each, (type, str)) for each in classes):
        raise TypeError(f"leaf_module_classes must be classes or their names, got {list(classes)!r}")
    found = [module for module in model.modules() if any(_is_of(module, each) for each in classes)]
    if not found and raise_if_not_found:
        raise ValueError(f"no modules of {list(classes)} in {type(model).__name__}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: nn.Module, wanted: ClassOrName) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}")


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the names of ``named_modules()``; return them, and the unknown names.

    Raises: ValueError naming them, unless ``raise_if_not_found`` is False.
    """
    return _mark_by(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their names, as ``set_z3_leaf_modules_by_name``."""
    return _mark_by(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _mark_by(
    model: nn.Module,
    names: Sequence[str],
    matches: Callable[[str, str], bool],
    flag: bool,
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    found: dict[int, nn.Module] = {}
    missing = []
    for wanted in names:
        here = [module for name, module in model.named_modules() if matches(name, wanted)]
        found |= {id(module): module for module in here}
        if not here:
            missing.append(wanted)
    if missing and raise_if_not_found:
        raise ValueError(f"no modules {missing} in {type(model).__name__}")
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing


class _Callable(ModuleType):
    """A module that is called as the function of its name."""

    def __call__(self, module: nn.Module) -> bool:
        return z3_leaf_module(module)


sys.modules[__name__].__class__ = _Callable
