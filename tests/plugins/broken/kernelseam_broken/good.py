"""What the broken ones share: an answer to ``kernelseam_info`` that is right."""

from __future__ import annotations

from kernelseam.contract import CONTRACT_VERSION, PluginInfo


def info(name: str, contract_version: int = CONTRACT_VERSION) -> PluginInfo:
    """Facts of a plugin of this distribution."""
    return PluginInfo(name, "0.1.0", contract_version)
