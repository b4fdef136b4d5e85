"""Operators of torch.ops.kernelseam: schema, kernel, fake kernel, autograd formula and vmap rule of
each are registered by ``define``.

It uses Library.define and Library.impl rather than torch.library.custom_op, which would put a
Python wrapper around every kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_library import flops as counting
from kernelseam.interop.torch_library.apart import check_apart
from kernelseam.interop.torch_library.arguments import Arguments, Rule
from kernelseam.interop.torch_library.batches import flat, one_by_one, with_empty_axes
from kernelseam.interop.torch_library.namespace import NAMESPACE, defined, operator_of
from kernelseam.interop.torch_library.sharding import check_alike, register_sharding
from kernelseam.interop.torch_library.transforms import transformed

Tensor = Any
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def define(
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    batched: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
    rules: Mapping[str, Rule] | None = None,
    captured: bool = True,
) -> Callable[..., Any]:
    """Define the operator of a schema, and return a function that calls it.

    ``compute`` is the kernel; ``fake`` makes empty results of the same shapes, strides and dtypes.
    ``setup(ctx, inputs, keyword_only_inputs, output)`` and ``backward(ctx, *gradients)`` are as for
    torch.library.register_autograd, but ``ctx.wanted`` has a flag for every input, and for every
    tensor of a list, and ``backward`` returns gradients of all inputs. ``batched(info, in_dims,
    *args, **kwargs)`` is as for register_vmap, but is not called for a mapped axis of extent 0;
    without it torch.vmap calls the operator once an element. ``flops``: the formula for
    torch.utils.flop_counter, of the call's arguments. ``rules``: checks of options that differ from
    those of other operators. ``captured``: whether a device graph may capture calls; torch.compile
    launches others outside of its graphs. The returned function checks its arguments,
    and takes dtypes by any of their names.
    """
    name = schema.partition("(")[0]
    defined(name)  # before torch asks whether there is one of this name
    tags = [torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides]
    if not captured:
        tags += [x for n, x in torch.Tag.__members__.items() if n.endswith("graph_unsafe")]
    LIBRARY.define(schema, tags=tuple(tags))
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    qualified = f"{NAMESPACE}::{name}"
    packet = operator_of(name)
    operator: Callable[..., Any] = packet.default
    described: Any = packet.default._schema
    arguments = Arguments(described.arguments, rules or {})
    torch.library.register_fake(qualified, fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            qualified, _cut(backward), setup_context=setup and _with_wanted(setup), lib=LIBRARY
        )
    register_sharding(name)
    if flops is not None:
        counting.register(packet, flops)
    mapped = with_empty_axes(batched or one_by_one(lambda *x, **given: call(*x, **given)))
    if not described.is_mutable:
        torch.library.register_vmap(qualified, mapped, lib=LIBRARY)
    under_transforms = backward and transformed(operator, arguments, setup, backward, mapped)

    def call(*tensors: Tensor | None, **options: Any) -> Any:
        register_sharding(name)
        options = arguments.checked(tensors, options)
        if torch.compiler.is_compiling():
            return operator(*tensors, **options)
        if flops is not None:
            counting.tell_counters(packet, flops)
        check_alike(name, tensors)
        if under_transforms is not None:
            transform = _interpreter()
            if transform is not None and transform.key() != _FUNCTIONALIZE:
                return under_transforms(*tensors, **options)
        return operator(*tensors, **options)

    return call


_interpreter = torch._C._functorch.peek_interpreter_stack
_FUNCTIONALIZE = torch._C._functorch.TransformType.Functionalize


def _with_wanted(setup: Callable[..., None]) -> Callable[..., None]:
    """Set ``ctx.wanted``, one flag per input, of lists one per tensor: torch leaves inputs at their
    defaults out of ``needs_input_grad``, whose last entry is its own."""

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        given = ctx.needs_input_grad[:-1]
        count = len(flat(inputs))
        ctx.wanted = (*given, *[False] * (count - len(given)))[:count]
        setup(ctx, inputs, keyword_only_inputs, output)

    return setup_context


def _cut(backward: Callable[..., Any]) -> Callable[..., Any]:
    def cut(ctx: Any, *gradients: Tensor | None) -> Any:
        return backward(ctx, *gradients)[: len(ctx.needs_input_grad)]

    return cut


def refuse_second_derivative(function: str) -> Callable[..., Any]:
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


def result_like(out: Tensor, copied: bool = False) -> Tensor:
    """A new tensor of the shape, strides and dtype of ``out``, which the caller gives for a result:
    operators are functional, and mutate none of their operands. ``copied``: with ``out``'s values,
    as a result needs that is added to."""
    result = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    # an expanded one is refused where it would be written
    return result.copy_(out) if copied and unrepeated(out) == list(out.shape) else result


def results_like(given: Mapping[str, Tensor], copied: Collection[str] = ()) -> dict[str, Tensor]:
    """``result_like`` for each of several results; those named in ``copied`` with their values."""
    check_apart(given)
    return {n: result_like(x, n in copied) for n, x in given.items()}


def fake_result_like(out: Tensor, name: str = "out") -> Tensor:
    """``result_like`` on fake tensors. Raises InvalidValue for an array, known by ``name``, whose
    elements share memory, which torch cannot copy to."""
    if unrepeated(out) != list(out.shape):
        raise InvalidValue(
            name,
            f"an array of shape {list(out.shape)} with strides {list(out.stride())}",
            "must have memory of its own for every element",
            "Give one that is not expanded",
        )
    return out.new_empty_strided(out.shape, out.stride())


def fake_results_like(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``results_like`` on fake tensors."""
    check_apart(given)
    return {n: fake_result_like(x, n) for n, x in given.items()}


def unrepeated(x: Tensor) -> list[Any]:
    """The shape with extent 1 along every axis of stride 0, as ``ops.calling.unexpanded_shape``
    has it."""
    if 0 in x.shape:
        return list(x.shape)
    return [1 if s == 0 else n for n, s in zip(x.shape, x.stride(), strict=True)]


def absent_result(like: Tensor) -> Tensor:
    """An empty tensor in the place of a result that was not asked for: an operator returns as many
    as its schema says."""
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
