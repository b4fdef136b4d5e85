"""What plans from numbers bind beside what built plans bind, to the byte, over random problems, and
what calls of known numbers launch beside those of new ones: run by a test in a process that has
loaded a driver that does nothing. Its arguments: how many problems of each kind, and a seed. Prints
how many were compared, by implementation, and what differed."""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from idle_calls import makes
from idle_compiler import compile_nothing
from kernelseam import dispatch
from kernelseam.descriptors import GroupedGemmPointers
from kernelseam.errors import KernelSeamError
from kernelseam.kernels.known import KnownProblems
from kernelseam.kernels.listed import ListedKernels
from kernelseam.ops.calling import CallCache
from kernelseam.plugins import plugins
from kernelseam.tuned.classes import representative
from kernelseam_cuda import launch, runtime, tensor_maps

from benchmarks.comparing import clocks, drawing, idle_device
from benchmarks.comparing.decoding import DecodeRow
from benchmarks.comparing.paging import PagedRow
from benchmarks.comparing.rows import Session

_FIRST, _WORKSPACE, _SHIFT = 1 << 50, 1 << 60, 1 << 30
_NEAR = 1 << 40
"""Below it and above: the driver puts an address of so few bits first into a tensor map."""
LATENT = (
    PagedRow(((1, 512, 2048), (63, 1, 4096)), 128, 1, 576, 16, latent=512),
    DecodeRow(64, 4096, 16, 1, 576, 64, latent=512),
)
"""Problems whose values are views of their keys."""
bound: list[Any] = []
"""What was prepared last: kernels with their configs and arguments, and memsets."""


def encode(
    place: Any, kind: int, axes: int, address: Any, extents: Any, strides: Any, box: Any, *rest: Any
) -> int:
    """A tensor map that has the address, and a digest of all else."""
    numbers = [
        list((ctypes.c_uint64 * n).from_address(at.value))
        for n, at in ((axes, extents), (axes - 1, strides))
    ]
    digest = zlib.crc32(repr((kind, numbers, list(box), rest[1:])).encode())
    ctypes.memmove(place, struct.pack("<QQ112x", address.value, digest), 128)
    return 0


def replace_address(place: Any, address: Any) -> int:
    ctypes.memmove(place, struct.pack("<Q", address.value), 8)
    return 0


class Launched(tuple[Any, ...]):
    """A kernel's name, config, blocks and arguments."""

    def __call__(self, stream: int) -> None: ...


class Memory(NamedTuple):
    """Of a result."""

    address: int
    layout: tuple[Any, ...]

    def data_ptr(self) -> int:
        return self.address


def record() -> None:
    def nothing(stream: int) -> None: ...

    def prepare(self: Any, *given: Any) -> Callable[[int], None]:
        bound.append((self.facts.name, *given))
        return nothing

    def prepare_memset(
        self: Any, pointer: int, value: int, size: int, device: Any
    ) -> Callable[[int], None]:
        bound.append((pointer, value, size, device))
        return nothing

    def reusable(self: Any, config: Any, packer: struct.Struct) -> Callable[..., Launched]:
        return lambda blocks, *values: Launched(
            (self.facts.name, config, blocks, packer.pack(*values))
        )

    patched: Any = (launch.CudaKernel, runtime.CudaRuntime, tensor_maps)
    patched[0].reusable, patched[0].prepare = reusable, prepare
    patched[1].prepare_memset = prepare_memset
    patched[2]._encode_tiled, patched[2]._replace_address = lambda: encode, lambda: replace_address


def relatives(problem: Any) -> Iterator[Any]:
    """Its class's representative, itself, and others of the spec."""
    yield representative(problem)
    known = {f.name for f in fields(problem)}
    for name in known & {"M", "batch", "S_q", "S_k", "total_q"}:
        if getattr(problem, name) > 1:
            yield replace(problem, **{name: getattr(problem, name) - 1})
    yield problem


