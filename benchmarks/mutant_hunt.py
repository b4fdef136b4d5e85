"""A bug planted in the device sources that this process compiles, and the cases that it is tried on
until one shows it."""

from __future__ import annotations

import faulthandler
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kernelseam.contract import Device, DeviceLimits
from kernelseam.errors import CompileError, DeviceError, SlowBinary, Unsupported
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.kernel import build, bundle
from kernelseam.parity.matrix import matrix, named
from kernelseam.parity.report import summary
from kernelseam.parity.running.run import Target, run_case
from kernelseam.parity.running.stages import expected
from kernelseam.plugins import plugins
from kernelseam.samples.case import Case

from benchmarks import precompile

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / "host" / "helpers"), str(TESTS / "gpu" / "helpers")]

import fast_cases  # noqa: E402
import mutants  # noqa: E402
from mutant import Mutant  # noqa: E402

MUTANTS = (*mutants.NVIDIA, *mutants.SM90)
LUCK = mutants.LUCK

CONTROL = "none"
"""The name of the sources as they are, among the bugs."""
REPEATS = 60
"""Launches whose bits are compared, on each of two streams."""
FEW = 6
"""Cases for a bug that may go unseen, and for the sources as they are in one process."""
UNITS = 132
"""Multiprocessors of the GPU that is compiled for where there is none: on them depends how a
problem is divided."""


@dataclass(frozen=True)
class Seen:
    """What became of a bug: the case that showed it and how, or why none did."""

    name: str
    passed: int
    """Cases that did not show it."""
    case: str = ""
    finding: str = ""
    trouble: str = ""
    """Why it counts for nothing."""

    @property
    def as_it_should(self) -> bool:
        """Whether a bug was seen, or the sources as they are passed everything."""
        return not self.trouble and bool(self.case) == (self.name != CONTROL)

    @property
    def may_pass(self) -> bool:
        """Whether it is a bug that a GPU need not show, and passed all there was."""
        return self.name in LUCK and not (self.trouble or self.case)


def case_named(name: str) -> Case:
    """A case of the matrix or of fast_cases.py; raises KeyError."""
    return fast_cases.CASES.get(name) or named(name)


Tried = tuple[str, Case]
"""An implementation and a case."""


def first_cases(chosen: Iterable[Mutant] | None = None) -> list[Tried]:
    """What the bugs name, once each."""
    pairs = dict.fromkeys(
        (m.implementation, m.case) for m in (MUTANTS if chosen is None else chosen)
    )
    return [(implementation, case_named(case)) for implementation, case in pairs]


def mutant_named(name: str) -> Mutant | None:
    """None: the header as it is."""
    return None if name == CONTROL else {m.name: m for m in MUTANTS}[name]


def plant(mutant: Mutant | None, backend: str) -> None:
    """From now on this process compiles the backend's device sources with the bug."""
    registered = plugins().backend(backend)
    toolchain = registered.toolchain
    assert toolchain is not None
    # not what was planted before
    files = dict(type(toolchain).platform_files(toolchain, toolchain.archs[0]))
    changed = files if mutant is None else mutant.planted(files)

    def platform_files(arch: str) -> Mapping[str, str]:
        return changed

    toolchain.platform_files = platform_files  # type: ignore[method-assign]
    for definition in _with_sources(KernelDefinition):
        original = _ORIGINALS.setdefault(definition, definition.__dict__["sources"])

        def sources(self: Any, original: Any = original) -> Mapping[str, str]:
            return {name: changed.get(name, text) for name, text in original(self).items()}

        definition.sources = sources


_ORIGINALS: dict[Any, Any] = {}
"""Kernel definitions' own ``sources``, as they were before the first bug."""


def _with_sources(definition: Any) -> Iterator[Any]:
    """The classes with a ``sources`` of their own: definitions of kernels that only others launch
    (the backward's rows and sums) are not among a backend's kernels."""
    if "sources" in definition.__dict__:
        yield definition
    for below in definition.__subclasses__():
        yield from _with_sources(below)


def cases_of(
    mutant: Mutant | None, device: Device, chosen: Iterable[Mutant] | None = None
) -> Iterator[Tried]:
    """What a bug is tried on, the likeliest first; what the sources as they are have to pass."""
    if mutant is None:
        yield from first_cases(chosen)
        return
    mine, own = mutant.implementation, case_named(mutant.case)
    names = [own.name]
    yield mine, own
    for implementation, case in first_cases():
        if implementation == mine and case.name not in names and case.operation == own.operation:
            names.append(case.name)
            yield mine, case
        if mutant.name in LUCK and len(names) == FEW:
            return
    for case in precompile.choice(matrix(), device):
        if case.name not in names:
            yield mine, case


