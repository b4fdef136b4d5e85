"""Operators of products with an epilogue, and their gradients: one mechanism for all products.

An operator's epilogue is the text of its expression (``epilogues``). Its second result is what the
epilogue is of, where there is an array for it, ``preactivation``, or gradients are wanted, which
start from it; the derivative is an operator of its own, ``epilogue_bwd``. Where nothing traces the
call, ``differentiated`` has gradients to the tensors that the epilogue captures, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import torch

from kernelseam.epilogues import epilogue_expression, without_reductions
from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import EpilogueExpression, EpilogueStructure
from kernelseam.expressions.reductions import SUM
from kernelseam.frozen import dataclass
from kernelseam.interop.torch_epilogues import (
    by_captured,
    by_groups,
    by_product,
    check_preactivation,
)
from kernelseam.interop.torch_expression import captured_tensors, over
from kernelseam.interop.torch_function import (
    check_bwd_implementation,
    differentiable_once,
    uncompiled,
    wanted,
)
from kernelseam.interop.torch_library.arguments import Rule
from kernelseam.interop.torch_library.define import (
    absent_result,
    define,
    fake_results_like,
    refuse_gradients,
    refuse_second_derivative,
    results_like,
)
from kernelseam.interop.torch_library.dtypes import dtype_name, result_dtype
from kernelseam.interop.torch_library.epilogues import expression_of, structure_of, traced
from kernelseam.interop.torch_library.mods import CAPTURED
from kernelseam.ops import gemm

Tensor = Any
Given = Mapping[str, Tensor]
Derivative = Callable[..., Tensor | None]
"""``derivative(chosen, offs)``: the gradient by what the epilogue is of, by rows that ``chosen``
takes of the results', in groups that ``offs`` ends."""

_ARRAYS = ", ".join(f"Tensor? {n}=None" for n in CAPTURED)
_PREACTIVATION = "preactivation"
_EXPRESSION = "str expression, float[] captured_numbers"


@dataclass(frozen=True)
class Product:
    """A product as its operator with an epilogue needs it."""

    name: str
    """Of the operator without one."""
    operation: str
    operands: tuple[str, ...]
    operand_schema: str
    option_schema: str
    function: Callable[..., Any]
    """On arrays."""
    shape: Callable[[Given, Mapping[str, Any]], tuple[Any, ...]]
    """Of the product, ``out`` left aside. Raises InvalidValue for operands of other ranks."""
    differentiable: Callable[[Tensor], tuple[str, ...]]
    """The operands that gradients flow to, by a."""
    saved: tuple[str, ...]
    """Operands that gradients are computed from."""
    kept: tuple[str, ...]
    """Options that gradients take, beside the name of their implementation."""
    gradients: Callable[[Any, Given, Derivative], dict[str, Tensor | None]]
    """``gradients(ctx, saved, derivative)`` by operand; ``ctx.needed`` has the names of those that
    are wanted, ``ctx.layouts`` (shape, dtype) of each that was given."""
    flops: Callable[..., int]
    rules: Mapping[str, Rule] = field(default_factory=dict)
    writes_all: bool = True
    """Whether results are written whole, so that of an array that is given nothing stays."""
    counted: Callable[[Given, Tensor, Tensor], tuple[Tensor, ...]] = lambda saved, acc, dout: (
        acc,
        dout,
    )
    """What the epilogue is of and its result's gradient, by rows as the product counts them, and
    where they are not counted by matrices, the matrix of each."""


def with_epilogue(product: Product) -> Callable[..., Any]:
    """Define the operator ``<name>_epilogue``, and return what calls it: (the result, what the
    epilogue is of or what stands for it)."""
    names = (*product.operands, _PREACTIVATION, *CAPTURED)
    operator = define(
        f"{product.name}_epilogue({product.operand_schema}, Tensor? {_PREACTIVATION}=None, "
        f"{_ARRAYS}, *, {_EXPRESSION}, bool keep_preactivation=False, {product.option_schema}) "
        "-> (Tensor, Tensor)",
        _computed(product, names),
        _faked(product, names),
        setup=_setup(product, names),
        backward=_backward(product, names),
        flops=product.flops,
        rules=product.rules,
    )

    def call(*tensors: Tensor | None, **given: Any) -> Any:
        """Of what gradients may be wanted of, with what they start from."""
        kept = torch.is_grad_enabled() and any(map(_wants, tensors))
        return operator(*tensors, keep_preactivation=kept, **given)

    return call


def _wants(x: Tensor | None) -> bool:
    """Whether a gradient is wanted of it or, under torch.func's transforms, of what it stands
    for."""
    while x is not None and not x.requires_grad and _is_wrapped(x):
        x = _unwrapped(x)
    return x is not None and x.requires_grad


def _may_want(x: Tensor | None) -> bool:
    """``_wants`` as Dynamo follows it, which sees not through what stands for others."""
    return x is not None and (
        x.requires_grad or torch._C._functorch.peek_interpreter_stack() is not None
    )


_wants._torchdynamo_inline = _may_want  # type: ignore[attr-defined]
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped = torch._C._functorch.get_unwrapped


