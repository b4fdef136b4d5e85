"""Packed rows of no sequence: nothing is launched, and nothing is written."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostArray

ROWS, H, G, D = 3, 4, 2, 16


@pytest.mark.parametrize(("batch", "longest"), [(2, 0), (0, 0), (0, 5)])
def test_rows_of_no_sequence(hostcpp: Plugins, batch: int, longest: int) -> None:
    q, out = (np.full((ROWS, H, D), x, np.float16) for x in (1, 7))
    pages = np.ones((2, 4, G, D), np.float16)
    table, lengths = np.zeros((batch, 2), np.int32), np.zeros(batch, np.int32)
    starts = np.zeros(batch + 1, np.int32)
    attend: Any = kernelseam.attention_paged
    with kernelseam.trace() as launches:
        _, lse = attend(
            *[HostArray(x) for x in (q, pages, pages, table, lengths)],
            cu_seqlens_q=HostArray(starts),
            max_seqlen_q=longest,
            return_lse=True,
            out=HostArray(out),
        )
    assert launches == []
    assert (out == 7).all() and lse.host.shape == (H, ROWS)


@pytest.mark.parametrize("longest", [0, 5])
def test_gradients_of_no_sequence(hostcpp: Plugins, longest: int) -> None:
    q, k = np.ones((ROWS, H, D), np.float16), np.ones((ROWS, G, D), np.float16)
    starts, lse = np.zeros(1, np.int32), np.zeros((H, ROWS), np.float32)
    with kernelseam.trace() as launches:
        found = kernelseam.attention_bwd(
            *[HostArray(x) for x in (q, q, k, k, q, lse)],
            cu_seqlens_q=HostArray(starts),
            cu_seqlens_k=HostArray(starts),
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
    assert launches == []
    assert [x.host.shape for x in (found.dq, found.dk, found.dv)] == [q.shape, k.shape, k.shape]
