"""An operator's rules of gradients as autograd functions: for the transforms of torch.func, which
differentiate and map those, and not what torch.library.register_autograd makes; and for tensors of
torch's own where nothing traces the call, without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelseam.interop.torch_function import differentiable_once
from kernelseam.interop.torch_library.arguments import Arguments
from kernelseam.interop.torch_library.batches import as_before, flat

Tensor = Any


def transformed(
    operator: Any,
    arguments: Arguments,
    setup: Callable[..., None] | None,
    backward: Callable[..., Any],
    batched: Callable[..., Any],
) -> Callable[..., Any]:
    """``call(*tensors, **options)`` of the operator; arguments as ``define.define`` has them."""
    places, defaults = len(arguments.operands), arguments.defaults
    returns_list = str(operator._schema.returns[0].real_type) == "List[Tensor]"

    class Transformed(torch.autograd.Function):  # type: ignore[misc]
        """Options, the arguments' form (``batches.as_before``), then all tensors, None for what is
        left out."""

        @staticmethod
        def forward(options: dict[str, Any], form: Any, *tensors: Tensor | None) -> Any:
            result = operator(*as_before(tensors, form), **options)
            return tuple(result) if isinstance(result, list) else result

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            options, form, *tensors = inputs
            ctx.wanted = ctx.needs_input_grad[2:]
            if setup is not None and any(ctx.wanted):
                setup(ctx, as_before(tensors, form), {**defaults, **options}, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            made = backward(ctx, list(gradients)) if returns_list else backward(ctx, *gradients)
            return None, None, *flat(made)[: len(ctx.needs_input_grad) - 2]

        @staticmethod
        def vmap(
            info: Any, in_dims: Any, options: dict[str, Any], form: Any, *tensors: Tensor | None
        ) -> Any:
            given, dims = as_before(tensors, form), as_before(in_dims[2:], form)
            results, out_dims = batched(info, dims, *given, **options)
            return (tuple(results), tuple(out_dims)) if returns_list else (results, out_dims)

    def call(*tensors: Any, **options: Any) -> Any:
        whole = (*tensors, *[None] * (places - len(tensors)))
        form = [[None] * len(x) if isinstance(x, list | tuple) else None for x in whole]
        result = Transformed.apply(options, form, *flat(whole))
        return list(result) if returns_list else result

    return call


def differentiated(
    function: str,
    compute: Callable[..., Any],
    setup: Callable[..., None],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """``call(options, *tensors)``: what the operator of ``compute`` returns, differentiable once;
    ``backward`` is that of a function that computes. All tensors are given, None for what is left
    out."""
    gradients = differentiable_once(function)(backward)

    class Differentiated(torch.autograd.Function):  # type: ignore[misc]
        """Options, then all tensors."""

        @staticmethod
        def forward(ctx: Any, options: dict[str, Any], *tensors: Tensor | None) -> Any:
            result = compute(*tensors, **options)
            ctx.wanted = ctx.needs_input_grad[1:]
            setup(ctx, tensors, options, result)
            return result

        @staticmethod
        def backward(ctx: Any, *given: Tensor | None) -> Any:
            return None, *gradients(ctx, *given)

    call: Callable[..., Any] = Differentiated.apply
    return call
