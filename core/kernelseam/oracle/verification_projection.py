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
from kernelseam.oracle import check, formulas, projections
from kernelseam.oracle.formulas import Array
from kernelseam.oracle.operands import Operands
from kernelseam.oracle.projections import Results, tokens
from kernelseam.oracle.sampling import sampled
from kernelseam.oracle.verifier import Verifier

Projection = (
    QkvProjectionProblem
    | OutputProjectionProblem
    | QkvProjectionBwdProblem
    | OutputProjectionBwdProblem
)


Made = tuple[Results, dict[str, Array]]
"""What the oracle expects, and the results to hold against it."""


class ProjectionVerifier(Verifier[Projection]):
    """Of large results some tokens, and of d_weight some rows. ``compared``: a problem and its
    operands by name → what to compare."""

    def __init__(self, compared: Callable[[Any, Mapping[str, Array]], Made]) -> None:
        self._compared = compared

    def kept(self, problem: Projection, operands: Operands) -> dict[str, Array]:
        return {r.name: operands.strided(r, problem.batch) for r in problem.operands if r.may_be}

    def verdict(
        self, problem: Projection, operands: Operands, kept: dict[str, Array], flushed: bool
    ) -> check.Verdict:
        x = {
            r.name: operands.strided(r, 1 if r.name == "weight" else problem.batch)
            for r in problem.operands
        }
        wanted, got = self._compared(problem, {**x, **kept})
        return check.projection(wanted, problem.spec.dtype, got, zero_mean=False, flushed=flushed)


def _some(batch: int, S: int, limit: int) -> Callable[[Array], Array]:
    """[B, heads, S, columns] → the same of some tokens, as one entry; all where there are few."""
    numbers = formulas.sample_rows(batch * S, limit)
    if numbers is None:
        return lambda x: x
    entry, token = np.divmod(numbers, max(S, 1))
    return lambda x: x[entry, :, token].swapaxes(0, 1)[None]


def qkv(p: QkvProjectionProblem, x: Mapping[str, Array]) -> Made:
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
    wanted = projections.qkv_projection(
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
    return wanted, {n: of(y) for n, y in results.items()}


def output(p: OutputProjectionProblem, x: Mapping[str, Array]) -> Made:
    """out of some tokens."""
    of = _some(p.batch, p.S, sampled(4 * p.hidden * p.num_heads * p.head_dim))
    residual = of(x["residual"]) if "residual" in x else None
    wanted = projections.output_projection(
        of(x["attn_out"]), x["weight"][0, 0], x.get("bias"), residual
    )
    return wanted, {"out": of(x["out"])}


def qkv_gradients(p: QkvProjectionBwdProblem, x: Mapping[str, Array]) -> Made:
    """d_input of some tokens, some rows of d_weight, d_bias."""
    of = _some(p.batch, p.S, sampled(4 * p.hidden * p.width))
    wanted: Results = {}
    got: dict[str, Array] = {}
    if "d_input" in x:
        dq, dk, dv = (of(x[n]) for n in ("dq", "dk", "dv"))
        made = projections.qkv_projection_bwd(dq, dk, dv, None, x["weight"])
        wanted, got = {"d_input": made["d_input"]}, {"d_input": of(x["d_input"])}
    d = tokens(x["dq"], x["dk"], x["dv"])[:, None]
    return _with_sums(p, x, d, "input", wanted, got)


def output_gradients(p: OutputProjectionBwdProblem, x: Mapping[str, Array]) -> Made:
    """d_attn_out of some tokens, some rows of d_weight, d_bias."""
    of = _some(p.batch, p.S, sampled(4 * p.hidden * p.width))
    wanted: Results = {}
    got: dict[str, Array] = {}
    if "d_attn_out" in x:
        made = projections.output_projection_bwd(of(x["d_output"]), None, x["weight"], p.num_heads)
        wanted, got = {"d_attn_out": made["d_attn_out"]}, {"d_attn_out": of(x["d_attn_out"])}
    return _with_sums(p, x, x["d_output"], "attn_out", wanted, got)


def _with_sums(
    p: QkvProjectionBwdProblem | OutputProjectionBwdProblem,
    x: Mapping[str, Array],
    d: Array,
    read: str,
    wanted: Results,
    got: dict[str, Array],
) -> Made:
    """With what is summed over all tokens of d [B, 1, S, columns], and for d_weight of what was
    ``read``."""
    if "d_weight" in x:
        columns = x["d_weight"].shape[3]
        rows = formulas.sample_rows(d.shape[3], sampled(4 * p.batch * p.S * columns))
        some = slice(None) if rows is None else rows
        made = projections.output_projection_bwd(d[..., some], x[read], None, 1)
        wanted, got = (
            {**wanted, "d_weight": made["d_weight"]},
            {**got, "d_weight": x["d_weight"][:, :, some]},
        )
    if "d_bias" in x:
        made = projections.output_projection_bwd(d, None, None, 1)
        wanted, got = {**wanted, "d_bias": made["d_bias"]}, {**got, "d_bias": x["d_bias"]}
    return wanted, got
