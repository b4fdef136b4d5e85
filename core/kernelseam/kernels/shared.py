"""The host side of every shared kernel: spec and tile to binary, problem to launch, for any toolchain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Protocol

from kernelseam.compilation import Binary, compiled
from kernelseam.contract import (
    ArchRow,
    Cost,
    Device,
    KernelFacts,
    LaunchRecord,
    LoadedKernel,
    PlanParts,
    SourceBundle,
    Step,
    Toolchain,
)
from kernelseam.costs import Work, predicted, roofline
from kernelseam.errors import PluginError
from kernelseam.kernels.launches import Launch, Launches
from kernelseam.kernels.signature import Signature
from kernelseam.variants import Variant

MAX_BLOCKS = 2**31 - 1
"""Blocks along the one axis of a grid."""


class Composition(Protocol):
    """A way to compute an operation's problems by shared kernels."""

    operation: str

    def refuse(self, problem: Any, row: ArchRow) -> str | None:
        """Why it does not take the problem on that arch, or None."""

    def tile(self, problem: Any, row: ArchRow, device: Device) -> Any:
        """The tile configuration for a problem, or those of its kernels."""

    def launches(self, problem: Any, tile: Any, device: Device) -> Launches:
        """What computes the problem: one kernel or several."""


class HostHalf(Composition, Protocol):
    """What stands beside a device source: everything about it that is not the vendor's. Its launches are that kernel,
    or that one and others."""

    entry: str
    """The kernel's name in the device source."""
    source: str
    """Its file, by include name."""

    def tiles(self, spec: Any, row: ArchRow) -> tuple[Any, ...]:
        """The arch's tile configurations for a spec, the preferred first."""

    def defines(self, spec: Any, tile: Any, row: ArchRow) -> dict[str, object]:
        """Constants of the binary."""

    def signature(self, spec: Any) -> Signature: ...

    def grid(self, problem: Any, tile: Any, device: Device) -> int:
        """Blocks."""

    def threads(self, tile: Any, row: ArchRow) -> int:
        """Threads of a block."""

    def shared_bytes(self, spec: Any, tile: Any) -> int: ...

    def values(self, problem: Any, tile: Any, device: Device) -> dict[str, int | float]:
        """Arguments by parameter name, pointers left out."""

    def pointers(self, spec: Any) -> dict[str, str]:
        """Pointer parameter → operand name."""

    def work(self, problem: Any, tile: Any, device: Device) -> Work:
        """What its launch asks of a device."""


@cache
def shared_sources() -> dict[str, str]:
    """Include name → text of every device source of this package."""
    found: dict[str, str] = {}

    def walk(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".h"):
                found[prefix + entry.name] = entry.read_text(encoding="utf-8")

    walk(resources.files("kernelseam.kernels"), "")
    if not found:
        raise PluginError("the shared device sources are missing from this installation: install kernelseam again")
    return found


def bundle(half: HostHalf, spec: Any, tile: Any, toolchain: Toolchain, arch: str) -> SourceBundle:
    """The sources and constants of one binary. Only the operation's own files travel, so that a change elsewhere
    does not change its key."""
    row = toolchain.arch_row(arch)
    folder = half.source.split("/")[0]
    files = {n: t for n, t in shared_sources().items() if n.split("/")[0] in (folder, "tile")}
    platform = dict(toolchain.platform_files(arch))
    files["platform.h"] = platform.pop(row.platform)
    files.update(platform)
    defines = {**dict(row.defines), **{f"KS_{k}": v for k, v in half.defines(spec, tile, row).items()}}
    return SourceBundle(
        name=half.entry, main=half.source, files=tuple(sorted(files.items())),
        defines=tuple((k, str(int(v) if isinstance(v, bool) else v)) for k, v in defines.items()), options=row.options,
    )


def build(half: HostHalf, spec: Any, tile: Any, toolchain: Toolchain, arch: str) -> tuple[Binary, KernelFacts]:
    """The binary, from the cache or the compiler, with its parameters checked."""
    binary = compiled(toolchain, bundle(half, spec, tile, toolchain, arch), arch)
    facts = toolchain.inspect(binary.data, arch)[half.entry]
    half.signature(spec).check(facts)
    return binary, facts


