"""The projections around an attention whose heads lie on several ranks: each rank has the columns
of its heads, and between them the rows of all. Rows go in chunks: while one chunk travels, another
is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernelseam.descriptors.common.validation import extent, flag
from kernelseam.distributed.agreement import agree
from kernelseam.distributed.operands import (
    check_axes,
    check_names,
    check_operand,
    check_own,
    described,
    one_of,
    own_tensors,
)
from kernelseam.distributed.order import ORDERS, joined, parted
from kernelseam.distributed.partials import wider
from kernelseam.distributed.ranks import Axis, axis_of
from kernelseam.distributed.transfers import Transfer, start_gather, start_scatter, start_sum
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import (
    Gradients,
    autocast,
    check_bwd_implementation,
    differentiable_once,
    wanted,
    with_rows,
)
from kernelseam.ops import projection, projection_bwd

Tensor = Any
ROWS = ("sharded", "whole")


def shard_qkv(
    weight: Tensor, *, group: Any, num_heads: int, num_kv_heads: int | None = None
) -> Tensor:
    """This rank's rows of a whole weight [(num_heads + 2·num_kv_heads)·head_dim, …], or bias: those
    of its q heads, then of its k and v heads. Differentiable, without a transfer."""
    axis = axis_of(group)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    _check_heads(axis, num_heads, kv_heads)
    check_own({"weight": weight}, ("weight",))
    total = num_heads + 2 * kv_heads
    if not weight.ndim:
        raise InvalidValue("weight", "a tensor of no axes", "has no rows", "Pass one that has")
    if weight.shape[0] % total:
        raise InvalidValue(
            "weight.shape[0]",
            weight.shape[0],
            f"must be a multiple of num_heads + 2·num_kv_heads = {total}",
            "Check the numbers of heads",
        )
    dim = weight.shape[0] // total
    parts = weight.split([num_heads * dim, kv_heads * dim, kv_heads * dim])
    return torch.cat([p.chunk(axis.size)[axis.index] for p in parts])


def qkv_projection(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Any,
    num_heads: int,
    num_kv_heads: int | None = None,
    rows: str = "sharded",
    order: str = "contiguous",
    chunks: int = 4,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of this rank's heads and all rows: ``kernelseam.fused_qkv_projection`` with its
    weight by heads over the n ranks of ``group``.

    ``rows`` "sharded": input [B, S/n, hidden] is this rank's rows (``order`` as ``shard`` has
    them), gathered in ``chunks``, each while the one before is multiplied; d_input is summed over
    ranks in float32 (float64 of float64) and scattered likewise. "whole": input [B, S, hidden] is
    the same on every rank, and so is d_input, by an all-reduce. ``weight``
    [(num_heads + 2·num_kv_heads)/n·head_dim, hidden] and ``bias`` are this rank's, as ``shard_qkv``
    cuts them; num_heads and num_kv_heads are the whole's, multiples of n. Fewer chunks are taken
    where rows have no such divisor.

    Returns q [B, num_heads/n, S, head_dim], k and v [B, num_kv_heads/n, S, head_dim], their rows in
    the order of the whole: ``kernelseam.interop.torch.attention`` goes between this and
    ``output_projection``. Raises as ``attention``.
    """
    axis = axis_of(group)
    given = {"input": input, "weight": weight, "bias": bias}
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads

    def make() -> tuple[_ShardedProjection, dict[str, object]]:
        _check_heads(axis, num_heads, kv_heads)
        names = (backend, implementation, bwd_implementation)
        call = _call(axis, given, "qkv_projection_bwd", rows, order, chunks, names)
        call.heads = (num_heads // axis.size, kv_heads // axis.size)
        total = call.heads[0] + 2 * call.heads[1]
        x, w = call.operands["input"], call.operands["weight"]
        check_axes("input", x, "B, rows, hidden")
        check_axes("weight", w, "rows, hidden")
        if w.shape[0] % total or w.shape[1] != x.shape[-1]:
            raise InvalidValue(
                "weight",
                tuple(w.shape),
                f"must be [{total}·head_dim, hidden] beside an input [B, rows, hidden], here "
                f"{tuple(x.shape)}",
                "Cut it with shard_qkv",
            )
        _check_order(call, "input.shape[1]", x.shape[1])
        return call, call.said | {"num_heads": num_heads, "num_kv_heads": kv_heads}

    call = agree(axis, flag("check", check), make)
    x = call.operands
    q, k, v = _Qkv.apply(call, x["input"], x["weight"], x.get("bias"))
    return q, k, v


def output_projection(
    attn_out: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    group: Any,
    rows: str = "sharded",
    order: str = "contiguous",
    chunks: int = 4,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
    check: bool = False,
) -> Tensor:
    """``kernelseam.fused_output_projection_residual`` of heads that lie on the n ranks of
    ``group``: attn_out [B, H/n, S, D] of all rows, ``weight`` [hidden, H/n·D] of this rank's heads
    (``shard(weight, dim=1)``).

    The ranks' products are summed in float32 (float64 of float64), in ``chunks`` of rows, each
    while the next is multiplied; then bias and residual are added, once, and all is rounded once.
    ``rows`` "sharded": by reduce-scatter, the result and ``residual`` are this rank's rows
    [B, S/n, hidden] (``order`` as ``shard`` has them); "whole": by all-reduce, both are
    [B, S, hidden] and the same on every rank. ``bias`` [hidden] is the same on every rank; its
    gradient is of this rank's rows: sum it over ranks where rows are sharded.

    Raises as ``attention``.
    """
    axis = axis_of(group)
    given = {"attn_out": attn_out, "weight": weight, "bias": bias, "residual": residual}

    def make() -> tuple[_ShardedProjection, dict[str, object]]:
        names = (backend, implementation, bwd_implementation)
        call = _call(axis, given, "output_projection_bwd", rows, order, chunks, names)
        x, w = call.operands["attn_out"], call.operands["weight"]
        check_axes("attn_out", x, "B, H/n, S, D")
        check_axes("weight", w, "hidden, H/n·D")
        if w.shape[1] != x.shape[1] * x.shape[3]:
            raise InvalidValue(
                "weight",
                tuple(w.shape),
                f"must be [hidden, H/n·D] beside an attn_out [B, H/n, S, D], here {tuple(x.shape)}",
                "Cut it with shard(weight, dim=1)",
            )
        count = axis.size if rows == "sharded" else 1
        if x.shape[2] % count:
            raise InvalidValue(
                "attn_out.shape[2]",
                x.shape[2],
                f"must be a multiple of the {count} ranks",
                f"Pad to {-(-x.shape[2] // count) * count}",
            )
        each = x.shape[2] // count
        _check_order(call, "attn_out.shape[2]", each)
        shape, dtypes = (x.shape[0], each, w.shape[0]), (x.dtype, torch.float32)
        for name, extents in (("residual", shape), ("bias", shape[2:])):
            check_operand(name, call.operands.get(name), x, dtypes, extents)
        return call, call.said

    call = agree(axis, flag("check", check), make)
    x = call.operands
    return _Output.apply(call, x["attn_out"], x["weight"], x.get("bias"), x.get("residual"))


@dataclass(eq=False)
class _ShardedProjection:
    axis: Axis
    operands: dict[str, Tensor]
    sharded: bool
    balanced: bool
    chunks: int
    backend: str | None
    implementation: str | None
    bwd_implementation: str | None
    said: dict[str, object]
    heads: tuple[int, int] = (0, 0)

    @property
    def parts(self) -> int:
        """Of how many ranks the rows of a product are."""
        return self.axis.size if self.sharded else 1

    def pieces(self, rows: int) -> list[slice]:
        """A rank's rows in chunks of one length."""
        count = max(c for c in range(1, min(self.chunks, max(rows, 1)) + 1) if rows % c == 0)
        each = rows // count
        return [slice(i * each, (i + 1) * each) for i in range(count)]

    def gather(self, x: Tensor, step: str) -> tuple[Tensor, Transfer]:
        """[n·B, rows, …] of every rank's x [B, rows, …]; x itself where rows are whole."""
        if not self.sharded:
            return x, Transfer((), step, None, 0)
        out, transfer = start_gather(self.axis, x.contiguous(), self._named(step))
        return out.flatten(0, 1), transfer

    def scatter(self, x: Tensor, step: str) -> tuple[Tensor, Transfer]:
        """[B, rows, …] of the sum over ranks of x [n·B, rows, …]: this rank's rows, or all."""
        if not self.sharded:
            return start_sum(self.axis, x.contiguous(), self._named(step))
        x = x.unflatten(0, (self.axis.size, -1)).contiguous()
        return start_scatter(self.axis, x, self._named(step))

    def _named(self, step: str) -> str:
        return f"{step} on rank {self.axis.index} of {self.axis.size}"

    def by_rank(self, x: Tensor) -> list[Tensor]:
        """Rows of the whole x [B, H, S, D] by rank."""
        return parted(x, self.parts, 2, self.balanced)

    def whole(self, chunks: list[Tensor]) -> Tensor:
        """[B, H, S, D] from chunks [n·B, H, rows, D]."""
        x = torch.cat(chunks, 2)
        return joined(list(x.unflatten(0, (self.parts, -1)).unbind(0)), 2, self.balanced)


def _stacked(by_rank: list[Tensor], piece: slice) -> Tensor:
    """[n·B, H, rows, D] of a chunk of every rank's rows."""
    return (
        torch.cat([x[:, :, piece] for x in by_rank])
        if len(by_rank) > 1
        else by_rank[0][:, :, piece]
    )


def _call(
    axis: Axis,
    given: dict[str, Any],
    gradients: str,
    rows: str,
    order: str,
    chunks: int,
    names: tuple[str | None, str | None, str | None],
) -> _ShardedProjection:
    """What was checked of a call. ``gradients``: their operation; ``names``: of the backend and the
    implementations of results and gradients."""
    needed = tuple(given)[:2]
    one_of("rows", rows, ROWS)
    one_of("order", order, ORDERS)
    operands = autocast(own_tensors(given, needed), needed)
    wanted(operands, tuple(given))
    said = described(operands)
    check_names(backend=names[0], implementation=names[1])
    check_bwd_implementation(names[2], gradients, needed[0], operands)
    said |= {"rows": rows, "order": order, "chunks": extent("chunks", chunks, 1)}
    said |= zip(("backend", "implementation", "bwd_implementation"), names, strict=True)
    return _ShardedProjection(
        axis, operands, rows == "sharded", order == "balanced", chunks, *names, said
    )


def _check_heads(axis: Axis, num_heads: int, kv_heads: int) -> None:
    for name, count in (("num_heads", num_heads), ("num_kv_heads", kv_heads)):
        if extent(name, count, 1) % axis.size:
            raise InvalidValue(
                name,
                count,
                f"must be a multiple of the {axis.size} ranks",
                "Shard the sequence instead: kernelseam.distributed.attention",
            )


def _check_order(call: _ShardedProjection, field: str, rows: int) -> None:
    if call.sharded and call.balanced and rows % 2:
        raise InvalidValue(
            field,
            rows,
            "order 'balanced' has two chunks of one length on each rank",
            "Pad the sequence, or shard it with order='contiguous'",
        )


class _Qkv(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, call: _ShardedProjection, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        result: list[tuple[Tensor, Tensor, Tensor]] = []
        options: dict[str, Any] = {"backend": call.backend, "implementation": call.implementation}

        def multiply(rows: Tensor, piece: slice) -> None:
            result.append(
                projection.fused_qkv_projection(rows, weight, bias, *call.heads, **options)
            )

        _gathering(call, x, "gather of the projection's input", multiply)
        ctx.call, ctx.bias = call, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        q, k, v = (call.whole([chunk[i] for chunk in result]) for i in range(3))
        return q, k, v

    @staticmethod
    @differentiable_once("kernelseam.distributed.qkv_projection")
    def backward(ctx: Any, *given: Tensor) -> Gradients:
        call, (x, weight) = ctx.call, ctx.saved_tensors
        wide, (heads, kv_heads) = wider(x.dtype), call.heads
        of_x, of_weight = ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:])
        dim = given[0].shape[3]
        by_rank = [call.by_rank(with_rows(g.to(x.dtype))) for g in given]
        d_weight = torch.zeros_like(weight, dtype=wide)
        d_bias = None if ctx.bias is None else weight.new_zeros(weight.shape[0], dtype=wide)
        sums: list[tuple[Tensor, Transfer]] = []

        def multiply(rows: Tensor, piece: slice) -> None:
            dq, dk, dv = (_stacked(g, piece) for g in by_rank)
            result = projection_bwd.fused_qkv_projection_bwd(
                dq,
                dk,
                dv,
                rows,
                weight,
                ctx.bias is not None,
                heads,
                kv_heads,
                dim,
                input_gradient=of_x,
                weight_gradient=of_weight,
                backend=call.backend,
                implementation=call.bwd_implementation,
            )
            if of_weight:
                d_weight.add_(result.d_weight)
            if of_weight and d_bias is not None:
                d_bias.add_(result.d_bias)
            if result.d_input is not None:
                sums.append(call.scatter(result.d_input.to(wide), "sum of the input's gradient"))

        _gathering(call, x, "gather of the projection's input", multiply)
        d_x = torch.cat([_done(*s) for s in sums], 1).to(x.dtype) if of_x else None
        return (
            None,
            d_x,
            d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(ctx.bias),
        )


