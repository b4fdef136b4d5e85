"""Gradients of matrix products on arrays."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

from kernelseam.descriptors.common.options import read_values, values_of
from kernelseam.descriptors.gemm.options import ProductGradientOptions
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.calling import operate
from kernelseam.ops.gemm import check_added, check_shape, result, result_shape
from kernelseam.ops.operation import Operation, not_none, unexpanded_shape
from kernelseam.ops.products import check_matrices, matrices, multiply, transpose
from kernelseam.ops.signatures import Array


class ProductGradients(NamedTuple, Generic[Array]):
    """Gradients of a product's inputs; None for one that was not requested."""

    da: Array | None
    db: Array | None


def bmm_bwd(
    dc: Array,
    a: Array,
    b: Array,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    beta: float = 0,
    a_gradient: bool = True,
    b_gradient: bool = True,
    sum_repeats: bool = True,
    da: Any = None,
    db: Any = None,
    out_dtype: DType | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> ProductGradients[Array]:
    """The gradients of ``bmm(a, b, …)`` with the same options, one launch each: of op(a)
    alpha·dc·op(b)ᵀ, of op(b) alpha·op(a)ᵀ·dc.

    ``dc``, shaped as the result and of a's dtype, is the gradient of the loss by the result. A
    gradient has its input's shape, but extent 1 along every axis of stride 0 (batches, heads, rows
    or columns): there it is summed over the expanded axis. ``sum_repeats=False`` computes it for
    the expanded shape instead. Where b has fewer heads, db is always summed over the heads of a
    that share one of b. Strides are as in ``bmm``. Where batch and head strides cannot describe the
    summed and the other axes, for instance where both rows and heads are expanded, the launch takes
    lists of addresses: each call copies them to the device, and synchronises.

    ``a_gradient`` and ``b_gradient`` say which are computed. ``da`` and ``db``: arrays for the
    results, which take beta times what they hold as well (beta = 1 accumulates; beta ≠ 0 needs
    them, beta = 0 never reads them); else new row-major ones of a's kind and of ``out_dtype``, a's
    where that is None. da is computed first: it must not overlap a (unless ``b_gradient`` is
    False), b, dc or db; db must not overlap a or dc, but may be b itself. Products are summed in
    float32 (float64 where a is), always in the same order. All else is as in ``bmm``. Raises
    InvalidValue, Unsupported; nothing is then launched.
    """
    arrays = {"dc": dc, "a": a, "b": b, **not_none(da=da, db=db)}
    options = _values(
        batched=True,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        alpha=alpha,
        beta=beta,
        a_gradient=a_gradient,
        b_gradient=b_gradient,
        sum_repeats=sum_repeats,
        out_dtype=out_dtype,
    )
    return _results(
        arrays, operate(gradient_work, arrays, options, backend, implementation, stream)
    )


def matmul2d_bwd(
    dc: Array,
    a: Array,
    b: Array,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    beta: float = 0,
    a_gradient: bool = True,
    b_gradient: bool = True,
    sum_repeats: bool = True,
    da: Any = None,
    db: Any = None,
    out_dtype: DType | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> ProductGradients[Array]:
    """The gradients of ``matmul2d(a, b, …)`` with the same options; everything else as in
    ``bmm_bwd``."""
    arrays = {"dc": dc, "a": a, "b": b, **not_none(da=da, db=db)}
    options = _values(
        batched=False,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        alpha=alpha,
        beta=beta,
        a_gradient=a_gradient,
        b_gradient=b_gradient,
        sum_repeats=sum_repeats,
        out_dtype=out_dtype,
    )
    return _results(
        arrays, operate(gradient_work, arrays, options, backend, implementation, stream)
    )


def gradient_work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``ProductGradientOptions``."""
    asked = read_values(ProductGradientOptions, values)
    transposed = {"da": asked.a_transposed, "db": asked.b_transposed}
    infos, wanted = operation.infos, {"da": asked.a_gradient, "db": asked.b_gradient}
    for name, requested in wanted.items():
        if not requested and name in infos:
            raise InvalidValue(
                name, "given", f"{name[1]}_gradient is False", "Leave one of the two out"
            )
        if requested:
            check_added(asked.beta, name in infos, name)
    dc, a, b = infos["dc"], infos["a"], infos["b"]
    check_shape("dc", dc, result_shape(infos, asked.batched, transposed["da"], transposed["db"]))
    if dc.dtype is not a.dtype:
        raise InvalidValue(
            "dc", f"an array of {dc.dtype}", f"must be {a.dtype} as a is", "Convert it"
        )
    for name in ("dc", "a", "b"):
        check_matrices(name, infos[name])
    op_a, op_b, product = matrices(a, transposed["da"]), matrices(b, transposed["db"]), matrices(dc)
    for name, of, first, second in (
        ("da", a, product, transpose(op_b)),
        ("db", b, transpose(op_a), product),
    ):
        if not wanted[name]:
            continue
        shape = unexpanded_shape(of) if asked.sum_repeats else of.shape
        result(operation, name, shape, asked.out_dtype)
        check_matrices(name, infos[name])
        names = (
            {"A": "dc", "B": "b", "C": name} if name == "da" else {"A": "a", "B": "dc", "C": name}
        )
        operands = {"A": first, "B": second, "C": matrices(infos[name], transposed[name])}
        multiply(operation, operands, names, asked.alpha, asked.beta)


def _results(arrays: dict[str, Any], results: dict[str, Any]) -> ProductGradients[Any]:
    """The caller's arrays for gradients where given, else new ones; None for one that was not
    requested."""
    return ProductGradients(*(arrays[n] if n in arrays else results.get(n) for n in ("da", "db")))


_values = values_of(ProductGradientOptions)
