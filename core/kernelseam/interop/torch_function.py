"""What the differentiable functions share: validation of operands and options in the forward, and
backwards that refuse to be differentiated again. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from kernelseam.arrays import describe
from kernelseam.arrays.guards import Guard, never, tensor_guard
from kernelseam.arrays.torch import refuse_tangent
from kernelseam.errors import InvalidValue, UnknownName
from kernelseam.plugins import plugins
from kernelseam.torch_dispatch import stands_for_others

Tensor = Any
Gradients = tuple[Tensor | None, ...]


def tensors(
    given: Mapping[str, Tensor | None], needed: Sequence[str]
) -> tuple[dict[str, Tensor], bool]:
    """(the tensors that are given, whether torch traces the call). torch traces where it compiles,
    exports or transforms the caller, or where a dispatch mode is active; the custom operator is
    then called.

    Raises InvalidValue for values that are no tensors, where one of ``needed`` is None, and under
    forward-mode differentiation.
    """
    result: dict[str, Tensor] = {}
    odd = False
    for name, x in given.items():
        kind: Any = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            result[name] = x
        elif x is not None:
            if not isinstance(x, torch.Tensor):
                raise must_be_tensor(name, x)
            result[name] = x
            odd = True
        elif name in needed:
            raise must_be_tensor(name, x)
    if forward_ad._current_level >= 0:
        for name, x in result.items():
            refuse_tangent(f"{name}.tangent", x)
    if odd or result[needed[0]].is_meta:
        return result, stands_for_others(result.values())
    return result, _modes() > 0 or _interpreter() is not None or _tracing() is not None


def plain(given: Mapping[Any, Tensor | None]) -> tuple[dict[Any, Tensor] | None, bool]:
    """(the tensors that are given, whether one requires a gradient), where all are plain torch
    tensors and no tracing, autocast or transform is active; else (None, False). Without gradients
    such a call needs nothing of torch's."""
    if (
        forward_ad._current_level >= 0
        or _autocasts()
        or _modes() > 0
        or _interpreter() is not None
        or _tracing() is not None
    ):
        return None, False
    graph, wants, result = torch.is_grad_enabled(), False, {}
    for name, x in given.items():
        if x is None:
            continue
        kind: Any = type(x)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return None, False
        wants = wants or (graph and x.requires_grad)
        result[name] = x
    return result, wants


# As below: not while Dynamo compiles the caller.
plain._torchdynamo_inline = lambda given: (None, False)  # type: ignore[attr-defined]

_MOST_KINDS = 8
_kinds: dict[int, tuple[tuple[Guard, bool], ...]] = {}
"""Number of tensors → guards of kinds that were ``plain``, and whether one of them requires a
gradient."""


def plain_kind(*given: Tensor) -> bool | None:
    """Whether one of these tensors requires a gradient, if they are ``plain``; else None. A guard
    from an earlier call decides it: plain torch tensors of one dtype and device, and no tracing,
    autocast or transform."""
    # guards are silent on modes that fake or trace
    if forward_ad._current_level >= 0 or _modes() > 0:
        return None
    for x in given:
        if getattr(x, "is_nested", False):  # torch's guards abort at strided ones
            return None
    for holds, wants in _kinds.get(len(given), ()):
        if holds(*given):
            return wants and torch.is_grad_enabled()
    known, wants = plain(dict(enumerate(given)))
    if known is None or len(known) < len(given) or any(x.is_meta for x in given):
        return None
    holds = tensor_guard(given, extents=False, loses=False)
    if holds is not never:
        kind = holds, any(x.requires_grad for x in given)
        _kinds[len(given)] = (kind, *_kinds.get(len(given), ())[: _MOST_KINDS - 1])
    return wants


plain_kind._torchdynamo_inline = lambda *given: None  # type: ignore[attr-defined]


def uncompiled(*functions: Any) -> None:
    """Keep Dynamo from compiling these functions and their callees where they run after a graph
    break. Inlining them into a compiled caller is not affected."""
    # torch.compiler.disable would import Dynamo, which takes seconds. A torch that has not these
    # names (they are its own affair) compiles what it can of the functions.
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "_FrameExecStrategy"):
        return
    skip = frames._FrameAction.SKIP
    for function in functions:
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def must_be_tensor(name: str, x: object) -> InvalidValue:
    """The error for an operand that is no tensor, or is missing."""
    if x is None:
        return InvalidValue(name, None, "must be a torch tensor", "Give it")
    return InvalidValue(name, type(x).__name__, "must be a torch tensor", "Pass torch.as_tensor(…)")


def _compiled(
    given: Mapping[str, Tensor | None], needed: Sequence[str]
) -> tuple[dict[str, Tensor], bool]:
    """``tensors`` as Dynamo follows it."""
    for name, x in given.items():
        if name in needed if x is None else not isinstance(x, torch.Tensor):
            raise must_be_tensor(name, x)
    return {name: x for name, x in given.items() if x is not None}, True


