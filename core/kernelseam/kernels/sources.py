"""The device sources that all vendors share."""

from __future__ import annotations

from functools import cache
from importlib import resources

from kernelseam.compilation.sources import headers_below
from kernelseam.errors import PluginError


@cache
def shared_sources() -> dict[str, str]:
    """Include name → text of every device source of this package."""
    files = headers_below(resources.files(__package__))
    if not files:
        raise PluginError(
            "the shared device sources are missing from this installation: install kernelseam again"
        )
    return files
