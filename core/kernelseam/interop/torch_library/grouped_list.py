"""``torch.ops.kernelseam.grouped_mm_list``, whose gradients are one list of products: they
differentiate again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kernelseam.descriptors.gemm.options import ListOptions
from kernelseam.interop.torch_function import check_bwd_implementation, with_matrices
from kernelseam.interop.torch_library import flops, gemm
from kernelseam.interop.torch_library.batches import Batched
from kernelseam.interop.torch_library.define import (
    define,
    fake_results_like,
    of_rank,
    refuse_gradients,
    results_like,
)
from kernelseam.interop.torch_library.dtypes import dtype_name, result_dtype
from kernelseam.interop.torch_library.schemas import CHOSEN, schema_of
from kernelseam.interop.torch_library.sharding import are_sharded
from kernelseam.ops import grouped_list as ops

Tensor = Any
Tensors = Sequence[Tensor]
_LISTS = ("a", "b", "out")
_is_legacy = torch._C._functorch.is_legacy_batchedtensor


def _compute(
    a: Tensors,
    b: Tensors,
    out: Tensors | None = None,
    *,
    out_dtype: Any = None,
    bwd_implementation: str | None = None,
    **options: Any,
) -> list[Tensor]:
    if a:
        check_bwd_implementation(
            bwd_implementation, "grouped_gemm_pointers", "a[0]", {"a[0]": a[0]}
        )
    if out is not None:
        places = {f"out[{g}]": x for g, x in enumerate(out)}
        out = list(results_like(places, places if options.get("beta") else ()).values())
    with torch.no_grad():
        made: list[Tensor] = ops.grouped_mm_list(
            a,
            b,
            out=out,
            out_dtype=dtype_name(out_dtype),
            **options,
        )
    return made


def _fake(
    a: Tensors,
    b: Tensors,
    out: Tensors | None = None,
    *,
    out_dtype: Any = None,
    **options: Any,
) -> list[Tensor]:
    ops.named({"a": a, "b": b, **({} if out is None else {"out": out})})
    for name, given in (("a", a), ("b", b)):
        for g, x in enumerate(given):
            of_rank(f"{name}[{g}]", x, 2)
    if out is not None:
        return list(fake_results_like({f"out[{g}]": x for g, x in enumerate(out)}).values())
    return [
        x.new_empty((x.shape[0], y.shape[1]), dtype=result_dtype(x, out_dtype))
        for x, y in zip(a, b, strict=True)
    ]


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    a, b, out = inputs
    names = [f"{n}[{g}]" for n, x in zip(_LISTS, inputs, strict=True) for g in range(len(x or [0]))]
    of_8_bits = a[0].itemsize == 1
    refuse_gradients(ctx, tuple(names), () if of_8_bits else tuple(names[: 2 * len(a)]))
    options = {n: keyword_only_inputs[n] for n in ("alpha", "precision", "backend")}
    way = keyword_only_inputs["bwd_implementation"]
    ctx.options = {**options, "implementation": way, "bwd_implementation": way}
    ctx.save_for_backward(*a, *b)


def _backward(ctx: Any, dcs: Tensors) -> Any:
    operands, count = ctx.saved_tensors, len(dcs)
    a, b = operands[:count], operands[count:]
    dc = [with_matrices(x.to(y.dtype)) for x, y in zip(dcs, a, strict=True)]
    of = [i for i, wanted in enumerate(ctx.wanted[: 2 * count]) if wanted]
    made = in_parts(
        partial(multiply, **ctx.options),
        [dc[i] if i < count else a[i - count].mT for i in of],
        [b[i].mT if i < count else dc[i - count] for i in of],
    )
    by_place = dict(zip(of, made, strict=True))
    every = [by_place.get(i) for i in range(2 * count)]
    return every[:count], every[count:], [None] * count


def in_parts(multiply: Callable[..., Tensors], *lists: Tensors) -> list[Tensor]:
    """The results of lists that may have more products than one call takes."""
    results: list[Tensor] = []
    for first in range(0, len(lists[0]), ops.MOST):
        results += multiply(*(x[first : first + ops.MOST] for x in lists))
    return results


def _batched(info: Any, in_dims: Any, *lists: Any, **options: Any) -> Batched:
    """Entries of the mapped axis are more products of one list."""
    count, given = len(lists[0]), [x for x in lists if x is not None]
    dims = [d for d, x in zip(in_dims, lists, strict=True) if x is not None]
    whole = [
        [
            x if d is None else x.select(d, i)
            for i in range(info.batch_size)
            for x, d in zip(tensors, of, strict=True)
        ]
        for tensors, of in zip(given, dims, strict=True)
    ]
    made = in_parts(lambda *x: GROUPED_MM_LIST(*x, **options), *whole)
    return [torch.stack(made[g::count]) for g in range(count)], [0] * count


GROUPED_MM_LIST = define(
    "grouped_mm_list(Tensor[] a, Tensor[] b, Tensor[]? out=None, *, "
    f"{schema_of(ListOptions(), 'alpha', 'beta', 'out_dtype', 'precision')}, {CHOSEN}, "
    "str? bwd_implementation=None) -> Tensor[]",
    _compute,
    _fake,
    setup=_setup,
    backward=_backward,
    batched=_batched,
    flops=flops.products,
    captured=False,  # lists of addresses are copied to the device first
)


def multiply(a: Tensors, b: Tensors, out: Tensors | None = None, **options: Any) -> list[Tensor]:
    """The operator, while torch traces the call. Products of DTensors, and in a backward of batched
    gradients, are called one after the other: torch takes no lists there."""
    if are_sharded((*a, *b)) or (
        not torch.compiler.is_compiling() and any(map(_is_legacy, (*a, *b)))
    ):
        arrays = out or [None] * len(a)
        rest = (None, None, None, None)
        return [
            gemm.MATMUL2D(x, y, *rest, z, **options) for x, y, z in zip(a, b, arrays, strict=True)
        ]
    made: list[Tensor] = GROUPED_MM_LIST(list(a), list(b), out and list(out), **options)
    return made
