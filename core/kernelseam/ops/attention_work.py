"""What a call of attention on arrays allocates and launches: results by the arrays' shapes, and a
descriptor over all of them."""

from __future__ import annotations

from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors import Attention
from kernelseam.descriptors.attention.arrays import PACKED
from kernelseam.descriptors.attention.forward_fields import OPTIONAL
from kernelseam.descriptors.attention.options import PAGED, AttentionOptions
from kernelseam.descriptors.common.layouts import LAYOUTS
from kernelseam.descriptors.common.options import checked, of_values, scalars_of
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.expressions import captured_in, expression_of
from kernelseam.ops.operation import Cleared, Operation, check_rank

_SCALARS = scalars_of(AttentionOptions)
EXTENTS = {
    **dict.fromkeys(("batch", "num_heads", "batch·num_heads", "S_q", "head_dim", "total_q"), "q"),
    **dict.fromkeys(("kv_heads", "S_k", "total_k", "pages", "page_size"), "k"),
    "value_dim": "v",
    "table_width": "block_table",
}
"""Descriptor fields that follow from an array's shape, and the operand that they follow from."""


def attention_work(operation: Operation, *values: Any) -> None:
    """``values``: the scalars of ``AttentionOptions``; where there are a score_mod and a mask_mod,
    then what ``with_expression`` adds."""
    infos = operation.infos
    given, functions = values[: len(_SCALARS)], values[len(_SCALARS) :]
    options = checked(of_values(AttentionOptions, given))
    out_dtype, return_lse = options.pop("out_dtype"), options.pop("return_lse")
    packed, layout = "cu_seqlens_q" in infos, options["layout"]
    if packed and "block_table" in infos and layout != PAGED.layout:
        rule, remedy = "is of dense queries, and cu_seqlens_q packs them, [T, H, D]", "Leave it out"
        raise InvalidValue("layout", layout, rule, remedy)
    labels = (PACKED if packed else LAYOUTS[layout]).split()
    first = infos["q"]
    check_rank("q", first, labels)
    if "out" in infos:
        check_rank("out", infos["out"], labels)
        if out_dtype is not None and DType.of(out_dtype, "out_dtype") is not infos["out"].dtype:
            raise InvalidValue(
                "out_dtype",
                out_dtype,
                f"out is an array of {infos['out'].dtype}",
                "Give one of the two",
            )
    else:
        own = DType.bfloat16 if first.dtype.is_fp8 else first.dtype
        dtype = own if out_dtype is None else DType.of(out_dtype, "out_dtype")
        value_dim = infos["v"].shape[-1] if infos["v"].shape else 0
        operation.new_result("out", (*first.shape[:-1], value_dim), dtype, "q", "out_dtype")
    if return_lse:
        operation.new_result("lse", _lse_shape(first, labels), first.dtype.accumulator, "q")
    ordered: dict[str, Any] = {
        n: infos[n] for n in ("q", "k", "v", "out", "lse", *OPTIONAL) if n in infos
    }
    operation.launch(
        {**ordered, **captured_in(infos)},
        lambda: Attention.from_arrays(
            **ordered, **options, expression=expression_of(functions, infos)
        ),
    )


CLEARED_ATTENTION = Cleared(attention_work, ("out",))
"""Rows of no sequence, which no launch writes, are 0."""


def _lse_shape(q: ArrayInfo, names: list[str]) -> tuple[int, ...]:
    by_name = dict(zip(names, q.shape, strict=True))
    return tuple(by_name[n] for n in ("B", "H", "S", "T") if n in by_name)
