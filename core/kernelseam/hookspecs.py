"""The three hooks a plugin may implement. Each runs once, never on the way of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pluggy

from kernelseam.contract import PluginInfo
from kernelseam.registry import Registry

PROJECT = "kernelseam"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's hook functions."""


@hookspec
def kernelseam_info() -> PluginInfo:  # type: ignore[empty-body]
    """Name, version and contract version. Imports no vendor runtime."""


@hookspec
def kernelseam_register(registry: Registry) -> None:
    """Hand over backends and implementations. May look for devices, must survive their absence."""


@hookspec
def kernelseam_doctor() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """What a person should know of this installation: libraries, versions, devices, what is
    missing."""
