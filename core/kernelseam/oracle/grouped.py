"""Grouped products in float64: each group's by the formula of a GEMM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernelseam.oracle import formulas
from kernelseam.oracle.formulas import Array, GemmResult


def grouped_gemm(
    a: Array,
    b: Array,
    offsets: Sequence[int],
    along: str,
    c: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    a_scales: Array | None = None,
    b_scales: Array | None = None,
    scale_block: tuple[int, int, int] | None = None,
    a_indices: Array | None = None,
    c_factors: Array | None = None,
) -> GemmResult:
    """alpha·A_g·B_g + beta·C_g of A [1 or groups, M, K] and B [1 or groups, K, N], transposes
    resolved, for groups from one of ``offsets`` to the next.

    Along "m" the result is [offsets[-1], N], along "n" [M, offsets[-1]], along "k" [groups, M, N];
    ``c``, where beta is not 0, has that shape. Scales are [1 or groups, M] and [1 or groups, N], of
    blocks [1, M, ⌈K/k⌉] and [groups, ⌈N/n⌉, ⌈K/k⌉]. ``a_indices`` say which rows of A, and of its
    scales, are multiplied; rows of the product are multiplied by ``c_factors``.
    """
    if a_indices is not None:
        a = a[:, a_indices]
        a_scales = None if a_scales is None else a_scales[:, a_indices]
    if c_factors is not None:
        a = a[:, : len(c_factors)].astype(np.float64) * c_factors[:, None].astype(np.float64)
    parts: list[tuple[Array, Array, Array]] = []
    begin = 0
    for g, end in enumerate(offsets):
        part = {x: slice(begin, end) if x == along else slice(None) for x in "mnk"}
        begin = end
        left, right = _of(a, g)[part["m"], part["k"]], _of(b, g)[part["k"], part["n"]]
        old = None
        if c is not None:
            old = c[g] if along == "k" else c[part["m"], part["n"]]
        of_rows, of_columns = (
            None if x is None else _of(x, g)[part[axis]] if along == axis else _of(x, g)
            for x, axis in ((a_scales, "m"), (b_scales, "n"))
        )
        if scale_block is not None and of_rows is not None and of_columns is not None:
            _, n, k = scale_block
            of_rows = of_rows.repeat(k, axis=1)[:, : left.shape[1]]
            of_columns = of_columns.repeat(n, axis=0)[: right.shape[1]]
            of_columns = of_columns.repeat(k, axis=1)[:, : left.shape[1]]
        result = formulas.gemm(
            left[None, None],
            right[None, None],
            None if old is None else old[None, None],
            alpha,
            beta,
            a_scales=None if of_rows is None else of_rows[None, None],
            b_scales=None if of_columns is None else of_columns[None, None],
        )
        assert result.products is not None
        parts.append((result.out[0, 0], result.magnitude[0, 0], result.products[0, 0]))
    if not parts:
        rows = 0 if along == "m" else a.shape[1]
        columns = 0 if along == "n" else b.shape[2]
        lead = (0,) if along == "k" else ()
        return GemmResult(*[np.zeros((*lead, rows, columns))] * 3)
    return GemmResult(*(_joined(x, along) for x in zip(*parts, strict=True)))


def _of(x: Array, g: int) -> Array:
    one: Array = x[g if len(x) > 1 else 0]
    return one


def _joined(parts: Sequence[Array], along: str) -> Array:
    if along == "k":
        return np.stack(parts)
    return np.concatenate(parts, axis=0 if along == "m" else 1)