class _Output(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        call: _ShardedProjection,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        wide = wider(x.dtype)
        by_rank = call.by_rank(x)
        sums = []
        for piece in call.pieces(by_rank[0].shape[2]):
            part = projection.fused_output_projection_residual(
                _stacked(by_rank, piece),
                weight,
                out_dtype=str(wide).removeprefix("torch."),
                backend=call.backend,
                implementation=call.implementation,
            )
            sums.append(call.scatter(part, "sum of the projection's result"))
        out = torch.cat([_done(*s) for s in sums], 1)
        for added in (bias, residual):
            if added is not None:
                out += added
        ctx.call = call
        ctx.dtypes = [None if a is None else a.dtype for a in (bias, residual)]
        ctx.save_for_backward(x, weight)
        return out.to(x.dtype)

    @staticmethod
    @differentiable_once("kernelseam.distributed.output_projection")
    def backward(ctx: Any, given: Tensor) -> Gradients:
        call, (x, weight) = ctx.call, ctx.saved_tensors
        wide, (of_bias, of_residual) = wider(x.dtype), ctx.dtypes
        of_x, of_weight = ctx.needs_input_grad[1:3]
        by_rank = call.by_rank(x)
        d_weight = torch.zeros_like(weight, dtype=wide)
        d_rows: list[Tensor] = []

        def multiply(rows: Tensor, piece: slice) -> None:
            gradients = projection_bwd.fused_output_projection_residual_bwd(
                rows,
                _stacked(by_rank, piece),
                weight,
                False,
                input_gradient=of_x,
                weight_gradient=of_weight,
                backend=call.backend,
                implementation=call.bwd_implementation,
            )
            if of_weight:
                d_weight.add_(gradients.d_weight)
            if of_x:
                d_rows.append(gradients.d_attn_out)

        if of_x or of_weight:
            rows_of = with_rows(given.to(x.dtype))
            _gathering(call, rows_of, "gather of the result's gradient", multiply)
        d_bias = None if of_bias is None else given.to(wide).sum((0, 1)).to(of_bias)
        d_residual = None if of_residual is None else given.to(of_residual)
        d_x = call.whole(d_rows) if of_x else None
        return None, d_x, d_weight.to(weight.dtype), d_bias, d_residual


def _gathering(
    call: _ShardedProjection, x: Tensor, step: str, multiply: Callable[[Tensor, slice], None]
) -> None:
    """Hand over chunks of x's rows from all ranks, the next under way meanwhile."""
    pieces = call.pieces(x.shape[1])
    coming = call.gather(x[:, pieces[0]], step)
    for i, piece in enumerate(pieces):
        here = coming
        if i + 1 < len(pieces):
            coming = call.gather(x[:, pieces[i + 1]], step)
        multiply(_done(*here), piece)


def _done(x: Tensor, transfer: Transfer) -> Tensor:
    transfer.wait()
    return x
