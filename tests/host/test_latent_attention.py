"""Latent attention: one head of 576 columns is read as keys, its first 512 as values; nothing is
copied."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.oracle import check
from kernelseam.oracle.formulas import Variant
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostArray

HEADS, KEYS, PAGE, D, D_V = 16, (70, 33), 16, 576, 512
RNG = np.random.default_rng(3)


def verdict(q: Any, cache: Any, out: Any, lse: Any) -> check.Verdict:
    """Operands as [batch, head, row, column]; the cache is read as [batch, 1, row, D]."""
    return check.attention(
        q,
        cache,
        cache[..., :D_V],
        out,
        lse,
        causal=True,
        scale=0.05,
        variant=Variant(kv_lengths=KEYS),
    )


@pytest.mark.parametrize("host", [False, True], ids=["shared", "reference"])
@pytest.mark.parametrize("queries", [1, 2])
def test_values_are_columns_of_the_keys(hostcpp: Plugins, host: bool, queries: int) -> None:
    kind = (lambda x: x) if host else HostArray
    q = RNG.standard_normal((2, HEADS, queries, D)).astype(np.float16)
    cache = np.full((2, 1, max(KEYS), D), np.nan, np.float16)
    pages, table = np.full((12, PAGE, 1, D), np.nan, np.float16), np.full((2, 5), -1, np.int32)
    places = iter(RNG.permutation(12))
    for b, n in enumerate(KEYS):
        cache[b, 0, :n] = RNG.standard_normal((n, D))
        for j in range(0, n, PAGE):
            table[b, j // PAGE] = page = next(places)
            pages[page, : n - j, 0] = cache[b, 0, j : min(j + PAGE, n)]
    lengths = kind(np.array(KEYS, np.int32))
    options = {"scale": 0.05, "return_lse": True}
    values = cache[..., :D_V]
    assert np.shares_memory(values, cache)
    out, lse = kernelseam.attention(
        kind(q),
        kind(cache),
        kind(values),
        kv_lengths=lengths,
        causal=True,
        layout="bhsd",
        **options,
    )
    out, lse = (x if host else x.host for x in (out, lse))
    outcome = verdict(q, np.nan_to_num(cache), out, lse)
    assert outcome.passed and outcome.checked == 2 * HEADS * queries * (D_V + 1), outcome.message

    paged, paged_lse = kernelseam.attention_paged(
        kind(q), kind(pages), kind(pages[..., :D_V]), kind(table), lengths, layout="bhsd", **options
    )
    paged, paged_lse = (x if host else x.host for x in (paged, paged_lse))
    outcome = verdict(q, np.nan_to_num(cache), paged, paged_lse)
    assert outcome.passed and outcome.checked == 2 * HEADS * queries * (D_V + 1), outcome.message
