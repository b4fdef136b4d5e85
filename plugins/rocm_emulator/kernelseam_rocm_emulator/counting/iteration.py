"""One iteration of a kernel's hot loop: its instructions by class, and the model's cycles.

The hot loop is the main loop over tiles: an innermost loop with matrix instructions and the copies
of their operands. The instructions of an iteration are counted in a launch (`executed`), or derived
from the code alone (`compiled`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kernelseam_rocm_emulator.counting import model
from kernelseam_rocm_emulator.counting.instructions import (
    LDS,
    VECTOR,
    Class,
    Instruction,
    access,
    shape,
    width,
)
from kernelseam_rocm_emulator.counting.listing import Listing
from kernelseam_rocm_emulator.counting.loops import Flow, Loop, components, flow, loops
from kernelseam_rocm_emulator.counting.model import ComputeUnit, Cycles
from kernelseam_rocm_emulator.counting.recorder import Tally
from kernelseam_rocm_emulator.counting.trips import trips


@dataclass(frozen=True)
class Iteration:
    """One wave's iteration, as a mean over the waves that ran."""

    header: int
    """The address where the loop begins."""
    times: float
    """Iterations summed over all waves; 1 where nothing ran."""
    classes: Mapping[Class, float]
    """Instructions."""
    names: Mapping[str, float]
    """Instructions by mnemonic, matrix instructions by their shape."""
    cycles: Cycles
    lds: Mapping[Class, tuple[float, float]] = field(default_factory=dict)
    """LDS clocks of reads and of writes, and the fewest possible."""

    def count(self, classes: Iterable[Class]) -> float:
        return sum(self.classes.get(c, 0.0) for c in classes)

    @property
    def vector(self) -> float:
        """Vector instructions other than matrix ones."""
        return self.count(VECTOR)

    def conflicts(self, kind: Class) -> float | None:
        """LDS clocks of reads or writes divided by the fewest possible; None without any."""
        cycles, fewest = self.lds.get(kind, (0.0, 0.0))
        return cycles / fewest if fewest else None


def tile_loops(control_flow: Flow) -> tuple[Loop, ...]:
    """Innermost loops with matrix instructions that load or write to LDS; where there are none,
    innermost loops with matrix instructions. A loop over fragments that the compiler did not
    unroll belongs to the loop around it."""

    def has(loop: Loop, *kinds: Class) -> bool:
        return any(x.kind in kinds for x in control_flow.instructions(loop.blocks))

    def inner(chosen: list[Loop]) -> tuple[Loop, ...]:
        headers = {x.header for x in chosen}
        return tuple(
            x for x in chosen if not any(y.header in headers for y in x.nest() if y is not x)
        )

    nest = [x for outer in loops(control_flow) for x in outer.nest() if has(x, Class.MATRIX)]
    return inner([x for x in nest if has(x, Class.LOAD, Class.LDS_WRITE)]) or inner(nest)


def compiled(listing: Listing, arch: str) -> Iteration | None:
    """The hot loop of a kernel that was only compiled; None where no loop has matrix instructions.

    Of a loop's paths from its header back to it, the one that multiplies the most, writes the most
    bytes to LDS and loads the most by its widest loads; among those the one with the fewest cycles.
    So optional work (masks, narrow loads of a ragged end, rescaling) is left out. Among loops that
    multiply as much, the one with the fewest cycles. LDS is assumed free of conflicts.
    """
    unit, graph = model.unit(arch), flow(listing)
    chosen = []
    for loop in tile_loops(graph):
        tallies = _way(graph, loop, unit)
        chosen.append(_iteration(loop, graph.instructions(loop.blocks), tallies, 1, unit))
    return max(chosen, key=lambda x: (x.cycles.matrix, -_total(x.cycles)), default=None)


def executed(listing: Listing, arch: str, tallies: Mapping[int, Tally]) -> Iteration | None:
    """The hot loop of a launch: the loop over tiles in which the most matrix work was done."""
    unit, graph = model.unit(arch), flow(listing)
    ran = {x.header: tallies[x.header].count for x in tile_loops(graph) if x.header in tallies}
    passes = [
        _iteration(x, graph.instructions(x.blocks), tallies, ran[x.header], unit)
        for x in tile_loops(graph)
        if x.header in ran
    ]
    return max(passes, key=lambda x: x.cycles.matrix * x.times, default=None)


