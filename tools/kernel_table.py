"""Registers, spills and shared memory of the kernels by arch, as docs/parity/compiled.md has them,
and the facts of every binary.

    python tools/kernel_table.py              compile what every run of the tests does (of a spec's
                                              tiles, and of archs that are like another, a part);
                                              show what is beyond the page
    python tools/kernel_table.py --all        compile what the slow tests do, too; show what differs
    python tools/kernel_table.py --write      … and write the page
    python tools/kernel_table.py --csv FILE   also write the facts of every binary that is compiled
    … --csv FILE --against FILE               and show which differ from those of another run

Needs no device. Archs whose compiler is missing here keep their rows. Exit status 1 if any kernel
spills.
"""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from compile_matrix import Covered, compile_matrix
from compile_matrix.choice import fewest, flat
from kernelseam.contract import Composition, KernelFacts, Toolchain
from kernelseam.errors import KernelSeamError, SlowBinary
from kernelseam.kernels import build_binary
from kernelseam.plugins import plugins

PAGE = Path(__file__).parent.parent / "docs" / "parity" / "compiled.md"
ARCHS = (
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90a",
    "sm_100a",
    "sm_103",
    "sm_120",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    "gfx1151",
    "gfx1200",
    "gfx1201",
)
ALIKE = {
    "sm_89": "sm_86",
    "sm_120": "sm_86",
    "sm_100a": "sm_90a",
    "gfx1151": "gfx1100",
    "gfx1200": "gfx1201",
}
"""Archs with the tiles of another: every run of the tests compiles one of PART of their binaries,
the slow ones all."""
MIXED = {"sm_103": ("sm_90a", "sm_86")}
"""Archs with the tiles of one other, but for float64's, which are those of a second: as rare."""
OWN = ("sm_75", "gfx90a")
"""Archs with tiles of their own, which are nearly those of others: as rare."""
PART = 25
SHARED = (("sm_80", "sm_86", "sm_90a"), ("gfx942", "gfx1100", "gfx950", "gfx1201"))
"""Archs that take turns: of a kernel's specs every run of the tests compiles few that have every
field value, each for one of these archs, or for several where they are fewer than the archs. The
slow tests compile all, for all. There is no time for more: a run sees a third of what is particular
to sm_80 in these, and a quarter of what is to gfx950. A kernel of one arch takes no turns."""
READ = ("sm_90a",)
"""Archs whose kernels' PTX tests read."""
COLUMNS = (
    "arch",
    "kernel",
    "tile",
    "registers",
    "spills",
    "scratch_bytes",
    "shared_bytes",
    "matrix_instructions",
)

Key = tuple[str, str, str]


UNSHOWN = (
    "dtypes",
    "max_dim",
    "plain",
    "grouped",
    "splits",
    "rate",
    "softmax_columns",
    "latency",
    "resident_threads",
    "most_ahead",
    "rate_in_order",
    "rate_along_m",
    "b_first",
    "most_tiles",
    "mostly_c",
    "group_rows",
    "block_seconds",
    "slice_seconds",
    "start_seconds",
    "section_bytes",
    "few_keys",
    "precision",
    "dtype_kv",
    "widened",
    "lean",
    "item_seconds",
    "q_returned",
    "sections",
    "scale_k",
    "reduces_halves",
)
"""Columns of tiles that shape no binary, or are told by the spec or by another of the arch's."""


USUAL = {
    "split": 1,
    "score_unroll": 4,
    "shared_a": False,
    "shared_stage": False,
    "in_turns": False,
    "halves": False,
    "page_rows": 0,
}
"""Columns that few tiles have, and what the others have there."""


def tile_name(tile: Any) -> str:
    """Of its fields; what it has computed since is not among them."""
    of_fields = ((f.name, getattr(tile, f.name)) for f in fields(tile))
    shown = {k: v for k, v in of_fields if k not in UNSHOWN and (k not in USUAL or v != USUAL[k])}
    return " ".join(f"{k}={int(v) if isinstance(v, bool) else v}" for k, v in shown.items())