def multiply(
    operator: Any, operands: tuple[Tensor | None, ...], epilogue: Any, options: dict[str, Any]
) -> Tensor:
    """The result of an operator with an epilogue over all of the product's operands, while torch
    traces the call."""
    text, numbers, arrays = traced(epilogue, operands[0])
    given = {**options, "expression": text, "captured_numbers": numbers}
    out, _ = operator(*operands, None, *arrays, **given)
    return out


def _shapes(
    product: Product, given: Given, text: str, options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(what the epilogue is of, the result)."""
    *lead, rows, columns = product.shape(given, options)
    out = given.get("out")
    if out is not None and out.dim() > 1:  # which may have more rows
        rows = out.shape[-2]
    pairs = structure_of(text).pairs
    return (*lead, rows, columns), (*lead, rows, columns // 2 if pairs else columns)


def _dtype(given: Given, out_dtype: Any) -> Any:
    out = given.get("out")
    return result_dtype(given["a"], out_dtype) if out is None else out.dtype


def _results(given: Given) -> dict[str, Tensor]:
    """Those that there is an array for."""
    return {n: given[n] for n in (_PREACTIVATION, "out") if given.get(n) is not None}


def _computed(product: Product, names: tuple[str, ...]) -> Callable[..., Any]:
    def compute(
        *tensors: Tensor,
        expression: str,
        captured_numbers: list[float],
        keep_preactivation: bool = False,
        out_dtype: Any = None,
        bwd_implementation: str | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, tensors, strict=False))
        arrays = [given.pop(n, None) for n in CAPTURED]
        a = given["a"]
        check_bwd_implementation(bwd_implementation, product.operation, "a", {"a": a})
        results = _results(given)
        added_to = ("out",) if options.get("beta") else ()
        given |= results_like(results, added_to if product.writes_all else results)
        if keep_preactivation and _PREACTIVATION not in results:
            whole, _ = _shapes(product, given, expression, options)
            given[_PREACTIVATION] = a.new_empty(whole, dtype=_dtype(given, out_dtype))
        with torch.no_grad():
            result = product.function(
                **given,
                **options,
                out_dtype=dtype_name(out_dtype),
                epilogue=expression_of(expression, captured_numbers, arrays),
            )
        kept = given.get(_PREACTIVATION)
        return result, absent_result(a) if kept is None else kept

    return compute


def _faked(product: Product, names: tuple[str, ...]) -> Callable[..., Any]:
    def fake(
        *tensors: Tensor,
        expression: str,
        captured_numbers: list[float],
        keep_preactivation: bool = False,
        out_dtype: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, tensors, strict=False))
        a = given["a"]
        whole, own = _shapes(product, given, expression, options)
        dtype = _dtype(given, out_dtype)
        made = fake_results_like(_results(given))
        result = made["out"] if "out" in made else a.new_empty(own, dtype=dtype)
        if _PREACTIVATION in made:
            gemm.check_preactivation(made | {"out": result}, whole)
            return result, made[_PREACTIVATION]
        return result, a.new_empty(whole, dtype=dtype) if keep_preactivation else absent_result(a)

    return fake


def _setup(product: Product, names: tuple[str, ...]) -> Callable[..., None]:
    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        given = dict(zip(names, inputs, strict=True))
        refuse_gradients(ctx, names, product.differentiable(given["a"]))
        check_preactivation(output[0].dtype)
        options = dict(keyword_only_inputs)
        if not options["keep_preactivation"] and given[_PREACTIVATION] is None:
            raise InvalidValue("keep_preactivation", False, "gradients start from it", "Pass True")
        ctx.options = {n: options[n] for n in product.kept if n in options}
        ctx.options["implementation"] = options.get("bwd_implementation")
        ctx.expression = {n: options[n] for n in ("expression", "captured_numbers")}
        ctx.layouts = {
            n: (x.shape, x.dtype) for n, x in given.items() if n not in CAPTURED and x is not None
        }
        ctx.needed = frozenset(n for n, x in zip(names, ctx.wanted, strict=True) if x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            output[1], *(given[n] for n in product.saved), *(given[n] for n in CAPTURED)
        )

    return setup


def _backward(product: Product, names: tuple[str, ...]) -> Callable[..., Any]:
    def backward(ctx: Any, dout: Tensor | None, dsums: Tensor | None) -> Any:
        sums, *rest = ctx.saved_tensors
        saved = dict(zip(product.saved, rest, strict=False))
        captured = rest[len(saved) :]

        def derivative(
            chosen: Callable[[Tensor], Tensor] = lambda x: x, offs: Tensor | None = None
        ) -> Tensor | None:
            dc = None if dsums is None else chosen(dsums)
            if dout is None:
                return dc
            given, backend = ctx.expression, ctx.options.get("backend")
            of_sums = EPILOGUE_BWD(
                chosen(dout), chosen(sums), offs, *captured, **given, backend=backend
            )
            return of_sums if dc is None else of_sums + dc

        made = {} if dout is dsums is None else product.gradients(ctx, saved, derivative)
        return tuple([made.get(n) for n in names])

    return backward


def _derivative(
    dout: Tensor,
    sums: Tensor,
    offs: Tensor | None = None,
    *captured: Tensor,
    expression: str,
    captured_numbers: list[float],
    backend: str | None = None,
) -> Tensor:
    with torch.no_grad():
        own = expression_of(expression, captured_numbers, captured)
        if offs is None:
            return by_product(own, sums, dout.contiguous(), backend)
        return by_groups(own, sums, dout.contiguous(), offs, backend)


def _derivative_fake(
    dout: Tensor, sums: Tensor, offs: Tensor | None = None, *captured: Tensor, **options: Any
) -> Tensor:
    return sums.new_empty(sums.shape)


EPILOGUE_BWD = define(
    f"epilogue_bwd(Tensor dout, Tensor preactivation, Tensor? offs=None, {_ARRAYS}, *, "
    f"{_EXPRESSION}, str? backend=None) -> Tensor",
    _derivative,
    _derivative_fake,
    backward=refuse_second_derivative("products with an epilogue"),
)


def differentiated(product: Product, function: str) -> Callable[..., Tensor]:
    """``call(operands, options, epilogue, bwd_implementation)``: the product on tensors that have
    memory, where nothing traces the call. Sums and maxima are written as an observer writes: no
    gradient passes through them. ``function``: what a refused second derivative names."""

    @differentiable_once(function)
    def gradients(ctx: Any, dout: Tensor) -> Any:
        acc, *rest = ctx.saved_tensors
        saved = dict(zip(product.saved, rest, strict=False))
        expression = over(ctx.expression, rest[len(saved) :])
        learnt = ctx.needs_input_grad[3 + len(product.operands) :]

        def derivative(
            chosen: Callable[[Tensor], Tensor] = lambda x: x, offs: Tensor | None = None
        ) -> Tensor:
            given = expression, chosen(acc), chosen(dout)
            backend = ctx.options.get("backend")
            return by_product(*given, backend) if offs is None else by_groups(*given, offs, backend)

        made = product.gradients(ctx, saved, derivative) if ctx.needed else {}
        more: Any = (None,) * len(learnt)
        if any(learnt):
            more = by_captured(expression, learnt, *product.counted(saved, acc, dout))
        return None, None, None, *map(made.get, product.operands), *more

    class Differentiated(torch.autograd.Function):  # type: ignore[misc]
        """The expression without reductions, options of the product and of its gradients, all
        operands, then captured tensors."""

        @staticmethod
        def forward(
            ctx: Any,
            expression: EpilogueExpression,
            options: Mapping[str, Any],
            bwd_options: Mapping[str, Any],
            *tensors: Tensor | None,
        ) -> Tensor:
            count = len(product.operands)
            every = dict(zip(product.operands, tensors, strict=False))
            given = {n: x for n, x in every.items() if x is not None}
            dtype = result_dtype(given["a"], options.get("out_dtype"))
            check_preactivation(dtype)
            try:
                whole = product.shape(given, options)
            except InvalidValue:  # the function refuses it in the caller's words
                return product.function(**given, **options)
            acc = given["a"].new_empty(whole, dtype=dtype)
            result = product.function(**given, **options, preactivation=acc)
            ctx.expression = expression
            ctx.options = bwd_options
            ctx.layouts = {n: (x.shape, x.dtype) for n, x in given.items()}
            needs = zip(product.operands, ctx.needs_input_grad[3:], strict=False)
            ctx.needed = frozenset(n for n, x in needs if x)
            ctx.save_for_backward(acc, *map(every.get, product.saved), *tensors[count:])
            return result

        backward = staticmethod(gradients)

    def call(
        operands: Given, options: dict[str, Any], epilogue: Any, bwd_implementation: str | None
    ) -> Tensor:
        wants = wanted(operands, product.differentiable(operands["a"]))
        written = whole = epilogue_expression(epilogue)
        learnt = any(x.requires_grad for x in captured_tensors(whole))
        if not (torch.is_grad_enabled() and (wants or learnt)):
            return product.function(**operands, **options, epilogue=whole)
        if whole.structure.reductions:
            _refuse_sums(whole.structure)
            whole = epilogue_expression(without_reductions(epilogue))
        ways = {"implementation": bwd_implementation, "bwd_implementation": bwd_implementation}
        given = {**options, **ways}
        return Differentiated.apply(
            whole,
            {**options, "epilogue": written},
            {n: given[n] for n in ("implementation", *product.kept) if n in given},
            *map(operands.get, product.operands),
            *captured_tensors(whole),
        )

    uncompiled(call)
    return call


def _refuse_sums(structure: EpilogueStructure) -> None:
    """Raise InvalidValue where an epilogue whose operands want gradients has sums, which a loss
    might be made of: they are arrays that are written to, which torch knows no gradient of."""
    if any(r.operation == SUM for r in structure.reductions):
        raise InvalidValue(
            "epilogue",
            "row_sums or column_sums",
            "has no gradients, and some are wanted",
            "Sum the result with torch, or call it under torch.no_grad() or on detached operands",
        )
