"""Gradients of an attention by the tensors that its score_mod captures. Imports torch.

They begin with those by every score, [B, H, S_q, S_k], which the gradient kernel writes;
torch's autograd takes them on through the expression, an entry of the batch at a time. Their order
is that of torch's own indexing: the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kernelseam.errors import InvalidValue
from kernelseam.expressions.derivatives import array_gradients
from kernelseam.expressions.nodes import order
from kernelseam.expressions.scores import ScoreExpression
from kernelseam.interop.torch_expression import captured_tensors, gradients_by_tensors

Tensor = Any


class Mods(NamedTuple):
    score_mod: Any = None
    mask_mod: Any = None
    block_mask: Any = None


def learnt_by(
    expression: ScoreExpression, wanted: Sequence[bool], operands: Mapping[str, Tensor]
) -> tuple[bool, ...]:
    """Which of ``captured_tensors`` have gradients, of those that are wanted: none that the mask
    alone reads."""
    read = {n.value[0] for n in order([expression.structure.score]) if n.operation == "load"}
    numbers = (i for i, x in enumerate(expression.arrays) if isinstance(x, torch.Tensor))
    found = tuple(w and i in read for i, w in zip(numbers, wanted, strict=True))
    if any(found) and "cu_seqlens_q" in operands:
        raise InvalidValue(
            "score_mod",
            "captures a tensor that wants a gradient",
            "of packed sequences there is none by what it captures",
            "Call attention on each sequence, or detach the tensor",
        )
    return found


def by_captured(
    learnt: Sequence[bool],
    dscores: Tensor,
    operands: Mapping[str, Tensor],
    options: Mapping[str, Any],
) -> list[Tensor | None]:
    """Gradients by captured tensors, given those by every score."""
    expression: ScoreExpression = options["score_mod"]
    root = expression.structure.score
    gradients = array_gradients(root)
    reads_scores = any("score" in g.factor.reads for g in gradients)
    _, H, S_q, S_k = dscores.shape
    device = dscores.device
    h, i, j = (
        torch.arange(n, device=device).reshape([-1 if axis == at else 1 for axis in range(3)])
        for at, n in enumerate((H, S_q, S_k))
    )
    totals = [
        torch.zeros_like(x) if w else None
        for x, w in zip(captured_tensors(expression), learnt, strict=True)
    ]
    for b, arriving in enumerate(dscores):
        keys = int(operands["kv_lengths"][b]) if "kv_lengths" in operands else S_k
        scores = torch.zeros((1, 1, 1), dtype=dscores.dtype, device=device)
        if reads_scores:
            scores = _scores(b, operands, options, keys, dscores.dtype)
        at = {"score": scores, "b": b, "h": h, "q_idx": i, "kv_idx": j[..., :keys]}
        at |= {"q_len": S_q, "kv_len": keys}
        own = arriving[..., :keys]
        parts = gradients_by_tensors(root, at, expression, learnt, own, dscores)
        for total, part in zip(totals, parts, strict=True):
            if total is not None and part is not None:
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
