"""Entry points of the installed distributions: files of hundreds are read once for all groups."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any


def entry_points(group: str) -> list[metadata.EntryPoint]:
    """Those of a group, as they were when any group's were first asked for. Raises whatever a
    distribution with unreadable metadata makes of it."""
    return list(_all().select(group=group))


@cache
def _all() -> Any:
    return metadata.entry_points()


forget = _all.cache_clear
"""Read them again at the next use."""
