"""Attention that torch differentiates. Imports torch: ``kernelseam.interop.torch`` imports this at
its first use."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from kernelseam.compilation.ahead import expect, expect_no_more
from kernelseam.descriptors.attention.options import (
    AttentionOptions,
    GradientOptions,
    ScoreOperands,
    ScoreScalars,
    band,
)
from kernelseam.descriptors.common.options import (
    operands_of,
    refuse_others,
    scalars_of,
    spelled_out,
)
from kernelseam.descriptors.common.validation import flag
from kernelseam.errors import InvalidValue
from kernelseam.expressions.block_mask import BlockMask
from kernelseam.expressions.scores import MaskMod, ScoreMod, score_expression
from kernelseam.interop import torch_attention, torch_nested, torch_scores
from kernelseam.interop.torch_attention import DIFFERENTIABLE
from kernelseam.interop.torch_expression import captured_tensors, over
from kernelseam.interop.torch_function import (
    Gradients,
    autocast,
    check_bwd_implementation,
    differentiable_once,
    plain,
    plain_kind,
    tensors,
    wanted,
)
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_scores import Mods
from kernelseam.ops.attention import DENSE
from kernelseam.ops.signatures import DenseTensors, PackedTensors

_ADDED = operands_of(ScoreOperands)
_DENSE = {
    n: getattr(AttentionOptions(), n)
    for n in (
        *(*scalars_of(ScoreScalars), *_ADDED),
        *("layout", "out_dtype", "return_lse", "batch_invariant"),
    )
}
"""Options of ``attention`` with their defaults."""
_USUAL = {n: x for n, x in _DENSE.items() if n not in (*_ADDED, "out_dtype")}
_PACKED = {n: x for n, x in _DENSE.items() if n not in ("kv_lengths", "layout")}
_USUAL_PACKED = _USUAL.keys() & _PACKED.keys()
_ADDED_PACKED = tuple(n for n in _ADDED if n in _PACKED)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DenseTensors],
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[DenseTensors]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[DenseTensors]
) -> Tensor | tuple[Tensor, Tensor]: ...


@spelled_out(AttentionOptions(), *_DENSE)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | Any = None,
    deterministic: bool = True,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """``kernelseam.attention`` on torch tensors, with gradients to q, k, v, ``bias``, ``sinks`` and
    the tensors that ``score_mod`` captures (there is none to ``bias`` beside a ``score_mod`` or a
    ``mask_mod``, as FlexAttention takes them).

    ``return_lse``: (result, LSE), both of which have gradients. ``out_dtype`` may be torch's;
    gradients of a result of another dtype than q's start from it rounded to that.
    ``deterministic=False`` allows gradients whose order of summation varies, where that is faster.
    ``implementation`` selects one of the forward, ``bwd_implementation`` one of the gradients. Both
    run on torch's current stream. All else is as there, shapes and dtypes too. A bias that repeats
    because it has extent 1, or lacks an axis, takes the sum over what it repeats along; one that is
    expanded takes a gradient of its whole shape, which torch sums.

    Nested q, k and v of layout torch.jagged, [B, H, rows, D] (``layout`` "bshd": [B, rows, H, D]),
    are taken as packed sequences, and so is the result; the LSE is then refused. Under
    torch.autocast q, k and v are converted to its dtype. Where torch compiles, exports or
    transforms the caller, ``torch.ops.kernelseam`` is called.

    Gradients are differentiable once: under ``create_graph`` a second derivative raises
    InvalidValue. Where none are wanted, nothing is kept for them.
    """
    needed, mods = ("q", "k", "v"), None  # the usual call makes no object of them
    if not (score_mod is mask_mod is block_mask is None):
        mods = Mods(score_mod, mask_mod, block_mask)
    elif (
        (bwd_implementation is None and deterministic is True)
        and options.keys() <= _USUAL.keys()
        and (wants := plain_kind(q, k, v)) is not None
    ):
        if not wants:
            where = backend, implementation, None
            return DENSE.call({"q": q, "k": k, "v": v}, options, (None, None, None), None, where)
        options |= {"backend": backend, "implementation": implementation}
        return _apply_here(needed, options, None, *map(unwrap_if_dead, (q, k, v)))
    given, options = _parted("attention", _DENSE, options, backend)
    given |= {"q": q, "k": k, "v": v}
    return _apply(given, needed, options, implementation, deterministic, bwd_implementation, mods)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PackedTensors],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[PackedTensors],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **options: Unpack[PackedTensors],
) -> Tensor | tuple[Tensor, Tensor]: ...


@spelled_out(AttentionOptions(), *_PACKED)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | Any = None,
    deterministic: bool = True,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """``kernelseam.attention_varlen`` on torch tensors, with gradients to q, k, v, ``bias`` and
    ``sinks``; see ``attention``.

    Rows that belong to no sequence are 0, in the result and in the gradients, and −inf in the LSE.
    """
    operands: tuple[Tensor, ...] = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    needed, mods = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), None
    if not (score_mod is mask_mod is block_mask is None):
        mods = Mods(score_mod, mask_mod, block_mask)
    elif (
        (bwd_implementation is None and deterministic is True)
        and options.keys() <= _USUAL_PACKED
        and (wants := plain_kind(*operands)) is not None
    ):
        options |= {**longest, "backend": backend, "implementation": implementation}
        if not wants:
            return torch_attention.forward(dict(zip(needed, operands, strict=True)), options)
        return _apply_here(needed, options, None, *map(unwrap_if_dead, operands))
    given, options = _parted("attention_varlen", _PACKED, options, backend)
    given |= dict(zip(needed, operands, strict=True))
    options |= longest
    return _apply(given, needed, options, implementation, deterministic, bwd_implementation, mods)


def _parted(
    function: str, defaults: dict[str, Any], options: dict[str, Any], backend: str | None
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """(operands, None for those that are not given; all other options, defaults filled in)."""
    if not options.keys() <= defaults.keys():
        refuse_others(function, options, defaults)
    whole = {**defaults, **options, "backend": backend}
    operands = _ADDED_PACKED if defaults is _PACKED else _ADDED
    # by calls that make no frames of Python's
    return dict(zip(operands, map(whole.pop, operands), strict=True)), whole


def _apply(
    given: dict[str, Tensor | None],
    needed: tuple[str, ...],
    options: dict[str, Any],
    implementation: str | None,
    deterministic: bool,
    bwd_implementation: str | None,
    mods: Mods | None,
) -> Any:
    if deterministic is not True:
        deterministic = flag("deterministic", deterministic)
    if options["out_dtype"] is not None:
        options["out_dtype"] = dtype_name(options["out_dtype"])
    known, wants = plain(given)
    usual = not wants and mods is None and bwd_implementation is None
    if usual and known is not None and all(map(known.__contains__, needed)):
        options["implementation"] = implementation
        return torch_attention.forward(known, options)
    operands, traced = tensors(given, needed)
    nested = operands["q"].is_nested
    if nested and mods is not None:
        raise InvalidValue(
            "score_mod, mask_mod, block_mask",
            "given",
            "are not supported of nested tensors",
            "Call attention_varlen on their rows",
        )
    operands = autocast(operands, ("q", "k", "v"))
    if traced or nested:
        chosen = {
            "deterministic": deterministic,
            "implementation": implementation,
            "bwd_implementation": bwd_implementation,
        }
    if nested and "layout" in options and torch_nested.is_jagged(operands["q"]):
        return torch_nested.attention(operands, options, chosen, attention_varlen)
    if traced:
        return _traced(operands, options, chosen, mods)
    check_bwd_implementation(bwd_implementation, "attention_bwd", "q", operands)
    forward = {**options, "implementation": implementation}
    functions, learnt, captured = dict[str, Any](), False, list[Tensor]()
    differentiable: tuple[str, ...] = DIFFERENTIABLE
    if mods is not None:
        # once: at the gradients a function may find other values
        expression = functions["score_mod"] = score_expression(*mods)
        captured = captured_tensors(expression)
        learning = [torch.is_grad_enabled() and x.requires_grad for x in captured]
        learnt = any(torch_scores.learnt_by(expression, learning, operands))
        differentiable = tuple(n for n in DIFFERENTIABLE if n != "bias")
    if not wanted(operands, differentiable) and not learnt:
        return torch_attention.forward(operands, forward | functions)
    backward = _of_gradients(options, deterministic, bwd_implementation) | functions
    every = (*operands.values(), *captured)
    return _Attention.apply(tuple(operands), forward | functions, backward, *every)


def _of_gradients(
    options: dict[str, Any], deterministic: bool, implementation: str | None
) -> dict[str, Any]:
    own = {n: x for n, x in options.items() if n in _OF_GRADIENTS}
    return {**own, "deterministic": deterministic, "implementation": implementation}


_OF_GRADIENTS = (*scalars_of(GradientOptions), "backend")


def _traced(
    operands: dict[str, Tensor], options: dict[str, Any], chosen: dict[str, Any], mods: Mods | None
) -> Any:
    """By the operator that torch knows."""
    from kernelseam.interop.torch_library import attention as operators
    from kernelseam.interop.torch_library.mods import CAPTURED
    from kernelseam.interop.torch_library.mods import traced as traced_mods

    window, asked = options.pop("window"), options.pop("return_lse")
    left, right = (None, None) if window is None else band("window", window)
    names, operator = (
        (operators.FORWARD_VARLEN, operators.ATTENTION_VARLEN)
        if "cu_seqlens_q" in operands
        else (operators.FORWARD_DENSE, operators.ATTENTION)
    )
    if mods is not None:
        text, numbers, arrays = traced_mods(*mods, operands["q"])
        operator, names = operators.MODS[names]
        operands = {**operands, **dict(zip(CAPTURED, arrays, strict=False))}
        options = {**options, "expression": text, "captured_numbers": numbers}
    out, lse = operator(
        *[operands.get(n) for n in names],
        **options,
        **chosen,
        window_left=left,
        window_right=right,
        return_lse=asked,
    )
    return (out, lse) if asked else out


@differentiable_once("attention")
def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Gradients:
    names, needed = ctx.names, ctx.needs_input_grad[3:]
    if dout is None and dlse is None:
        return (None,) * (3 + len(needed))
    *inputs, out, lse = ctx.saved_tensors
    given = dict(zip(names, inputs, strict=False))
    if (usual := ctx.usual) and (made := usual.gradients(dout, given, out, lse)):
        return (None, None, None, *map(made.get, map("d".__add__, names)))
    asked = dict(zip(names, needed, strict=False))
    options, learnt = ctx.options, tuple[bool, ...]()
    if captured := inputs[len(names) :]:
        expression = over(options["score_mod"], captured)
        learnt = torch_scores.learnt_by(expression, needed[len(names) :], given)
        options = {**options, "score_mod": expression, "score_gradient": any(learnt)}
    computed = torch_attention.gradients(
        dout,
        dlse,
        given,
        out,
        lse,
        bias_gradient=asked.get("bias", False),
        sink_gradient=asked.get("sinks", False),
        **options,
    )
    result = dict(zip(DIFFERENTIABLE, computed, strict=False))
    if not learnt and all(needed):
        return (None, None, None, *map(result.get, names))
    own = [result[n] if x else None for n, x in asked.items()]
    more: Any = (None,) * len(learnt)
    if any(learnt):
        more = torch_scores.by_captured(learnt, computed.dscores, given, options)
    return (None, None, None, *own, *more)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Operands by name; options of the forward and of the gradients; then all operands, and what
    the expression captures."""

    @staticmethod
    def forward(
        ctx: Any,
        names: tuple[str, ...],
        options: dict[str, Any],
        bwd_options: dict[str, Any] | None,
        *tensors: Tensor,
    ) -> Any:
        usual, asked = None, options.get("return_lse", False)
        if bwd_options is None:
            usual = None if asked else torch_attention.usual(options)
            bwd_options = _of_gradients(options, True, None) if usual is None else usual.bwd_options
        operands = dict(zip(names, tensors, strict=False))
        if type(asked) is not bool:
            asked = flag("return_lse", asked)
        ahead = expect(partial(torch_attention.gradients_ahead, operands, options, bwd_options))
        try:
            if usual is None:
                result = torch_attention.forward(operands, {**options, "return_lse": True}, asked)
            else:
                result = usual.result(operands)
        finally:
            expect_no_more(ahead)
        ctx.names, ctx.options, ctx.usual = names, bwd_options, usual
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *result)
        return result if asked else result[0]

    backward = staticmethod(_gradients)


_apply_here = super(torch.autograd.Function, _Attention).apply
"""What ``_Attention.apply`` comes to where no transform of torch.func is active."""