# As in ops.calling: asking at each call whether something compiles would cost all calls.
tensors._torchdynamo_inline = _compiled  # type: ignore[attr-defined]
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_interpreter = torch._C._functorch.peek_interpreter_stack
_autocasts = torch._C._is_any_autocast_enabled


def autocast(given: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """The tensors, with those of ``names`` converted to torch.autocast's dtype where it is enabled
    for their device. As in torch's own products float64 is not converted; nor are 8 bits."""
    if not _autocasts():  # by no device
        return given
    device = given[names[0]].device.type
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    cast = {
        n: x.to(dtype)
        for n, x in given.items()
        if n in names and x.is_floating_point() and x.itemsize not in (1, 8)
    }
    return {**given, **cast}


def wanted(given: Mapping[str, Tensor], differentiable: Sequence[str]) -> list[str]:
    """Names of the tensors that require gradients. Raises InvalidValue for one that is not
    differentiable."""
    if not torch.is_grad_enabled():
        return []
    result = [name for name, x in given.items() if x.requires_grad]
    for name in result:
        if name not in differentiable:
            raise InvalidValue(
                f"{name}.requires_grad", True, "gradients do not flow to it", "Pass tensor.detach()"
            )
    return result


def implementation_name(field: str, value: object) -> str:
    """The name of an implementation of the backward, validated. Raises InvalidValue."""
    if not isinstance(value, str):
        raise InvalidValue(
            field, type(value).__name__, "must be a name", "Leave it out for the cheapest"
        )
    return value


def check_bwd_implementation(
    name: object, operation: str, like: str, given: Mapping[str, Tensor]
) -> None:
    """Raise for a name that no implementation of the backward has on the device of ``like``, in the
    forward already: else the backward would fail later."""
    if name is None:
        return
    name = implementation_name("bwd_implementation", name)
    backend = describe(given[like].detach(), like).device.backend
    known = [i.name for i in plugins().registry.implementations_of(operation, backend)]
    if name not in known:
        raise UnknownName(
            "bwd_implementation",
            name,
            f"must be one of {', '.join(known) or 'none'} for {operation} on {backend}",
            "Name one of these, or leave it out",
        )


def differentiable_once(
    function: str,
) -> Callable[[Callable[..., Gradients]], Callable[..., Gradients]]:
    """Turn a function of (ctx, gradients of the results) into a ``backward`` that cannot be
    differentiated.

    Under ``create_graph`` its gradients are part of a graph, and differentiating them raises
    InvalidValue. torch's ``once_differentiable`` raises only where the results' gradients require a
    gradient; a gradient penalty, which differentiates by the inputs alone, would silently be
    constant.
    """

    def decorated(gradients: Callable[..., Gradients]) -> Callable[..., Gradients]:
        def backward(ctx: Any, *given: Tensor) -> Gradients:
            for i, x in enumerate(given):
                if x is not None and x.is_neg():  # as x.conj().imag makes it
                    given = (*given[:i], x.resolve_neg(), *given[i + 1 :])
            if not torch.is_grad_enabled():
                return gradients(ctx, *given)
            with torch.no_grad():
                result = gradients(ctx, *given)
            there = [x for x in result if x is not None]
            depends_on = [x for x in (*given, *ctx.saved_tensors) if x is not None]
            connected = iter(_Once.apply(function, len(there), *there, *depends_on))
            return tuple([None if x is None else next(connected) for x in result])

        return backward

    return decorated


class _Once(torch.autograd.Function):  # type: ignore[misc]
    """Returns ``count`` gradients unchanged, and makes them depend on the tensors they were
    computed from; its backward raises."""

    @staticmethod
    def forward(ctx: Any, function: str, count: int, *given: Tensor) -> Gradients:
        ctx.function = function
        return given[:count]

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Gradients:
        raise InvalidValue(
            "create_graph",
            True,
            f"gradients of {ctx.function} cannot be differentiated",
            "Use torch's own operations where second derivatives are wanted",
        )


def with_rows(x: Tensor) -> Tensor:
    """The tensor, copied if its last axis is not contiguous, as of transposed operands and of
    sum()'s gradient, which is expanded."""
    return x.contiguous() if x.stride(-1) != 1 and x.shape[-1] > 1 else x


def with_matrices(gradient: Tensor) -> Tensor:
    """The gradient, copied unless one of its last two axes is contiguous; that of sum() is
    expanded."""
    contiguous = any(
        n == 1 or s == 1 for n, s in zip(gradient.shape[-2:], gradient.stride()[-2:], strict=True)
    )
    return gradient if contiguous else gradient.contiguous()
