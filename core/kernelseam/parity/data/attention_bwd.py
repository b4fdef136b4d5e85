"""A backward case's operands: those of its forward, what that gave, what a loss takes from it, and
the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kernelseam.dtypes import DType
from kernelseam.oracle import formulas
from kernelseam.oracle.formulas import Array
from kernelseam.oracle.gradients import Gradient, attention_bwd
from kernelseam.parity.cases.attention_bwd_case import BackwardCase
from kernelseam.parity.data import attention as attention_data
from kernelseam.parity.data.memory import Place, once


def inputs(case: BackwardCase, rng: np.random.Generator) -> dict[str, Array]:
    """What is drawn: the forward's inputs, and dout [batch, head, row, column]."""
    found = attention_data.values(case.forward, rng)
    dout = rng.standard_normal(attention_data.shapes(case.forward)["out"])
    return {**found, "dout": dout.astype(case.dtype.numpy)}


def results(case: BackwardCase, x: Mapping[str, Array]) -> dict[str, Array]:
    """The forward's out and lse as an exact one would leave them: the oracle's, rounded."""
    f = case.forward
    found = formulas.attention(
        x["q"], x["k"], x["v"], f.causal, f.scale_used, None, attention_data.variant(f, x)
    )
    return {
        "out": found.out.astype(f.dtype.numpy),
        "lse": found.lse.astype(f.dtype.accumulator.numpy),
    }


def wanted(case: BackwardCase, x: Mapping[str, Array]) -> dict[str, Gradient]:
    """The oracle's gradients of the case's ``values``."""
    f = case.forward
    return attention_bwd(
        x["q"],
        x["k"],
        x["v"],
        x["dout"],
        f.causal,
        f.scale_used,
        attention_data.variant(f, x),
        bias_shape(case),
    )


def bias_shape(case: BackwardCase) -> tuple[int, ...]:
    """Of dbias: 1 along an axis where the bias repeats."""
    f = case.forward
    return once((f.batch, f.num_heads, f.S_q, f.S_k), f.bias_walk)


def outputs(case: BackwardCase) -> tuple[str, ...]:
    """Names of what is written."""
    more = {"dbias": case.bias_gradient, "dsinks": case.sink_gradient}
    return ("dq", "dk", "dv", *(name for name, given in more.items() if given))


def places(case: BackwardCase) -> dict[str, Place]:
    """Where every operand lies. Gradients have room for all S_k keys, also where lengths leave some
    out."""
    f = case.forward
    found, lie = attention_data.places(f), attention_data.shapes(f)
    whole = replace(f, kv_lengths=None, page_size=0)
    walks = {
        "dout": ("out", case.dout),
        "dq": ("q", case.dq),
        "dk": ("k", case.dk),
        "dv": ("v", case.dv),
    }
    for name, (like, walk) in walks.items():
        found[name] = replace(
            attention_data.rows(whole, like, walk, lie[like], case.dtype), block=name
        )
    if case.packed:
        slices = attention_data.places(replace(whole, packed=True))
        found |= {f"d{name}": replace(slices[name], block="dqkv") for name in "qkv"}
    if case.bias_gradient:
        assert f.bias is not None
        shape = bias_shape(case)
        found["dbias"] = Place(
            "dbias", f.bias, shape, case.dbias.plane(shape, f.bias.itemsize), case.dbias.offset
        )
    if case.sink_gradient:
        found["dsinks"] = Place("dsinks", DType.float32, (f.num_heads,), (1,))
    return found