def hunt(
    mutant: Mutant | None,
    device: Device,
    end: float,
    hang: float = 0.0,
    chosen: Iterable[Mutant] | None = None,
    tell: Callable[[Seen], None] = lambda seen: None,
) -> Seen:
    """Run case after case until one shows the bug, or until ``end`` on the monotonic clock.

    Before each, ``tell`` what became of the bug if the process ends there: with ``hang``, that many
    seconds later.
    """
    name, passed = mutant.name if mutant else CONTROL, 0
    if (
        mutant is not None
        and name in LUCK
        and "changes nothing" in compiled(mutant, device.arch, device.backend)
    ):
        return Seen(name, 0, finding="its binary is the same")
    for implementation, case in cases_of(mutant, device, chosen):
        if time.monotonic() > end:
            return Seen(name, passed, trouble="there was no time for the other cases")
        steps = [partial(_verdict, case, device, implementation)]
        if case.name in fast_cases.CASES and device.backend == "cuda":
            steps.append(partial(_repeats, case, device, implementation))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowBinary)
            if not (units := precompile.units([case], device, implementation)):
                if mutant is None or case.name == mutant.case:
                    return Seen(name, passed, trouble=f"{implementation} refuses {case.name}")
                continue
            if trouble := _build_all(units, device):
                return Seen(name, passed, trouble=f"it does not compile: {trouble}")
            expected(case)  # before the watchdog's time
            for step in steps:
                tell(Seen(name, passed, case.name, f"it does not come back within {hang:g} s"))
                if hang:
                    # needs no lock that a hung call may hold
                    faulthandler.dump_traceback_later(hang, exit=True)
                try:
                    finding = step()
                finally:
                    faulthandler.cancel_dump_traceback_later()
                if finding:
                    return Seen(name, passed, case.name, finding)
        passed += finding is not None
    return Seen(name, passed)


def _build_all(units: Iterable[precompile.Unit], device: Device) -> str:
    """Compile into the cache: "" or what does not compile."""
    toolchain = plugins().backend(device.backend).toolchain
    assert toolchain is not None
    try:
        for kernel, spec, tile in units:
            build(kernel, spec, tile, toolchain, device.arch)
    except CompileError as e:
        return e.log
    return ""


def _verdict(case: Case, device: Device, implementation: str) -> str | None:
    """What shows a bug; "" for nothing, None for a case that is refused or of an operation that the
    implementation does not compute."""
    if not any(
        (i.name, i.operation, i.backend) == (implementation, case.operation, device.backend)
        for i in plugins().registry.implementations
    ):
        return None
    o = run_case(
        case, Target(device, implementation, case.operation, builtin=implementation == "shared")
    )
    if o.status in summary.FAILED:
        return o.detail.strip().splitlines()[-1]
    return "" if o.status == "passed" else None


def _repeats(case: Case, device: Device, implementation: str) -> str | None:
    """The same of the bits of many launches."""
    from bound_case import unlike

    try:
        unlike_first = unlike(case, device, implementation, REPEATS)
    except Unsupported:
        return None
    except Exception as e:
        # Launch failures are raised by our driver calls, or by CuPy's; any other error is this
        # script's.
        if not isinstance(e, DeviceError) and type(e).__name__ != "CUDARuntimeError":
            raise
        return f"{type(e).__name__}: {e}"
    return (
        f"{unlike_first} of {2 * REPEATS} launches over the same inputs have other bits than the "
        "first" * (unlike_first > 0)
    )


def compiled(mutant: Mutant, arch: str, backend: str) -> str:
    """Whether the kernels of a bug's first case compile to other binaries with it: "" or why not.
    Needs no GPU."""
    toolchain = plugins().backend(backend).toolchain
    assert toolchain is not None
    limits = DeviceLimits(UNITS, toolchain.arch_row(arch).shared_bytes_per_block, 1 << 36)
    units = precompile.units(
        [case_named(mutant.case)], Device(backend, 0, arch, limits=limits), mutant.implementation
    )
    binaries = []
    try:
        for change in (None, mutant):
            plant(change, backend)
            # Not from the cache: there a binary has its key, which is of the sources' texts.
            bundles = [bundle(kernel, spec, tile, toolchain, arch) for kernel, spec, tile in units]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SlowBinary)
                binaries.append([toolchain.compile(b, arch) for b in bundles])
    except CompileError as e:
        return f"{mutant.name}: {e}"
    return (
        f"{mutant.name}: it changes nothing in {mutant.case}" if binaries[0] == binaries[1] else ""
    )
