"""Counts as tables: a launch's hot loop and its totals, and the model's entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kernelseam.forking import cached_property

from kernelseam_rocm_emulator.counting import model
from kernelseam_rocm_emulator.counting.instructions import (
    LDS,
    MEMORY,
    VECTOR,
    Class,
    Instruction,
)
from kernelseam_rocm_emulator.counting.iteration import Iteration
from kernelseam_rocm_emulator.counting.model import Banks, ComputeUnit, Entry, Mark
from kernelseam_rocm_emulator.counting.recorder import Tally
from kernelseam_rocm_emulator.counting.recording import Counted
from kernelseam_rocm_emulator.counting.segments import SIZES

LOOP_HEAD = (
    "case",
    "arch",
    "kernel",
    "matrix share %, one / two waves a SIMD [M]",
    "vector / matrix [C]",
    "matrix : vector : other : LDS cycles [M]",
    "accumulator moves [C]",
    "LDS reads / writes over conflict-free [M on C]",
    "registers (AGPRs) [C]",
    "waves a SIMD [M]",
)
LAUNCH_HEAD = (
    "case",
    "arch",
    "kernel",
    "matrix",
    "vector",
    "scalar",
    "LDS",
    "memory",
    "other",
    "KiB loaded / stored",
    "128-byte segments over the fewest, loads / stores",
    "spills",
)
"""All counted."""

_OTHER_CLASSES = {Class.WAIT, Class.BARRIER, Class.HINT, Class.CACHE, Class.SCRATCH}


@dataclass(frozen=True)
class Row:
    """What the tables say of one launch."""

    case: str
    counted: Counted

    @cached_property
    def iteration(self) -> Iteration | None:
        return self.counted.iteration()

    @cached_property
    def unit(self) -> ComputeUnit:
        return model.unit(self.counted.arch)

    @cached_property
    def executed(self) -> tuple[tuple[Instruction, Tally], ...]:
        """Every instruction that ran."""
        tallies = self.counted.tallies
        return tuple((x, tallies[x.address]) for x in self.counted.listing if x.address in tallies)

    def loop_cells(self) -> tuple[str, ...] | None:
        """`LOOP_HEAD`'s; None where no loop has matrix instructions."""
        iteration = self.iteration
        if iteration is None:
            return None
        one, two = iteration.cycles.shares(self.unit)
        c = iteration.cycles
        registers, agprs, waves = self._registers()
        return (
            self.case,
            self.counted.arch,
            self.counted.kernel,
            f"{100 * one:.0f} / {100 * two:.0f}",
            f"{iteration.vector / iteration.count([Class.MATRIX]):.1f}",
            f"{c.matrix:.0f} : {c.vector:.0f} : {c.other:.0f} : {c.lds:.0f}",
            f"{iteration.count([Class.MOVE]):.0f}",
            " / ".join(_ratio(iteration.conflicts(k)) for k in (Class.LDS_READ, Class.LDS_WRITE)),
            f"{registers} ({agprs})",
            str(waves),
        )

    def launch_cells(self) -> tuple[str, ...]:
        """`LAUNCH_HEAD`'s."""
        counts = Counter[Class]()
        for x, tally in self.executed:
            counts[x.kind] += int(tally.count)
        facts = self.counted.code.kernels[self.counted.kernel]

        def count(classes: Iterable[Class]) -> str:
            return str(sum(counts[c] for c in classes))

        sides = (Class.LOAD, Class.STORE)
        return (
            self.case,
            self.counted.arch,
            self.counted.kernel,
            count([Class.MATRIX]),
            count(VECTOR),
            count([Class.SCALAR, Class.SCALAR_LOAD]),
            count(LDS),
            count(MEMORY),
            count(_OTHER_CLASSES),
            " / ".join(f"{sum(t.bytes for t in self._tallies(side)) / 1024:.0f}" for side in sides),
            " / ".join(self._segments(side) for side in sides),
            str(facts.get(".vgpr_spill_count", 0) + facts.get(".sgpr_spill_count", 0)),
        )

    def details(self) -> Iterator[str]:
        """What the hot loop is made of, for reading."""
        iteration = self.iteration
        if iteration is None:
            return
        yield (
            f"loop at {iteration.header:#x} of {self.counted.kernel}, "
            f"{iteration.times:.0f} iterations of waves; in one:"
        )
        for counts in (iteration.classes, iteration.names):
            ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            yield "  " + ", ".join(f"{n:.1f} {name}" for name, n in ordered[:40])

    def _tallies(self, kind: Class) -> list[Tally]:
        return [tally for x, tally in self.executed if x.kind is kind]

    def _segments(self, kind: Class) -> str:
        at = SIZES.index(128)
        tallies = self._tallies(kind)
        fewest = sum(t.fewest[at] for t in tallies)
        return _ratio(sum(t.touched[at] for t in tallies) / fewest if fewest else None)

    def _registers(self) -> tuple[int, int, int]:
        """Registers, AGPRs among them, and waves a SIMD."""
        facts = self.counted.code.kernels[self.counted.kernel]
        registers, launch = facts[".vgpr_count"], self.counted.launch
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        shared = facts[".group_segment_fixed_size"] + launch.shared_bytes
        waves = -(-threads // facts[".wavefront_size"])
        occupancy = model.occupancy(self.unit, registers, shared, waves)
        return registers, facts.get(".agpr_count", 0), occupancy


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


# ---------------------------------------------------------------- the model

MODEL_HEAD = ("archs", "entry", "value", "mark", "source")


def model_rows() -> Iterator[tuple[str, ...]]:
    """`MODEL_HEAD`'s: every entry of the table, archs with the same together."""
    groups: dict[tuple[str, str, Mark, str], list[str]] = {}
    for arch, unit in model.UNITS.items():
        for name, value, entry in _entries(unit):
            groups.setdefault((name, value, entry.mark, entry.source), []).append(arch)
    for (name, value, mark, source), archs in groups.items():
        yield ", ".join(archs), name, value, mark.value, source


def _entries(unit: ComputeUnit) -> Iterator[tuple[str, str, Entry[object]]]:
    plain: tuple[tuple[str, Entry[int]], ...] = (
        ("SIMDs of a compute unit", unit.simds),
        ("cycles of an instruction's issue", unit.issue),
        ("cycles of a transcendental instruction", unit.transcendental),
        ("LDS clocks of a permutation of lanes", unit.cross_lane),
        ("registers of a lane on a SIMD", unit.registers),
        ("registers given out at a time", unit.granule),
        ("waves of a SIMD at most", unit.most_waves),
        ("bytes of LDS", unit.lds_bytes),
    )
    for name, entry in plain:
        yield name, str(entry.value), _any(entry)
    for shape, entry in unit.matrix.items():
        of = "TF32" if shape == "16x16x8" else "halves or of 8 bits"
        yield f"cycles of a {shape} product, of {of}", str(entry.value), _any(entry)
    overlap = "beside each other" if unit.overlaps.value else "one after another"
    yield "matrix and vector instructions of two waves", overlap, _any(unit.overlaps)
    for side, widths in (("reads", unit.reads), ("writes", unit.writes)):
        for size, served in sorted(widths.items()):
            value = f"{served.value.count} banks, lanes {_lanes(served.value.phases)}"
            yield f"LDS {side} of {size} bytes, a phase", value, _any(served)


def _any(entry: Entry[int] | Entry[bool] | Entry[Banks]) -> Entry[object]:
    return Entry(entry.value, entry.mark, entry.source)


def _lanes(phases: model.Phases) -> str:
    """The first phases' lanes, ranges shortened; "in order" where they are."""
    lanes = [lane for phase in phases for lane in phase]
    if lanes == sorted(lanes):
        return f"{len(phases[0])} in order"
    half = [phase for phase in phases if phase[0] < len(lanes) // 2]
    return "; ".join(_ranges(phase) for phase in half) + "; the same + 32"


def _ranges(lanes: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and runs[-1][-1] == lane - 1:
            runs[-1].append(lane)
        else:
            runs.append([lane])
    return ", ".join(f"{run[0]}–{run[-1]}" for run in runs)
