"""The table of what kernels take, and the page that sums it up."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import kernel_table  # noqa: E402

ROWS = {
    ("sm_90a", "gemm float16", "bm=64"): ("100", "0", "0", "4096", "64"),
    ("sm_90a", "gemm float32", "bm=32"): ("255", "3", "16", "4096", "0"),
    ("gfx942", "merge_states float32", "warps=4"): ("40", "0", "0", "0", "0"),
}


def test_the_summary_counts_by_arch_and_kernel() -> None:
    lines = kernel_table.summary(ROWS).splitlines()
    assert lines[-2:] == [
        "| sm_90a | compiled | gemm | 2 | 255 | 3 | 16 |", "| gfx942 | compiled | merge_states | 1 | 40 | 0 | 0 |"
    ]


def test_the_page_is_that_of_the_table() -> None:
    assert kernel_table.SUMMARY.read_text(encoding="utf-8") == kernel_table.summary(kernel_table.read())


def test_nothing_in_the_table_spills() -> None:
    spilling = {key for key, facts in kernel_table.read().items() if facts[1:3] != ("0", "0")}
    assert spilling == set()
