"""Devices that need not be here: who compiles for an arch, and a device as its data sheet has it.

An arch is named as its compiler names it, without the letter at its end (``sm_90``), or by words of
a product's name (``H100``, ``RTX 4090``, ``mi300x``).
"""

from __future__ import annotations

import logging
import re
import shlex
from importlib import metadata

from kernelseam.contract import Backend, Device, Toolchain
from kernelseam.errors import UnknownName
from kernelseam.plugins import Plugins, plugins

_log = logging.getLogger("kernelseam")


def arch_of(name: str) -> str:
    """The arch that a name stands for. Raises UnknownName."""
    return _find(name)[2]


def compiler_for(name: str) -> tuple[Backend, Toolchain]:
    """The backend that compiles for the arch, and its toolchain. Raises UnknownName."""
    return _find(name)[:2]


def product(name: str) -> Device:
    """A device of the arch, or of that name, as its data sheet has it; nothing runs on it. Raises
    UnknownName, also where the arch's plugin wrote none down."""
    _, toolchain, arch, device = _find(name)
    result = device or toolchain.arch_row(arch).product
    if result is None:
        raise UnknownName(
            "arch",
            name,
            f"the plugin of backend {toolchain.backend} has no data sheet of such a device",
            "Ask on a machine that has one, without --arch",
        )
    return result


def _find(name: str) -> tuple[Backend, Toolchain, str, Device | None]:
    """Who compiles for what ``name`` stands for, the arch, and the product where it names one."""
    known = list(_archs(plugins()))
    plain = name.strip().lower()
    for backend, toolchain, arch in known:
        if arch.lower() == plain:
            return backend, toolchain, arch, None
    # a variant's letter may be left out: sm_90 for sm_90a
    for backend, toolchain, arch in known:
        if re.fullmatch(re.escape(plain) + "[a-z]", arch.lower()):
            return backend, toolchain, arch, None
    asked = _words(plain)
    for backend, toolchain, arch in known:
        row = toolchain.arch_row(arch)
        for device in (row.product, *row.more_products):
            if device is not None and asked and asked <= _words(device.name.lower()):
                return backend, toolchain, arch, device
    if not known:
        commands = " or ".join(f"`{c}`" for c in missing_plugins().values())
        remedy = f"In a checkout: {commands}; no GPU is needed. " if commands else ""
        raise UnknownName(
            "arch",
            name,
            "no installed plugin compiles",
            f"{remedy}`kernelseam doctor` shows plugins that are kept out",
        )
    archs = ", ".join(arch for _, _, arch in known)
    rows = ((backend.name, toolchain.arch_row(a).product) for backend, toolchain, a in known)
    named = " or ".join({vendor: device.name for vendor, device in rows if device}.values())
    rule = f"must be one of {archs}" + (f", or a product such as {named}" if named else "")
    raise UnknownName(
        "arch", name, rule, "See `kernelseam doctor` for plugins that are missing or kept out"
    )


def _archs(result: Plugins) -> list[tuple[Backend, Toolchain, str]]:
    known = []
    for backend in result.registry.backends.values():
        try:
            archs = result.archs_of(backend)
        except Exception:  # one that is broken must not stand before the one that knows the arch
            _log.warning("backend %s does not list its archs", backend.name, exc_info=True)
            continue
        if backend.toolchain is not None:
            known += [(backend, backend.toolchain, arch) for arch in archs]
    return known


def missing_plugins() -> dict[str, str]:
    """The plugins that this distribution's extras name and that are not installed, each with the
    command that installs it from a checkout."""
    commands = {}
    for requirement in metadata.requires("kernelseam") or ():
        found = re.match(r"(kernelseam-([a-z]+))(\[[a-z0-9]+\])?.*extra ==", requirement)
        if found is None:
            continue
        distribution, folder, extra = found.groups()
        try:
            metadata.version(distribution)
        except metadata.PackageNotFoundError:
            path = f"./plugins/{folder}{extra or ''}"
            commands[distribution] = f"pip install {shlex.quote(path)}"
    return commands


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name))