@cache
def shared_choice() -> tuple[Covered, ...]:
    """The shared kernels' part: asked for each arch and number."""
    return compile_matrix()


def rare(arch: str, number: int, covered: Covered) -> bool:
    """Whether only the slow tests compile what is that number of the compile matrix for the
    arch, of whatever tile."""
    if not covered.often:
        return True
    if arch in (*ALIKE, *MIXED, *OWN):
        return number % PART > 0
    turns = next((archs for archs in SHARED if arch in archs), ())
    return bool(turns) and not covered.kernel.archs and arch not in whose_turn(number, turns)


@cache
def taking_turns() -> dict[int, list[int]]:
    """Of the compile matrix's shared kernels, the numbers of few specs that have every field
    value; each with those of its kernel."""
    kernels: dict[str, dict[Any, int]] = {}
    for i, covered in enumerate(shared_choice()):
        if covered.often:
            kernels.setdefault(covered.kernel.entry, {})[covered.spec] = i
    chosen = [sorted(numbers[s] for s in fewest(numbers)) for numbers in kernels.values()]
    return {number: few for few in chosen for number in few}


@cache
def whose_turn(number: int, archs: tuple[str, ...]) -> list[str]:
    """Which of the archs compile what is that number of the compile matrix in every run: one that
    has a tile for it. Of a kernel with fewer specs than archs every arch has one."""
    few = taking_turns().get(number, [])
    if not few:
        return []
    able = [a for a in archs if _has_tile(a, number)] or archs
    if len(few) < len(archs):
        firsts = {
            a: next((n for n in (*few[i % len(few) :], *few) if _has_tile(a, n)), None)
            for i, a in enumerate(archs)
        }
        return [a for a in archs if firsts[a] == number] or [able[0]]
    return [_taker(tuple(few), archs)[number]]


@cache
def _taker(few: tuple[int, ...], archs: tuple[str, ...]) -> dict[int, str]:
    """The arch of each: of those that have a tile for it the one with the fewest so far, of such
    the one that has had the fewest of its field values. What one arch alone has comes first."""
    seen: dict[str, list[Any]] = {a: [] for a in archs}
    taker = dict[int, str]()
    able = {n: [a for a in archs if _has_tile(a, n)] or list(archs) for n in few}
    for n in sorted(few, key=lambda n: len(able[n]) > 1):
        values = flat(shared_choice()[n].spec)
        taker[n] = min(
            able[n], key=lambda a: (len(seen[a]), sum(v in had for had in seen[a] for v in values))
        )
        seen[taker[n]].append(set(values))
    return taker


@cache
def _has_tile(arch: str, number: int) -> bool:
    """Of an arch that no plugin compiles for here it is not asked."""
    toolchains = (b.toolchain for b in plugins().registry.backends.values() if b.toolchain)
    known = [t.arch_row(arch) for t in toolchains if arch in t.archs]
    return not known or bool(shared_choice()[number].tiles(known[0]))


def _with_every_value(kernels: Iterable[Covered]) -> set[tuple[str, Any]]:
    """Entries and specs: few that have every field value of each kernel's."""
    specs: dict[str, list[Any]] = {}
    for covered in kernels:
        specs.setdefault(covered.kernel.entry, []).append(covered.spec)
    return {(entry, s) for entry, known in specs.items() for s in fewest(known)}


@dataclass(frozen=True)
class Binaries:
    """Those of one of the compile matrix for an arch, by their tiles."""

    covered: Covered
    often: tuple[Any, ...]
    """Tiles that every run of the tests compiles it with."""
    rarely: tuple[Any, ...]
    """And those that only the slow ones do."""


