"""A parity case as executables, one a launch, as sanitizers want it: the kernel, its launch and its
memory, no Python.

Under a sanitizer every operand is an allocation that ends with its last element; without one memory
lies as in the matrix, between guards. Launches hand their memory on through files. Each place in
the workspace is a buffer of its own.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from kernelseam.contract import Device, Launch, Launches, SourceBundle
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.descriptors.gemm.grouped_pointers import table_of
from kernelseam.descriptors.gemm.grouped_pointers_problem import TABLE, GroupedGemmPointersProblem
from kernelseam.kernels import COMPOSITIONS, DECODE, GEMV
from kernelseam.kernels.attention.unfused import Unfused
from kernelseam.kernels.kernel import bundle
from kernelseam.oracle.check import Verdict
from kernelseam.oracle.formulas import Array
from kernelseam.parity.running.stages import judge_memory
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.case import Case
from kernelseam.samples.common import UNFUSED
from kernelseam.samples.data.memory import POISON, Layout
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.grouped_pointers_case import GroupedPointersCase
from kernelseam.samples.operations import operands
from kernelseam.samples.operations.operands import describe

from kernelseam_hostcpp import compiler
from kernelseam_hostcpp.archs import OPTIONS
from kernelseam_hostcpp.runtime import HostCppRuntime
from kernelseam_hostcpp.toolchain import HostToolchain

SANITIZERS = {
    "thread": ("-O1", "-g1", "-fsanitize=thread"),
    "address": ("-O0", "-g1", "-fsanitize=address,undefined"),
}
"""Compiler options by name; "address" looks for undefined behaviour too, and compiles far longer
when optimised."""
BUILDS = {"plain": ("-O1",), "contracted": ("-O1", "-DKS_CONTRACTED"), **SANITIZERS}
"""All the ways to compile a case: "plain" as in the matrix, "contracted" with products and sums of
float32 fused."""
_ENVIRONMENT = {
    "TSAN_OPTIONS": "halt_on_error=1",
    "ASAN_OPTIONS": "detect_leaks=1",
    "UBSAN_OPTIONS": "print_stacktrace=0",
}
_SPACE = 1 << 40
_FINDINGS = (
    re.compile(r"WARNING: ThreadSanitizer: ([\w -]+?) \("),
    re.compile(r"ERROR: AddressSanitizer: ([\w-]+)"),
    re.compile(r"ERROR: LeakSanitizer: ([\w ]+)"),
    re.compile(r"runtime error: (.+)"),
    re.compile(r"launch failed: (.+)"),
)

Change = Callable[[SourceBundle], SourceBundle]


@dataclass(frozen=True)
class Report:
    """What became of a run: what sanitizers or the launch found, in words and order; the verdict if
    it ended well."""

    findings: tuple[str, ...]
    verdict: Verdict | None
    log: str


@dataclass(frozen=True)
class Prepared:
    """A case over memory that is not there yet: buffer i begins at the address (i + 1)·2⁴⁰."""

    layout: Layout
    addresses: Mapping[str, int]
    descriptor: Descriptor

    @property
    def problem(self) -> Any:
        """Spec, extents and strides."""
        return self.descriptor.problem()


def prepared(case: Case, device: Device, separate: bool = True) -> Prepared:
    """The case's layout, every operand's block a buffer of its own or all in one, and its
    descriptor; lists are the host's."""
    if isinstance(case, GemmCase | GroupedPointersCase | AttentionCase) and case.view == "device":
        case = replace(case, view="host")
    layout = operands.layout(case, separate)
    blocks = layout.blocks()
    space = {
        name: (i + 1) * _SPACE
        for i, name in enumerate(dict.fromkeys(buffer for buffer, _ in blocks.values()))
    }
    addresses = {
        name: space[blocks[p.block][0]] + blocks[p.block][1] + p.offset * p.dtype.itemsize
        for name, p in layout.placements.items()
    }
    return Prepared(layout, addresses, describe(case, layout, addresses, HostCppRuntime(), device))


@cache
def problem_of(case: Case, device: Device) -> Any:
    """The problem of a prepared case, made once: several modules choose their cases by it."""
    return prepared(case, device).problem


