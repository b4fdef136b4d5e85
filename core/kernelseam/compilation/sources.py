"""Device sources held in memory: every header below a folder, and what one of them includes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources.abc import Traversable

from kernelseam.errors import PluginError

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"\n]+)"|([A-Za-z_]\w*))', re.MULTILINE)


def headers_below(folder: Traversable) -> dict[str, str]:
    """Include name (the path below the folder) → text of every header in it and in its folders."""
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
    """``main`` and what it includes, and what that includes, by name; nothing else of ``files``.

    An include name is the path from the folder of all sources, or a constant of ``defines`` that
    holds one in quotes. Conditions are not evaluated: what stands between #if and #endif counts.
    Raises PluginError where one is missing.
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
        for quoted, constant in _INCLUDE.findall(files[name]):
            pending.append((name, quoted or defines.get(constant, constant).strip('"')))
    return tuple(sorted(headers.items()))
