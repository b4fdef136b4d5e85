"""Where the rows of a bias lie for Hopper's attention (cuda_kernels/sm90/attention/plane.h): copied
by 16 bytes where all of them begin at such multiples, else element by element."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernelseam.contract import SourceBundle

pytest.importorskip("kernelseam_cuda.toolchain", reason="kernelseam-cuda is not installed")
from mutant import Mutant  # noqa: E402
from sm90_probe import TILES_CONSTANTS, Change, as_it_is, run  # noqa: E402

PLACES = """
#include "sm90/attention/plane.h"
KS_KERNEL(16, 1) probe(const f16* bias, const i64* n, i64* out) {
  if (thread_index() != 0) return;
  const Planes<f16> planes{bias + n[0], n[1], n[2], n[3], n[4]};
  for (int b = 0; b < 2; b++)
    for (int h = 0; h < 2; h++)
      for (int lane = 0; lane < 16; lane++) {
        const Plane<f16> plane = planes.from(b, h);
        const PlaneRows<f16, 64> rows(planes, plane, 32, 1024, lane);
        *out++ = rows.to % 2 == 0;
        *out++ = planes.base + (i64)rows.from * 8 - bias;
      }
}"""

STRIDES = {
    "rows of 16 bytes": (0, 64 * 72, 64 * 72, 72, 1),
    "heads between rows": (0, 64 * 2 * 500, 500, 2 * 500, 1),
    "heads between rows, from the fourth key on": (4, 64 * 2 * 500, 500, 2 * 500, 1),
    "entries between rows, from the fourth key on": (4, 500, 64 * 2 * 500, 2 * 500, 1),
    "rows apart": (0, 64 * 70, 64 * 70, 70, 1),
    "columns apart": (0, 64 * 144, 64 * 144, 144, 2),
}
"""By what they are: the bias' first element, and strides of its axes, in elements."""


def without_softmax(change: Change) -> Change:
    """Whose words are CUDA's."""

    def changed(made: SourceBundle) -> SourceBundle:
        own = change(made)
        files = dict(own.files) | {"sm90/attention/softmax.h": "#pragma once\n"}
        return replace(own, files=tuple(sorted(files.items())))

    return changed


def check_places(change: Change, name: str) -> None:
    first, *strides = STRIDES[name]
    bias = np.zeros(1 << 18, np.float16)
    offset = -bias.ctypes.data % 16 // 2
    out = np.full((2, 2, 16, 2), -1, np.int64)
    run(
        PLACES,
        TILES_CONSTANTS | {"BIAS": "f16"},
        without_softmax(change),
        bias[offset:],
        np.array([first, *strides], np.int64),
        out,
    )
    for entry in range(2):
        for head in range(2):
            row = first + entry * strides[0] + head * strides[1]
            whole = not (first % 8 or row % 8 or strides[2] % 8) and strides[3] == 1
            for lane, (wide, place) in enumerate(out[entry, head].tolist()):
                assert wide == whole
                assert not wide or place == row + (32 + lane // 8) * strides[2] + lane % 8 * 8


@pytest.mark.parametrize("name", STRIDES)
def test_rows_are_copied_by_16_bytes_where_they_and_their_base_begin_so(name: str) -> None:
    check_places(as_it_is, name)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("(u64)planes.base | ", "", "heads between rows, from the fourth key on"),
        ("(u64)plane.base | ", "", "heads between rows"),
        (" | (u64)(i64)plane.row * SIZE", "", "rows apart"),
        ("plane.column == 1 && ", "", "columns apart"),
    ],
)
def test_a_planted_bug_is_found(old: str, new: str, name: str) -> None:
    mutant = Mutant("wide", "sm90/attention/plane.h", old, new, "", "", "")
    with pytest.raises(AssertionError):
        check_places(mutant, name)
