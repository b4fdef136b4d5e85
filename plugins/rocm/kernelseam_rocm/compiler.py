"""Calls of hiprtc and comgr. They may end the process: run them in a child of the compile server
only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelseam.errors import CompileError

from kernelseam_rocm import bindings, disassembly

_LIBRARIES = ("libhiprtc.so", "libamd_comgr.so")


def version() -> str:
    """hiprtc's version and the files it came from: their names hold more of the version than it
    tells."""
    hiprtc = bindings.module("hiprtc")
    major, minor = _checked(hiprtc, "hiprtcVersion")
    disassembly.library()  # comgr is loaded at the first compilation otherwise
    files = sorted(
        {
            Path(os.path.realpath(path))
            for name in _LIBRARIES
            for path in disassembly.loaded_libraries(name)
        }
    )
    return (
        f"hiprtc {major}.{minor} "
        f"({', '.join(f'{f.name} of {f.stat().st_size} bytes' for f in files)})"
    )


def compile_source(
    name: str, arch: str, text: str, headers: Mapping[str, str], options: Sequence[str]
) -> bytes:
    """A translation unit to a code object. Raises CompileError with the compiler's log."""
    hiprtc = bindings.module("hiprtc")
    # hip-python keeps pointers into these lists: they must live as long as the program.
    texts, names = [t.encode() for t in headers.values()], [n.encode() for n in headers]
    program = _checked(
        hiprtc,
        "hiprtcCreateProgram",
        text.encode(),
        f"{name}.hip".encode(),
        len(texts),
        texts,
        names,
    )
    arguments = [o.encode() for o in options]
    (status,) = hiprtc.hiprtcCompileProgram(program, len(arguments), arguments)
    if int(status):
        size = _checked(hiprtc, "hiprtcGetProgramLogSize", program)
        log = bytearray(size)
        _checked(hiprtc, "hiprtcGetProgramLog", program, log)
        raise CompileError(name, arch, bytes(log).rstrip(b"\0").decode(errors="replace"))
    code = bytearray(_checked(hiprtc, "hiprtcGetCodeSize", program))
    _checked(hiprtc, "hiprtcGetCode", program, code)
    return bytes(code)  # the program ends with the process


def _checked(hiprtc: Any, name: str, *arguments: object) -> Any:
    status, *results = getattr(hiprtc, name)(*arguments)
    if int(status):
        meaning = bindings.text(hiprtc.hiprtcGetErrorString(status))
        raise RuntimeError(
            f"{name} failed with {getattr(status, 'name', 'status')} ({int(status)}): {meaning}"
        )
    return results[0] if len(results) == 1 else tuple(results)
