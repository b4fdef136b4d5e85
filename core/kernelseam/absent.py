"""Archs whose devices need not be here: who compiles for them, and a device of each from its data
sheet."""

from __future__ import annotations

import logging

from kernelseam.contract import Backend, Device, Toolchain
from kernelseam.errors import UnknownName
from kernelseam.plugins import plugins

_log = logging.getLogger("kernelseam")


def compiler_for(arch: str) -> tuple[Backend, Toolchain]:
    """The backend that compiles for the arch, and its toolchain. Raises UnknownName."""
    result, known = plugins(), list[str]()
    for backend in result.registry.backends.values():
        try:
            archs = result.archs_of(backend)
        except Exception:  # one that is broken must not stand before the one that knows the arch
            _log.warning("backend %s does not list its archs", backend.name, exc_info=True)
            continue
        if backend.toolchain is not None and arch in archs:
            return backend, backend.toolchain
        known += archs
    rule = f"must be one of {', '.join(known)}" if known else "no installed plugin compiles"
    raise UnknownName(
        "arch", arch, rule, "See `kernelseam doctor` for plugins that are missing or kept out"
    )


def product(arch: str) -> Device:
    """A device of the arch as its data sheet has it; nothing runs on it. Raises UnknownName, also
    where the arch's plugin wrote none down."""
    _, toolchain = compiler_for(arch)
    result = toolchain.arch_row(arch).product
    if result is None:
        raise UnknownName(
            "arch",
            arch,
            f"the plugin of backend {toolchain.backend} has no data sheet of such a device",
            "Ask on a machine that has one, without --arch",
        )
    return result
