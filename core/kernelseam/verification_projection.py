"""A projection's numbers held against the oracle: of a large one those of some tokens, and of some
rows of d_weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernelseam.descriptors.projection.backward_problem import (
    OutputProjectionBwdProblem,
    QkvProjectionBwdProblem,
)
from kernelseam.descriptors.projection.problem import OutputProjectionProblem, QkvProjectionProblem
from kernelseam.parity import check, oracle, oracle_projection
from kernelseam.parity.oracle import Array
from kernelseam.parity.oracle_projection import Results, tokens

Projection = (
    QkvProjectionProblem
    | OutputProjectionProblem
    | QkvProjectionBwdProblem
    | OutputProjectionBwdProblem
)


def projection(
    problem: Projection, x: Mapping[str, Array], sampled: Callable[[int], int], flushed: bool
) -> check.Verdict:
    """The verdict on operands by name, as their rules walk over them. ``sampled``: how many rows
    may be computed that take so many operations each."""
    if isinstance(problem, QkvProjectionProblem):
        wanted, got = _qkv(problem, x, sampled)
    elif isinstance(problem, OutputProjectionProblem):
        of = _some(
            problem.batch,
            problem.S,
            sampled(4 * problem.hidden * problem.num_heads * problem.head_dim),
        )
        residual = of(x["residual"]) if "residual" in x else None
        wanted = oracle_projection.output_projection(
            of(x["attn_out"]), x["weight"][0, 0], x.get("bias"), residual
        )
        got = {"out": of(x["out"])}
    else:
        wanted, got = _gradients(problem, x, sampled)
    return check.projection(wanted, problem.spec.dtype, got, zero_mean=False, flushed=flushed)


def _some(batch: int, S: int, limit: int) -> Callable[[Array], Array]:
    """[B, heads, S, columns] → the same of some tokens, as one entry; all where there are few."""
    numbers = oracle.sample_rows(batch * S, limit)
    if numbers is None:
        return lambda x: x
    entry, token = np.divmod(numbers, max(S, 1))
    return lambda x: x[entry, :, token].swapaxes(0, 1)[None]


def _qkv(
    p: QkvProjectionProblem, x: Mapping[str, Array], sampled: Callable[[int], int]
) -> tuple[Results, dict[str, Array]]:
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
    wanted = oracle_projection.qkv_projection(
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


def _gradients(
    p: QkvProjectionBwdProblem | OutputProjectionBwdProblem,
    x: Mapping[str, Array],
    sampled: Callable[[int], int],
) -> tuple[Results, dict[str, Array]]:
    """Those by what was projected of some tokens, and of some rows those by the weight, summed over
    all tokens."""
    wanted: Results = {}
    got: dict[str, Any] = {}
    of = _some(p.batch, p.S, sampled(4 * p.hidden * p.width))
    if isinstance(p, QkvProjectionBwdProblem):
        d, read = tokens(x["dq"], x["dk"], x["dv"])[:, None], x["input"]
        if "d_input" in x:
            dq, dk, dv = (of(x[n]) for n in ("dq", "dk", "dv"))
            wanted |= {
                "d_input": oracle_projection.qkv_projection_bwd(dq, dk, dv, None, x["weight"])[
                    "d_input"
                ]
            }
            got |= {"d_input": of(x["d_input"])}
    else:
        d, read = x["d_output"], x["attn_out"]
        if "d_attn_out" in x:
            made = oracle_projection.output_projection_bwd(of(d), None, x["weight"], p.num_heads)
            wanted |= {"d_attn_out": made["d_attn_out"]}
            got |= {"d_attn_out": of(x["d_attn_out"])}
    if "d_weight" in x:
        columns = x["d_weight"].shape[3]
        rows = oracle.sample_rows(d.shape[3], sampled(4 * p.batch * p.S * columns))
        some = slice(None) if rows is None else rows
        wanted |= {
            "d_weight": oracle_projection.output_projection_bwd(d[..., some], read, None, 1)[
                "d_weight"
            ]
        }
        got |= {"d_weight": x["d_weight"][:, :, some]}
    if "d_bias" in x:
        wanted |= {"d_bias": oracle_projection.output_projection_bwd(d, None, None, 1)["d_bias"]}
        got |= {"d_bias": x["d_bias"]}
    return wanted, got