def _iteration(
    loop: Loop,
    instructions: Iterable[Instruction],
    tallies: Mapping[int, Tally],
    times: float,
    unit: ComputeUnit,
) -> Iteration:
    classes, names = defaultdict[Class, float](float), defaultdict[str, float](float)
    lds: dict[Class, tuple[float, float]] = {}
    cycles = Cycles()
    for x in instructions:
        tally = tallies.get(x.address)
        if tally is None:
            continue
        n = tally.count / times
        classes[x.kind] += n
        names[shape(x.name) if x.kind is Class.MATRIX else x.name] += n
        if x.kind in (Class.LDS_READ, Class.LDS_WRITE):
            cycles_, fewest = lds.get(x.kind, (0.0, 0.0))
            lds[x.kind] = cycles_ + tally.lds_clocks / times, fewest + tally.lds_fewest / times
        cycles = _added(cycles, _cycles(x, tally, unit), 1 / times)
    return Iteration(loop.header, times, dict(classes), dict(names), cycles, lds)


def _cycles(instruction: Instruction, tally: Tally, unit: ComputeUnit) -> Cycles:
    """The totals over all executions of an instruction."""
    kind, n = instruction.kind, tally.count
    if kind is Class.MATRIX:
        return Cycles(matrix=n * unit.matrix_cycles(shape(instruction.name)))
    if kind is Class.TRANSCENDENTAL:
        return Cycles(vector=n * unit.transcendental.value)
    if kind in VECTOR:
        return Cycles(vector=n * unit.issue.value)
    crossed = n * unit.cross_lane.value if kind is Class.LDS_LANES else 0
    return Cycles(other=n * unit.issue.value, lds=tally.lds_clocks + crossed)


def _added(a: Cycles, b: Cycles, factor: float) -> Cycles:
    return Cycles(
        a.matrix + b.matrix * factor,
        a.vector + b.vector * factor,
        a.other + b.other * factor,
        a.lds + b.lds * factor,
    )


def _total(cycles: Cycles) -> float:
    return cycles.matrix + cycles.vector + cycles.other + cycles.lds


# ---------------------------------------------------------------- without a launch


def _tally(instruction: Instruction, unit: ComputeUnit, times: int) -> Tally:
    """Executions by all lanes, without bank conflicts."""
    memory_access = access(instruction)
    clocks = 0
    if memory_access is not None and (memory_access.kind in LDS or memory_access.to_lds):
        served = unit.banks(memory_access.kind is Class.LDS_READ, memory_access.width)
        clocks = len(served.phases) * len(memory_access.offsets) * times
    return Tally(times, clocks, clocks)


_Worth = tuple[float, float, float, float]
"""Matrix cycles, bytes written to LDS, bytes of the widest loads, cycles below zero: the more the
better, in this order."""


def _way(graph: Flow, loop: Loop, unit: ComputeUnit) -> dict[int, Tally]:
    """Tallies of the path that `compiled` documents. Inner loops count with their constant number
    of trips, where that is known, else once."""
    times = dict.fromkeys(loop.blocks, 1)
    for inner in (x for x in loop.nest() if x is not loop):
        for block in inner.blocks:
            times[block] *= trips(graph, inner) or 1
    loads = [x for x in graph.instructions(loop.blocks) if x.kind is Class.LOAD]
    widest = max((width(x.name) for x in loads), default=0)
    tallies = {
        b: {x.address: _tally(x, unit, times[b]) for x in graph.blocks[b]} for b in loop.blocks
    }

    def worth(block: int) -> _Worth:
        matrix = written = loaded = total = 0.0
        for x in graph.blocks[block]:
            cycles = _cycles(x, tallies[block][x.address], unit)
            matrix, total = matrix + cycles.matrix, total + _total(cycles)
            if x.kind is Class.LDS_WRITE and (memory_access := access(x)) is not None:
                written += memory_access.width * len(memory_access.offsets) * times[block]
            elif x.kind is Class.LOAD and width(x.name) == widest:
                loaded += widest * times[block]
        return matrix, written, loaded, -total

    inside = {
        b: tuple(n for n in graph.follows[b] if n in loop.blocks and n != loop.header)
        for b in loop.blocks
    }
    best: dict[int, tuple[_Worth, tuple[int, ...]]] = {}
    for component in components(inside, loop.blocks):  # what follows comes first
        ways = [best[n] for b in component for n in inside[b] if n not in component and n in best]
        if any(loop.header in graph.follows[b] for b in component):
            ways.append(((0.0, 0.0, 0.0, 0.0), ()))
        if ways:  # else it leaves the loop
            total, rest = max(ways, key=lambda way: way[0])
            for block in component:
                total = _sum(total, worth(block))
            best.update(dict.fromkeys(component, (total, (*component, *rest))))
    _, way = best[loop.header]
    return {address: tally for block in way for address, tally in tallies[block].items()}


def _sum(a: _Worth, b: _Worth) -> _Worth:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]