@dataclass(frozen=True)
class KernelStep:
    """One launch of a loaded kernel."""

    kernel: LoadedKernel
    signature: Signature
    values: Mapping[str, int | float]
    pointers: Mapping[str, str]
    record: LaunchRecord
    workspace: Mapping[str, int] = field(default_factory=dict)
    """Parameters that point into the workspace, with their offset."""

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        arguments = {**self.values, **{p: pointers.get(name, 0) for p, name in self.pointers.items()}}
        for parameter, offset in self.workspace.items():
            arguments[parameter] = workspace + offset
        return self.kernel.prepare(
            self.record.grid, self.record.block, self.record.shared_bytes, self.signature.pack(arguments)
        )


class SharedImplementation:
    """A shared kernel on one vendor's toolchain."""

    name = "shared"

    def __init__(self, half: Composition, toolchain: Toolchain) -> None:
        self._half, self._toolchain = half, toolchain
        self.operation, self.backend = half.operation, toolchain.backend

    def supports(self, problem: Any, device: Device) -> str | None:
        if device.arch not in self._toolchain.archs:
            return f"arch {device.arch} is not among {', '.join(self._toolchain.archs)}"
        row = self._toolchain.arch_row(device.arch)
        return self._half.refuse(problem, row) or self._refuse_launches(self.launches(problem, device), device)

    def _refuse_launches(self, launches: Launches, device: Device) -> str | None:
        memory = device.limits.memory_bytes
        if launches.workspace_bytes > memory > 0:
            return f"it needs a workspace of {launches.workspace_bytes} bytes, more than the device's memory, {memory}"
        for launch in launches.steps:
            if (blocks := launch.half.grid(launch.problem, launch.tile, device)) > MAX_BLOCKS:
                return f"it needs {blocks} blocks, more than {MAX_BLOCKS}"
        return None

    def launches(self, problem: Any, device: Device) -> Launches:
        """Its kernels for a problem that it supports."""
        row = self._toolchain.arch_row(device.arch)
        return self._half.launches(problem, self._half.tile(problem, row, device), device)

    def cost(self, problem: Any, device: Device) -> Cost:
        """Its launches one after the other."""
        return self.cost_of(problem, self.launches(problem, device), device)

    def cost_of(self, problem: Any, launches: Launches, device: Device) -> Cost:
        """By the model of the arch's row; where that knows nothing, the problem's roofline."""
        known = self._toolchain.arch_row(device.arch).costs
        if known is None:
            return roofline(problem, device.limits)
        works = [x.half.work(x.problem, x.tile, device) for x in launches.steps]
        seconds = sum(predicted(w, known, device.limits) for w in works if w.blocks or w.bytes)
        return Cost(sum(w.bytes for w in works), problem.operations, seconds or device.limits.launch_seconds)

    def build(self, problem: Any, device: Device) -> PlanParts:
        return self._build(self.launches(problem, device), device)

    def variants(self, problem: Any, device: Device) -> tuple[Variant, ...]:
        """Its tiles, by the names that its host half gives them."""
        found = {n: self._half.launches(problem, t, device) for n, t in self._tiles(problem, device).items()}
        return tuple(
            Variant(n, self.cost_of(problem, x, device)) for n, x in found.items()
            if self._refuse_launches(x, device) is None
        )

    def build_variant(self, problem: Any, device: Device, variant: str) -> PlanParts:
        return self._build(self._half.launches(problem, self._tiles(problem, device)[variant], device), device)

    def _tiles(self, problem: Any, device: Device) -> Mapping[str, Any]:
        """By name, where the host half has names for them."""
        ask = getattr(self._half, "named_tiles", None)
        found: Mapping[str, Any] = ask(problem, self._toolchain.arch_row(device.arch), device) if ask else {}
        return found

    def _build(self, launches: Launches, device: Device) -> PlanParts:
        row = self._toolchain.arch_row(device.arch)
        steps = tuple(s for launch in launches.steps if (s := self._step(launch, row, device)) is not None)
        return PlanParts(steps, launches.workspace_bytes if steps else 0)

    def _step(self, launch: Launch, row: ArchRow, device: Device) -> Step | None:
        """One kernel, compiled and loaded; None where it has nothing to do."""
        half, problem, tile = launch.half, launch.problem, launch.tile
        blocks = half.grid(problem, tile, device)
        if not blocks:
            return None
        binary, _ = build(half, problem.spec, tile, self._toolchain, device.arch)
        shared = half.shared_bytes(problem.spec, tile)
        return KernelStep(
            self._toolchain.load(binary.data, half.entry, device), half.signature(problem.spec),
            half.values(problem, tile, device), {**half.pointers(problem.spec), **launch.operands},
            LaunchRecord(
                half.entry, (blocks, 1, 1), (half.threads(tile, row), 1, 1), shared, device.arch,
                evidence=device.evidence,
            ),
            launch.workspace,
        )
