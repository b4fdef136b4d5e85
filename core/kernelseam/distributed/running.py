"""An attention that was checked, as it runs on a rank: heads for rows where ranks share heads, the
ring or the gathered keys between the others, and gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernelseam.distributed import gathered, heads, ring
from kernelseam.distributed.mods import Mods
from kernelseam.distributed.partials import wider
from kernelseam.distributed.pieces import Options
from kernelseam.distributed.plan import Mask
from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.ring import Ring
from kernelseam.distributed.states import states_dtype
from kernelseam.expressions.scores import ScoreExpression
from kernelseam.frozen import dataclass
from kernelseam.interop.torch_expression import captured_tensors
from kernelseam.interop.torch_function import Gradients, differentiable_once, with_rows

Tensor = Any


class Setup(NamedTuple):
    """What an attention over the ranks of one axis takes beside its operands."""

    around: Ring
    method: str
    options: Options
    out_dtype: Any

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Any:
        """(result, LSE)."""
        return _Attention.apply(self, q, k, v, sinks)


@dataclass(frozen=True, eq=False)
class ShardedAttention:
    """An attention that was checked: what runs where."""

    outer: Axis
    inner: Axis
    method: str
    balanced: bool
    mask: Mask
    operands: dict[str, Tensor]
    forward: dict[str, Any]
    backward: dict[str, Any]
    out_dtype: Any
    return_lse: bool
    expression: ScoreExpression | None = None

    def run(self) -> Any:
        x = self.operands
        q, k, v, sinks = x["q"], x["k"], x["v"], x.get("sinks")
        slopes, n, head = x.get("alibi_slopes"), self.inner.size, None
        if n > 1:
            each = q.shape[1] // n
            head = self.inner.index * each
            mine = slice(head, head + each)
            q, k, v = heads.heads_for_rows(self.inner, (q, k, v), self.balanced)
            sinks = None if sinks is None else sinks[mine]
            slopes = None if slopes is None else slopes[..., mine]
        setup = self.setup(q, k, v, sinks, slopes, head)
        out, lse = setup.run(q, k, v, sinks)
        if n == 1:
            return (out, lse) if self.return_lse else out
        (out,) = heads.rows_for_heads(self.inner, (out,), self.balanced)
        if not self.return_lse:
            return out
        (lse,) = heads.rows_for_heads(self.inner, (lse.unsqueeze(-1),), self.balanced)
        return out, lse.squeeze(-1)

    def setup(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        head: int | None = None,
    ) -> Setup:
        """``head``: the first of q's, where ranks share heads."""
        lengths = self.operands.get("prefix_lengths", self.operands.get("kv_lengths"))
        around = Ring(self.outer, self.mask, self.balanced)
        narrow = sinks is None and self.out_dtype in (None, q.dtype)
        states = self.out_dtype  # asked for in float32, nothing is rounded before
        if states in (None, q.dtype):
            states = states_dtype(q, k, v, self.mask, self.forward)
        mods = None if self.expression is None else Mods(self.expression, self.mask, head)
        options = Options(self.forward, self.backward, slopes, lengths, states, mods, narrow)
        return Setup(around, self.method, options, self.out_dtype)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The ring's, or the gathered, (result, LSE) of rows that lie on the ranks of one axis."""

    @staticmethod
    def forward(
        ctx: Any, setup: Setup, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        around, method, options, out_dtype = setup
        by = gathered if method == "all_gather" else ring
        out, lse = by.forward(around, q, k, v, options)
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
            out *= torch.exp(lse - with_sink).masked_fill_(lse == -torch.inf, 0).unsqueeze(-1)
            lse = with_sink
            nowhere = around.of_no_document(q.device)
            if nowhere is not None:
                lse = lse.masked_fill_(nowhere, -torch.inf)
        result = out.to(out_dtype or q.dtype)
        ctx.setup, ctx.has_sinks = setup, sinks is not None
        ctx.set_materialize_grads(False)
        rounded = result if result.dtype == q.dtype else out.to(q.dtype)
        kept = () if sinks is None else (sinks,)
        # the rest so that torch refuses gradients where it was changed since
        beside = [x for x in (options.slopes, options.lengths) if x is not None]
        if options.mods is not None:
            beside += captured_tensors(options.mods.expression)
        ctx.save_for_backward(q, k, v, rounded, lse, *kept, *beside)
        return result, lse

    @staticmethod
    @differentiable_once("kernelseam.distributed.attention")
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        around, method, options, _ = ctx.setup
        q, k, v, out, lse, *rest = ctx.saved_tensors
        given = (None if dout is None else with_rows(dout.to(q.dtype)), dlse)
        if dout is None and dlse is None:
            given = (torch.zeros_like(out), None)  # the other ranks wait for this one
        by = gathered if method == "all_gather" else ring
        result = by.backward(around, given, q, k, v, out, lse, options)
        dq, dk, dv = (a.to(x.dtype) for a, x in zip(result, (q, k, v), strict=True))
        dsinks = None
        if ctx.has_sinks and ctx.needs_input_grad[4]:
            dsinks = _of_sinks(rest[0], given, out, lse)
        return None, dq, dk, dv, dsinks


def _of_sinks(
    sinks: Tensor, given: tuple[Tensor | None, Tensor | None], out: Tensor, lse: Tensor
) -> Tensor:
    """−Σ e^(sink − lse)·(dout·out − dlse) over this rank's rows."""
    wide = wider(out.dtype)
    dout, dlse = given
    delta = torch.zeros_like(lse) if dout is None else (dout.to(wide) * out.to(wide)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(sinks.to(wide).view(1, -1, 1) - lse)
    return -(share.masked_fill_(lse == -torch.inf, 0) * delta).sum((0, 2)).to(sinks.dtype)