def run(
    case: Case,
    device: Device,
    build: str = "plain",
    change: Change | None = None,
    seconds: float = 120,
    implementation: str = "shared",
) -> Report:
    """Compile a case's kernels for a device's arch in one of the BUILDS, run them in order while
    nothing is found, and hold the results against the oracle.

    ``change`` plants a fault in their sources. ``implementation``: "shared", UNFUSED, "decode" or
    "gemv". Raises CompileError, subprocess.TimeoutExpired.
    """
    toolchain, made = HostToolchain(), prepared(case, device, separate=build in SANITIZERS)
    before = made.layout.buffers()
    made.layout.write(before, operands.values(case))
    problem = made.problem
    named = {UNFUSED: Unfused(), DECODE.name: DECODE, GEMV.name: GEMV}
    composition = named.get(implementation, COMPOSITIONS[problem.operation])
    launches = composition.launches(
        problem, composition.tile(problem, toolchain.arch_row(device.arch), device), device
    )
    memory = {**before, **_workspace(launches)}
    addresses, lists = dict(made.addresses), dict[str, Array]()
    if isinstance(problem, GroupedGemmPointersProblem):
        memory[TABLE] = table_of(problem).view(np.uint8)
        addresses[TABLE] = len(memory) * _SPACE
    for name, value in made.descriptor.operands().items():
        if isinstance(value, list):
            lists[name] = np.array(value, np.uint64).view(np.uint8)
            addresses[name] = (len(memory) + len(lists)) * _SPACE
    findings, log, options = tuple[str, ...](), "", (*OPTIONS, *BUILDS[build])
    for launch in launches.kernels:
        if not launch.kernel.grid(launch.problem, launch.tile, device):
            continue
        sources = bundle(launch.kernel, launch.problem.spec, launch.tile, toolchain, device.arch)
        sources = replace(change(sources) if change else sources, options=options)
        program = compiler.compile_bundle(sources, device.arch, '#include "host/executable.h"\n')
        content = _content(launch, device, toolchain, addresses, memory, lists)
        findings, log, after = _run(program, content, memory, seconds)
        if after is None:
            return Report(findings, None, log)
        memory = after
        if findings:
            break
    return Report(
        findings,
        judge_memory(case, made.layout, before, {name: memory[name] for name in before}),
        log,
    )


def _place(offset: int) -> str:
    return f"workspace from {offset}"


def _workspace(launches: Launches) -> dict[str, Array]:
    """What lies between one place that launches name in the workspace and the next."""
    workspace = np.full(launches.workspace_bytes, POISON, np.uint8)
    workspace[: launches.zeroed_bytes] = 0
    starts = sorted({offset for launch in launches.kernels for offset in launch.workspace.values()})
    ends = (*starts[1:], launches.workspace_bytes)
    return {_place(s): workspace[s:e] for s, e in zip(starts, ends, strict=False)}


def _content(
    launch: Launch,
    device: Device,
    toolchain: HostToolchain,
    addresses: Mapping[str, int],
    memory: Mapping[str, Array],
    lists: Mapping[str, Array],
) -> bytes:
    """A launch as kernels/executable.h reads it."""
    kernel, problem, tile, spec = launch.kernel, launch.problem, launch.tile, launch.problem.spec
    names = {**kernel.pointers(spec), **launch.operands}
    pointers = {p: addresses.get(n, 0) for p, n in names.items()}
    buffers = list(memory)
    pointers.update(
        (p, (buffers.index(_place(offset)) + 1) * _SPACE) for p, offset in launch.workspace.items()
    )
    signature = kernel.signature(spec)
    arguments = signature.pack({**kernel.values(problem, tile, device), **pointers})
    offsets = [offset for _, kind, offset in signature.scalars if kind == "pointer"]
    words = (
        kernel.grid(problem, tile, device),
        kernel.threads(tile, toolchain.arch_row(device.arch)),
        kernel.shared_bytes(spec, tile),
        len(arguments),
        len(offsets),
        len(memory) + len(lists),
        *offsets,
    )
    content = struct.pack(f"<{len(words)}Q", *words) + _padded(arguments)
    for name, buffer in (*memory.items(), *lists.items()):
        content += struct.pack("<2Q", buffer.nbytes, name in lists) + _padded(buffer.tobytes())
    return content


def _padded(x: bytes) -> bytes:
    return x + bytes(-len(x) % 8)


def _started(line: list[Path], seconds: float) -> subprocess.CompletedProcess[bytes]:
    """A program that was just written, run to its end. A process that another thread forked
    meanwhile holds the file open for writing until its own exec: execve then fails with ETXTBSY."""
    environment = {**os.environ, **_ENVIRONMENT}
    for attempt in range(200):
        try:
            return subprocess.run(line, capture_output=True, timeout=seconds, env=environment)
        except OSError as e:
            if e.errno != errno.ETXTBSY or attempt == 199:
                raise
            time.sleep(0.01)
    raise AssertionError


def _run(
    program: bytes, content: bytes, before: Mapping[str, Array], seconds: float
) -> tuple[tuple[str, ...], str, dict[str, Array] | None]:
    """What was found, the log, and memory afterwards where the program came that far."""
    with tempfile.TemporaryDirectory(prefix="kernelseam-hostcpp-") as name:
        folder = Path(name)
        (folder / "program").write_bytes(program)
        (folder / "program").chmod(0o700)
        (folder / "input").write_bytes(content)
        done = _started([folder / "program", folder / "input", folder / "output"], seconds)
        log = done.stderr.decode(errors="replace")
        findings = tuple(m for line in log.splitlines() for f in _FINDINGS for m in f.findall(line))
        if done.returncode and not findings:
            findings = (f"exit status {done.returncode}",)
        if not (folder / "output").exists():
            return findings, log, None
        raw, at, after = np.fromfile(folder / "output", np.uint8), 0, dict[str, Array]()
        for key, buffer in before.items():
            after[key] = raw[at : at + buffer.nbytes]
            at += buffer.nbytes
    return findings, log, after
