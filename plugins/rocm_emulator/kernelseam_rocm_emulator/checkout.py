"""The emulator's checkout: its location, requirements and version. Nothing of it is imported
here."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from kernelseam_rocm.emulator import VARIABLE

_EMULATOR = Path("test/mockgpu/amd/emu.py")


@dataclass(frozen=True)
class Checkout:
    """A usable checkout: everything that the emulator needs is present."""

    folder: Path
    compiler: tuple[str, ...]
    """The clang command with which the emulator compiles the semantics of instructions."""

    def version(self) -> str:
        """A digest of what results depend on: the emulator's sources by name, size and time, and
        this package's patches."""
        digest = hashlib.sha256()
        sources = [self.folder / "tinygrad", self.folder / "test/mockgpu", Path(__file__).parent]
        for root in sources:
            for path in sorted(root.rglob("*.py")):
                facts = path.stat()
                digest.update(f"{path}:{facts.st_size}:{facts.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def find() -> Checkout | str:
    """The checkout that the environment variable names, or why there is none."""
    named = os.environ.get(VARIABLE, "")
    if not named:
        return f"{VARIABLE} is not set"
    try:
        folder = Path(named).expanduser().absolute()
    except (RuntimeError, OSError) as e:  # ~ of an unknown user; no current folder
        return (
            f"{VARIABLE} = {named}: means no folder ({e}). Name it by its whole path, or "
            "unset the variable"
        )
    if not (folder / _EMULATOR).is_file():
        return (
            f"{VARIABLE} = {named}: must be a checkout of tinygrad's repository, and there is no "
            f"{_EMULATOR} in it. "
            "Clone the repository (its packages do not hold the emulator), or unset the variable"
        )
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return (
            f"{VARIABLE} is set, but emulation needs Linux on x86_64, not {sys.platform} on "
            f"{platform.machine()}"
        )
    compiler = _compiler()
    if compiler is None:
        return (
            f"{VARIABLE} is set, but the emulator needs clang, and there is none on PATH. "
            "Install clang, or the package ziglang, which brings one"
        )
    return Checkout(folder, compiler)


def _compiler() -> tuple[str, ...] | None:
    if path := shutil.which("clang"):
        return (path,)
    zig = importlib.util.find_spec("ziglang")  # its wheel holds the program beside the module
    if (
        zig is not None
        and zig.origin
        and os.access(program := Path(zig.origin).with_name("zig"), os.X_OK)
    ):
        return (str(program), "clang")
    return None
