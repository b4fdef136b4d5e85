"""What a plugin fills in: the protocols between the core and a vendor, versioned as one.

The core calls these and nothing else of a plugin. A backend brings a *runtime* (devices, memory, streams,
arrays), may bring a *toolchain* (compile and load shared kernels), and may bring *implementations* of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kernelseam.dtypes import DType
from kernelseam.forking import cached_property

CONTRACT_VERSION = 1
"""Raised with every incompatible change of this module; a plugin that names another is kept out."""


# ---------------------------------------------------------------- devices


EMULATED = "emulated"
"""`Device.evidence` of a device whose instructions are interpreted by a program."""
HOST = "host"
"""`Device.evidence` of the host's processor, which shares its memory with Python."""


@dataclass(frozen=True)
class DeviceLimits:
    """What dispatch and the host halves of kernels ask of a device. Rates are peaks, in SI units."""

    compute_units: int = 1
    shared_bytes_per_block: int = 0
    memory_bytes: int = 0
    bytes_per_second: float = 1e10
    operations_per_second: Mapping[str, float] = field(default_factory=dict, hash=False)
    """By dtype name; float16 and bfloat16 mean the matrix units."""
    launch_seconds: float = 5e-6


@dataclass(frozen=True)
class Device:
    """One GPU, or the host."""

    backend: str
    index: int
    arch: str
    name: str = field(default="", compare=False)
    limits: DeviceLimits = field(default_factory=DeviceLimits, compare=False)
    evidence: str = field(default="measured", compare=False)
    """What a result from here shows of the arch: "measured" on the hardware itself, "emulated" by a program that runs
    the hardware's instructions, or "host", where the host's processor is the arch. An emulated device is used only
    where its backend or the device itself is named, and its times say nothing."""

    def __str__(self) -> str:
        emulated = ", emulated" if self.evidence == EMULATED else ""
        return f"{self.backend}:{self.index} ({self.arch}{emulated})"


# ---------------------------------------------------------------- arrays


@dataclass(frozen=True, init=False)
class ArrayInfo:
    """An array as host code sees it: where its first element is and how it is walked. Nothing is copied."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    dtype: DType
    device: Device
    kind: str
    """Who made it: "numpy", "torch", … — results are of the same kind."""
    owner: object = field(repr=False)
    writable: bool = True

    def __init__(
        self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, device: Device, kind: str,
        owner: object, writable: bool = True,
    ) -> None:
        # Every call makes one for each array, and what a frozen dataclass writes itself takes three times as long.
        put = self.__dict__
        put["pointer"], put["shape"], put["strides"], put["dtype"] = pointer, shape, strides, dtype
        put["device"], put["kind"], put["owner"], put["writable"] = device, kind, owner, writable


@runtime_checkable
class Runtime(Protocol):
    """Devices, memory, streams and arrays of one backend."""

    def devices(self) -> Sequence[Device]:
        """The devices that are here; empty, never an exception, where there are none."""

    def describe(self, array: object) -> ArrayInfo | None:
        """The array's view if it is of a kind and on a device that this runtime knows, else None."""

    def empty(self, shape: Sequence[int], dtype: DType, device: Device, like: ArrayInfo | None = None) -> object:
        """A new, uninitialised, row-major array on the device; of ``like``'s kind where given."""

    def from_host(self, host: npt.NDArray[Any], device: Device) -> object:
        """A copy of a host array on the device, complete when this returns."""

    def to_host(self, array: object) -> npt.NDArray[Any]:
        """A host copy of an array (strides kept simple: row-major), after the work already queued."""

    def read(self, pointer: int, size: int, device: Device) -> npt.NDArray[np.uint8]:
        """A host copy of ``size`` bytes of the device's memory from an address on, after the work already queued."""

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        """The handle of the stream that the array's library would use now."""

    def synchronize(self, device: Device) -> None:
        """Wait for everything queued on the device."""

    def activate(self, device: Device) -> AbstractContextManager[None]:
        """Make the device current, and restore the one before."""

    def time(self, launch: Callable[[int], None], device: Device, repeats: int) -> list[float]:
        """Seconds of each of ``repeats`` runs of ``launch(stream)``, measured on the device where it has a clock."""


