"""``torch.ops.kernelseam.bmm_epilogue`` and ``matmul2d_epilogue``, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import epilogue_of
from kernelseam.interop.torch_epilogues import by_product, check_preactivation
from kernelseam.interop.torch_function import check_bwd_implementation
from kernelseam.interop.torch_library import flops, gemm
from kernelseam.interop.torch_library.define import (
    define,
    none,
    once_only,
    refuse_gradients,
    room,
)
from kernelseam.interop.torch_library.dtypes import dtype_name, result_dtype
from kernelseam.interop.torch_library.epilogues import expression_of, traced
from kernelseam.interop.torch_library.mods import CAPTURED
from kernelseam.ops import gemm as ops

Tensor = Any

OPERANDS = (*gemm.OPERANDS, *CAPTURED)
_ARRAYS = ", ".join(f"Tensor? {n}=None" for n in CAPTURED)
_EXPRESSION = "str expression, float[] captured_numbers"


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(
        *tensors: Tensor,
        expression: str,
        captured_numbers: list[float],
        preactivation: bool = False,
        out_dtype: Any = None,
        bwd_implementation: str | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        given = dict(zip(OPERANDS, tensors, strict=False))
        arrays = [given.pop(n, None) for n in CAPTURED]
        a, out = given["a"], given.pop("out", None)
        check_bwd_implementation(bwd_implementation, "gemm", "a", {"a": a})
        kept = none(a)
        if preactivation:
            whole, _ = _shapes(given, expression, out, out_dtype, options)
            kept = a.new_empty(whole, dtype=_dtype(a, out, out_dtype))
        with torch.no_grad():
            result = function(
                **given,
                **options,
                out=None if out is None else room(out, bool(options.get("beta"))),
                out_dtype=dtype_name(out_dtype),
                epilogue=expression_of(expression, captured_numbers, arrays),
                preactivation=kept if preactivation else None,
            )
        return result, kept

    return compute


def _dtype(a: Tensor, out: Tensor | None, out_dtype: Any) -> Any:
    if out is not None:
        return out.dtype
    return result_dtype(a, out_dtype)


def _shapes(
    given: dict[str, Tensor], text: str, out: Tensor | None, out_dtype: Any, options: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(what the epilogue is of, the result)."""
    a, b = given["a"], given["b"]
    rows = a.shape[-1 if options.get("a_transposed") else -2]
    columns = b.shape[-2 if options.get("b_transposed") else -1]
    lead = (*a.shape[:-2], rows)
    return (*lead, columns), (*lead, columns // 2 if epilogue_of(text).pairs else columns)


def _faked(plain: Callable[..., Any]) -> Callable[..., Any]:
    def fake(
        *tensors: Tensor,
        expression: str,
        captured_numbers: list[float],
        preactivation: bool = False,
        out_dtype: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        given = dict(zip(OPERANDS, tensors, strict=False))
        a, out = given["a"], given.get("out")
        result = plain(*tensors[: len(gemm.OPERANDS)], out_dtype=out_dtype, **options)
        whole, own = _shapes(given, expression, out, out_dtype, options)
        if out is None:
            result = a.new_empty(own, dtype=result.dtype)
        return result, a.new_empty(whole, dtype=result.dtype) if preactivation else none(a)

    return fake


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    a, b, bias, residual, *_ = inputs
    refuse_gradients(ctx, OPERANDS, OPERANDS[2:4] if a.itemsize == 1 else OPERANDS[:4])
    check_preactivation(output[0].dtype)
    options = dict(keyword_only_inputs)
    if not options["preactivation"]:
        raise InvalidValue(
            "preactivation", False, "gradients start from it", "Pass preactivation=True"
        )
    names = ("a_transposed", "b_transposed", "alpha", "backend")
    ctx.options = {n: options[n] for n in names if n in options}
    ctx.options["implementation"] = options.get("bwd_implementation")
    ctx.expression = {n: options[n] for n in ("expression", "captured_numbers")}
    ctx.added = [None if x is None else (x.shape, x.dtype) for x in (bias, residual)]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b, output[1], *inputs[len(gemm.OPERANDS) :])


def _backward(operator: Any) -> Callable[..., Any]:
    def backward(ctx: Any, dout: Tensor | None, dsums: Tensor | None) -> Any:
        a, b, sums, *captured = ctx.saved_tensors
        given, backend = ctx.expression, ctx.options.get("backend")
        dc = dsums
        if dout is not None:
            dc = EPILOGUE_BWD(dout, sums, *captured, **given, backend=backend)
            dc = dc if dsums is None else dc + dsums
        gradients: list[Tensor | None] = [None] * len(OPERANDS)
        if dc is None:
            return tuple(gradients)
        of_a, of_b, *rest = ctx.wanted[: len(gemm.OPERANDS)]
        if of_a or of_b:
            wants = {"a_gradient": of_a, "b_gradient": of_b}
            da, db = operator(dc.to(a.dtype), a, b, **wants, **ctx.options)
            gradients[:2] = da if of_a else None, db if of_b else None
        gradients[2:4] = gemm.added_gradients(dc, ctx.added, rest)
        return tuple(gradients)

    return backward


def _derivative(
    dout: Tensor,
    sums: Tensor,
    *captured: Tensor,
    expression: str,
    captured_numbers: list[float],
    backend: str | None = None,
) -> Tensor:
    with torch.no_grad():
        own = expression_of(expression, captured_numbers, captured)
        return by_product(own, sums, dout.contiguous(), backend)


def _derivative_fake(dout: Tensor, sums: Tensor, *captured: Tensor, **options: Any) -> Tensor:
    return sums.new_empty(sums.shape)


EPILOGUE_BWD = define(
    f"epilogue_bwd(Tensor dout, Tensor preactivation, {_ARRAYS}, *, {_EXPRESSION}, "
    "str? backend=None) -> Tensor",
    _derivative,
    _derivative_fake,
    backward=once_only("bmm and matmul2d"),
)


def _defined(name: str, function: Any, plain: Any, gradients: Any) -> Any:
    operator = define(
        f"{name}_epilogue({gemm.OPERAND_SCHEMA}, {_ARRAYS}, *, {_EXPRESSION}, "
        f"bool preactivation=False, {gemm.OPTION_SCHEMA}) "
        "-> (Tensor, Tensor)",
        _computed(function),
        _faked(plain),
        setup=_setup,
        backward=_backward(gradients),
        flops=flops.product,
        rules=gemm.RULES,
    )

    def call(*tensors: Tensor | None, preactivation: bool = False, **given: Any) -> Any:
        """Of what gradients may be wanted of, with what they start from."""
        kept = torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in tensors
        )
        return operator(*tensors, preactivation=preactivation or kept, **given)

    return call


WITH_EPILOGUE = {
    gemm.BMM: _defined("bmm", ops.bmm, gemm.faked(3, 4), gemm.BMM_BWD),
    gemm.MATMUL2D: _defined("matmul2d", ops.matmul2d, gemm.faked(2), gemm.MATMUL2D_BWD),
}
"""By the operator without one: (the result, what the epilogue is of or what stands for it)."""


def multiply(
    operator: Any, operands: tuple[Tensor | None, ...], epilogue: Any, options: dict[str, Any]
) -> Tensor:
    """The result of an operator of products (a, b, bias, residual) with an epilogue, while torch
    traces the call."""
    text, numbers, arrays = traced(epilogue, operands[0])
    given = {**options, "expression": text, "captured_numbers": numbers}
    out, _ = WITH_EPILOGUE[operator](*operands, None, None, None, *arrays, **given)
    return out
