"""The vendor Acme with a compiler, and a kernel of its own that it registers through
Backend.kernels.

Its language is Python, its "binary" the program with every include and constant in place.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from kernelseam.compilation.sources import headers_below
from kernelseam.contract import (
    CONTRACT_VERSION,
    ArchRow,
    Backend,
    Device,
    KernelFacts,
    Launch,
    LaunchConfig,
    Launches,
    Memset,
    PluginInfo,
    SourceBundle,
    TensorMap,
)
from kernelseam.costs import Work
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.hookspecs import hookimpl
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.signature import Signature
from kernelseam.registry import Registry

from kernelseam_thirdvendor.runtime import AcmeRuntime

PROGRAM = "<acme>"


@cache
def sources() -> Mapping[str, str]:
    """Include name → text of Acme's device sources."""
    return headers_below(resources.files("kernelseam_thirdvendor") / "kernels")


class AcmeToolchain:
    """kernelseam.contract.Toolchain: includes are put in their place, constants become
    variables."""

    backend = "acme"
    archs = ("acme1",)

    def __init__(self) -> None:
        self.encoded: list[tuple[str, int]] = []
        """Operand and address of every tensor map so far."""

    def arch_row(self, arch: str) -> ArchRow:
        return ArchRow(arch, 1, 0, 0, "acme/words.h", (), frozenset(), {}, cluster_blocks=2)

    def platform_files(self, arch: str) -> Mapping[str, str]:
        return sources()

    def compiler(self) -> str:
        return "acme 1"

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        files = dict(bundle.files)

        def whole(text: str) -> str:
            return re.sub(
                r'^#include "(.*)"$',
                lambda actual: whole(files[actual[1]]),
                text,
                flags=re.MULTILINE,
            )

        return re.sub(
            r"^#define (\w+) (.*)$", r"\1 = \2", whole(bundle.text()), flags=re.MULTILINE
        ).encode()

    def inspect(self, binary: bytes, arch: str) -> Mapping[str, KernelFacts]:
        result = {}
        for name, codes in re.findall(r"^# kernel (\w+): (.*)$", binary.decode(), re.MULTILINE):
            places, end = [], 0
            for code in codes.split():
                size = struct.calcsize(code)
                at = -(-end // min(size, 8)) * min(size, 8)
                places.append((at, size))
                end = at + size
            result[name] = KernelFacts(name, 1, 0, 0, 0, 0, tuple(places))
        return result

    def load(self, binary: bytes, kernel: str, device: Device) -> AcmeKernel:
        return AcmeKernel(binary, self.inspect(binary, device.arch)[kernel])

    def refuse_tensor_map(self, tensor_map: TensorMap, arch: str, alignment: int) -> str | None:
        return (
            None
            if len(tensor_map.extents) == 2
            else f"Acme's tensor maps have two axes, {tensor_map.operand} more"
        )

    def encode_tensor_map(self, tensor_map: TensorMap, address: int) -> bytes:
        self.encoded.append((tensor_map.operand, address))
        content = struct.pack("<4Q", address, *tensor_map.extents, tensor_map.strides[1])
        return content.ljust(128, b"\0")


class AcmeKernel:
    """kernelseam.contract.LoadedKernel: a function of the program."""

    def __init__(self, binary: bytes, facts: KernelFacts) -> None:
        program: dict[str, Any] = {}
        exec(compile(binary, PROGRAM, "exec"), program)
        self.facts, self._run = facts, program[facts.name]
        (codes,) = re.findall(rf"^# kernel {facts.name}: (.*)$", binary.decode(), re.MULTILINE)
        self._codes = codes.split()

    def prepare(self, config: LaunchConfig, arguments: bytes) -> Callable[[int], None]:
        given = [
            struct.unpack_from("<" + code, arguments, at)[0]
            for code, (at, _) in zip(self._codes, self.facts.parameters, strict=True)
        ]
        return lambda stream: self._run(config.grid[0], *given)


@dataclass(frozen=True)
class RowsTile:
    """Rows of C a block."""

    rows: int


class Rows(KernelDefinition):
    """Kernel definition of rows.h."""

    operation, name, entry, source = "gemm", "acme-rows", "rows", "acme/rows.h"
    archs = ("acme1",)

    def sources(self) -> Mapping[str, str]:
        return sources()

    def covering(self) -> Iterable[GemmSpec]:
        yield GemmSpec(DType.float32, DType.float32, DType.float32)

    def refuse(self, problem: GemmProblem, row: ArchRow) -> str | None:
        spec = problem.spec
        if problem.batch * problem.num_heads != 1 or spec.view == "pointers":
            return "it multiplies one matrix by another, not a batch"
        if (
            not spec.plain
            or spec.a_transposed
            or spec.b_transposed
            or problem.beta
            or not problem.reads_inputs
        ):
            return "it multiplies, and does nothing else"
        return None if spec.dtype is spec.dtype_c is DType.float32 else "it has float32 alone"

    def tiles(self, spec: GemmSpec, row: ArchRow) -> tuple[RowsTile, ...]:
        return RowsTile(4), RowsTile(1)

    def tile(self, problem: GemmProblem, row: ArchRow, device: Device) -> RowsTile:
        return self.tiles(problem.spec, row)[problem.M < 4]

    def launches(self, problem: GemmProblem, tile: RowsTile, device: Device) -> Launches:
        return Launches((Memset(0, 4), Launch(self, problem, tile, {"counter": 0})), 256, 256)

    def defines(self, spec: GemmSpec, tile: RowsTile, row: ArchRow) -> dict[str, object]:
        return {"ROWS": tile.rows}

    def signature(self, spec: GemmSpec) -> Signature:
        return Signature(
            (
                ("a", "tensor_map"),
                ("b", "pointer"),
                ("c", "pointer"),
                ("counter", "pointer"),
                ("b_row", "i64"),
                ("c_row", "i64"),
                ("M", "i32"),
                ("N", "i32"),
                ("K", "i32"),
                ("alpha", "f32"),
            )
        )

    def grid(self, problem: GemmProblem, tile: RowsTile, device: Device) -> int:
        return -(-problem.M // tile.rows)

    def threads(self, tile: RowsTile, row: ArchRow) -> int:
        return 1

    def shared_bytes(self, spec: GemmSpec, tile: RowsTile) -> int:
        return 0

    def values(
        self, problem: GemmProblem, tile: RowsTile, device: Device
    ) -> dict[str, int | float]:
        p = problem
        rows = {"b_row": p.b_strides[2], "c_row": p.c_strides[2]}
        return {**rows, "M": p.M, "N": p.N, "K": p.K, "alpha": p.alpha}

    def pointers(self, spec: GemmSpec) -> dict[str, str]:
        return {"b": "B", "c": "C", "counter": ""}

    def tensor_maps(
        self, problem: GemmProblem, tile: RowsTile, device: Device
    ) -> dict[str, TensorMap]:
        p = problem
        return {
            "a": TensorMap("A", p.spec.dtype, (p.K, p.M), (1, p.a_strides[2]), (p.K, tile.rows))
        }

    def work(self, problem: GemmProblem, tile: RowsTile, device: Device) -> Work:
        return Work(problem.bytes_moved)


@hookimpl
def kernelseam_info() -> PluginInfo:
    return PluginInfo(
        "thirdvendor-compiled", "0.1.0", CONTRACT_VERSION, "Acme devices, with a compiler"
    )


@hookimpl
def kernelseam_register(registry: Registry) -> None:
    registry.add_backend(
        Backend("acme", AcmeRuntime(), AcmeToolchain(), kernels=(Rows(),), priority=-200)
    )
