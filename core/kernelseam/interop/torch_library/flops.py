"""Floating-point operations as torch.utils.flop_counter counts them: two for each multiply-add of a
matrix product, and none hidden by a mask, a window or causality left out. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

from kernelseam.descriptors.attention.options import PAGED

Tensor = Any


def register(operator: Any, formula: Callable[..., int]) -> None:
    """Register a formula for torch.utils.flop_counter: an operator's operations from its
    arguments."""
    register_flop_formula(operator, get_raw=True)(formula)
    tell_counters(operator, formula)


def tell_counters(operator: Any, formula: Callable[..., int]) -> None:
    """Tell the counters that are active: each copied torch's formulas when it was made, which may
    have been before the operator was registered."""
    if not _modes():
        return
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", mode)
        if isinstance(counter, FlopCounterMode):
            counter.flop_registry.setdefault(operator, formula)


_modes = torch._C._len_torch_dispatch_stack


def _differences(offsets: Tensor, count: int, longest: int) -> list[int]:
    """The length of each sequence; ``longest`` for all ``count`` where the offsets' contents are
    not known."""
    return offsets.diff().tolist() if _is_known(offsets) else [longest] * count


def _is_known(x: Tensor) -> bool:
    return not x.is_meta and not isinstance(x, FakeTensor)


def _pairs(operands: dict[str, Tensor], options: dict[str, Any]) -> int:
    """Queries times keys, summed over entries and heads."""
    q, k = operands["q"], operands.get("k")
    offsets, table = operands.get("cu_seqlens_q"), operands.get("block_table")
    by_row = options.get("layout", "bhsd" if table is None else PAGED.layout) == "bshd"
    if offsets is not None:
        heads, count = q.shape[1], offsets.shape[0] - 1
        queries = _differences(offsets, count, options.get("max_seqlen_q") or q.shape[0])
    else:
        heads, count = q.shape[2 if by_row else 1], q.shape[0]
        queries = [q.shape[1 if by_row else 2]] * count
    if table is not None:
        lengths, pages = operands["kv_lengths"], operands["k_pages"]
        size = pages.shape[1 if options.get("kv_layout", PAGED.kv_layout) == "nhd" else 2]
        keys = lengths.tolist() if _is_known(lengths) else [table.shape[1] * size] * count
    elif offsets is not None:
        keys = _differences(operands["cu_seqlens_k"], count, options["max_seqlen_k"])
    else:
        assert k is not None
        keys = [k.shape[1 if by_row else 2]] * count
    return int(heads * sum(n * m for n, m in zip(queries, keys, strict=True)))


def attention(names: Sequence[str]) -> Any:
    """The formula of an attention with these operands: q·kᵀ and P·v."""

    def count(*tensors: Tensor, out_val: Any = None, **options: Any) -> int:
        operands = dict(zip(names, tensors, strict=False))
        v = operands["v"] if "v" in operands else operands["v_pages"]
        columns: int = operands["q"].shape[-1] + v.shape[-1]
        return 2 * _pairs(operands, options) * columns

    return count


def attention_bwd(names: Sequence[str]) -> Any:
    """The formula of an attention's backward: q·kᵀ again, dP, dq, dk and dv."""

    def count(
        dout: Tensor,
        dlse: Tensor,
        out: Tensor,
        lse: Tensor,
        *tensors: Tensor,
        out_val: Any = None,
        **options: Any,
    ) -> int:
        operands = dict(zip(names, tensors, strict=False))
        columns: int = 3 * operands["q"].shape[-1] + 2 * operands["v"].shape[-1]
        return 2 * _pairs(operands, options) * columns

    return count


def grouped(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    a_scales: Tensor | None = None,
    b_scales: Tensor | None = None,
    a_indices: Tensor | None = None,
    *others: Tensor,
    out_val: Any = None,
    **options: Any,
) -> int:
    """Operations of a grouped product whose groups cover the whole divided axis."""
    if a_indices is not None:
        return 2 * int(a_indices.numel() * a.shape[-1] * b.shape[-1])
    return 2 * int(b.numel() * a.shape[-2] if a.dim() > b.dim() else a.numel() * b.shape[-1])


def product(a: Tensor, b: Tensor, *rest: Any, b_transposed: bool = False, **options: Any) -> int:
    return 2 * int(a.numel() * b.shape[-2 if b_transposed else -1])


def products(a: Sequence[Tensor], b: Sequence[Tensor], *rest: Any, **options: Any) -> int:
    """Operations of a list of products."""
    return sum(product(x, y) for x, y in zip(a, b, strict=True))


def product_bwd(
    dc: Tensor, a: Tensor, b: Tensor, *, a_gradient: bool, b_gradient: bool, **options: Any
) -> int:
    """Each gradient takes as many multiply-adds as the forward."""
    once = product(a, b, b_transposed=options.get("b_transposed", False))
    return (a_gradient + b_gradient) * once


def projection(x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> int:
    """Operations of rows times a weight, as in torch.nn.Linear."""
    return 2 * int(x.numel() * weight.shape[0])


def qkv_bwd(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    input: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    input_gradient: bool,
    weight_gradient: bool,
    **options: Any,
) -> int:
    rows = dq.numel() + dk.numel() + dv.numel()
    read = weight if weight is not None else input
    hidden = 0 if read is None else read.shape[-1]
    return (input_gradient + weight_gradient) * 2 * int(rows * hidden)


def output_bwd(
    d_output: Tensor,
    attn_out: Tensor,
    weight: Tensor | None = None,
    *,
    input_gradient: bool,
    weight_gradient: bool,
    **options: Any,
) -> int:
    once = 2 * int(attn_out.numel() * d_output.shape[-1])
    return (input_gradient + weight_gradient) * once
