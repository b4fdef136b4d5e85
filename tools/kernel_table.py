"""The committed table of registers, spills, shared memory and matrix instructions, by kernel and
arch, and its summary.

    python tools/kernel_table.py            compile what every run of the tests does (of a spec's
                                            tiles, and of archs that are like another, a part);
                                            show what differs
    python tools/kernel_table.py --all      compile what the slow tests do, too
    python tools/kernel_table.py --write    … and write the table, and docs/parity/compiled.md

Needs no device. Archs whose compiler is missing here keep their rows. Exit status 1 if any kernel
spills.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernelseam.contract import Composition, KernelFacts, Toolchain
from kernelseam.errors import KernelSeamError, SlowBinary
from kernelseam.kernels import Covered, build_binary, covering
from kernelseam.parity.cases.covering import covering as with_new_values
from kernelseam.parity.cases.covering import fewest
from kernelseam.plugins import plugins

TABLE = Path(__file__).parent.parent / "docs" / "kernel-facts.csv"
SUMMARY = TABLE.parent / "parity" / "compiled.md"
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
PART = 14
SHARED = (("sm_80", "sm_86", "sm_90a"), ("gfx942", "gfx1100", "gfx950", "gfx1201"))
"""Archs that take turns: of a kernel with MANY specs every run of the tests compiles those that
have a field value which none before had, each for one of these archs. The slow tests compile all,
for all. There is no time for more: a run sees a third of what is particular to sm_80 in these, and
a quarter of what is to gfx950. A kernel of one arch takes no turns."""
MANY = 5
"""Specs of a kernel for which archs take turns: of fewer each arch has all, or a kind of arch might
have none."""
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
    "section_bytes",
    "few_keys",
    "precision",
    "dtype_kv",
    "widened",
    "q_returned",
    "short_causal",
    "sections",
    "scale_k",
)
"""Columns of tiles that shape no binary, or are told by the spec or by another of the arch's."""


USUAL = {
    "split": 1,
    "score_unroll": 4,
    "shared_a": False,
    "in_turns": False,
    "halves": False,
    "page_rows": 0,
}
"""Columns that few tiles have, and what the others have there."""


def tile_name(tile: object) -> str:
    shown = {
        k: v
        for k, v in vars(tile).items()
        if k not in UNSHOWN and (k not in USUAL or v != USUAL[k])
    }
    return " ".join(f"{k}={int(v) if isinstance(v, bool) else v}" for k, v in shown.items())


def rare(arch: str, number: int, covered: Covered) -> bool:
    """Whether only the slow tests compile what is that number of the covering choice for the
    arch, of whatever tile."""
    if not covered.often:
        return True
    if arch in (*ALIKE, *MIXED, *OWN):
        return number % PART > 0
    turns = next((archs for archs in SHARED if arch in archs), ())
    if covered.kernel.archs or not turns or _count()[covered.kernel.entry] < MANY:
        return False
    place = taking_turns().get(number)
    return place is None or turns[_turn(place, len(turns))] != arch


@cache
def _count() -> Counter[str]:
    """Specs of each shared kernel that could be compiled in every run."""
    return Counter(c.kernel.entry for c in covering() if c.often)


@cache
def taking_turns() -> dict[int, int]:
    """Of the covering choice's kernels with MANY specs, the numbers of those specs that have a new
    field value; each with its place among its kernel's."""
    places: dict[int, int] = {}
    for entry, count in _count().items():
        known = [
            (i, c.spec) for i, c in enumerate(covering()) if c.often and c.kernel.entry == entry
        ]
        if count >= MANY:
            needed = {id(s) for s in with_new_values([s for _, s in known], each_dtype=False)}
            numbers = [i for i, s in known if id(s) in needed]
            places |= {number: place for place, number in enumerate(numbers)}
    return places


def _with_every_value(kernels: Iterable[Covered]) -> set[tuple[str, Any]]:
    """Entries and specs: few that have every field value of each kernel's."""
    specs: dict[str, list[Any]] = {}
    for covered in kernels:
        specs.setdefault(covered.kernel.entry, []).append(covered.spec)
    return {(entry, s) for entry, known in specs.items() for s in fewest(known)}


def _turn(number: int, of: int) -> int:
    """Whose turn it is: the sum of digits, which has no period that the covering choice could have.
    From 1 on it gives every arch each large kernel, which test_kernel_table.py asserts."""
    digits = 0
    while number:
        number, digit = divmod(number, of)
        digits += digit
    return digits % of


