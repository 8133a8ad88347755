#!/usr/bin/env python3
"""Check that no module assigns a callable to an attribute of another object; `make lint` runs it.

The file of an object with a plugged callable does not tell which code runs, and when. Give the callable to the
constructor instead, or an object with methods (as UpdateHooks). Findings are assignments of a lambda, a partial, a
function or a method of the same file, also by ``setattr``. ALLOWED has patches of torch and of objects that their own
file makes. It may only shrink: an entry without its assignment is a finding, too.

Usage: tools/check_callbacks.py [ROOT]. Exit status 1 and a line `file:line: text` for each finding, else 0.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PLACE = "python/zcomm"
ALLOWED = {
    "python/zcomm/torch_backend/completer.py: callbacks.on_begun",
    "python/zcomm/torch_backend/completer.py: torch._C._collect_all",
    "python/zcomm/torch_backend/replaced.py: c10d.monitored_barrier",
    "python/zcomm/torch_backend/replaced.py: c10d.new_comm",
    "python/zcomm/torch_backend/replaced.py: c10d.split_group",
    "python/zcomm/torch_backend/replaced.py: device_mesh.split_group",
    "python/zcomm/torch_backend/replaced.py: dist.monitored_barrier",
    "python/zcomm/torch_backend/replaced.py: dist.split_group",
    "python/zcomm/zero/materialize/init.py: torch.nn.init._no_grad_trunc_normal_",
    "python/zcomm/zero/sharded/transposed_rows.py: made._whole",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets and values of an assignment."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    value = getattr(node, "value", None)
    for target in targets:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        elif value is not None:
            yield target, value


def _is_callable(value: ast.expr, functions: set[str], methods: set[str]) -> bool:
    if isinstance(value, ast.IfExp):
        return any(_is_callable(each, functions, methods) for each in (value.body, value.orelse))
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("partial", "functools.partial")
    if isinstance(value, ast.Name):
        return value.id in functions
    own = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self"
    return isinstance(value, ast.Lambda) or (own and isinstance(value, ast.Attribute) and value.attr in methods)


def _is_others(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and not (
        isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
    )


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and target of each callable that the file assigns to another object."""
    tree = ast.parse(path.read_text())
    methods: set[str] = set()
    properties: set[str] = set()
    for node in ast.walk(tree):
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(each, FUNCTIONS):
                is_property = any(ast.unparse(found).endswith("property") for found in each.decorator_list)
                (properties if is_property else methods).add(each.name)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, FUNCTIONS)} - methods - properties
    for node in ast.walk(tree):
        for target, value in _pairs(node):
            if _is_others(target) and _is_callable(value, functions, methods - properties):
                yield node.lineno, ast.unparse(target)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) == 3:
            owner, name, value = node.args
            if ast.unparse(owner) not in ("self", "cls") and _is_callable(value, functions, methods - properties):
                yield node.lineno, f"{ast.unparse(owner)}.{ast.unparse(name)}"


def main(root: Path) -> int:
    """Print all findings. Returns: the exit status."""
    left, found = set(ALLOWED), []
    for path in sorted((root / PLACE).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for line, target in findings(path):
            if f"{name}: {target}" in ALLOWED:
                left.discard(f"{name}: {target}")
            else:
                found.append(f"{name}:{line}: a callable is assigned to {target}: give it to a constructor")
    found += [f"tools/check_callbacks.py: {entry} is allowed, and not there any more" for entry in sorted(left)]
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
