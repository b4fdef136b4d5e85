"""The binaries that an arch needs for the problems of a trace.

Of a problem's kernels those are compiled that are predicted to be the fastest, a vendor's library
aside, and those that the trace has. Predictions depend on a device's limits: those of the traced
device, where it is of the arch, and those of the arch's products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from kernelseam.absent import compiler_for
from kernelseam.compilation import Binary, compiled
from kernelseam.containment import error_text
from kernelseam.contract import ABSENT, Backend, Device, SourceBundle, Toolchain
from kernelseam.dispatch import ask
from kernelseam.frozen import dataclass
from kernelseam.kernels import KernelImplementation
from kernelseam.launch_trace import TracedProblem
from kernelseam.plugins import plugins
from kernelseam.variants import variants_of


@dataclass(frozen=True)
class Collected:
    """A binary, and what it was compiled from."""

    source: SourceBundle
    arch: str
    backend: str
    binary: Binary


@dataclass(frozen=True)
class LeftOut:
    """A problem that no kernel of an arch takes, and why."""

    problem: str
    arch: str
    reason: str


Progress = Callable[[int, int, str], None]
"""Called before each compilation: its number from 1, the total, and the kernel's name."""


def collect(
    traced: Sequence[TracedProblem],
    archs: Iterable[str],
    *,
    all_choices: bool = False,
    progress: Progress = lambda number, total, name: None,
) -> tuple[list[Collected], list[LeftOut]]:
    """Compile what the problems launch on these archs.

    ``all_choices``: every implementation and tile that takes a problem, for tuning, for other
    extents and for other devices of the arch. Raises UnknownName for an arch, CompileError.
    """
    wanted: dict[tuple[str, SourceBundle], Toolchain] = {}
    left_out: list[LeftOut] = []
    for arch in dict.fromkeys(archs):
        backend, toolchain = compiler_for(arch)
        for entry in dict.fromkeys(traced):
            sources, reasons = _sources(entry, arch, backend, all_choices)
            wanted.update(dict.fromkeys(((arch, s) for s in sources), toolchain))
            if reasons is not None:
                left_out.append(LeftOut(str(entry.problem), arch, reasons))
    collected = []
    for number, ((arch, source), toolchain) in enumerate(wanted.items(), start=1):
        progress(number, len(wanted), f"{source.name} for {arch}")
        binary = compiled(toolchain, source, arch)
        collected.append(Collected(source, arch, toolchain.backend, binary))
    return collected, left_out


def _sources(
    entry: TracedProblem, arch: str, backend: Backend, all_choices: bool
) -> tuple[list[SourceBundle], str | None]:
    """What a problem's launches are compiled from; and, where no kernel takes it, why."""
    result: list[SourceBundle] = []
    reasons: dict[str, None] = {}
    taken = False
    for device in _devices(entry.device, arch, backend):
        takers: list[KernelImplementation] = []
        seconds: dict[str, float] = {}
        for implementation in _kernels(backend.name, entry.problem.operation):
            answer = ask(implementation, entry.problem, device)
            if answer.refusal is not None:
                reasons[f"{implementation.name}: {answer.refusal}"] = None
            else:
                seconds[implementation.name] = answer.rank
                takers.append(implementation)
        takers.sort(key=lambda i: seconds[i.name])
        for rank, implementation in enumerate(takers):
            if all_choices or rank == 0 or implementation.name == entry.implementation:
                try:
                    for variant in _variants(implementation, entry, device, all_choices):
                        result += implementation.source_bundles(entry.problem, device, variant)
                    taken = True
                except Exception as e:
                    reasons[f"{implementation.name}: its sources raised {error_text(e)}"] = None
    none = "; ".join(reasons) or f"backend {backend.name} has no kernel for it"
    return result, None if taken else none


def _kernels(backend: str, operation: str) -> Iterator[KernelImplementation]:
    for i in plugins().registry.implementations_of(operation, backend):
        if isinstance(i, KernelImplementation):
            yield i


def _devices(traced: Device, arch: str, backend: Backend) -> Iterator[Device]:
    """The devices whose limits choose tiles."""
    assert backend.toolchain is not None
    row = backend.toolchain.arch_row(arch)
    of_this_arch = (traced.backend, traced.arch) == (backend.name, arch)
    if of_this_arch:
        yield replace(traced, evidence=ABSENT)
    if row.product is not None:
        yield from (row.product, *row.more_products)
    elif not of_this_arch:
        yield Device(backend.name, 0, arch, evidence=ABSENT)


def _variants(
    implementation: KernelImplementation, entry: TracedProblem, device: Device, all_choices: bool
) -> tuple[str, ...]:
    """Variants' names; "" is the default."""
    offered = tuple(v.name for v in variants_of(implementation, entry.problem, device))
    if all_choices:
        return ("", *offered)
    chosen = entry.variant if implementation.name == entry.implementation else ""
    return ("", chosen) if chosen in offered else ("",)
