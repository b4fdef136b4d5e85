"""Attention under a score_mod and a mask_mod that torch differentiates: by q, k, v, sinks, and by
the tensors that the score_mod captures. Imports torch.

Gradients by captured tensors begin with those by every score, [B, H, S_q, S_k], which the gradient
kernel writes; the function itself takes them on through torch's autograd, an entry of the batch at
a time. Their order is that of torch's own indexing: the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from kernelseam.descriptors.common.validation import flag
from kernelseam.errors import InvalidValue
from kernelseam.expressions.derivatives import array_gradients
from kernelseam.expressions.scores import ScoreExpression, score_expression
from kernelseam.expressions.tracing import asked
from kernelseam.interop import torch_attention
from kernelseam.interop.torch_function import (
    Gradients,
    autocast,
    check_bwd_implementation,
    differentiable_once,
    tensors,
    wanted,
)

Tensor = Any
DIFFERENTIABLE = ("q", "k", "v", "sinks")


class Mods(NamedTuple):
    score_mod: Any = None
    mask_mod: Any = None
    block_mask: Any = None


def attention(
    given: Mapping[str, Tensor | None],
    needed: tuple[str, ...],
    options: dict[str, Any],
    mods: Mods,
    implementation: str | None,
    backward: dict[str, Any],
) -> Any:
    """The result, or (result, lse). ``backward``: options of the gradients."""
    operands, _ = tensors(given, needed)
    if operands["q"].is_nested:
        raise InvalidValue(
            "score_mod, mask_mod, block_mask",
            "given",
            "are not supported of nested tensors",
            "Call attention_varlen on their rows",
        )
    operands = autocast(operands, ("q", "k", "v"))
    check_bwd_implementation(backward["implementation"], "attention_bwd", "q", operands)
    forward = {**options, **mods._asdict(), "implementation": implementation}
    learnt = _learnt(score_expression(*mods), operands)
    if not wanted(operands, DIFFERENTIABLE) and not learnt:
        return torch_attention.forward(operands, forward)
    names = tuple(operands)
    return _Attention.apply(
        names, forward, {**backward, **mods._asdict()}, *operands.values(), *learnt
    )


def _learnt(expression: ScoreExpression, operands: Mapping[str, Tensor]) -> list[Tensor]:
    """The captured tensors that want gradients."""
    if not torch.is_grad_enabled():
        return []
    found = [x for x in expression.arrays if getattr(x, "requires_grad", False)]
    if found and "cu_seqlens_q" in operands:
        raise InvalidValue(
            "score_mod",
            "captures a tensor that wants a gradient",
            "of packed sequences there is none by what it captures",
            "Call attention on each sequence, or detach the tensor",
        )
    return found


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Operands by name, then captured tensors; options of the forward and of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        names: tuple[str, ...],
        options: dict[str, Any],
        bwd_options: dict[str, Any],
        *inputs: Tensor,
    ) -> Any:
        operands = dict(zip(names, inputs, strict=False))
        asked = flag("return_lse", options["return_lse"])
        result = torch_attention.forward(operands, {**options, "return_lse": True}, asked)
        ctx.names, ctx.options = names, bwd_options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *result)
        return result if asked else result[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        result: Gradients = _gradients(ctx, *gradients)
        return result


@differentiable_once("attention")
def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Gradients:
    *inputs, out, lse = ctx.saved_tensors
    names, count = ctx.names, len(ctx.names)
    if dout is None and dlse is None:
        return (None,) * (3 + len(inputs))
    operands, learnt = dict(zip(names, inputs, strict=False)), inputs[count:]
    asked = dict(zip(names, ctx.needs_input_grad[3:], strict=False))
    wants = [i for i, x in enumerate(ctx.needs_input_grad[3 + count :]) if x]
    computed = torch_attention.gradients(
        dout,
        dlse,
        operands,
        out,
        lse,
        bias_gradient=False,
        sink_gradient=asked.get("sinks", False),
        score_gradient=bool(wants),
        **ctx.options,
    )
    by_name = {n: getattr(computed, f"d{n}") for n in DIFFERENTIABLE if asked.get(n)}
    by_captured: list[Tensor | None] = [None] * len(learnt)
    if wants:
        own = [learnt[i] for i in wants]
        parts = _by_captured(own, computed.dscores, operands, ctx.options)
        for i, x in zip(wants, parts, strict=True):
            by_captured[i] = x
    return (None, None, None, *map(by_name.get, names), *by_captured)


def _by_captured(
    learnt: list[Tensor],
    dscores: Tensor,
    operands: Mapping[str, Tensor],
    options: Mapping[str, Any],
) -> list[Tensor]:
    """Gradients by captured tensors, given those by every score."""
    mod = options["score_mod"]
    gradients = array_gradients(score_expression(mod).structure.score)
    reads_scores = any("score" in g.factor.reads for g in gradients)
    _, H, S_q, S_k = dscores.shape
    device = dscores.device
    h, i, j = (
        torch.arange(n, device=device).reshape([-1 if axis == at else 1 for axis in range(3)])
        for at, n in enumerate((H, S_q, S_k))
    )
    totals = [torch.zeros_like(x) for x in learnt]
    for b, arriving in enumerate(dscores):
        keys = int(operands["kv_lengths"][b]) if "kv_lengths" in operands else S_k
        lengths = {"q_len": S_q, "kv_len": keys}
        given = {n: lengths[n] for n in asked(mod)}
        scores = torch.zeros((1, 1, 1), dtype=dscores.dtype, device=device)
        if reads_scores:
            scores = _scores(b, operands, options, keys, dscores.dtype)
        with torch.enable_grad():
            new = mod(scores, torch.tensor(b, device=device), h, i, j[..., :keys], **given)
            new = new.expand(H, S_q, keys)
            parts = torch.autograd.grad(
                new, learnt, arriving[..., :keys].to(new.dtype), allow_unused=True
            )
        for total, part in zip(totals, parts, strict=True):
            if part is not None:
                total += part
    return totals


def _scores(
    b: int, operands: Mapping[str, Tensor], options: Mapping[str, Any], keys: int, dtype: Any
) -> Tensor:
    """What score_mod is given for an entry of the batch, [H, S_q, keys]."""
    q, k = (operands[n][b].to(dtype) for n in "qk")
    if options.get("layout") == "bshd":
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    k = k[:, :keys].repeat_interleave(q.shape[0] // k.shape[0], 0)
    scale = options.get("scale")
    x = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if (cap := options.get("softcap")) is not None:
        x = cap * torch.tanh(x / cap)
    if (slopes := operands.get("alibi_slopes")) is not None:
        i, j = (torch.arange(n, device=x.device) for n in x.shape[1:])
        distance = (j - i[:, None] - (keys - x.shape[1])).abs()
        own = slopes if slopes.ndim < 2 else slopes[min(b, len(slopes) - 1)]
        x = x - own[:, None, None] * distance
    if (bias := operands.get("bias")) is not None:
        own = bias if bias.ndim < 4 else bias[min(b, len(bias) - 1)]
        x = x + own[..., :keys].to(dtype)
    return x
