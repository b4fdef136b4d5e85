"""What is refused, word for word: the texts of tests/unit/refusals, of which an entry is a line of
keyword arguments and, indented, the message."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "refusals"


def refusals(name: str, section: str, names: Mapping[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """(keyword arguments, message) of each entry of a text's section. Values are expressions over
    ``names``, the globals of a test's module; later arguments replace those of ``**more``."""
    text = (FOLDER / f"{name}.txt").read_text("utf-8")
    (part,) = re.findall(rf"^\[{section}\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^(\S.*)\n +(\S.*)\n", part, re.MULTILINE)
    assert len(part.splitlines()) == 2 * len(entries), f"[{section}] of {name}.txt"
    return [(_arguments(given, dict(names)), message) for given, message in entries]


def _arguments(text: str, names: dict[str, Any]) -> dict[str, Any]:
    call = ast.parse(f"call({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    result: dict[str, Any] = {}
    for keyword in call.keywords:
        value = eval(ast.unparse(keyword.value), names)
        result |= value if keyword.arg is None else {keyword.arg: value}
    return result