def binaries(toolchain: Toolchain, arch: str, kernels: Iterable[Composition]) -> list[Binaries]:
    """The compile matrix for an arch, with a toolchain's own ``kernels``.

    Every run compiles a spec with one tile: of those that its kernel was given least often so far,
    the first. Tiles of different element sizes and precisions are different ones, whatever their
    names. Of an arch's own kernels it compiles few specs that have every field value, and those
    whose tiles none of these has.
    """
    row = toolchain.arch_row(arch)
    often: dict[int, list[Any]] = {}
    uses: Counter[tuple[object, ...]] = Counter()
    known = list(enumerate(compile_matrix(kernels)))
    values = _with_every_value(c for _, c in known if c.often)

    def later(number: int, covered: Covered) -> bool:
        entry = covered.kernel.entry
        return bool(covered.kernel.archs) and (entry, covered.spec) not in values

    for i, covered in sorted(known, key=lambda k: later(*k)):
        tiles = () if rare(arch, i, covered) else covered.tiles(row)
        dtype = getattr(covered.spec, "dtype", None)
        kind = (
            covered.kernel.entry,
            dtype and dtype.itemsize,
            getattr(covered.spec, "precision", None),
        )
        used = all(uses[*kind, tile_name(t)] for t in tiles)
        if not tiles or (used and later(i, covered)):
            continue
        chosen = min(tiles, key=lambda t: uses[*kind, tile_name(t)])
        uses[*kind, tile_name(chosen)] += 1
        often[i] = [chosen]
    result = []
    for i, covered in known:
        tiles, chosen = covered.tiles(row), often.get(i, [])
        parts = [tuple(t for t in tiles if (t in chosen) == which) for which in (True, False)]
        result.append(Binaries(covered, *parts))
    return result


def facts_of(
    toolchain: Toolchain, arch: str, chosen: Iterable[tuple[Covered, Iterable[Any]]]
) -> dict[Key, KernelFacts]:
    """Facts of these with their tiles, for the arch."""
    result: dict[Key, KernelFacts] = {}
    for covered, tiles in chosen:
        for tile in tiles:
            _, kernels = build_binary(toolchain, covered.spec, arch, tile, covered.kernel)
            for facts in kernels.values():
                result[arch, str(covered), tile_name(tile)] = facts
    return result


def keeping(toolchain: Toolchain | None, arch: str) -> Toolchain:
    """Where tests read what is compiled for the arch as PTX, a toolchain that keeps it for them."""
    assert toolchain is not None
    if arch not in READ:
        return toolchain
    from kept_ptx import KeepsPtx
    from kernelseam_cuda.runtime import CudaRuntime

    return KeepsPtx(CudaRuntime())


def left_out(arch: str, known: Iterable[Binaries]) -> set[Key]:
    """What only the slow tests compile."""
    return {(arch, str(b.covered), tile_name(tile)) for b in known for tile in b.rarely}


def facts_in(path: Path) -> dict[Key, tuple[str, ...]]:
    """The facts that ``--csv`` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {(r[0], r[1], r[2]): tuple(r[3:]) for r in rows}


def write_facts(path: Path, facts: Mapping[Key, tuple[str, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        rows = sorted(facts.items(), key=lambda row: (ARCHS.index(row[0][0]), row[0]))
        writer.writerows([*k, *v] for k, v in rows)


class Row(NamedTuple):
    """Of a kernel's binaries for an arch."""

    binaries: int
    registers: int
    """The most of any."""
    shared_bytes: int
    """The most of any."""
    spills: int
    """Of all."""
    scratch_bytes: int
    """Of all."""


HEADS = (
    *("arch", "evidence", "kernel", "binaries", "registers at most", "shared bytes at most"),
    *("spills", "scratch bytes"),
)
Rows = dict[tuple[str, str], Row]
"""By arch and kernel."""


def summed(facts: Mapping[Key, tuple[str, ...]]) -> Rows:
    by_kernel: dict[tuple[str, str], list[list[int]]] = {}
    for (arch, kernel, _), values in facts.items():
        by_kernel.setdefault((arch, kernel.split()[0]), []).append([int(x) for x in values])
    result = {}
    for key, found in by_kernel.items():
        registers, spills, scratch, shared, _ = zip(*found, strict=True)
        result[key] = Row(len(found), max(registers), max(shared), sum(spills), sum(scratch))
    return result