def compare(problem: Any, device: Any, counts: Counter[str], differ: list[str]) -> None:
    known = KnownProblems().find(problem, device, None)
    try:
        choice = dispatch.select(problem, device)
        _, parts = dispatch.build(choice, problem, device)
    except KernelSeamError:
        return
    if known is None:
        return
    sizes = parts.workspace_bytes, parts.workspace_alignment, parts.zeroed_bytes
    if sizes != (known.workspace_bytes, known.workspace_alignment, known.zeroed_bytes):
        differ.append(f"sizes of {problem}")
    for shift in (0, _SHIFT):
        names = [r.name for r in problem.operands]
        pointers = {n: _FIRST * (i + 1) + shift for i, n in enumerate(names)}
        pointers |= {r.name: pointers[r.same_as] for r in problem.operands if r.same_as}
        bound.clear()
        if known.bind(pointers, _WORKSPACE) is None:
            differ.append(f"not bound: {problem}")
            continue
        actual = [*bound]
        bound.clear()
        for step in parts.steps:
            step.bind(pointers, _WORKSPACE)
        if actual != bound:
            differ.append(f"arguments of {problem}")
        counts[choice.implementation.name] += 1


def compare_lists(device: Any, count: int, counts: Counter[str], differ: list[str]) -> None:
    """Lists of random sizes, by what those of a spec are known by."""
    kernels = ListedKernels()
    for i in range(12 * count):
        wide = 8 if i % 4 < 2 else 1  # rows at multiples of 16 bytes
        drawn = [torch.randint(1, 40 << 3 * (i % 3), (6 + i % 4,)) * wide for _ in range(3)]
        m, n, k = (x.tolist() for x in drawn)
        kind = ("bfloat16", "float32")[i % 2]
        given: dict[str, Any] = {"alpha": 0.5, "dtype": kind, "alignment": (16, 4)[i % 2]}
        problem = GroupedGemmPointers(M=m, N=n, K=k, a_transposed=i % 3 == 0, **given).problem()
        pointers = {r.name: _FIRST * (i + 1) for i, r in enumerate(problem.operands)}
        named = "sm90" if i % 4 == 0 else None
        found = kernels.find(problem, device, named)
        bound.clear()
        if found is None or found.packed(pointers, _WORKSPACE, True) is None:
            differ.append(f"not packed: {problem}")
            continue
        actual = [*bound]
        bound.clear()
        choice = dispatch.select(problem, device, named)
        _, parts = dispatch.build(choice, problem, device)
        for step in parts.steps:
            step.bind(pointers, _WORKSPACE)
        if actual != bound or not 0 <= 8 * found.workspace_words - parts.workspace_bytes < 256:
            differ.append(f"arguments of {problem}")
        counts[f"lists by {choice.implementation.name}"] += 1


def compare_calls(counts: Counter[str], differ: list[str]) -> None:
    """Of each call that comes, on new memory, what is launched where its numbers are known."""
    for make in makes().values():
        for n in (70, 71, 350, 351, 359):
            make(n)()
    for caller in plugins().cache_of(CallCache).callers.values():
        for kind, numbers in ((k, n) for k in caller._kinds for n in k.known):
            kind.last, kind.runs = (), False  # no guard is made
            known: Any = kind.again(kind.known[numbers], numbers, (), ())
            for first in (_NEAR, _NEAR << 2):
                pointers = [first + (i << 24) for i in range(len(caller._names))]
                actual = known.again(*_memory(first), *pointers)
                function = known.function
                run = function.run(function.once, *_memory(first), *pointers, *numbers)
                if actual is None or actual != run:
                    differ.append(f"{actual} beside {run}")
                counts["calls"] += 1


def _memory(first: int) -> tuple[Callable[..., Memory], Callable[[int], int]]:
    """Results one after the other, and memory that is 0."""
    at = iter(range(first << 1, first << 2, 1 << 24))
    return (lambda *layout: Memory(next(at), layout)), lambda size: first >> 1


if __name__ == "__main__":
    idle_device.install()
    compile_nothing()
    record()
    torch.manual_seed(0)
    count, seed = map(int, sys.argv[1:])
    session = Session("cuda", clocks.HostClock())
    device, counts, differ = session.target(), Counter[str](), list[str]()
    drawn = (row for kind in drawing.KINDS for row in drawing.drawn([kind], count, seed))
    for row in (*drawn, *LATENT):
        for descriptor in row.planned(session):
            problem: Any = descriptor.simplified()[0].problem()
            family = list(relatives(problem))
            for like in family[:2]:
                KnownProblems().learn(like, device, None)
            for like in family:
                compare(like, device, counts, differ)
    compare_lists(device, count, counts, differ)
    compare_calls(counts, differ)
    print(json.dumps({"counts": counts, "differ": differ}))
