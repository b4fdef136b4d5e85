"""``torch.ops.kernelseam.grouped_mm``, whose gradients are products of the same kind: they
differentiate again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelseam.descriptors.common.options import scalars_of
from kernelseam.descriptors.gemm.options import GroupedOptions
from kernelseam.interop.torch_function import check_bwd_implementation, with_matrices
from kernelseam.interop.torch_library import flops
from kernelseam.interop.torch_library.bags import Bags
from kernelseam.interop.torch_library.define import (
    define,
    fake_result_like,
    of_rank,
    refuse_gradients,
    result_like,
)
from kernelseam.interop.torch_library.dtypes import dtype_name, result_dtype
from kernelseam.interop.torch_library.schemas import CHOSEN, given_by, schema_of, tensors_of
from kernelseam.ops.grouped_gemm import grouped_mm

Tensor = Any

INDICES = ("a_indices", "out_indices", "out_factors")
OPERANDS = ("a", "b", "offs", "a_scales", "b_scales", *INDICES, "out")
DIFFERENTIABLE = ("a", "b", "out_factors")


def _compute(
    *tensors: Tensor, out_dtype: Any = None, bwd_implementation: str | None = None, **options: Any
) -> Tensor:
    given = given_by(OPERANDS, tensors)
    check_bwd_implementation(bwd_implementation, "grouped_gemm", "a", given)
    if "out" in given:  # what follows the last group stays as it is
        given["out"] = result_like(given["out"], True)
    with torch.no_grad():
        return grouped_mm(**given, out_dtype=dtype_name(out_dtype), **options)


def _fake(*tensors: Tensor, out_dtype: Any = None, **options: Any) -> Tensor:
    given = given_by(OPERANDS, tensors)
    shape = shape_of(given)
    if "out" in given:
        return fake_result_like(given["out"])
    return given["a"].new_empty(shape, dtype=result_dtype(given["a"], out_dtype))


def shape_of(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The product's, of as many rows as are gathered or scattered. Raises InvalidValue for operands
    of other ranks than a form has."""
    a, b, offs = given["a"], given["b"], given.get("offs")
    of_rank("a", a, 2, 3)
    of_rank("b", b, 2, 3)
    rows = a.shape[-2]
    for name in INDICES:
        if (x := given.get(name)) is not None:
            of_rank(name, x, 1)
            rows = x.shape[0]
    if a.dim() != b.dim():
        return rows, b.shape[-1]
    if a.dim() == 2 and offs is not None:
        of_rank("offs", offs, 1)
    return a.shape[0] if offs is None else offs.shape[0], rows, b.shape[-1]


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    a, b, offs, _, _, *indices, _ = inputs
    refuse_gradients(ctx, OPERANDS, () if a.itemsize == 1 else DIFFERENTIABLE)
    options = dict(keyword_only_inputs)
    for name in ("out_dtype", "scale_block", "beta", "implementation"):
        options.pop(name)
    options["implementation"] = options["bwd_implementation"]
    ctx.options = options
    ctx.save_for_backward(a, b, offs, *indices)


def _backward(ctx: Any, dc: Tensor) -> Any:
    a, b, offs, a_indices, out_indices, factors = ctx.saved_tensors
    wanted = dict(zip(OPERANDS, ctx.wanted, strict=True))
    rows = Rows(a, b, offs, a_indices, out_indices, factors)
    da, db, dfactors = gradients(dc, a, b, rows, wanted, ctx.options)
    return da, db, None, None, None, None, None, dfactors, None


def gradients(
    dc: Tensor,
    a: Tensor,
    b: Tensor,
    rows: Rows,
    wanted: Mapping[str, bool],
    options: Mapping[str, Any],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those by a, b and out_factors, as far as they are ``wanted``, of the product's."""
    dc, offs, factors = with_matrices(dc.to(a.dtype)), rows.offs, rows.factors
    da = db = dfactors = None
    if wanted["a"] or wanted["out_factors"]:
        da = GROUPED_MM(dc, b.mT, offs, None, None, rows.of_result, **options)
        if wanted["out_factors"]:
            wide = torch.promote_types(a.dtype, factors.dtype)
            products = da.to(wide) * rows.gathered(a, rows.of_a)
            dfactors = rows.kept(products.sum(-1)).to(factors.dtype)
        da = rows.scattered(rows.multiplied(da), a) if wanted["a"] else None
    if wanted["b"]:
        left = rows.gathered(a, rows.of_a)
        right = rows.multiplied(rows.gathered(dc, rows.of_result))
        if b.dim() == 3 and b.stride(-2) == 1:  # as b lies, so that no one copies it
            db = GROUPED_MM(right.mT, left, offs, **options).mT
        else:
            db = GROUPED_MM(left.mT, right, offs, **options)
        if b.dim() == 2:
            db = rows.kept(db, a.dim() - 2)
    return da, db, dfactors


class Rows:
    """What ``offs`` divides of a product, rows that may be gathered, scattered or multiplied among
    it; of what is behind the last group nothing is read, and its gradient is 0."""

    def __init__(
        self, a: Tensor, b: Tensor, offs: Tensor, of_a: Tensor, of_result: Tensor, factors: Tensor
    ) -> None:
        self.of_a, self.of_result, self.factors, self.offs = of_a, of_result, factors, offs
        self.behind = None
        if offs is not None and a.dim() + b.dim() < 6:
            self.axis_of_a = 3 - b.dim()
            along = b.shape[1] if a.dim() == 3 else a.shape[self.axis_of_a]
            some = next((x for x in (of_a, of_result, factors) if x is not None), None)
            along = along if some is None else some.shape[0]
            ends = offs[-1:] if offs.shape[0] else offs.new_zeros(1)
            # of offs, so that it is a DTensor where that is
            self.behind = offs.new_ones(along).cumsum(0) > ends

    def kept(self, x: Tensor, axis: int = 0) -> Tensor:
        """Rows, numbers of rows, or columns (axis 1), 0 behind the last group."""
        if self.behind is None:
            return x
        behind = self.behind if axis == x.dim() - 1 else self.behind.unsqueeze(-1)
        return x.masked_fill(behind, 0)

    def gathered(self, x: Tensor, indices: Tensor | None) -> Tensor:
        return x if indices is None else x[self.kept(indices)]

    def multiplied(self, x: Tensor) -> Tensor:
        return x if self.factors is None else (x * self.factors[:, None]).to(x.dtype)

    def scattered(self, x: Tensor, like: Tensor) -> Tensor:
        """a's gradient, of the rows added up where ``a_indices`` had taken them from."""
        if like.dim() == 3:
            return x
        x = self.kept(x, self.axis_of_a)
        if self.of_a is None:
            return x
        places, tokens = self.of_a, like.shape[0]
        if self.behind is not None:  # of zeros, which no one token shall get all of
            number = torch.arange(x.shape[0], dtype=places.dtype, device=places.device)
            places = torch.where(self.behind, number % max(tokens, 1), places)
        return Bags.of(places, tokens).sums(x)


OPERAND_SCHEMA = tensors_of("a", "b", optional=OPERANDS[2:])
OPTION_SCHEMA = (
    f"{schema_of(GroupedOptions(), *scalars_of(GroupedOptions))}, {CHOSEN}, "
    "str? bwd_implementation=None"
)
GROUPED_MM = define(
    f"grouped_mm({OPERAND_SCHEMA}, *, {OPTION_SCHEMA}) -> Tensor",
    _compute,
    _fake,
    setup=_setup,
    backward=_backward,
    flops=flops.grouped,
)
