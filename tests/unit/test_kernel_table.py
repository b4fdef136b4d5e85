"""The page of what kernels take, and what each run of the tests compiles."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import kernel_table
import pytest
from compile_matrix import Covered, compile_matrix
from compile_matrix.choice import flat
from kernel_table import Binaries
from kernelseam.contract import ArchRow
from kernelseam.plugins import plugins

ROWS = {
    ("sm_90a", "gemm float16", "bm=64"): ("100", "0", "0", "4096", "64"),
    ("sm_90a", "gemm float32", "bm=32"): ("255", "3", "16", "4096", "0"),
    ("gfx942", "merge_states float32", "warps=4"): ("40", "0", "0", "0", "0"),
}


def in_every_run() -> list[tuple[int, Covered]]:
    """Numbers and specs of the shared kernels that every run compiles for some arch."""
    return [(i, c) for i, c in enumerate(compile_matrix()) if i in kernel_table.taking_turns()]


def test_the_page_counts_by_arch_and_kernel() -> None:
    lines = kernel_table.page(kernel_table.summed(ROWS)).splitlines()
    assert lines[-2:] == [
        "| sm_90a | compiled | gemm | 2 | 255 | 4096 | 3 | 16 |",
        "| gfx942 | compiled | merge_states | 1 | 40 | 0 | 0 | 0 |",
    ]


def test_the_page_is_as_it_is_written() -> None:
    text = kernel_table.PAGE.read_text(encoding="utf-8")
    assert text == kernel_table.page(kernel_table.read())


def test_facts_are_written_and_read(tmp_path: Path) -> None:
    kernel_table.write_facts(tmp_path / "facts.csv", ROWS)
    assert kernel_table.facts_in(tmp_path / "facts.csv") == ROWS


def test_what_is_beyond_the_page_is_shown() -> None:
    """Of all binaries whatever differs; of some what is more than the page has."""
    before = kernel_table.summed(ROWS)
    gemm = ("sm_90a", "gemm")
    fewer = {gemm: before[gemm]._replace(binaries=1, registers=200)}
    more = {gemm: before[gemm]._replace(shared_bytes=8192), ("sm_90a", "new"): before[gemm]}
    assert list(kernel_table.differing(before, before, True)) == []
    assert list(kernel_table.differing(before, fewer, False)) == []
    assert len(list(kernel_table.differing(before, fewer, True))) == 1
    shown = list(kernel_table.differing(before, more, False))
    assert shown[0] == "sm_90a | gemm: shared_bytes 4096 -> 8192"
    assert shown[1].startswith("sm_90a | new: new -> Row(binaries=2, ")


def test_nothing_on_the_page_spills() -> None:
    spilling = [k for k, row in kernel_table.read().items() if row.spills or row.scratch_bytes]
    assert spilling == []


def test_every_arch_that_a_plugin_compiles_for_is_on_the_page() -> None:
    toolchains = [b.toolchain for b in plugins().registry.backends.values() if b.toolchain]
    known = [arch for t in toolchains for arch in t.archs]
    assert set(known) <= set(kernel_table.ARCHS), (
        "a new arch belongs into ARCHS, and its rows onto the page"
    )
    assert {key[0] for key in kernel_table.read()} == set(kernel_table.ARCHS)


@pytest.mark.parametrize("arch", kernel_table.ALIKE)
def test_archs_that_are_alike_have_the_same_tiles(arch: str) -> None:
    """So that a part of one's binaries, and all of the other's, are enough to look at often."""
    other = kernel_table.ALIKE[arch]
    rows = {
        a: t.arch_row(a)
        for t in (b.toolchain for b in plugins().registry.backends.values())
        if t
        for a in (arch, other)
        if a in t.archs
    }
    if not rows:
        pytest.skip(f"no plugin compiles for {arch}")
    mine, its = rows[arch], rows[other]
    assert (
        mine.shared_bytes_per_block == its.shared_bytes_per_block and mine.platform == its.platform
    )
    both = mine.fp8_dtypes & its.fp8_dtypes

    def shapes(row: ArchRow) -> dict[str, list[str]]:
        """Tiles of 8 bits that only one of them knows left out, and those that Blackwell's archs
        may lack."""
        return {
            o: [
                kernel_table.tile_name(t)
                for t in tiles
                if not of_split_gradients(o, t)
                and getattr(t, "dtype_kv", None) in (None, *both)
                and not any(d.is_fp8 and d not in both for d in getattr(t, "dtypes", ()))
            ]
            for o, tiles in row.tiles.items()
        }

    assert shapes(mine) == shapes(its)
    often = in_every_run()
    others = [a for archs in kernel_table.SHARED if other in archs for a in archs] or [other]
    assert all(any(not kernel_table.rare(a, i, c) for a in others) for i, c in often)
    part = [c for i, c in enumerate(compile_matrix()) if not kernel_table.rare(arch, i, c)]
    assert 0 < len(part) < len(often) / 4 and len({c.kernel.entry for c in part}) >= 3


def test_a_tiles_name_is_of_its_fields() -> None:
    """What a tile has computed since it was made is not among them."""

    @dataclass(frozen=True)
    class Tile:
        warps: int

        @cached_property
        def bm(self) -> int:
            return 16 * self.warps

    tile = Tile(4)
    assert tile.bm == 64 and kernel_table.tile_name(tile) == "warps=4"


def of_split_gradients(operation: str, tile: Any) -> bool:
    """One of these is left out on Blackwell's archs, where it spills."""
    return operation == "attention_bwd" and getattr(tile, "precision", "") == "tf32x3"


