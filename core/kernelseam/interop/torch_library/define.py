"""How an operator is defined: its schema, what computes it, its results' shapes, its gradients, its
batches.

Library.define and Library.impl, not torch.library.custom_op: a kernel that is registered directly
is called without the wrapper that custom_op puts around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_library.sharding import check_alike, tell
from kernelseam.interop.torch_library.transforms import transformed

Tensor = Any
LIBRARY = torch.library.Library("kernelseam", "DEF")


def define(
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    batched: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define ``kernelseam::schema``, and return a function that calls it.

    ``compute`` runs on tensors with memory, ``fake`` makes empty results of the same shapes,
    strides and dtypes. ``setup(ctx, inputs, keyword_only_inputs, output)`` and ``backward(ctx,
    *gradients)`` as torch.library.register_autograd takes them, but that ``ctx.wanted`` says of
    every input whether it has a gradient, and the gradients are of every input.
    ``batched(info, in_dims, *args, **kwargs)`` as register_vmap takes it; without it torch.vmap
    calls the operator once an element.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    qualified = f"kernelseam::{name}"
    torch.library.register_fake(qualified, fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            qualified, _cut(backward), setup_context=setup and _with_wanted(setup), lib=LIBRARY
        )
    if batched is not None:
        torch.library.register_vmap(qualified, batched, lib=LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.kernelseam, name).default
    tell(name)
    if backward is None:
        return operator
    under_transforms = transformed(operator, setup, backward, batched)

    def call(*tensors: Tensor | None, **options: Any) -> Any:
        tell(name)
        if not torch.compiler.is_compiling():
            check_alike(name, tensors)
            transform = _interpreter()
            if transform is not None and transform.key() != _FUNCTIONALIZE:
                return under_transforms(*tensors, **options)
        return operator(*tensors, **options)

    return call


_interpreter = torch._C._functorch.peek_interpreter_stack
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize


def _with_wanted(setup: Callable[..., None]) -> Callable[..., None]:
    """Set ``ctx.wanted``, one flag per input: torch leaves inputs at their defaults out of
    ``needs_input_grad``, whose last entry is its own."""

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        given = ctx.needs_input_grad[:-1]
        ctx.wanted = (*given, *[False] * (len(inputs) - len(given)))
        setup(ctx, inputs, keyword_only_inputs, output)

    return setup_context


def _cut(backward: Callable[..., Any]) -> Callable[..., Any]:
    def cut(ctx: Any, *gradients: Tensor | None) -> Any:
        return backward(ctx, *gradients)[: len(ctx.needs_input_grad)]

    return cut


def once_only(function: str) -> Callable[..., Any]:
    """The ``backward`` of an operator that computes gradients of ``function``: it refuses."""

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InvalidValue(
            "create_graph",
            True,
            f"gradients of {function} cannot be differentiated",
            "Use torch's own operations where second derivatives are wanted",
        )

    return backward


def refuse_gradients(ctx: Any, names: tuple[str, ...], differentiable: tuple[str, ...]) -> None:
    """Raise InvalidValue for an operand that wants a gradient and can have none."""
    for name, wanted in zip(names, ctx.wanted, strict=True):
        if wanted and name not in differentiable:
            raise InvalidValue(
                f"{name}.requires_grad", True, "gradients do not flow to it", "Pass tensor.detach()"
            )


def none(like: Tensor) -> Tensor:
    """What stands for a result that was not asked for: operators return all of theirs."""
    return like.new_empty(0)


def of_rank(name: str, x: Tensor, *ranks: int) -> Tensor:
    """Refuse a tensor whose number of axes is none of these, before shapes are read off it."""
    if x.dim() not in ranks:
        raise InvalidValue(
            name,
            f"an array of shape {list(x.shape)}",
            f"must have {' or '.join(map(str, ranks))} axes",
            "Add or remove axes with reshape",
        )
    return x
