"""The model that the counter of AMD's kernels multiplies by, and the committed table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("kernelseam_rocm_emulator", reason="kernelseam-rocm-emulator is not installed")
from kernelseam.errors import UnknownName  # noqa: E402
from kernelseam_rocm_emulator.counting import model, report  # noqa: E402
from kernelseam_rocm_emulator.counting.model import Cycles, Mark, unit  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import amd_count_table as table  # noqa: E402

# ---------------------------------------------------------------- the model


def test_shares_of_two_waves_overlap() -> None:
    cycles = Cycles(matrix=512, vector=1585, other=342, lds=184)
    assert cycles.shares(unit("gfx950")) == pytest.approx((512 / 2439, 512 / 1585))
    cycles = Cycles(matrix=512, vector=305, other=316, lds=96)
    assert cycles.shares(unit("gfx942")) == pytest.approx((512 / 1133, 1024 / 1133))
    cycles = Cycles(matrix=1024, vector=517, other=221, lds=345)
    assert cycles.shares(unit("gfx1100")) == pytest.approx((1024 / 1762, 1024 / 1541))
    # LDS, which all four SIMDs share, is the limit.
    assert Cycles(100, 100, 0, 100).shares(unit("gfx942")) == (0.25, 0.25)
    assert Cycles().shares(unit("gfx942")) == (0, 0)


@pytest.mark.parametrize(
    ("arch", "registers", "lds", "waves", "expected"),
    [
        ("gfx942", 248, 49152, 4, 1),
        ("gfx950", 256, 49152, 4, 2),
        ("gfx950", 280, 1, 4, 1),
        ("gfx942", 116, 32768, 4, 2),
        ("gfx1100", 157, 32768, 8, 8),
        ("gfx1100", 24, 0, 1, 16),
    ],
)
def test_occupancy(arch: str, registers: int, lds: int, waves: int, expected: int) -> None:
    assert model.occupancy(unit(arch), registers, lds, waves) == expected


def test_every_entry_has_a_source() -> None:
    rows = list(report.model_rows())
    assert {row[3] for row in rows} == {Mark.MODELLED.value, Mark.GUESSED.value}
    assert all(len(row[4]) > 8 for row in rows)
    shown = {row[0]: row[2] for row in rows if row[1] == "LDS reads of 16 bytes, a phase"}
    assert shown["gfx950"] == (
        "64 banks, lanes 0–3, 12–15, 20–27; 4–11, 16–19, 28–31; the same + 32"
    )
    assert shown["gfx1100, gfx1151, gfx1200, gfx1201"] == "32 banks, lanes 8 in order"


def test_the_page_has_the_model() -> None:
    page = (table.TABLE.parent / "parity" / "amd-counts.md").read_text(encoding="utf-8")
    assert "\n".join(report.table(report.MODEL_HEAD, report.model_rows())) in page


def test_an_unknown_arch_is_refused() -> None:
    with pytest.raises(UnknownName, match="arch = gfx803: must be one of gfx90a, gfx942"):
        unit("gfx803")


# ---------------------------------------------------------------- the table


def row(share: float, moves: int = 0) -> table.Counts:
    return table.Counts(share, moves, (32, 100, 10, 4, 20))


BEFORE = {
    ("gfx942", "gemm", "bm=128"): row(90.0),
    ("gfx942", "gemm", "bm=64"): row(50.0),
    ("gfx950", "attention", "rows=32"): row(32.0, 144),
}


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({("gfx942", "gemm", "bm=128"): row(87.0)}, []),
        (
            {("gfx942", "gemm", "bm=128"): row(86.9)},
            [
                "gfx942 | gemm | bm=128: the matrix share fell from 90.0 to 86.9 %",
                "gfx942 | gemm: the best tile's matrix share fell from 90.0 to 86.9 %",
            ],
        ),
        (
            {("gfx942", "gemm", "bm=128"): row(90.0), ("gfx942", "gemm", "bm=64"): row(46.0)},
            ["gfx942 | gemm | bm=64: the matrix share fell from 50.0 to 46.0 %"],
        ),
        ({("gfx950", "attention", "rows=32"): row(32.0, 144)}, []),
        (
            {("gfx950", "attention", "rows=32"): row(32.0, 145)},
            [
                " | ".join(("gfx950", "attention", "rows=32"))
                + ": 145 registers move to the other file in an iteration, not 144"
            ],
        ),
        (
            {("gfx942", "gemm", "bm=256"): row(90.0, 4)},
            ["gfx942 | gemm | bm=256: 4 registers move to the other file in an iteration"],
        ),
        (
            {("gfx942", "gemm", "bm=256"): row(80.0)},
            ["gfx942 | gemm: the best tile's matrix share fell from 90.0 to 80.0 %"],
        ),
        ({("gfx1100", "gemm", "bm=256"): row(10.0, 4)}, []),
    ],
    ids=[
        "three points",
        "more",
        "not the best tile",
        "as many moves",
        "one more",
        "a new tile moves",
        "a new tile is slow",
        "nothing to compare with",
    ],
)
def test_what_is_worse(after: dict[table.Key, table.Counts], expected: list[str]) -> None:
    assert table.worse(BEFORE, after) == expected


def test_the_best_tile_is_known_where_all_were_compiled() -> None:
    after, other = {("gfx942", "gemm", "bm=64"): row(50.0)}, ("gfx942", "gemm", "bm=128")
    assert table.worse(BEFORE, after, {other}) == []
    assert table.worse(BEFORE, after) == [
        "gfx942 | gemm: the best tile's matrix share fell from 90.0 to 50.0 %"
    ]


def test_the_table_is_read_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "TABLE", tmp_path / "counts.csv")
    assert table.read() == {}
    table.TABLE.write_text(table.written(BEFORE), encoding="utf-8")
    assert table.read() == BEFORE
    assert table.TABLE.read_text(encoding="utf-8").splitlines()[:2] == [
        "arch,kernel,tile,matrix_share,accumulator_moves,matrix,vector,lds,memory,other",
        "gfx942,gemm,bm=128,90.0,0,32,100,10,4,20",
    ]


def test_the_committed_table_has_every_arch() -> None:
    rows = table.read()
    assert {key[0] for key in rows} == set(model.UNITS)
    assert all(0 < actual.share <= 100 for actual in rows.values())
