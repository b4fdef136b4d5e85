"""An operator under the transforms of torch.func, which differentiate and map an autograd function
of their own kind, and not what torch.library.register_autograd makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
