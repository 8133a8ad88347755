"""Keeps torch.compile out of the code of this package.

torch calls a process group from C++ while a compiled module runs (DDP broadcasts its buffers). Dynamo would trace each
resulting Python frame. A process group cannot be traced, so its frames run untraced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from zcomm.comm.dynamo import skip


def run_eagerly() -> None:
    """Keep Dynamo out of all functions of the modules that have been imported by now."""
    for name, module in list(sys.modules.items()):
        if name.startswith("zcomm.torch_backend") and module is not None:
            for code in _codes_of(module):
                skip(code)


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:  # functions, also of static and class methods and properties
            for function in (member, *(getattr(member, name, None) for name in ("__func__", "fget", "fset"))):
                if isinstance(function, FunctionType):
                    yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