@dataclass(frozen=True)
class Binaries:
    """Those of one of the covering choice for an arch, by their tiles."""

    covered: Covered
    often: tuple[Any, ...]
    """Tiles that every run of the tests compiles it with."""
    rarely: tuple[Any, ...]
    """And those that only the slow ones do."""


def binaries(toolchain: Toolchain, arch: str, kernels: Iterable[Composition]) -> list[Binaries]:
    """The covering choice for an arch, with a toolchain's own ``kernels``.

    Every run compiles a spec with one tile: of those that its kernel was given least often so far,
    the first. Tiles of different element sizes and precisions are different ones, whatever their
    names. Of an arch's own kernels it compiles few specs that have every field value, and those
    whose tiles none of these has.
    """
    row = toolchain.arch_row(arch)
    often: dict[int, list[Any]] = {}
    uses: Counter[tuple[object, ...]] = Counter()
    known = list(enumerate(covering(kernels)))
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


def read() -> dict[Key, tuple[str, ...]]:
    if not TABLE.exists():
        return {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {(r[0], r[1], r[2]): tuple(r[3:]) for r in rows}


def summary(rows: dict[Key, tuple[str, ...]]) -> str:
    """A page: what was compiled for each arch, kernel by kernel."""
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
        "`python tools/kernel_table.py --write` from [kernel-facts.csv](../kernel-facts.csv).",
        "",
        "| arch | evidence | kernel | binaries | registers at most | spills | scratch bytes |",
        "|" + "---|" * 7,
    ]
    for arch in ARCHS:
        for kernel in sorted({key[1].split()[0] for key in rows if key[0] == arch}):
            counts = [
                [int(x) for x in v]
                for key, v in rows.items()
                if key[0] == arch and key[1].split()[0] == kernel
            ]
            registers, spills, scratch = ([facts[i] for facts in counts] for i in range(3))
            lines.append(
                f"| {arch} | compiled | {kernel} | {len(counts)} | {max(registers)} | "
                f"{sum(spills)} | {sum(scratch)} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--arch", action="append", choices=ARCHS)
    options = parser.parse_args()
    # else the tests would find it in the cache, and its log unread
    warnings.simplefilter("error", SlowBinary)
    known_backends = plugins().registry.backends.values()
    backends = {arch: b for b in known_backends if b.toolchain for arch in b.toolchain.archs}
    everything, before, after = options.all or options.write, read(), {}
    left = set[Key]()
    for arch in options.arch or ARCHS:
        try:
            toolchain = keeping(backends[arch].toolchain, arch)
            known = binaries(toolchain, arch, backends[arch].kernels)
            chosen = [(b.covered, b.often + b.rarely * everything) for b in known]
            facts = facts_of(toolchain, arch, chosen)
            left |= set() if everything else left_out(arch, known)
        except (KeyError, KernelSeamError) as e:
            print(f"{arch}: not compiled here ({type(e).__name__}: {str(e).splitlines()[0]})")
            continue
        for key, f in facts.items():
            after[key] = tuple(
                str(x)
                for x in (
                    f.registers,
                    f.spills,
                    f.scratch_bytes,
                    f.shared_bytes,
                    f.matrix_instructions,
                )
            )
        most = max((f.registers for f in facts.values()), default=0)
        print(f"{arch}: {len(facts)} kernels, {most} registers at most")
    compiled = {key[0] for key in after}
    kept = {k: v for k, v in before.items() if k[0] not in compiled}
    for key in sorted({k for k in before if k[0] in compiled and k not in left} | set(after)):
        if before and before.get(key) != after.get(key):
            print(f"  {' | '.join(key)}: {before.get(key, 'new')} -> {after.get(key, 'gone')}")
    if options.write:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        rows = sorted({**kept, **after}.items(), key=lambda row: (ARCHS.index(row[0][0]), row[0]))
        writer.writerows([*k, *v] for k, v in rows)
        TABLE.write_text(out.getvalue(), encoding="utf-8")
        SUMMARY.write_text(summary(dict(rows)), encoding="utf-8")
    return int(any(v[1] != "0" or v[2] != "0" for v in after.values()))


if __name__ == "__main__":
    sys.exit(main())
