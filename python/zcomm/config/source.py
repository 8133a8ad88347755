"""Sources of a configuration: a mapping, a file, or text, in JSON, hjson or base64 of JSON.

Plain JSON is tried first. If it fails, the package ``hjson`` reads the text, with comments, trailing commas and bare
keys, as for DeepSpeed. It is imported only then. A key given twice in one section is an error in each form.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

Source = Mapping[str, Any] | str | os.PathLike[str]
_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]+={0,2}\s*")


def read_source(source: Source) -> tuple[Mapping[str, Any], str]:
    """Return the raw mapping and a name for it ("config" for a dict or text, else the file's path).

    source: a mapping; a path of a JSON or hjson file; such text, which starts with "{" or a comment; or base64 of it.
    Raises: FileNotFoundError / OSError (file), ValueError (syntax, duplicate key, not an object).
    """
    if isinstance(source, Mapping):
        return source, "config"
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"config must be a dict, a path or JSON text, not {type(source).__name__}")
    if isinstance(source, str):
        text = source if _is_text(source) else _decoded(source)
        if text is not None:
            return _parsed(text, "config"), "config"
    name = os.fspath(source)
    return _parsed(Path(name).read_text(encoding="utf-8"), name), name


def _is_text(source: str) -> bool:
    """Return True for text of an object. hjson may begin with a comment, and has several lines then."""
    begin = source.lstrip()
    return begin.startswith("{") or ("\n" in begin and begin.startswith(("#", "//", "/*")))


def _decoded(source: str) -> str | None:
    """Return the text behind base64, or None if ``source`` is a path or no such text."""
    if not _BASE64.fullmatch(source) or os.path.exists(source):
        return None
    letters = "".join(source.split()).replace("+", "-").replace("/", "_")
    try:
        text = base64.urlsafe_b64decode(letters + "=" * (-len(letters) % 4)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return text if _is_text(text) and text.rstrip().endswith("}") else None


def _parsed(text: str, name: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ValueError(f'{name}: key "{key}" is given twice in one section')
            seen[key] = value
        return seen

    def no_constant(word: str) -> NoReturn:
        raise ValueError(f"{name}: {word} is not a number that JSON has")

    try:
        data = json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        data = _by_hjson(text, name, error, no_duplicates)
    if not isinstance(data, dict):
        raise ValueError(f"{name}: a configuration is a JSON object, not {_kind(data)}")
    return data


def _by_hjson(text: str, name: str, error: json.JSONDecodeError, pairs_hook: Any) -> Any:
    where = f"{name}: not valid JSON at line {error.lineno} column {error.colno}: {error.msg}"
    try:
        import hjson
    except ImportError:
        raise ValueError(
            f"{where}. (With comments or trailing commas it is hjson, which needs the package: pip install hjson)"
        ) from None
    try:
        return hjson.loads(text, object_pairs_hook=pairs_hook)
    except hjson.HjsonDecodeError as second:
        raise ValueError(f"{where}; nor is it valid hjson: {second}") from None


def _kind(data: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(data), "null" if data is None else type(data).__name__)
