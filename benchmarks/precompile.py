"""Compile all kernels of parity cases or benchmarks in parallel, into the binary cache, before they
run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from compile_matrix.choice import covering
from kernelseam.contract import Device
from kernelseam.errors import SlowBinary
from kernelseam.kernels.kernel import KernelImplementation, build, bundle
from kernelseam.parity.running.workers import Workers, cores
from kernelseam.plugins import plugins
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.case import Case
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.operations import operands

FEW = 2000
"""Heads of all entries of the batch: what a checker that slows a launch down a hundred times still
takes."""
Unit = tuple[Any, Any, Any]
"""Kernel definition, spec, tile: one binary."""


def problem_of(case: Case, device: Device) -> Any:
    """What is planned for a case, over memory that is not there."""
    if isinstance(case, GemmCase | AttentionCase) and case.view == "device":
        case = replace(case, view="host")
    return operands.problem_of(case, plugins().backend(device.backend).runtime, device)


def units(cases: Iterable[Case], device: Device, implementation: str | None = None) -> list[Unit]:
    """Every binary that shared kernels launch for the cases, once."""
    return list(keyed(cases, device, implementation).values())


def keyed(
    cases: Iterable[Case], device: Device, implementation: str | None = None
) -> dict[Hashable, Unit]:
    """The same by their sources."""
    units: dict[Hashable, Unit] = {}
    for case in cases:
        takers = [
            i
            for i in plugins().registry.implementations_of(case.operation, device.backend)
            if isinstance(i, KernelImplementation) and implementation in (None, i.name)
        ]
        problem = problem_of(case, device) if takers else None
        for i in takers:
            if i.supports(problem, device) is not None:
                continue
            units.update(units_of(i, problem, device))
    return units


def units_of(
    implementation: KernelImplementation, problem: Any, device: Device, variant: str = ""
) -> dict[Hashable, Unit]:
    """What one implementation of ours launches for a problem, by the sources: options lie in a
    generated file, so that names and constants of different binaries may be equal."""
    toolchain = plugins().backend(device.backend).toolchain
    assert toolchain is not None
    units: dict[Hashable, Unit] = {}
    for x in implementation.launches(problem, device, variant).kernels:
        source = bundle(x.kernel, x.problem.spec, x.tile, toolchain, device.arch)
        units[source] = x.kernel, x.problem.spec, x.tile
    return units


def compile_all(
    units: Sequence[Unit],
    device: Device,
    processes: int | None = None,
    limit: float = 300.0,
    seconds: float | None = None,
) -> list[str]:
    """Compile binaries into the cache, each in ``limit`` seconds and all in ``seconds``; what
    failed, in words."""
    failures = []
    end = None if seconds is None else time.monotonic() + seconds
    with closing(Workers(min(processes or cores(), max(len(units), 1)), limit)) as team:
        tasks = [team.start(_compile, unit, device) for unit in units]
        for done, ((kernel, spec, tile), task) in enumerate(zip(units, tasks, strict=True)):
            try:
                task.result(None if end is None else max(end - time.monotonic(), 0))
            except TimeoutError:
                failures.append(
                    f"only {done} of {len(units)} binaries were compiled within {seconds:.0f} s"
                )
                break
            except Exception as e:
                failures.append(f"{kernel.entry} of {spec} in {tile}: {e}")
    return failures


def _compile(unit: Unit, device: Device) -> None:
    kernel, spec, tile = unit
    toolchain = plugins().backend(device.backend).toolchain
    assert toolchain is not None
    warnings.simplefilter("error", SlowBinary)
    build(kernel, spec, tile, toolchain, device.arch)


def choice(cases: Iterable[Case], device: Device) -> list[Case]:
    """The first case of every spec of a covering choice of them."""
    first: dict[Any, Case] = {}
    for case in cases:
        if getattr(case, "batch", 1) * getattr(case, "num_heads", 1) <= FEW:
            first.setdefault(problem_of(case, device).spec, case)
    return [first[spec] for spec in covering(first)]
