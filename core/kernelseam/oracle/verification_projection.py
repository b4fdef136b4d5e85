"""``bind(check=True)`` of projections and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernelseam.descriptors.projection.backward_problem import (
    OutputProjectionBwdProblem,
    QkvProjectionBwdProblem,
)
from kernelseam.descriptors.projection.problem import OutputProjectionProblem, QkvProjectionProblem
from kernelseam.oracle import appended, cache, check, formulas, projections
from kernelseam.oracle.cache import CacheRows
from kernelseam.oracle.formulas import Array
from kernelseam.oracle.operands import Operands
from kernelseam.oracle.projections import Results, tokens
from kernelseam.oracle.sampling import sampled
from kernelseam.oracle.verification_cache import own_places
from kernelseam.oracle.verifier import Verifier

Projection = (
    QkvProjectionProblem
    | OutputProjectionProblem
    | QkvProjectionBwdProblem
    | OutputProjectionBwdProblem
)
Comparison = tuple[Results, dict[str, Array]]
"""The oracle's results, and the call's."""


class ProjectionVerifier(Verifier[Projection]):
    """Of large results some tokens, and of d_weight some rows. ``compared``: a problem and its
    operands by name → the comparison."""

    def __init__(self, compared: Callable[[Any, Mapping[str, Array]], Comparison]) -> None:
        self._compared = compared

    def kept(self, problem: Projection, operands: Operands) -> dict[str, Array]:
        return {r.name: operands.strided(r, problem.batch) for r in problem.operands if r.may_alias}

    def verdict(
        self, problem: Projection, operands: Operands, kept: dict[str, Array], flushed: bool
    ) -> check.Verdict:
        x = {
            r.name: operands.strided(r, 1 if r.name == "weight" else problem.batch)
            for r in problem.operands
        }
        expected, actual = self._compared(problem, {**x, **kept})
        return check.projection(
            expected, problem.spec.dtype, actual, zero_mean=False, flushed=flushed
        )


class QkvVerifier(ProjectionVerifier):
    """With an append: some tokens that have a place of their own."""

    def __init__(self) -> None:
        super().__init__(qkv)

    def verdict(
        self, problem: Projection, operands: Operands, kept: dict[str, Array], flushed: bool
    ) -> check.Verdict:
        p: Any = problem
        append, h, between = p.append, p.heads, p.spec.dtype_out
        if append is None:
            return super().verdict(problem, operands, kept, flushed)
        x = {r.name: operands.strided(r, r.shape[0]) for r in p.operands}
        found = np.array(own_places(append, x), np.int64).reshape(-1, 4)
        some = formulas.sample_rows(len(found), sampled(4 * p.hidden * h.columns))
        token, page, row, position = (found if some is None else found[some]).T
        entry, place = np.divmod(token, max(h.tokens, 1))
        rotated = h.first_position + place
        if p.spec.heads.positions:
            rotated = x["positions"][entry, place]
        products = projections.qkv_projection(
            x["input"][entry, 0, place][None],
            x["weight"][0, 0],
            x.get("bias"),
            *(h.num_heads, h.kv_heads, h.head_dim, x.get("cos"), x.get("sin")),
            p.spec.heads.rotary,
            rotated[None],
        )
        tables = (x["cos"], x["sin"]) if append.spec.rotary else None
        expected, results = dict[str, CacheRows](), dict[str, Array]()
        scales, written = dict[str, Array](), dict[str, Array]()
        for name, (result, K) in products.items():
            rotated = tables if name != "v" else None
            kind = between if name != "q" or rotated else between.accumulator
            how = (rotated, append.spec.rotary, position[None])
            expected[name] = appended.rows(result, K, p.spec.dtype, kind, *how, flushed=flushed)
            at = (entry, slice(None), place) if name == "q" else (page, slice(None), row)
            results[name] = x[name][at].swapaxes(0, 1)[None]
            if append.spec.scaled and name != "q":
                own = x[f"{name}_scales"]
                by_token = append.spec.scaled == "tokens"
                scales[name] = own[at].swapaxes(0, 1)[None] if by_token else own[[0], :, :1]
                written |= {name: scales[name]} if by_token else {}
        accumulator = p.spec.dtype.accumulator
        return cache.verdict(expected, results, scales, accumulator, written, flushed)


def _some(batch: int, S: int, limit: int) -> Callable[[Array], Array]:
    """[B, heads, S, columns] → the same of some tokens, as one entry; all where there are few."""
    numbers = formulas.sample_rows(batch * S, limit)
    if numbers is None:
        return lambda x: x
    entry, token = np.divmod(numbers, max(S, 1))
    return lambda x: x[entry, :, token].swapaxes(0, 1)[None]


def qkv(p: QkvProjectionProblem, x: Mapping[str, Array]) -> Comparison:
    """q, k and v of some tokens."""
    h = p.heads
    positions = x.get("positions")
    if positions is None:
        positions = np.broadcast_to(h.first_position + np.arange(h.tokens), (p.batch, h.tokens))
    results = {n: x[n] for n in ("q", "k", "v")}
    if p.spec.heads.paged:
        page, row = np.divmod(positions, h.page_size)
        page = np.take_along_axis(x["block_table"], page, axis=1)
        results |= {n: x[n][page, :, row].swapaxes(1, 2) for n in ("k", "v")}
    of = _some(p.batch, h.tokens, sampled(4 * p.hidden * h.columns))
    expected = projections.qkv_projection(
        of(x["input"])[:, 0],
        x["weight"][0, 0],
        x.get("bias"),
        h.num_heads,
        h.kv_heads,
        h.head_dim,
        x.get("cos"),
        x.get("sin"),
        p.spec.heads.rotary,
        of(positions[:, None, :, None])[:, 0, :, 0],
    )
    return expected, {n: of(y) for n, y in results.items()}


def output(p: OutputProjectionProblem, x: Mapping[str, Array]) -> Comparison:
    """out of some tokens."""
    of = _some(p.batch, p.S, sampled(4 * p.hidden * p.num_heads * p.head_dim))
    residual = of(x["residual"]) if "residual" in x else None
    expected = projections.output_projection(
        of(x["attn_out"]), x["weight"][0, 0], x.get("bias"), residual
    )
    return expected, {"out": of(x["out"])}


def qkv_gradients(p: QkvProjectionBwdProblem, x: Mapping[str, Array]) -> Comparison:
    """d_input of some tokens, some rows of d_weight, d_bias."""
    return _gradients(p, x, tokens(x["dq"], x["dk"], x["dv"])[:, None], "input", 1)


def output_gradients(p: OutputProjectionBwdProblem, x: Mapping[str, Array]) -> Comparison:
    """d_attn_out of some tokens, some rows of d_weight, d_bias."""
    return _gradients(p, x, x["d_output"], "attn_out", p.num_heads)


def _gradients(
    p: QkvProjectionBwdProblem | OutputProjectionBwdProblem,
    x: Mapping[str, Array],
    d: Array,
    read: str,
    heads: int,
) -> Comparison:
    """Those by the operand ``read``, whose gradient has so many heads, by the weight and by a bias;
    d [B, 1, S, columns]: that of the result."""
    expected: Results = {}
    actual: dict[str, Array] = {}
    if (own := f"d_{read}") in x:
        of = _some(p.batch, p.S, sampled(4 * p.hidden * p.width))
        results = projections.output_projection_bwd(of(d), None, x["weight"], heads)
        expected[own], actual[own] = results["d_attn_out"], of(x[own])
    if "d_weight" in x:
        columns = x["d_weight"].shape[3]
        rows = formulas.sample_rows(d.shape[3], sampled(4 * p.batch * p.S * columns))
        some = slice(None) if rows is None else rows
        results = projections.output_projection_bwd(d[..., some], x[read], None, 1)
        expected["d_weight"], actual["d_weight"] = results["d_weight"], x["d_weight"][:, :, some]
    if "d_bias" in x:
        results = projections.output_projection_bwd(d, None, None, 1)
        expected["d_bias"], actual["d_bias"] = results["d_bias"], x["d_bias"]
    return expected, actual
