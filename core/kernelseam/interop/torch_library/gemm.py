"""``torch.ops.kernelseam.bmm`` and ``matmul2d``, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kernelseam.descriptors.gemm.options import ProductOptions
from kernelseam.interop.torch_function import check_bwd_implementation, with_matrices
from kernelseam.interop.torch_library import flops
from kernelseam.interop.torch_library.arguments import Rule
from kernelseam.interop.torch_library.batches import Batched, each, fold, repeats, unfold
from kernelseam.interop.torch_library.define import (
    absent_result,
    define,
    fake_result_like,
    of_rank,
    refuse_gradients,
    refuse_second_derivative,
    result_like,
    unrepeated,
)
from kernelseam.interop.torch_library.dtypes import dtype_name, result_dtype, torch_dtype
from kernelseam.interop.torch_library.schemas import CHOSEN, given_by, schema_of, tensors_of
from kernelseam.interop.torch_library.transforms import differentiated
from kernelseam.ops import gemm, gemm_bwd

Tensor = Any

OPERANDS = ("a", "b", "bias", "residual", "a_scales", "b_scales", "out")
_DEFAULTS = ProductOptions()
_FACTORS = schema_of(_DEFAULTS, "a_transposed", "b_transposed", "alpha")
_OUT_DTYPE = schema_of(_DEFAULTS, "out_dtype")


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(
        *tensors: Tensor,
        out_dtype: Any = None,
        bwd_implementation: str | None = None,
        **options: Any,
    ) -> Tensor:
        given = given_by(OPERANDS, tensors)
        check_bwd_implementation(bwd_implementation, "gemm", "a", given)
        if "out" in given:
            given["out"] = result_like(given["out"], bool(options.get("beta")))
        with torch.no_grad():
            return function(**given, out_dtype=dtype_name(out_dtype), **options)

    return compute


def shape_of(
    ranks: Sequence[int], given: Mapping[str, Tensor], options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The product's, of operands of these ranks. Raises InvalidValue for others."""
    a, b = given["a"], given["b"]
    of_rank("a", a, *ranks)
    of_rank("b", b, a.dim())
    rows = a.shape[-1 if options.get("a_transposed") else -2]
    return (*a.shape[:-2], rows, b.shape[-2 if options.get("b_transposed") else -1])


def _faked(*ranks: int) -> Callable[..., Any]:
    """What makes an empty result of operands of these ranks."""

    def fake(*tensors: Tensor, out_dtype: Any = None, **options: Any) -> Tensor:
        given = given_by(OPERANDS, tensors)
        shape = shape_of(ranks, given, options)
        if "out" in given:
            return fake_result_like(given["out"])
        return given["a"].new_empty(shape, dtype=result_dtype(given["a"], out_dtype))

    return fake


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    a, b, bias, residual, *_ = inputs
    refuse_gradients(ctx, OPERANDS, OPERANDS[2:4] if a.itemsize == 1 else OPERANDS[:4])
    options = dict(keyword_only_inputs)
    for name in ("out_dtype", "precision", "scale_block", "beta", "implementation"):
        options.pop(name, None)
    options["implementation"] = options.pop("bwd_implementation")
    ctx.options = options
    ctx.added = [None if x is None else (x.shape, x.dtype) for x in (bias, residual)]
    ctx.save_for_backward(a, b)


def added_gradients(dc: Tensor, added: Any, wanted: Any) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of (bias, residual), of which ``added`` has the shape and dtype."""
    bias, residual = added
    dbias = dresidual = None
    if wanted[0]:
        rows = dc.sum_to_size((*bias[0][:-1], 1, bias[0][-1]))
        dbias = rows.squeeze(-2).to(bias[1])
    if wanted[1]:
        dresidual = dc.to(residual[1])
    return dbias, dresidual


def _backward(operator: Any) -> Callable[..., Any]:
    def backward(ctx: Any, dc: Tensor) -> Any:
        a, b = ctx.saved_tensors
        of_a, of_b, *rest = ctx.wanted
        da = db = None
        if of_a or of_b:
            da, db = operator(dc.to(a.dtype), a, b, a_gradient=of_a, b_gradient=of_b, **ctx.options)
        added = added_gradients(dc, ctx.added, rest)
        return da if of_a else None, db if of_b else None, *added, None, None, None

    return backward


def bwd_computed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What computes gradients by a function on arrays: (da, db)."""

    def compute(
        dc: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        sum_repeats: bool = False,
        out_dtype: Any = None,
        **options: Any,
    ) -> Any:
        with torch.no_grad():
            result = function(
                with_matrices(dc),
                a,
                b,
                sum_repeats=sum_repeats,
                out_dtype=dtype_name(out_dtype),
                **options,
            )
        return tuple(absent_result(a) if x is None else x for x in result)

    return compute


def _bwd_fake(
    dc: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    a_gradient: bool,
    b_gradient: bool,
    sum_repeats: bool = False,
    out_dtype: Any = None,
    **options: Any,
) -> Any:
    def like(x: Tensor) -> Tensor:
        shape = unrepeated(x) if sum_repeats else x.shape
        return x.new_empty(shape, dtype=a.dtype if out_dtype is None else out_dtype)

    return like(a) if a_gradient else absent_result(a), like(b) if b_gradient else absent_result(a)


