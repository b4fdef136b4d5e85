"""Pages that hold a key's and a value's numbers in one row, as vLLM's do: read in place by the
shared kernels."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostArray

PAGES, PAGE, H, G, D = 12, 16, 4, 2, 64
LENGTHS = (70, 33)


@pytest.mark.parametrize("implementation", ["shared", "decode"])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_keys_beside_values(hostcpp: Plugins, order: str, implementation: str) -> None:
    rng = np.random.default_rng(3)
    queries = 1 if implementation == "decode" else 3
    whole = rng.standard_normal((PAGES, PAGE, G, 2 * D)).astype(np.float16)
    if order == "hnd":
        whole = np.ascontiguousarray(whole.swapaxes(1, 2)).swapaxes(1, 2)
    pages = whole.swapaxes(1, 2)
    table = np.array([[7, 1, 3, 4, 9], [2, 5, 6, 0, 0]], np.int32)
    q = rng.standard_normal((len(LENGTHS) * queries, H, D)).astype(np.float16)
    starts = np.arange(0, len(q) + 1, queries, dtype=np.int32)
    lengths = np.array(LENGTHS, np.int32)

    def attend(make: Any, **options: Any) -> Any:
        return kernelseam.attention_paged(
            make(q),
            make(pages[..., :D]),
            make(pages[..., D:]),
            make(table),
            make(lengths),
            cu_seqlens_q=make(starts),
            max_seqlen_q=queries,
            max_seqlen_k=table.shape[1] * PAGE,
            kv_layout="hnd",
            **options,
        )

    found = attend(HostArray, implementation=implementation)
    expected = attend(np.asarray, backend="numpy")
    np.testing.assert_allclose(
        np.asarray(found.host, np.float32), expected.astype(np.float32), atol=2e-3, rtol=2e-3
    )
