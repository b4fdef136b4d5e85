"""Attention over lists of addresses through the shared kernels: every head in memory of its own,
held to the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernelseam import AttentionPointers, plan
from kernelseam.oracle import check, formulas
from kernelseam.plugins import Plugins
from kernelseam_hostcpp.runtime import HostArray

D = 64
EVERYTHING: dict[str, Any] = {
    "window": (40, 3),
    "softcap": 9.0,
    "alibi_slopes": np.array([[0.5, 0.25, 0.1, 0.0]] * 2, "f4"),
    "sinks": np.array([0.0, 1.0, -2.0, 3.0], "f4"),
    "prefix_lengths": np.array([3, 50], "i4"),
    "mask": np.random.default_rng(6).random((2, 4, 33, 70)) < 0.7,
    "kv_lengths": np.array([70, 41], "i4"),
    "bias": np.random.default_rng(7).standard_normal((2, 4, 33, 70)).astype("f2"),
}
CASES: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    "plain": (2, 4, 2, 33, 70, {}),
    "everything": (2, 4, 2, 33, 70, EVERYTHING),
    "split": (1, 1, 1, 3, 1500, {"causal": True}),
}


def scattered(rng: np.random.Generator, count: int, rows: int, columns: int) -> list[np.ndarray]:
    """Matrices with rows of a gap, in a random order, NaN around them."""
    pool = np.full((count, rows + 2, columns + 8), np.nan, "f2")
    results = [pool[i, 1 : rows + 1, :columns] for i in rng.permutation(count)]
    for m in results:
        m[...] = rng.standard_normal((rows, columns))
    return results


@pytest.mark.parametrize(
    ("name", "lists"),
    # A host list of one entry is evenly spaced, and taken for strided memory.
    [
        ("plain", "host"),
        ("plain", "device"),
        ("everything", "host"),
        ("everything", "device"),
        ("split", "device"),
    ],
)
def test_lists(hostcpp: Plugins, name: str, lists: str) -> None:
    batch, heads, kv_heads, S_q, S_k, options = CASES[name]
    rng = np.random.default_rng(0)
    q, out = (scattered(rng, batch * heads, S_q, D) for _ in range(2))
    k, v = (scattered(rng, batch * kv_heads, S_k, D) for _ in range(2))
    for m in out:
        m[...] = np.nan
    given: dict[str, Any] = {}
    for letter, entries in (("q", q), ("k", k), ("v", v), ("out", out)):
        places = np.array([m.ctypes.data for m in entries])
        given[f"{letter}_ptrs"] = (
            HostArray(places) if lists == "device" else [HostArray(m) for m in entries]
        )
    lse = np.full((batch, heads, S_q), np.nan, "f4")
    arrays = {n: HostArray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    planned = plan(
        AttentionPointers(
            batch=batch,
            num_heads=heads,
            kv_heads=kv_heads,
            S_q=S_q,
            S_k=S_k,
            head_dim=D,
            dtype="float16",
            stride_q_row=D + 8,
            stride_k_row=D + 8,
            stride_v_row=D + 8,
            stride_out_row=D + 8,
            lse=HostArray(lse),
            alignment=16,
            **given,
            **arrays,
        )
    )
    assert (planned.problem.spec.q_view, planned.problem.spec.vector, planned.device.backend) == (
        "pointers",
        16,
        "hostcpp",
    )
    assert len(planned.launches) == (2 if name == "split" else 1)
    planned.bind(check=True)()
    whole = [np.stack(m).reshape(batch, -1, *m[0].shape) for m in (q, k, v, out)]
    known = {n: x for n, x in options.items() if n not in ("causal", "scale")}
    variant = formulas.Variant(**known)
    verdict = check.attention(*whole, lse, causal=options.get("causal", False), variant=variant)
    assert verdict.passed and verdict.checked == whole[3].size + lse.size, verdict.message
