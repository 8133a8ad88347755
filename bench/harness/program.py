"""Command lines of the benches: a program's cases, sizes as people write them, ladders of sizes, names by commas."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module


def run_case(description: str, cases: Mapping[str, str]) -> int:
    """Run the case that the command line names and return its exit code. cases: "module:function" by name.

    A case's module is imported before the project's interpreter is chosen, so it imports neither torch nor zcomm at
    its top. Its function gets the words after the case's name.
    """
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        name, words = words[0], words[1:]
        if name not in cases:
            sys.exit(f"{sys.argv[0]} {name}: use {', '.join(cases)}")
    elif {"-h", "--help"} & set(words):
        print(f"{description.strip()}\n\nCases: {', '.join(cases)}. `{sys.argv[0]} CASE --help` lists a case's flags.")
        return 0
    else:
        name = next(iter(cases))
    module, _, function = cases[name].partition(":")
    case: Callable[[list[str]], int] = getattr(import_module(module), function)
    return case(words)


def parse_size(text: str) -> int:
    """Parse a size: '8', '64K', '256M', '1G' -> bytes (powers of 1024, as nccl-tests reads them)."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = text[-1:].upper()
    try:
        nbytes = int(float(text[:-1]) * scale[unit]) if unit in scale else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a size; write for example 8, 64K, 256M, 1G") from None
    if nbytes <= 0:
        raise ValueError(f"size {text!r} is not positive")
    return nbytes


def sizes(begin: int, end: int, factor: float, step: int | None = None) -> Iterator[int]:
    """Yield begin, begin * factor (or + step), ... <= end."""
    size = begin
    while size <= end:
        yield size
        size = size + step if step else max(size + 1, int(size * factor))


def listed(parser: argparse.ArgumentParser, flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Split names by commas, each once. An unknown one ends the program with the list of known names."""
    names = list(dict.fromkeys(filter(None, text.split(","))))
    for name in names:
        if name not in known:
            parser.error(f"{flag} {name}: use {', '.join(known)}")
    return names


def make_parser(case: str, description: str | None) -> argparse.ArgumentParser:
    """Create the parser of a case; its description is printed verbatim. case: its command."""
    return argparse.ArgumentParser(
        prog=case, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_run_arguments(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    """Add the flags of each case that starts ranks: the file of its results, and its time limit."""
    add = parser.add_argument
    add("--json", metavar="FILE", help="write machine and results as JSON lines")
    add("--append", action="store_true", help="keep the lines that are in FILE")
    add("--timeout", type=float, default=timeout_s, help=f"seconds until the run is given up ({timeout_s:g})")
