"""Hooks of mkdocs, named in mkdocs.yml: in a table's cells code may break after ``_``, ``/``, ``.``
and ``::``, so that a browser does not break names elsewhere."""

from __future__ import annotations

import re
from typing import Any

_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_AFTER = re.compile(r"(::|[_/.,=])(?=\w)")


def on_page_content(html: str, **_: Any) -> str:
    return _CELL.sub(lambda cell: _CODE.sub(_breakable, cell[0]), html)


def _breakable(code: re.Match[str]) -> str:
    return _AFTER.sub(r"\1<wbr>", code[0])
