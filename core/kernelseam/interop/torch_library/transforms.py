"""An operator under the transforms of torch.func, which differentiate and map an autograd function
of their own kind, and not what torch.library.register_autograd makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelseam.interop.torch_library.arguments import Arguments

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
            return batched(info, in_dims[1:], *tensors, **options)

    def call(*tensors: Tensor | None, **options: Any) -> Any:
        whole = (*tensors, *[None] * (places - len(tensors)))
        return Transformed.apply(options, *whole)

    return call
