"""An operator under the transforms of torch.func, which differentiate and map an autograd function
of their own kind, and not what torch.library.register_autograd makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelseam.interop.torch_library.batches import each

Tensor = Any


def transformed(
    operator: Any,
    setup: Callable[..., None] | None,
    backward: Callable[..., Any],
    batched: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """``call(*tensors, **options)`` of the operator; arguments as ``define.define`` has them."""
    arguments = operator._schema.arguments
    places = sum(not a.kwarg_only for a in arguments)
    defaults = {a.name: a.default_value for a in arguments if a.kwarg_only}

    class Transformed(torch.autograd.Function):  # type: ignore[misc]
        """Options, then all tensors, None for what is left out."""

        @staticmethod
        def forward(options: dict[str, Any], *tensors: Tensor | None) -> Any:
            return operator(*tensors, **options)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            options, *tensors = inputs
            ctx.wanted = ctx.needs_input_grad[1:]
            if setup is not None and any(ctx.wanted):
                setup(ctx, tensors, {**defaults, **options}, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            return None, *backward(ctx, *gradients)

        @staticmethod
        def vmap(info: Any, in_dims: Any, options: dict[str, Any], *tensors: Tensor | None) -> Any:
            if batched is None:
                return each(call, info.batch_size, in_dims[1:], tensors, options)
            return batched(info, in_dims[1:], *tensors, **options)

    def call(*tensors: Tensor | None, **options: Any) -> Any:
        whole = (*tensors, *[None] * (places - len(tensors)))
        return Transformed.apply(options, *whole)

    return call
