"""Emulated devices of an arch are used once its self-test has passed with this emulator and this
compiler."""

from __future__ import annotations

import hashlib

from kernelseam.compilation import compiled
from kernelseam.contract import SourceBundle, Toolchain
from kernelseam.errors import DeviceError

from kernelseam_rocm_emulator import selftest
from kernelseam_rocm_emulator.worker import Emulator

_NAMED = 8
"""Failures that the error names."""


def bundle(arch: str, toolchain: Toolchain) -> SourceBundle:
    """What is compiled for an arch."""
    files = (("selftest.h", selftest.source(arch)),)
    return SourceBundle(
        "emulation_selftest", "selftest.h", files, (), toolchain.arch_row(arch).options
    )


def require(emulator: Emulator, arch: str, toolchain: Toolchain) -> None:
    """Run an arch's self-test, unless it has passed with this emulator before. Raises DeviceError
    with what failed."""
    binary = compiled(toolchain, bundle(arch, toolchain), arch)
    digest = hashlib.sha256(f"{binary.key} {emulator.checkout.version()}".encode()).hexdigest()
    passed = emulator.folder() / f"passed-{arch}"
    if passed.is_file() and passed.read_text() == digest:
        return
    failures = emulator.test(binary.data, arch)
    if failures:
        more = f"; and {len(failures) - _NAMED} more" if len(failures) > _NAMED else ""
        raise DeviceError(
            f"the emulator in {emulator.checkout.folder} fails {len(failures)} self-tests for "
            f"{arch}, so its results mean nothing: {'; '.join(failures[:_NAMED])}{more}. Take the "
            "commit of tinygrad that the documentation names, or unset the variable"
        )
    passed.write_text(digest)
