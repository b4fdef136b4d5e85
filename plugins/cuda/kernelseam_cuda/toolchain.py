"""The toolchain: kernels to cubins through nvrtc, and onto a device."""

from __future__ import annotations

import hashlib
import importlib.resources
import re
import warnings
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from kernelseam.compilation.sources import headers_below
from kernelseam.contract import (
    ArchRow,
    Device,
    KernelFacts,
    LoadedKernel,
    Runtime,
    SourceBundle,
    TensorMap,
)
from kernelseam.errors import CompileError, SlowBinary
from kernelseam.forking import ForkGate, new_lock

from kernelseam_cuda import archs, bindings, cubin, launch, tensor_maps
from kernelseam_cuda.compiler_version import nvrtc, version

_SLOW_WARNINGS = re.compile(r"^.*(?:\(C75(?:08|1[0-5])\)|wgmma.* serialized).*$", re.MULTILINE)
"""Warnings of the assembler: C7508, a setmaxnreg is ignored; C7510 to C7515, wgmma are serialised.
The kernel's results stay right, but it is slow."""
_HAS_NO_CACHE = (13, 0)
"""The first nvrtc known to take --no-cache: a hit in its own cache has an empty log."""


class CudaToolchain:
    """kernelseam.contract.Toolchain over nvrtc. Compiling needs no device and no driver."""

    backend = "cuda"
    compiles_beside = True

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._modules: dict[tuple[str, int], Any] = {}
        self._kernels: dict[tuple[str, int, str], launch.CudaKernel] = {}
        self._facts: dict[str, Mapping[str, KernelFacts]] = {}
        self._lock = new_lock()

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(archs.ROWS)

    def arch_row(self, arch: str) -> ArchRow:
        return archs.ROWS.get(arch) or archs.row(arch)

    def platform_files(self, arch: str) -> Mapping[str, str]:
        return sources()

    def compiler(self) -> str:
        with _FORK_GATE.work():
            return version()

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        return self.compile_with_ptx(bundle, arch)[0]

    def compile_with_ptx(self, bundle: SourceBundle, arch: str) -> tuple[bytes, bytes]:
        """The cubin, and the PTX that it was assembled from. Raises CompileError."""
        self.arch_row(arch)
        names, texts = [n.encode() for n, _ in bundle.files], [t.encode() for _, t in bundle.files]
        with _FORK_GATE.work():
            no_cache = ["--no-cache"] * (nvrtc(bundle.name, arch, "nvrtcVersion") >= _HAS_NO_CACHE)
            options = [
                o.encode() for o in (f"--gpu-architecture={arch}", *bundle.options, *no_cache)
            ]
            program = nvrtc(
                bundle.name,
                arch,
                "nvrtcCreateProgram",
                bundle.text().encode(),
                b"unit.cu",
                len(names),
                texts,
                names,
            )
            try:
                (status,) = bindings.nvrtc().nvrtcCompileProgram(program, len(options), options)
                log = bytearray(nvrtc(bundle.name, arch, "nvrtcGetProgramLogSize", program))
                nvrtc(bundle.name, arch, "nvrtcGetProgramLog", program, log)
                text = log.rstrip(bytes(1)).decode(errors="replace")
                if int(status):
                    raise CompileError(bundle.name, arch, f"{status.name}\n{text}")
                if slow_warnings := _SLOW_WARNINGS.findall(text):
                    diagnostics = "\n".join(slow_warnings)
                    warnings.warn(
                        f"{bundle.name} compiles for {arch}, but not as intended: "
                        "its results are right, "
                        f"and it is slow. {version()} says:\n{diagnostics}",
                        SlowBinary,
                        stacklevel=2,
                    )
                results = []
                for kind in ("CUBIN", "PTX"):
                    result = bytearray(nvrtc(bundle.name, arch, f"nvrtcGet{kind}Size", program))
                    nvrtc(bundle.name, arch, f"nvrtcGet{kind}", program, result)
                    results.append(bytes(result))
                return results[0], results[1].rstrip(bytes(1))
            finally:
                bindings.nvrtc().nvrtcDestroyProgram(program)

    def inspect(self, binary: bytes, arch: str) -> Mapping[str, KernelFacts]:
        return self._inspect(binary, _digest(binary))

    def _inspect(self, binary: bytes, digest: str) -> Mapping[str, KernelFacts]:
        if digest not in self._facts:
            self._facts[digest] = cubin.facts(binary)
        return self._facts[digest]

    def load(self, binary: bytes, kernel: str, device: Device) -> LoadedKernel:
        digest = _digest(binary)
        module, key = (digest, device.index), (digest, device.index, kernel)
        with self._lock:
            if key not in self._kernels:
                with self._runtime.activate(device), bindings.kept_from_capture():
                    if module not in self._modules:
                        self._modules[module] = bindings.call("cuModuleLoadData", binary)
                    self._kernels[key] = launch.load(
                        self._modules[module], kernel, lambda: self._inspect(binary, digest)[kernel]
                    )
            return self._kernels[key]

    def refuse_tensor_map(self, tensor_map: TensorMap, arch: str, alignment: int) -> str | None:
        if arch not in archs.CLUSTERED:
            return f"it loads {tensor_map.operand} by a tensor map, {arch} has none"
        return tensor_maps.refuse(tensor_map, alignment)

    def tensor_map_encoder(
        self, template: TensorMap
    ) -> Callable[[tuple[int, ...], tuple[int, ...], int], bytes]:
        """See kernelseam.contract.TensorMapEncoder."""
        return tensor_maps.encoder(template)

    def address_first_encoder(
        self, template: TensorMap
    ) -> Callable[[tuple[int, ...], tuple[int, ...], int], tuple[bytes, int] | None]:
        """See kernelseam.contract.AddressFirstEncoder."""
        return tensor_maps.tails(template)

    def encode_tensor_map(self, tensor_map: TensorMap, address: int) -> bytes:
        return tensor_maps.encode(tensor_map, address)


@lru_cache(64)
def _digest(binary: bytes) -> str:
    """Of a binary that is loaded again for every plan."""
    return hashlib.sha256(binary).hexdigest()


_FORK_GATE = ForkGate()
"""Around nvrtc: a child forked during a compilation would deadlock on nvrtc's locks."""


@cache
def sources() -> Mapping[str, str]:
    """Include name → text of every device source of the plugin: the platform's, and those of
    kernels of its own."""
    return headers_below(importlib.resources.files(__package__) / "kernels")