def _bmm_batched(info: Any, in_dims: Any, *args: Any, **options: Any) -> Batched:
    count = info.batch_size
    given = dict(zip(OPERANDS, zip(args, in_dims, strict=True), strict=False))
    rank = args[0].dim() - (in_dims[0] is not None) - 1
    scaled = any(given.get(n, (None,))[0] is not None for n in ("a_scales", "b_scales"))
    if scaled or not repeats(*given.get("bias", (None, None)), rank):
        return each(BMM, count, in_dims, args, options)
    whole = [x if n == "bias" else fold(x, d, count) for n, (x, d) in given.items()]
    return unfold(BMM(*whole, **options), count)


def _sums_repeats(in_dims: Any, args: Any, options: dict[str, Any]) -> bool:
    """Whether gradients are summed along axes of stride 0, which a fold may copy."""
    if not options.get("sum_repeats"):
        return False
    ones = [x if d is None else x.select(d, 0) for x, d in zip(args[1:], in_dims[1:], strict=True)]
    return any(unrepeated(x) != list(x.shape) for x in ones)


def _bmm_bwd_batched(info: Any, in_dims: Any, *args: Any, **options: Any) -> Batched:
    if _sums_repeats(in_dims, args, options):
        return each(BMM_BWD, info.batch_size, in_dims, args, options)
    whole = [fold(x, d, info.batch_size) for x, d in zip(args, in_dims, strict=True)]
    return unfold(BMM_BWD(*whole, **options), info.batch_size)


def _rows(x: Tensor | None, dim: int | None, count: int) -> Tensor | None:
    """With the mapped axis first; one without repeats."""
    if x is None:
        return None
    return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _matmul2d_batched(info: Any, in_dims: Any, *args: Any, **options: Any) -> Batched:
    """Products of a batch; a bias that is mapped is one of each."""
    whole = [_rows(x, d, info.batch_size) for x, d in zip(args, in_dims, strict=True)]
    return BMM(*whole, **options), 0


def _matmul2d_bwd_batched(info: Any, in_dims: Any, *args: Any, **options: Any) -> Batched:
    if _sums_repeats(in_dims, args, options):
        return each(MATMUL2D_BWD, info.batch_size, in_dims, args, options)
    whole = [_rows(x, d, info.batch_size) for x, d in zip(args, in_dims, strict=True)]
    da, db = BMM_BWD(*whole, **options)
    return tuple(x if x.dim() > 1 else x.expand(info.batch_size, 0) for x in (da, db)), (0, 0)


RULES: dict[str, Rule] = {"out_dtype": lambda name, x: torch_dtype(x, name, fp8=True)}
OPERAND_SCHEMA = tensors_of("a", "b", optional=OPERANDS[2:])
OPTION_SCHEMA = (
    f"{_FACTORS}, {schema_of(_DEFAULTS, 'beta', 'out_dtype', 'precision', 'scale_block')}, "
    f"{CHOSEN}, str? bwd_implementation=None"
)


class Product(NamedTuple):
    """A product on tensors that have memory, its gradients, the operators of both, and the product
    with its gradients in torch's graph: (options, *tensors of OPERANDS)."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    operator: Callable[..., Any]
    of_gradients: Callable[..., Any]
    differentiated: Callable[..., Any]


def _defined(name: str, function: Any, gradients: Any, ranks: Any, batched: Any) -> Product:
    computed, computed_bwd = _computed(function), bwd_computed(gradients)
    of_gradients = define(
        f"{name}_bwd(Tensor dc, Tensor a, Tensor b, *, bool a_gradient, bool b_gradient, "
        f"bool sum_repeats=False, {_OUT_DTYPE}, {_FACTORS}, {CHOSEN}) "
        "-> (Tensor, Tensor)",
        computed_bwd,
        _bwd_fake,
        backward=refuse_second_derivative(name),
        batched=batched[1],
        flops=flops.product_bwd,
    )
    operator = define(
        f"{name}({OPERAND_SCHEMA}, *, {OPTION_SCHEMA}) -> Tensor",
        computed,
        _faked(*ranks),
        setup=_setup,
        backward=_backward(of_gradients),
        batched=batched[0],
        flops=flops.product,
        rules=RULES,
    )
    eager = differentiated("bmm and matmul2d", computed, _setup, _backward(computed_bwd))
    return Product(function, gradients, operator, of_gradients, eager)


OF_BMM = _defined("bmm", gemm.bmm, gemm_bwd.bmm_bwd, (3, 4), (_bmm_batched, _bmm_bwd_batched))
OF_MATMUL2D = _defined(
    "matmul2d",
    gemm.matmul2d,
    gemm_bwd.matmul2d_bwd,
    (2,),
    (_matmul2d_batched, _matmul2d_bwd_batched),
)
BMM, BMM_BWD = OF_BMM.operator, OF_BMM.of_gradients
MATMUL2D, MATMUL2D_BWD = OF_MATMUL2D.operator, OF_MATMUL2D.of_gradients
