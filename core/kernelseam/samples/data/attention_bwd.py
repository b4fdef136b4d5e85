"""A backward case's operands: the forward's inputs and results, dout, and the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kernelseam.dtypes import DType
from kernelseam.oracle import formulas
from kernelseam.oracle.formulas import Array
from kernelseam.oracle.gradients import Gradient, attention_bwd
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.data import attention as attention_data
from kernelseam.samples.data.memory import Placement, unrepeated_shape


def values(case: BackwardCase, rng: np.random.Generator) -> dict[str, Array]:
    """Random inputs: the forward's, and dout [batch, head, row, column]."""
    forward = attention_data.values(case.forward, rng)
    dout = rng.standard_normal(attention_data.shapes(case.forward)["out"])
    return {**forward, "dout": dout.astype(case.dtype.numpy)}


def results(case: BackwardCase, x: Mapping[str, Array]) -> dict[str, Array]:
    """The forward's out and lse: the oracle's, rounded."""
    f = case.forward
    forward = formulas.attention(
        x["q"], x["k"], x["v"], f.causal, f.scale_used, None, attention_data.variant(f, x)
    )
    return {
        "out": forward.out.astype(f.dtype.numpy),
        "lse": forward.lse.astype(f.dtype.accumulator.numpy),
    }


def expected(case: BackwardCase, x: Mapping[str, Array]) -> dict[str, Gradient]:
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
    """The shape of dbias: extent 1 where the bias is broadcast."""
    f = case.forward
    return unrepeated_shape((f.batch, f.num_heads, f.S_q, f.S_k), f.bias_layout)


def outputs(case: BackwardCase) -> tuple[str, ...]:
    more = {"dbias": case.bias_gradient, "dsinks": case.sink_gradient}
    return ("dq", "dk", "dv", *(name for name, given in more.items() if given))


def placements(case: BackwardCase) -> dict[str, Placement]:
    """Every operand's placement. Gradients have memory for all S_k keys, also where kv_lengths are
    shorter."""
    f = case.forward
    placements, operand_shapes = attention_data.placements(f), attention_data.shapes(f)
    whole = replace(f, kv_lengths=None, page_size=0)
    operand_layouts = {
        "dout": ("out", case.dout),
        "dq": ("q", case.dq),
        "dk": ("k", case.dk),
        "dv": ("v", case.dv),
    }
    for name, (like, operand_layout) in operand_layouts.items():
        placements[name] = replace(
            attention_data.rows(whole, like, operand_layout, operand_shapes[like], case.dtype),
            block=name,
        )
    if case.packed:
        slices = attention_data.placements(replace(whole, packed=True))
        placements |= {f"d{name}": replace(slices[name], block="dqkv") for name in "qkv"}
    if case.bias_gradient:
        assert f.bias is not None
        shape = bias_shape(case)
        placements["dbias"] = Placement(
            "dbias", f.bias, shape, case.dbias.plane(shape, f.bias.itemsize), case.dbias.offset
        )
    if case.sink_gradient:
        placements["dsinks"] = Placement("dsinks", DType.float32, (f.num_heads,), (1,))
    return placements
