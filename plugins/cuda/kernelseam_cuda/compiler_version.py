"""nvrtc's version, as keys of binaries have it.

Asking nvrtc means loading it and compiling a text of nothing: a sixth of what a command takes whose
binaries are in the cache. So the answer is kept in the cache's folder, beside the library's file
and the places where a library would be looked for; a change of either asks again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from kernelseam.compilation import entry
from kernelseam.compilation.folder import Untrusted, cache_folder, private
from kernelseam.errors import CompileError, DeviceError

from kernelseam_cuda import bindings

_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "LD_LIBRARY_PATH")
_BUILD = re.compile(r"Compiler Build ID: (?P<build>\S+)|release .*, V(?P<version>\S+)")
"""In the head of its PTX: nvrtcVersion knows no patch level."""


@cache
def version() -> str:
    """nvrtc's version with its patch level, and its build. Raises CompileError without nvrtc."""
    found = _known()
    if found is None:
        found = ask()
        _keep(found)
    return found


def ask() -> str:
    """The same from nvrtc itself, by the header of its PTX."""
    major, minor = nvrtc("nvrtc", "any arch", "nvrtcVersion")
    program = nvrtc("nvrtc", "any arch", "nvrtcCreateProgram", b"", b"version.cu", 0, [], [])
    nvrtc("nvrtc", "any arch", "nvrtcCompileProgram", program, 0, [])
    ptx = bytearray(nvrtc("nvrtc", "any arch", "nvrtcGetPTXSize", program))
    nvrtc("nvrtc", "any arch", "nvrtcGetPTX", program, ptx)
    nvrtc("nvrtc", "any arch", "nvrtcDestroyProgram", program)
    fields = {
        k: v
        for match in _BUILD.finditer(ptx.decode(errors="replace"))
        for k, v in match.groupdict().items()
        if v
    }
    return (
        f"nvrtc {fields.get('version', f'{major}.{minor}')} "
        f"({fields.get('build', 'unknown build')})"
    )


def nvrtc(name: str, arch: str, function: str, *arguments: object) -> Any:
    """An nvrtc function by name; its results without the status. Errors are raised as
    CompileError."""
    try:
        status, *results = getattr(bindings.nvrtc(), function)(*arguments)
    except (DeviceError, RuntimeError) as e:
        raise CompileError(name, arch, f"nvrtc cannot be used: {e}") from e
    if int(status):
        raise CompileError(name, arch, f"{function} failed with {status.name}")
    return results[0] if len(results) == 1 else tuple(results)


def _identity(path: str) -> list[object]:
    """A file or folder as it is now. Raises OSError."""
    found = os.stat(path)
    return [path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def _places() -> list[object]:
    """Where a library is looked for, as it is now: an installation changes its folder."""
    places: list[object] = [os.environ.get(name) for name in _VARIABLES]
    folders = [f for f in sys.path if f.endswith(("site-packages", "dist-packages"))]
    for folder in (*folders, "/etc/ld.so.cache"):
        with suppress(OSError):
            places.append(_identity(folder))
    return places


def _loaded() -> str | None:
    """The library that this process has loaded already, for itself or for another package."""
    try:
        with open("/proc/self/maps") as maps:
            paths = (line.split(maxsplit=5)[-1].strip() for line in maps if "libnvrtc.so" in line)
            return next(paths, None)
    except OSError:
        return None


def _path() -> Path:
    """The one file for this Python, whose name is its key."""
    key = hashlib.sha256(sys.prefix.encode()).hexdigest()
    return cache_folder() / entry.COMPILERS / (key + entry.COMPILER)


def _known() -> str | None:
    """The kept version, where all is as it was."""
    try:
        path = _path()
        if not (private(path.parent.parent, make=False) and private(path.parent, make=False)):
            return None
        _, kept = entry.read(path)
        version, places, library = json.loads(kept)
        same = places == _places() and library == _identity(_loaded() or library[0])
    except (OSError, Untrusted, entry.Damaged, ValueError, LookupError, TypeError):
        return None
    return str(version) if same else None


def _keep(version: str) -> None:
    """Keep it, where the library's file can be named and the folder is this user's."""
    try:
        library = bindings.module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc")
        kept = json.dumps([version, _places(), _identity(library.abs_path)])
        path = _path()
        private(path.parent.parent, make=True)
        private(path.parent, make=True)
        entry.write(path, {"key": path.stem, "name": version}, kept.encode())
    except (DeviceError, OSError, Untrusted, RuntimeError, AttributeError, TypeError):
        return
