"""Device sources in memory: all headers below a folder, the includes of one of them, and what
identifies those of a binary.

The texts are read and searched once a process: most are in every kernel's bundle.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources.abc import Traversable

from kernelseam.contract import SourceBundle
from kernelseam.errors import PluginError

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"\n]+)"|([A-Za-z_]\w*))', re.MULTILINE)
_TEXTS = 1024
"""Texts whose digests and includes are remembered: more than all devices' sources together."""


def headers_below(folder: Traversable) -> dict[str, str]:
    """Include name (the path below the folder) → text, of every header in the folder and below."""
    headers: dict[str, str] = {}

    def walk(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".h"):
                headers[prefix + entry.name] = entry.read_text(encoding="utf-8")

    walk(folder, "")
    return dict(sorted(headers.items()))


def included(
    main: str, files: Mapping[str, str], defines: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """``main`` and its transitive includes by name, and nothing else of ``files``.

    An include name is the path from the folder of all sources, or a constant of ``defines`` that
    holds one in quotes. Conditions are not evaluated: includes between #if and #endif count.
    Raises PluginError where a file is missing.
    """
    headers: dict[str, str] = {}
    pending = [("", main)]
    while pending:
        by, name = pending.pop()
        if name in headers:
            continue
        if name not in files:
            where = f'{by} includes "{name}"' if by else f'"{name}" is to be compiled'
            raise PluginError(f"{where}, which is not among the device sources")
        headers[name] = files[name]
        for quoted, constant in _includes(files[name]):
            pending.append((name, quoted or defines.get(constant, constant).strip('"')))
    return tuple(sorted(headers.items()))


def identity(bundle: SourceBundle) -> list[object]:
    """All that is given to the compiler, for JSON: a file's text by its digest."""
    files = [(name, _digest(text)) for name, text in sorted(bundle.files)]
    return [bundle.name, bundle.main, files, bundle.defines, bundle.options]


@lru_cache(_TEXTS)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(_TEXTS)
def _includes(text: str) -> tuple[tuple[str, str], ...]:
    """Of each include of a text, the quoted name or the constant; the other is empty."""
    return tuple(_INCLUDE.findall(text))
