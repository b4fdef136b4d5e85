"""What is refused, word for word: the texts of tests/unit/refusals, of which an entry is a line of
keyword arguments and, indented, the message."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Refused = Callable[[str, Callable[[], object]], None]
"""What the fixture ``refused`` is."""
FOLDER = Path(__file__).parents[1] / "refusals"


def entries(name: str, section: str) -> list[tuple[str, str]]:
    """(arguments, message) of each entry of a text's section."""
    text = (FOLDER / f"{name}.txt").read_text("utf-8")
    (part,) = re.findall(rf"^\[{section}\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^(\S.*)\n +(\S.*)\n", part, re.MULTILINE)
    assert len(part.splitlines()) == 2 * len(found), f"[{section}] of {name}.txt"
    return found


def refusals(name: str, section: str, names: Mapping[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """``entries`` with the arguments evaluated, as expressions over ``names``, the globals of a
    test's module; later arguments replace those of ``**more``."""
    return [(_arguments(given, dict(names)), message) for given, message in entries(name, section)]


def _arguments(text: str, names: dict[str, Any]) -> dict[str, Any]:
    call = ast.parse(f"call({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    result: dict[str, Any] = {}
    for keyword in call.keywords:
        value = eval(ast.unparse(keyword.value), names)
        result |= value if keyword.arg is None else {keyword.arg: value}
    return result


def cases(name: str, section: str, names: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The same as a test's parameters: the arguments' values, then the message."""
    return [(*given.values(), message) for given, message in refusals(name, section, names)]
