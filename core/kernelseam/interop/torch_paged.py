"""Attention over paged caches of torch tensors, which has no gradients. Imports torch:
``kernelseam.interop.torch`` imports this at its first use."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from torch import Tensor

from kernelseam.descriptors.attention.options import AttentionOptions
from kernelseam.descriptors.common.options import operands_of, taken
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import autocast, tensors, wanted
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.ops import attention as ops
from kernelseam.ops.signatures import PagedTensors

_OPERANDS = operands_of(AttentionOptions)


@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PagedTensors],
) -> Tensor: ...


@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedTensors],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[PagedTensors],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    out_dtype: Any = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """``kernelseam.attention_paged`` on torch tensors, with its options but ``out`` and ``stream``.
    Gradients do not flow through pages: a tensor that wants one is refused. Under torch.autocast q
    is converted to its dtype, unless it has 8 bits; the pages are not."""
    given = {
        "q": q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_table": block_table,
        **taken(_OPERANDS, options),
        "kv_lengths": kv_lengths,
    }
    operands, _ = tensors(given, ("q", "k_pages", "v_pages", "block_table", "kv_lengths"))
    for name in ("out", "stream"):
        if options.get(name) is not None:
            raise InvalidValue(
                name, "given", "results are new, on torch's current stream", "Leave it out"
            )
    wanted(operands, ())
    operands = autocast(operands, ("q",))
    return ops.attention_paged(**operands, **options, out_dtype=dtype_name(out_dtype))