def read() -> Rows:
    """The page's rows."""
    cells = [
        [c.strip() for c in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if " | compiled | " in line
    ]
    return {(c[0], c[2]): Row(*map(int, c[3:])) for c in cells}


def page(rows: Rows) -> str:
    """What was compiled for each arch, kernel by kernel."""
    lines = [
        "# Kernels, compiled",
        "",
        (
            "Every tile of a choice of specs that covers the options, by nvrtc for NVIDIA and by "
            "hiprtc for AMD, without a"
        ),
        (
            "GPU. This says that they compile and what they take, not that they are right: what ran "  # noqa: E501
            "is in"
        ),
        (
            "[h200.md](h200.md), [h100.md](h100.md) (measured) and "
            "[amd-emulated.md](amd-emulated.md) (emulated). Made by"
        ),
        (
            "`python tools/kernel_table.py --write`, which with `--csv FILE` writes the facts of "
            "every binary."
        ),
        "",
        f"| {' | '.join(HEADS)} |",
        "|" + "---|" * len(HEADS),
    ]
    for arch, kernel in sorted(rows, key=lambda key: (ARCHS.index(key[0]), key[1])):
        lines.append(
            f"| {arch} | compiled | {kernel} | {' | '.join(map(str, rows[arch, kernel]))} |"
        )
    return "\n".join(lines) + "\n"


def differing(before: Rows, after: Rows, whole: bool) -> Iterator[str]:
    """What is not as the page says. ``whole``: all binaries were compiled, else some, of which none
    may be beyond the page."""
    archs = {arch for arch, _ in after}
    for key in sorted({k for k in before if k[0] in archs} | set(after)):
        old, new = before.get(key), after.get(key)
        if whole or old is None:
            if old != new:
                yield f"{' | '.join(key)}: {old or 'new'} -> {new or 'gone'}"
        elif new is not None:
            beyond = [n for n in Row._fields if getattr(new, n) > getattr(old, n)]
            for name in beyond:
                yield f"{' | '.join(key)}: {name} {getattr(old, name)} -> {getattr(new, name)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--arch", action="append", choices=ARCHS)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    # else the tests would find it in the cache, and its log unread
    warnings.simplefilter("error", SlowBinary)
    known_backends = plugins().registry.backends.values()
    backends = {arch: b for b in known_backends if b.toolchain for arch in b.toolchain.archs}
    everything = options.all or options.write
    found: dict[Key, tuple[str, ...]] = {}
    for arch in options.arch or ARCHS:
        try:
            toolchain = keeping(backends[arch].toolchain, arch)
            known = binaries(toolchain, arch, backends[arch].kernels)
            chosen = [(b.covered, b.often + b.rarely * everything) for b in known]
            facts = facts_of(toolchain, arch, chosen)
        except (KeyError, KernelSeamError) as e:
            print(f"{arch}: not compiled here ({type(e).__name__}: {str(e).splitlines()[0]})")
            continue
        for key, f in facts.items():
            found[key] = tuple(str(getattr(f, name)) for name in COLUMNS[3:])
        most = max((f.registers for f in facts.values()), default=0)
        print(f"{arch}: {len(facts)} kernels, {most} registers at most")
    before, after = read(), summed(found)
    for line in differing(before, after, everything):
        print(f"  {line}")
    if options.csv:
        write_facts(options.csv, found)
    if options.against:
        others = facts_in(options.against)
        for key in sorted(k for k in found if others.get(k) != found[k]):
            print(f"  {' | '.join(key)}: {others.get(key, 'new')} -> {found[key]}")
    if options.write:
        compiled = {arch for arch, _ in after}
        kept = {k: row for k, row in before.items() if k[0] not in compiled}
        PAGE.write_text(page({**kept, **after}), encoding="utf-8")
    return int(any(row.spills or row.scratch_bytes for row in after.values()))


if __name__ == "__main__":
    sys.exit(main())