@pytest.mark.parametrize("arch", kernel_table.MIXED)
def test_archs_with_the_tiles_of_two_others(arch: str) -> None:
    """So that a part of its binaries is enough to look at often, too."""
    if "cuda" not in plugins().registry.backends:
        pytest.skip("kernelseam-cuda is not installed")
    toolchain = plugins().backend("cuda").toolchain
    assert toolchain is not None
    names = {}
    for a in (arch, *kernel_table.MIXED[arch]):
        tiles = [(o, t) for o, found in toolchain.arch_row(a).tiles.items() for t in found]
        names[a] = [
            (o, sorted(map(str, t.dtypes)), kernel_table.tile_name(t))
            for o, t in tiles
            if not of_split_gradients(o, t)
        ]
    most, doubles = kernel_table.MIXED[arch]
    expected = [x for x in names[most] if x[1] != ["float64"]]
    expected += [x for x in names[doubles] if x[1] == ["float64"]]
    assert sorted(names[arch]) == sorted(expected)
    own, other = toolchain.arch_row(arch), toolchain.arch_row(most)
    assert own.shared_bytes_per_block == other.shared_bytes_per_block
    part = [i for i, c in enumerate(compile_matrix()) if not kernel_table.rare(arch, i, c)]
    assert 0 < len(part) < len(compile_matrix()) / 4


@pytest.mark.parametrize("archs", kernel_table.SHARED, ids="-".join)
def test_archs_take_turns(archs: tuple[str, ...]) -> None:
    """Each spec is one arch's, and of a kernel with few of them several archs', which have a tile
    for it; each arch has every kernel, several dtypes and transposes, and its share. No field's
    value is left out."""
    often = in_every_run()
    parts = [[c for i, c in often if not kernel_table.rare(arch, i, c)] for arch in archs]
    count = Counter(c.kernel.entry for _, c in often)
    expected = [str(c) for i, c in often for _ in kernel_table.whose_turn(i, archs)]
    assert sorted(str(c) for part in parts for c in part) == sorted(expected)
    assert set(expected) == {str(c) for _, c in often}
    toolchains = [b.toolchain for b in plugins().registry.backends.values() if b.toolchain]
    rows = {a: t.arch_row(a) for t in toolchains for a in archs if a in t.archs}
    for i, c in often:
        if any(c.tiles(row) for row in rows.values()):
            assert all(c.tiles(rows[a]) for a in kernel_table.whose_turn(i, archs)), str(c)
    assert all({c.kernel.entry for c in part} == set(count) for part in parts)
    for part in parts:
        assert abs(len(part) - len(expected) / len(archs)) < len(often) / 10
        assert {"gemm", "attention_forward", "attention_backward"} <= {c.kernel.entry for c in part}
        assert len({c.spec.dtype for c in part if c.kernel.entry == "attention_forward"}) >= 2
        assert (
            len(
                {
                    (c.spec.a_transposed, c.spec.b_transposed)
                    for c in part
                    if c.kernel.operation == "gemm" and c.kernel.entry == "gemm"
                }
            )
            >= 2
        )
    for entry in count:
        values = [
            {pair for c in some if c.kernel.entry == entry for pair in flat(c.spec)}
            for some in ([c for c in compile_matrix() if c.often], [c for _, c in often])
        ]
        assert values[0] == values[1]


@pytest.mark.parametrize("arch", kernel_table.ARCHS)
def test_what_every_run_compiles(arch: str) -> None:
    """One tile a spec, not always the same; of an arch's own kernels every field's value, and a
    tile of every spec."""
    backends = [b for b in plugins().registry.backends.values() if b.toolchain]
    mine = [b for b in backends if b.toolchain and arch in b.toolchain.archs]
    if not mine:
        pytest.skip(f"no plugin compiles for {arch}")
    toolchain, kernels = mine[0].toolchain, mine[0].kernels
    assert toolchain is not None
    found = kernel_table.binaries(toolchain, arch, kernels)
    row = toolchain.arch_row(arch)
    own: dict[str, list[Binaries]] = {}
    for i, (b, covered) in enumerate(zip(found, compile_matrix(kernels), strict=True)):
        rare = kernel_table.rare(arch, i, covered)
        tiles = covered.tiles(row)
        assert b.covered == covered and Counter([*b.often, *b.rarely]) == Counter(tiles)
        could = not rare and bool(tiles)
        if covered.kernel.archs and could:
            own.setdefault(covered.kernel.entry, []).append(b)
        else:
            assert bool(b.often) == could
        assert len(b.often) <= 1
    assert (arch in ("sm_90a", "gfx950")) == bool(own)
    for known in own.values():
        often = [b for b in known if b.often]
        values = [{pair for b in some for pair in flat(b.covered.spec)} for some in (known, often)]
        assert values[0] == values[1]
        tiles_often = {kernel_table.tile_name(b.often[0]) for b in often}
        for b in known:
            assert tiles_often & {kernel_table.tile_name(t) for t in b.covered.tiles(row)}
    assert sum(bool(b.often) for k in own.values() for b in k) <= 0.85 * sum(map(len, own.values()))
    names = [kernel_table.tile_name(t) for b in found for t in b.often]
    assert len(set(names)) > len(names) / 4
    left = kernel_table.left_out(arch, found)
    assert len(left) == sum(len(b.rarely) for b in found)
    assert {k[0] for k in left} == {arch}
