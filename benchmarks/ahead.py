"""Compile all that parity cases launch before any of them runs: in parallel, into the binary cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from kernelseam.contract import Device
from kernelseam.kernels.shared import SharedImplementation, build
from kernelseam.parity import data
from kernelseam.parity.cases import AttentionCase, BackwardCase, Case, GemmCase
from kernelseam.parity.description import describe
from kernelseam.plugins import plugins

BASE = 1 << 40
Unit = tuple[Any, Any, Any]
"""Host half, spec, tile: one binary."""


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def problem_of(case: Case, device: Device) -> Any:
    """What is planned for a case, over memory that is not there."""
    if isinstance(case, GemmCase | AttentionCase) and case.view == "device":
        case = replace(case, view="host")
    layout = data.layout(case)
    blocks = layout.blocks()
    addresses = {n: BASE + blocks[p.block][1] + p.offset * p.dtype.itemsize for n, p in layout.places.items()}
    made = describe(case, layout, addresses, plugins().backend(device.backend).runtime, device)
    return made.simplified()[0].problem()


def units(cases: Iterable[Case], device: Device, implementation: str | None = None) -> Iterator[Unit]:
    """Every binary that the shared kernels launch for the cases, once."""
    seen: set[object] = set()
    known = [
        i for i in plugins().registry.implementations
        if isinstance(i, SharedImplementation) and i.backend == device.backend
        and implementation in (None, i.name)
    ]
    for case in cases:
        takers = [i for i in known if i.operation == case.operation]
        if not takers:
            continue
        problem = problem_of(case, device)
        for i in takers:
            if i.supports(problem, device) is not None:
                continue
            for launch in i.launches(problem, device).steps:
                key = (launch.half.entry, launch.problem.spec, _shape(launch.tile))
                if key not in seen:
                    seen.add(key)
                    yield launch.half, launch.problem.spec, launch.tile


def _shape(tile: Any) -> Any:
    """The tile without what is chosen for a launch and is in no binary."""
    return replace(tile, splits=min(tile.splits, 2)) if hasattr(tile, "splits") else tile


def compile_all(found: Sequence[Unit], device: Device, processes: int | None = None) -> list[str]:
    """Compile binaries into the cache; what failed, in words."""
    wrong = []
    with ProcessPoolExecutor(processes or cores(), get_context("spawn")) as pool:
        jobs = {pool.submit(_compile, unit, device): unit for unit in found}
        for job in as_completed(jobs):
            half, spec, tile = jobs[job]
            if (error := job.exception()) is not None:
                wrong.append(f"{half.entry} of {spec} in {tile}: {error}")
    return wrong


def _compile(unit: Unit, device: Device) -> None:
    half, spec, tile = unit
    toolchain = plugins().backend(device.backend).toolchain
    assert toolchain is not None
    build(half, spec, tile, toolchain, device.arch)


def covering(cases: Sequence[Case], device: Device) -> list[Case]:
    """The smallest cases that between them have every value that a field of a spec takes in some case, with each dtype;
    the first of each operation's views, dtypes and options."""
    from kernelseam.kernels.covering import flat_fields  # noqa: F401

    raise NotImplementedError


__all__ = ["BackwardCase", "compile_all", "cores", "covering", "problem_of", "units"]
