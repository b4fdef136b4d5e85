"""Every device source through one nvrtc, which need not be the one that is installed.

    python oldest_nvrtc.py LIBNVRTC [--whole]

prints as JSON the library's version, the sources that were compiled, and what failed: by its front
end, which knows builtins and the language, or as a whole, by its assembler too. cuda.bindings loads
the library that is installed, and of one's name no second: this loads any by its path.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import kernel_table
from kernelseam.contract import SourceBundle
from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.expressions.scores import score_expression
from kernelseam.expressions.text import text_of
from kernelseam.kernels.attention.row_kernels import RowTile
from kernelseam.kernels.attention.softmax import SOFTMAX
from kernelseam.kernels.kernel import bundle
from kernelseam_cuda import plugin
from kernelseam_cuda.runtime import CudaRuntime
from kernelseam_cuda.toolchain import CudaToolchain

ARCH = "sm_90a"
"""It has every kernel."""


class Nvrtc:
    """The C functions of a library that compile."""

    def __init__(self, path: Path, whole: bool) -> None:
        self._more = [] if whole else ["-fdevice-syntax-only"]
        for builtins in path.parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value

    def log_of_a_failure(self, source: SourceBundle) -> str | None:
        """What it says of sources that it does not compile; None where it does."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        files = [_strings([file[i] for file in source.files]) for i in (1, 0)]
        options = [f"--gpu-architecture={ARCH}", *source.options, *self._more]
        nvrtc = self._library
        assert not nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.text().encode(), b"unit.cu", len(source.files), *files
        )
        failed = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return log.value.decode(errors="replace") if failed else None


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def binaries() -> Iterator[tuple[str, SourceBundle]]:
    """Name and sources of a binary for each entry, and for each source that none before it
    includes; that of the softmax first, which the compile matrix has not, with a user's scores."""
    toolchain, seen = CudaToolchain(CudaRuntime()), set[str]()
    scores = score_expression(
        lambda score, b, h, q, kv: score * (q - kv) + h, lambda b, h, q, kv: q >= kv
    )
    spec = AttentionSpec(DType.float16, 64, 64, expression=text_of(scores.structure))
    yield "softmax", bundle(SOFTMAX, spec, RowTile(), toolchain, ARCH)
    for known in kernel_table.binaries(toolchain, ARCH, plugin.backend().kernels):
        kernel, tiles = known.covered.kernel, known.often or known.rarely
        if tiles:
            source = bundle(kernel, known.covered.spec, tiles[0], toolchain, ARCH)
            names = {kernel.entry, *(name for name, _ in source.files)}
            if names - seen:
                yield str(known.covered), source
            seen |= names


def main(path: Path, whole: bool) -> None:
    nvrtc, sources, failures = Nvrtc(path, whole), set[str](), dict[str, str]()
    for name, source in binaries():
        sources |= {name for name, _ in source.files}
        if log := nvrtc.log_of_a_failure(source):
            failures[name] = log
    print(json.dumps([nvrtc.version, sorted(sources), failures]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--whole" in sys.argv)
