"""What the broken ones share: an answer to ``kernelseam_info`` that is right, and a place to
hang."""

from __future__ import annotations

import threading

from kernelseam.contract import CONTRACT_VERSION, PluginInfo

LET_GO = threading.Event()
"""Ends every hang, so that tests leave no thread behind."""


def info(name: str, contract_version: int = CONTRACT_VERSION) -> PluginInfo:
    """Facts of a plugin of this distribution."""
    return PluginInfo(name, "0.1.0", contract_version)


def hang() -> None:
    """As a driver that does not answer."""
    LET_GO.wait(600)