# ---------------------------------------------------------------- compiling and launching


@dataclass(frozen=True)
class SourceBundle:
    """All that shapes one binary: sources held in memory, constants, and the kernels it must contain.

    ``files`` maps include names to texts; the file named ``main`` is compiled. ``defines`` stand before it.
    """

    name: str
    main: str
    files: tuple[tuple[str, str], ...]
    defines: tuple[tuple[str, str], ...]
    options: tuple[str, ...] = ()

    def text(self) -> str:
        """The translation unit handed to the compiler, constants first."""
        head = "".join(f"#define {k} {v}\n" for k, v in self.defines)
        return f'{head}#include "{self.main}"\n'


@dataclass(frozen=True)
class KernelFacts:
    """What can be read off a binary without running it."""

    name: str
    registers: int
    spills: int
    """Bytes (or registers, where the format counts those) spilled to memory; 0 is wanted everywhere."""
    scratch_bytes: int
    shared_bytes: int
    matrix_instructions: int
    parameters: tuple[tuple[int, int], ...]
    """(offset, size) of each kernel parameter, in order."""
    extra: Mapping[str, int] = field(default_factory=dict, hash=False)


class LoadedKernel(Protocol):
    """A kernel on a device."""

    def prepare(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, arguments: bytes
    ) -> Callable[[int], None]:
        """Keep the packed arguments and return ``launch(stream)``, which does nothing but launch."""


@dataclass(frozen=True)
class ArchRow:
    """One arch's row in its vendor's table: what shared kernels and their host halves need to know.

    ``tiles`` maps an operation ("gemm", "attention") to its rows of tile shapes; each operation's host half
    documents the columns it reads.
    """

    arch: str
    warp_size: int
    shared_bytes_per_block: int
    registers_per_lane: int
    platform: str
    """Include name of the platform header."""
    defines: tuple[tuple[str, str], ...]
    matrix_dtypes: frozenset[DType]
    tiles: Mapping[str, tuple[Any, ...]] = field(hash=False)
    options: tuple[str, ...] = ()


class Toolchain(Protocol):
    """What a backend brings to shared kernels."""

    @property
    def backend(self) -> str: ...

    @property
    def archs(self) -> tuple[str, ...]:
        """Every arch it compiles for, whether or not such a device is here."""

    def arch_row(self, arch: str) -> ArchRow:
        """The arch's row; raises UnknownName."""

    def platform_files(self, arch: str) -> Mapping[str, str]:
        """Include name → text of the platform header and what it includes."""

    def compiler(self) -> str:
        """Name and version of the compiler, part of a binary's key. Raises CompileError if it cannot be loaded."""

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        """Source to binary, with the bundle's options: what else shapes a binary is not in its key. The text of the
        constant KS_KEY is found in the binary, which is refused otherwise. Raises CompileError with the compiler's
        log."""

    def inspect(self, binary: bytes, arch: str) -> Mapping[str, KernelFacts]:
        """Facts of each kernel in a binary, read without a device."""

    def load(self, binary: bytes, kernel: str, device: Device) -> LoadedKernel:
        """The kernel on the device; loading the same binary again is cheap."""


# ---------------------------------------------------------------- problems and implementations


@dataclass(frozen=True)
class OperandRule:
    """What a plan wants of one pointer."""

    name: str
    dtype: DType | None
    """None: a list of addresses (8 bytes an entry)."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, one an axis. A shape with a 0 is never read and its address may be null."""
    alignment: int
    """Bytes that the address must be a multiple of."""
    written: bool = False
    optional: bool = False
    may_be: str = ""
    """A written operand that it may be: of the same address, dtype, shape and strides. Else they must not overlap."""

    @cached_property
    def span(self) -> int:
        """Elements from the first to one past the last that are touched; 0 where nothing is."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def walks_as(self, other: OperandRule) -> bool:
        """Whether it visits the same elements as another of the same address, in the same order."""
        steps = zip(self.shape, self.strides, other.strides, strict=True) if self.shape == other.shape else ()
        return self.dtype is other.dtype and self.shape == other.shape and all(s == t for n, s, t in steps if n > 1)


class Problem(Protocol):
    """Spec, extents and strides of one operation: hashable, without pointers."""

    @property
    def operation(self) -> str: ...

    @property
    def spec(self) -> Hashable: ...

    @property
    def operands(self) -> tuple[OperandRule, ...]: ...

    @property
    def operations(self) -> int:
        """Floating-point operations, a multiply-add counted as two."""

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that must cross memory: every input read once, every output written once."""

    @property
    def compute_dtype(self) -> DType:
        """The dtype whose rate bounds the operations."""


