"""The toolchain: kernels to code objects through hiprtc, and onto a device."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from kernelseam.compilation.sources import headers_below
from kernelseam.contract import (
    EMULATED,
    ArchRow,
    Device,
    KernelFacts,
    LoadedKernel,
    Runtime,
    SourceBundle,
    WithoutTensorMaps,
)
from kernelseam.errors import CompileError, KernelSeamError
from kernelseam.forking import new_lock

from kernelseam_rocm import (
    archs,
    bindings,
    codeobject,
    compiler,
    disassembly,
    emulator,
    launch,
    worker,
)


class HipToolchain(WithoutTensorMaps):
    """kernelseam.contract.Toolchain over hiprtc."""

    backend = "rocm"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._compiler = ""
        self._modules: dict[tuple[str, int], Any] = {}
        self._facts: dict[str, Mapping[str, KernelFacts]] = {}
        self._lock = new_lock()

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(archs.ROWS)

    def arch_row(self, arch: str) -> ArchRow:
        return archs.row(arch)

    def platform_files(self, arch: str) -> Mapping[str, str]:
        return sources()

    def compiler(self) -> str:
        with self._lock:
            if not self._compiler:
                self._compiler = in_child("hiprtc", "any arch", compiler.version)
            return self._compiler

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        self.arch_row(arch)  # an arch that the compiler does not know would end its process
        options = (f"--offload-arch={arch}", *bundle.options)
        binary: bytes = in_child(
            bundle.name,
            arch,
            compiler.compile_source,
            bundle.name,
            arch,
            bundle.text(),
            dict(bundle.files),
            options,
        )
        return binary

    def inspect(self, binary: bytes, arch: str) -> Mapping[str, KernelFacts]:
        digest = hashlib.sha256(binary).hexdigest()
        with self._lock:
            facts = self._facts.get(digest)
        if facts is None:
            code = codeobject.parse(binary)
            try:
                counts = in_child("disassembly", arch, disassembly.count, code)
            except CompileError:  # without a disassembler the rest of the facts remain
                counts = {}
            facts = {
                name: codeobject.facts(code, name, counts.get(name, {})) for name in code.kernels
            }
            with self._lock:
                self._facts[digest] = facts
        return facts

    def load(self, binary: bytes, kernel: str, device: Device) -> LoadedKernel:
        key = (hashlib.sha256(binary).hexdigest(), device.index)
        code = codeobject.parse(binary)
        if device.evidence == EMULATED:
            facts = codeobject.facts(code, kernel, {})
            return emulator.required().kernel(binary, key[0], facts, device.arch, self)
        with self._lock, self._runtime.activate(device):
            if key not in self._modules:
                self._modules[key] = bindings.call("hipModuleLoadData", binary)
            function = bindings.call("hipModuleGetFunction", self._modules[key], kernel.encode())
            facts = launch.driver_facts(function, codeobject.facts(code, kernel, {}))
        return launch.HipKernel(function, facts)


_REMEDY = (
    "\nInstall ROCm; or, on Debian and Ubuntu and without root, run `tools/get-hiprtc.sh DIR` in a "
    f"checkout and set {worker.VARIABLE}=DIR."
)


@cache
def sources() -> Mapping[str, str]:
    """Include name → text of every device source of the plugin: the platform's, and those of
    kernels of its own."""
    return headers_below(importlib.resources.files("kernelseam_rocm") / "kernels")


def in_child(name: str, arch: str, function: Callable[..., Any], *arguments: object) -> Any:
    """``function`` in a child of the compile server; its errors are raised as CompileError."""
    try:
        return worker.server().run(function, *arguments)
    except CompileError:
        raise
    except worker.WorkerDied as e:
        output = f" Its output:\n{e.log}" if e.log else " It wrote nothing."
        raise CompileError(name, arch, f"{e.reason}.{output}") from e
    except (KernelSeamError, RuntimeError) as e:
        raise CompileError(name, arch, f"hiprtc cannot be used: {bindings.said(e)}{_REMEDY}") from e
