"""``torch.ops.kernelseam.merge_states``, with gradients by formula: they differentiate again."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.interop.torch_library.batches import Batched, fold, unfold
from kernelseam.interop.torch_library.define import (
    define,
    fake_result_like,
    of_rank,
    refuse_gradients,
    result_like,
)
from kernelseam.interop.torch_library.dtypes import accumulator, dtype_name
from kernelseam.ops.merge import merge_states

Tensor = Any


def _compute(
    outs: Tensor,
    lses: Tensor,
    out: Tensor | None = None,
    *,
    out_dtype: Any = None,
    **options: Any,
) -> Any:
    into = None if out is None else result_like(out)
    with torch.no_grad():
        return merge_states(outs, lses, out=into, out_dtype=dtype_name(out_dtype), **options)


def _fake(
    outs: Tensor,
    lses: Tensor,
    out: Tensor | None = None,
    *,
    out_dtype: Any = None,
    **options: Any,
) -> Any:
    of_rank("outs", outs, 5)
    lead = outs.shape[1:-1]
    if options.get("layout", "bhsd") == "bshd":
        lead = (lead[0], lead[2], lead[1])
    return (
        outs.new_empty(outs.shape[1:], dtype=out_dtype or outs.dtype)
        if out is None
        else fake_result_like(out),
        outs.new_empty(lead, dtype=accumulator(outs.dtype)),
    )


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    refuse_gradients(ctx, ("outs", "lses", "out"), ("outs", "lses"))
    ctx.set_materialize_grads(False)
    ctx.tokens_first = keyword_only_inputs["layout"] == "bshd"
    ctx.save_for_backward(*inputs[:2], *output)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
    """A part's weight is w = e^(its LSE − the LSE); its result takes w·dout, its LSE w·(dout·(its
    result − the result) + dlse). A part of weight 0 is not read."""
    outs, lses, out, lse = ctx.saved_tensors
    seen = lses != -torch.inf
    w = torch.where(seen, (torch.where(seen, lses, 0) - torch.where(seen, lse, 0)).exp(), 0)
    douts, dw = None, torch.zeros_like(lses)
    if dout is not None:
        wide = dout.to(lse.dtype)
        of_rows, known = (x.mT if ctx.tokens_first else x for x in (w, seen))
        douts = (of_rows.unsqueeze(-1) * wide).to(outs.dtype)
        apart = torch.where(known.unsqueeze(-1), outs.to(lse.dtype) - out.to(lse.dtype), 0)
        dw = (wide * apart).sum(-1)
        dw = dw.mT if ctx.tokens_first else dw
    if dlse is not None:
        dw = dw + dlse
    return douts, w * dw, None


def _batched(info: Any, in_dims: Any, *args: Any, **options: Any) -> Batched:
    whole = [
        fold(x, d, info.batch_size, int(n < 2))
        for n, (x, d) in enumerate(zip(args, in_dims, strict=True))
    ]
    return unfold(MERGE_STATES(*whole, **options), info.batch_size)


MERGE_STATES = define(
    "merge_states(Tensor outs, Tensor lses, Tensor? out=None, *, ScalarType? out_dtype=None, "
    'str layout="bhsd", str? backend=None, str? implementation=None) -> (Tensor, Tensor)',
    _compute,
    _fake,
    setup=_setup,
    backward=_backward,
    batched=_batched,
)