@dataclass(frozen=True)
class Cost:
    """A prediction; dispatch compares ``seconds``."""

    bytes: int
    operations: int
    seconds: float


@dataclass(frozen=True)
class LaunchRecord:
    """One launch, as ``kernelseam.trace()`` and ``explain`` show it."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arch: str
    kind: str = "kernel"
    """"kernel", "library" (a vendor call that launches what it likes) or "memset"."""
    evidence: str = "measured"
    """The device's."""


class Step(Protocol):
    """One launch of a plan, not yet bound to memory."""

    @property
    def record(self) -> LaunchRecord: ...

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        """``launch(stream)`` over these addresses, any number of times. May pack and encode; must not launch, nor read
        what stands in memory: it may be another at each launch."""


@dataclass(frozen=True)
class PlanParts:
    """What an implementation builds: its launches in order and the workspace they share."""

    steps: tuple[Step, ...]
    workspace_bytes: int = 0


class Implementation(Protocol):
    """One way to compute a family of problems on a family of devices."""

    @property
    def name(self) -> str: ...

    @property
    def backend(self) -> str: ...

    @property
    def operation(self) -> str: ...

    def supports(self, problem: Any, device: Device) -> str | None:
        """None if it takes the problem, else why not, in words for the caller."""

    def cost(self, problem: Any, device: Device) -> Cost: ...

    def build(self, problem: Any, device: Device) -> PlanParts: ...


# ---------------------------------------------------------------- what a plugin hands over


@dataclass(frozen=True)
class PluginInfo:
    """Cheap facts, given without importing a vendor's runtime."""

    name: str
    version: str
    contract_version: int
    summary: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables of its own, each with its meaning, for ``kernelseam doctor``."""


@dataclass(frozen=True)
class Backend:
    """A vendor as the core sees it. Shared kernels follow from ``toolchain`` without another line."""

    name: str
    runtime: Runtime
    toolchain: Toolchain | None = None
    implementations: tuple[Implementation, ...] = ()
    priority: int = 0
    """Where no device is named, the backend with devices and the highest priority is the default."""


def host_array(pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: DType) -> npt.NDArray[Any]:
    """A NumPy view of host memory; strides in elements, never negative."""
    np_dtype = np.dtype(dtype.numpy)
    if 0 in shape:
        return np.empty(tuple(shape), np_dtype)
    import ctypes

    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory: Any = (ctypes.c_char * (span * np_dtype.itemsize)).from_address(pointer)
    return np.ndarray(tuple(shape), np_dtype, memory, 0, tuple([s * np_dtype.itemsize for s in strides]))


def host_copy(info: ArrayInfo, runtime: Runtime) -> npt.NDArray[Any]:
    """A row-major host copy of an array in device memory, by one ``read`` of what it spans; strides of any sign."""
    dtype = np.dtype(info.dtype.numpy)
    if 0 in info.shape:
        return np.empty(info.shape, dtype)
    ends = [(n - 1) * s for n, s in zip(info.shape, info.strides, strict=True)]
    first, last = sum(min(e, 0) for e in ends), sum(max(e, 0) for e in ends)
    size = (last - first + 1) * dtype.itemsize
    flat = runtime.read(info.pointer + first * dtype.itemsize, size, info.device).view(dtype)
    strides = tuple(s * dtype.itemsize for s in info.strides)
    return np.array(np.lib.stride_tricks.as_strided(flat[-first:], info.shape, strides), order="C")
