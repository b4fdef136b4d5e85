"""A compiler for tests of the binary cache: its binary is its input, and it notes each of its
runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelseam import compilation
from kernelseam.compilation import compiled
from kernelseam.contract import SourceBundle

BUNDLE = SourceBundle(
    "twice",
    "twice/main.h",
    (("platform.h", "// platform"), ("twice/main.h", "int twice;")),
    (("N", "2"),),
    ("-O3",),
)


def made(bundle: SourceBundle, arch: str, key: str) -> bytes:
    """The binary of a bundle that was compiled under a key."""
    return (
        arch + replace(bundle, defines=(*bundle.defines, ("KS_KEY", f'"{key}"'))).text()
    ).encode() * 100


class Toolchain:
    """contract.Toolchain as far as the cache knows it. Runs are noted in a file that processes
    share."""

    backend = "fake"

    def __init__(self, notes: Path, work: Callable[[], None] = lambda: None) -> None:
        self.notes, self.work, self.version = notes, work, "fakecc 1.0"

    def compiler(self) -> str:
        return self.version

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        with self.notes.open("a") as notes:
            notes.write(f"{os.getpid()}\n")
        self.work()
        return (arch + bundle.text()).encode() * 100

    @property
    def runs(self) -> int:
        return len(self.notes.read_text().splitlines()) if self.notes.exists() else 0

    def __getattr__(self, name: str) -> Any:  # the rest of the protocol is not reached
        raise AttributeError(name)


def again(
    toolchain: Toolchain, bundle: SourceBundle = BUNDLE, arch: str = "arch1"
) -> compilation.Binary:
    """As a new process would ask: with nothing remembered."""
    compilation.forget()
    return compiled(toolchain, bundle, arch)


def quietly(*args: Any) -> compilation.Binary:
    """The same, where nothing is to be warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return again(*args)
