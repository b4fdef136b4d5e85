"""The table docs/amd-counts.csv: one iteration of the hot loops of the covering AMD kernels,
compiled only. `amd_counts.py` writes it, and tests/crosscompile compares kernels with it."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernel_table
from compile_matrix import Covered
from kernelseam.contract import Backend, Toolchain
from kernelseam.kernels import build_binary
from kernelseam_rocm_emulator.counting import iteration, model
from kernelseam_rocm_emulator.counting.instructions import LDS, MEMORY, VECTOR, Class
from kernelseam_rocm_emulator.counting.iteration import Iteration
from kernelseam_rocm_emulator.counting.listing import listings

TABLE = Path(__file__).parent.parent / "docs" / "amd-counts.csv"
POINTS = 3.0
"""The most percentage points by which a matrix share may fall."""

COLUMNS = (
    "arch",
    "kernel",
    "tile",
    "matrix_share",
    "accumulator_moves",
    "matrix",
    "vector",
    "lds",
    "memory",
    "other",
)
"""Percent of cycles at two waves a SIMD, by the model, LDS without conflicts; then instructions of
an iteration, moves among the vector ones."""

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Counts:
    """A row of the table."""

    share: float
    """Percent, with one decimal."""
    moves: int
    instructions: tuple[int, ...]
    """Matrix, vector, LDS, memory, other."""

    @staticmethod
    def of(iteration: Iteration, arch: str) -> Counts:
        classes = ([Class.MATRIX], VECTOR, LDS, MEMORY)
        counts = [round(iteration.count(c)) for c in classes]
        counts.append(round(sum(iteration.classes.values())) - sum(counts))
        _, share = iteration.cycles.shares(model.unit(arch))
        return Counts(round(100 * share, 1), round(iteration.count([Class.MOVE])), tuple(counts))

    @staticmethod
    def parse(cells: Sequence[str]) -> Counts:
        return Counts(float(cells[0]), int(cells[1]), tuple(int(x) for x in cells[2:]))

    def cells(self) -> tuple[str, ...]:
        return (f"{self.share:.1f}", str(self.moves), *(str(n) for n in self.instructions))

    def __str__(self) -> str:
        named = zip(COLUMNS[5:], self.instructions, strict=True)
        counts = ", ".join(f"{n} {name}" for name, n in named)
        return f"{self.share:.1f} %, {self.moves} moves ({counts})"


def counts_of(
    toolchain: Toolchain, arch: str, covered: Covered, tiles: Iterable[Any]
) -> dict[Key, Counts]:
    """Rows of a covering kernel's binaries with these tiles, compiled where they are not in the
    cache; none of those without matrix instructions in a loop."""
    counts: dict[Key, Counts] = {}
    for tile in tiles:
        binary, _ = build_binary(toolchain, covered.spec, arch, tile, covered.kernel)
        (listing,) = listings(binary.data, arch).values()
        hot = iteration.compiled(listing, arch)
        if hot is not None:
            counts[arch, str(covered), kernel_table.tile_name(tile)] = Counts.of(hot, arch)
    return counts


def chosen(backend: Backend, arch: str) -> Iterator[kernel_table.Binaries]:
    """The covering kernels that multiply matrices and have tiles for the arch: with those that
    every run of the tests compiles, and the others."""
    assert backend.toolchain is not None
    for result in kernel_table.binaries(backend.toolchain, arch, backend.kernels):
        if result.covered.products and (result.often or result.rarely):
            yield result


def read() -> dict[Key, Counts]:
    """The committed table."""
    if not TABLE.exists():
        return {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {(r[0], r[1], r[2]): Counts.parse(r[3:]) for r in rows}


def written(rows: Mapping[Key, Counts]) -> str:
    """The table's text."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    archs = list(model.UNITS)
    for key in sorted(rows, key=lambda k: (archs.index(k[0]), k)):
        writer.writerow([*key, *rows[key].cells()])
    return out.getvalue()


def worse(
    before: Mapping[Key, Counts], after: Mapping[Key, Counts], left: Collection[Key] = ()
) -> list[str]:
    """Messages about what got worse among the kernels in ``after``; ``left``: what was not
    compiled.

    An existing tile: its share fell by more than `POINTS`, or its loop moves more registers
    between VGPRs and AGPRs. A new tile of a kernel that has rows: it moves any, or the best
    tile's share fell so far, if all tiles were compiled. A kernel without rows is not compared.
    """
    said = []
    for key, row in after.items():
        was, name = before.get(key), " | ".join(key)
        if was is not None:
            if row.share < was.share - POINTS:
                said.append(f"{name}: the matrix share fell from {was.share:.1f} to {row.share} %")
            if row.moves > was.moves:
                said.append(
                    f"{name}: {row.moves} registers move to the other file in an iteration, not "
                    f"{was.moves}"
                )
        elif row.moves and any(k[:2] == key[:2] for k in before):
            said.append(f"{name}: {row.moves} registers move to the other file in an iteration")
    partly = {key[:2] for key in left}
    for kernel in dict.fromkeys(key[:2] for key in after if key[:2] not in partly):
        best = max(row.share for key, row in after.items() if key[:2] == kernel)
        was_best = max((row.share for key, row in before.items() if key[:2] == kernel), default=0.0)
        if best < was_best - POINTS:
            said.append(
                f"{' | '.join(kernel)}: the best tile's matrix share fell from {was_best:.1f} to "
                f"{best:.1f} %"
            )
    return said
