"""The system's C++ compiler: a bundle's files written to a folder, compiled, the result read
back."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kernelseam.contract import SourceBundle
from kernelseam.errors import CompileError

from kernelseam_hostcpp.sources import sources

SECONDS = 300.0


def command() -> list[str]:
    """The compiler: that of the variable CXX, else c++."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"], "compiler", "any arch").splitlines()[0]


def version() -> str:
    """The compiler's own first line."""
    return _version(tuple(command()))


def compile_bundle(bundle: SourceBundle, arch: str, more: str = "") -> bytes:
    """What the compiler makes of a bundle whose kernel is ``bundle.name``, with ``more`` source
    after it.

    Raises CompileError with the command and its log.
    """
    with tempfile.TemporaryDirectory(prefix="kernelseam-hostcpp-") as name:
        folder = Path(name)
        for include, text in {**sources(), **dict(bundle.files)}.items():  # entry.h is in no bundle
            place = folder / include
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        unit = f'{bundle.text()}#define KS_ENTRY {bundle.name}\n#include "host/entry.h"\n{more}'
        (folder / "unit.cpp").write_text(unit, encoding="utf-8")
        line = [*command(), *bundle.options, "-I.", "unit.cpp", "-o", "made", "-lm"]
        _run(line, bundle.name, arch, folder)
        return (folder / "made").read_bytes()


def _run(line: Sequence[str], kernel: str, arch: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CompileError(kernel, arch, f"{line[0]} cannot be used: {e}") from e
    if done.returncode:
        raise CompileError(kernel, arch, f"{shlex.join(line)}\n{done.stdout}{done.stderr}")
    return done.stdout
