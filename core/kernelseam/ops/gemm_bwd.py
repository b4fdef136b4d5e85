"""Gradients of matrix products on arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.validation import flag, number
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.calling import handed_back, views
from kernelseam.ops.gemm import check_shape, result, result_shape
from kernelseam.ops.products import check_matrices, matrices, multiply, swapped


class ProductGradients(NamedTuple):
    """What a loss takes from a product's inputs; None for what was not asked for."""

    da: Any
    db: Any


def bmm_bwd(
    dc: Any,
    a: Any,
    b: Any,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    beta: float = 0,
    a_gradient: bool = True,
    b_gradient: bool = True,
    da: Any = None,
    db: Any = None,
    out_dtype: DType | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> ProductGradients:
    """The gradients of ``bmm(a, b, …)`` with the same options, one launch each: of op(a) alpha·dc·op(b)ᵀ, of op(b)
    alpha·op(a)ᵀ·dc.

    ``dc``, shaped as the result and of a's dtype, is what a loss takes from it. A gradient has its input's shape, but
    extent 1 along every axis on which the input repeats by a stride of 0 (batches, heads, rows or columns): there it is
    the sum over what was repeated. So is that of a b of fewer heads over the heads of a that meet it. Strides are as
    in ``bmm``; summed axes beside the others must step evenly as two, which those of contiguous arrays do.

    ``a_gradient`` and ``b_gradient`` say which are computed. ``da`` and ``db``: arrays for the results, which take beta
    times what they hold as well (beta = 1 accumulates; beta ≠ 0 needs them, beta = 0 never reads them); else new
    row-major ones of a's kind and of ``out_dtype``, a's where that is None. Products are summed in float32 (float64
    where a is), always in the same order. All else is as in ``bmm``. Raises InvalidValue, Unsupported.
    """
    infos = views(backend, dc=dc, a=a, b=b, **{n: x for n, x in (("da", da), ("db", db)) if x is not None})
    lead, lead_b = (("B", "H"), ("B", "H_b")) if len(infos["a"].shape) == 4 else (("B",), ("B",))
    wanted = {"da": a_gradient, "db": b_gradient}
    return _gradients(
        infos, lead, lead_b, a_transposed, b_transposed, alpha, beta, wanted, out_dtype, implementation, stream
    )


def matmul2d_bwd(
    dc: Any,
    a: Any,
    b: Any,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    beta: float = 0,
    a_gradient: bool = True,
    b_gradient: bool = True,
    da: Any = None,
    db: Any = None,
    out_dtype: DType | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> ProductGradients:
    """The gradients of ``matmul2d(a, b, …)`` with the same options; everything else as in ``bmm_bwd``."""
    infos = views(backend, dc=dc, a=a, b=b, **{n: x for n, x in (("da", da), ("db", db)) if x is not None})
    wanted = {"da": a_gradient, "db": b_gradient}
    return _gradients(infos, (), (), a_transposed, b_transposed, alpha, beta, wanted, out_dtype, implementation, stream)


def _gradients(
    infos: dict[str, ArrayInfo], lead: tuple[str, ...], lead_b: tuple[str, ...], a_transposed: bool, b_transposed: bool,
    alpha: float, beta: float, wanted: dict[str, bool], out_dtype: DType | str | None, implementation: str | None,
    stream: object,
) -> ProductGradients:
    turned = {"da": flag("a_transposed", a_transposed), "db": flag("b_transposed", b_transposed)}
    alpha, beta = number("alpha", alpha), number("beta", beta)
    given = {n for n in wanted if n in infos}
    for name, asked in wanted.items():
        if not flag(f"{name[1]}_gradient", asked) and name in given:
            raise InvalidValue(name, "given", f"{name[1]}_gradient is False", "Leave one of the two out")
        if asked and name not in given and beta != 0:
            raise InvalidValue(name, None, f"is read, because beta = {beta}", "Pass the array to add to, or beta=0")
    dc, a, b = infos["dc"], infos["a"], infos["b"]
    check_shape("dc", dc, result_shape(infos, lead, lead_b, turned["da"], turned["db"]))
    if dc.dtype is not a.dtype:
        raise InvalidValue("dc", f"an array of {dc.dtype}", f"must be {a.dtype} as a is", "Convert it")
    for name in ("dc", "a", "b"):
        check_matrices(name, infos[name])
    found: dict[str, Any] = {"da": None, "db": None}
    op_a, op_b, product = matrices(a, turned["da"]), matrices(b, turned["db"]), matrices(dc)
    for name, of, first, second in (("da", a, product, swapped(op_b)), ("db", b, swapped(op_a), product)):
        if not wanted[name]:
            continue
        result(infos, name, _once(of), out_dtype)
        check_matrices(name, infos[name])
        names = {"A": "dc", "B": "b", "C": name} if name == "da" else {"A": "a", "B": "dc", "C": name}
        operands = {"A": first, "B": second, "C": matrices(infos[name], turned[name])}
        multiply(operands, names, infos, alpha, beta, implementation, stream)
        found[name] = infos[name].owner if name in given else handed_back(infos[name], a, stream)
    return ProductGradients(**found)


def _once(info: ArrayInfo) -> tuple[int, ...]:
    """An array's shape with extent 1 where it repeats; the strides of an empty one say nothing."""
    if 0 in info.shape:
        return info.shape
    return tuple(1 if s == 0 else n for n, s in zip(info.shape, info.strides, strict=True))
