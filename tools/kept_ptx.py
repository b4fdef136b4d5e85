"""The PTX that NVIDIA's binaries were assembled from, kept beside them: a test that reads it does
not compile again what the table of kernels compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kernelseam.compilation import cache_folder, compiled
from kernelseam.compilation.build import KEY
from kernelseam.contract import SourceBundle
from kernelseam_cuda.toolchain import CudaToolchain


def place(key: str) -> Path:
    """Of a binary's key, in the folder of the cache."""
    return cache_folder() / "ptx" / f"{key}.ptx"


class KeepsPtx(CudaToolchain):
    """The toolchain; what it compiles for the cache leaves its PTX there, too."""

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        binary, text = self.compile_with_ptx(bundle, arch)
        if key := dict(bundle.defines).get(KEY):
            kept = place(str(key).strip('"'))
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            kept.write_bytes(text)  # its lock is held
        return binary

    def ptx(self, bundle: SourceBundle, arch: str) -> str:
        """Of a bundle's binary, compiled where it is not in the cache. Raises CompileError."""
        binary = compiled(self, bundle, arch)
        try:
            text = place(binary.key).read_bytes()
        except FileNotFoundError:  # the binary is from elsewhere
            keyed = replace(bundle, defines=(*bundle.defines, (KEY, f'"{binary.key}"')))
            text = self.compile_with_ptx(keyed, arch)[1]
        return text.decode()
