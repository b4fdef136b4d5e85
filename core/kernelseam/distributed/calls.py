"""Attention over a sequence that lies on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from kernelseam.descriptors.attention.forward import band
from kernelseam.descriptors.common.extents import default_scale
from kernelseam.descriptors.common.validation import finite, flag
from kernelseam.distributed import costs, gathered, heads, ring
from kernelseam.distributed.agreement import agree
from kernelseam.distributed.order import ORDERS
from kernelseam.distributed.pieces import Options, wider
from kernelseam.distributed.plan import Mask
from kernelseam.distributed.ranks import Axis, axis_of
from kernelseam.distributed.ring import Ring
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import (
    Gradients,
    autocast,
    check_bwd_implementation,
    differentiable_once,
    tensors,
    with_rows,
)
from kernelseam.interop.torch_library.dtypes import torch_dtype

Tensor = Any
METHODS = ("auto", "ring", "all_gather", "ulysses", "mesh")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    method: str = "auto",
    order: str | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
    check: bool = False,
) -> Any:
    """``kernelseam.attention`` of the whole sequence, of which each rank of ``group`` has its rows:
    q [B, H, S_q/n, D], k [B, H_kv, S_k/n, D], v [B, H_kv, S_k/n, D_v]. Every rank calls it alike,
    and walks its gradients back alike.

    ``group``: a ProcessGroup or a dimension of a DeviceMesh; for ``method="mesh"`` also a mesh of
    two dimensions (ring, heads). ``order``: how rows lie, as ``shard`` has them: "contiguous", or
    "balanced" (rank r has chunks r and 2n − 1 − r of 2n), the default where ``causal``.

    ``method``: "ring" passes K and V round, "all_gather" has all of both on each rank, "ulysses"
    exchanges rows for heads (H a multiple of n, H_kv dividing n or its multiple), "mesh" does so
    within blocks of neighbours and passes round between blocks; "auto" is the one that ``explain``
    expects to be fastest.

    Masks are those of the whole sequence, in ``kernelseam.attention``'s words and with its
    defaults; ``alibi_slopes``, ``sinks``, ``prefix_lengths`` and ``kv_lengths`` are whole and the
    same on every rank. ``bias`` and ``mask`` are refused (no rank could hold them), and so is
    ``kv_lengths`` beside a band or slopes, whose diagonal it would move for each entry.

    Gradients flow to q, k, v and ``sinks``, of the sum of all ranks' losses; that of ``sinks`` is
    this rank's part, to be summed over ranks as that of every parameter. States are joined in
    float32 (float64 where q is), and rounded once.

    ``check``: one small exchange, so that shapes, dtypes or options that differ between ranks, and
    what one rank refuses, raise the same InvalidValue on every rank; without it such ranks end by
    the group's timeout. The contents of whole operands are not compared.

    Returns the rank's rows of the result [B, H, S_q/n, D_v], or (result, lse [B, H, S_q/n]).
    Raises InvalidValue for what does not fit together, RankLost where another rank does not answer.
    """
    given = {
        "q": q,
        "k": k,
        "v": v,
        "bias": bias,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "prefix_lengths": prefix_lengths,
        "kv_lengths": kv_lengths,
    }
    everyone, dims = _ranks(group, method)

    def make() -> tuple[Call, dict[str, object]]:
        return _call(
            given,
            everyone,
            dims,
            method,
            order,
            documents=None,
            options={
                "causal": causal,
                "window": window,
                "scale": scale,
                "softcap": softcap,
                "out_dtype": out_dtype,
                "return_lse": return_lse,
                "batch_invariant": batch_invariant,
                "deterministic": deterministic,
                "backend": backend,
                "implementation": implementation,
                "bwd_implementation": bwd_implementation,
            },
        )

    return agree(everyone, flag("check", check), make).run()


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    *,
    group: Any,
    method: str = "auto",
    order: str | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
    implementation: str | None = None,
    bwd_implementation: str | None = None,
    check: bool = False,
) -> Any:
    """Packed documents over several ranks: q [T/n, H, D], k [T/n, H_kv, D], v [T/n, H_kv, D_v] are
    this rank's rows of T, wherever documents begin.

    Document b has rows cu_seqlens[b] … cu_seqlens[b + 1] − 1 of the whole, of queries and keys
    alike. The offsets are the same on every rank, a list or an integer tensor; one on a device is
    read, which synchronises. ``alibi_slopes`` is [H]. The rest is as in ``attention``.

    Returns the rank's rows of the result [T/n, H, D_v], or (result, lse [H, T/n]). Rows of no
    document are 0, and −inf in the LSE.
    """
    everyone, dims = _ranks(group, method)

    def make() -> tuple[Call, dict[str, object]]:
        given: dict[str, Any] = {"q": q, "k": k, "v": v}
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                if x.ndim != 3:
                    raise InvalidValue(
                        name, tuple(x.shape), "must be [T/n, heads, dim]", "Pack the documents"
                    )
                given[name] = x.transpose(0, 1).unsqueeze(0)
        rows = q.shape[0] * everyone.size if isinstance(q, torch.Tensor) else 0
        return _call(
            {**given, "alibi_slopes": alibi_slopes, "sinks": sinks},
            everyone,
            dims,
            method,
            order,
            documents=_offsets(cu_seqlens, rows),
            options={
                "causal": causal,
                "window": window,
                "scale": scale,
                "softcap": softcap,
                "out_dtype": out_dtype,
                "return_lse": return_lse,
                "batch_invariant": batch_invariant,
                "deterministic": deterministic,
                "backend": backend,
                "implementation": implementation,
                "bwd_implementation": bwd_implementation,
            },
        )

    made = agree(everyone, flag("check", check), make).run()
    if return_lse:
        return made[0][0].transpose(0, 1), made[1][0]
    return made[0].transpose(0, 1)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    order: str | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    machine: costs.Machine | None = None,
) -> costs.Explanation:
    """Which method "auto" takes for such operands, and what the model of bytes, links and products
    expects of each. Nothing is launched or sent, and q, k and v may be on the meta device."""
    axis, dims = _ranks(group, "mesh" if isinstance(group, DeviceMesh) else "auto")
    left, right = _band(causal, window)
    balanced = _balanced(order, causal)
    mask = Mask(q.shape[2] * axis.size, k.shape[2] * axis.size, left, right)
    return costs.explain(
        costs.Sizes.of(q, k, v),
        mask,
        axis.size,
        balanced,
        machine or costs.machine_of(q.device, q.dtype),
    )


@dataclass(frozen=True, eq=False)
class Call:
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

    def run(self) -> Any:
        x = self.operands
        q, k, v, sinks = x["q"], x["k"], x["v"], x.get("sinks")
        slopes, n = x.get("alibi_slopes"), self.inner.size
        if n > 1:
            each = q.shape[1] // n
            mine = slice(self.inner.index * each, (self.inner.index + 1) * each)
            q, k, v = heads.heads_for_rows(self.inner, (q, k, v), self.balanced)
            sinks = None if sinks is None else sinks[mine]
            slopes = None if slopes is None else slopes[..., mine]
        lengths = x.get("prefix_lengths", x.get("kv_lengths"))
        around = Ring(self.outer, self.mask, self.balanced)
        narrow = sinks is None and self.out_dtype in (None, q.dtype)
        options = Options(self.forward, self.backward, slopes, lengths, narrow)
        setup = (around, self.method, options, self.out_dtype)
        out, lse = _Attention.apply(setup, q, k, v, sinks)
        if n == 1:
            return (out, lse) if self.return_lse else out
        (out,) = heads.rows_for_heads(self.inner, (out,), self.balanced)
        if not self.return_lse:
            return out
        (lse,) = heads.rows_for_heads(self.inner, (lse.unsqueeze(-1),), self.balanced)
        return out, lse.squeeze(-1)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The ring's, or the gathered, (result, LSE) of rows that lie on the ranks of one axis."""

    @staticmethod
    def forward(
        ctx: Any, setup: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        around, method, options, out_dtype = setup
        by = gathered if method == "all_gather" else ring
        state = by.forward(around, q, k, v, options)
        out, lse = state.out, state.lse
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
            out *= torch.exp(lse - with_sink).masked_fill_(lse == -torch.inf, 0).unsqueeze(-1)
            lse = with_sink
        result = out.to(out_dtype or q.dtype)
        ctx.setup, ctx.has_sinks = setup, sinks is not None
        ctx.set_materialize_grads(False)
        rounded = result if result.dtype == q.dtype else out.to(q.dtype)
        kept = () if sinks is None else (sinks,)
        ctx.save_for_backward(q, k, v, rounded, lse, *kept)
        return result, lse

    @staticmethod
    @differentiable_once("kernelseam.distributed.attention")
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        around, method, options, _ = ctx.setup
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        given = (None if dout is None else with_rows(dout.to(q.dtype)), dlse)
        if dout is None and dlse is None:
            given = (torch.zeros_like(out), None)  # the other ranks wait for this one
        by = gathered if method == "all_gather" else ring
        made = by.backward(around, given, q, k, v, out, lse, options)
        dq, dk, dv = (a.to(x.dtype) for a, x in zip(made, (q, k, v), strict=True))
        dsinks = None
        if sinks and ctx.needs_input_grad[4]:
            dsinks = _of_sinks(sinks[0], given, out, lse)
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


def _ranks(group: Any, method: str) -> tuple[Axis, tuple[Axis, Axis] | None]:
    """All ranks, and (ring, heads) where a mesh of two dimensions has them."""
    if method not in METHODS:
        raise InvalidValue("method", method, f"must be one of {', '.join(METHODS)}", "Choose one")
    if isinstance(group, DeviceMesh) and group.ndim == 2 and method == "mesh":
        outer, inner = axis_of(group.get_group(0)), axis_of(group.get_group(1))
        return axis_of(group._flatten().get_group()), (outer, inner)
    return axis_of(group), None


def _balanced(order: str | None, causal: bool) -> bool:
    if order is None:
        return flag("causal", causal)
    if order not in ORDERS:
        raise InvalidValue("order", order, f"must be one of {', '.join(ORDERS)}", "Choose one")
    return order == "balanced"


def _band(
    causal: bool, window: tuple[int | None, int | None] | None
) -> tuple[int | None, int | None]:
    left, right = (None, None) if window is None else band("window", window)
    return left, 0 if flag("causal", causal) else right


def _offsets(given: Sequence[int] | Tensor, rows: int) -> tuple[int, ...]:
    if isinstance(given, torch.Tensor):
        if given.ndim != 1 or given.is_floating_point():
            raise InvalidValue(
                "cu_seqlens", tuple(given.shape), "must be integers [B + 1]", "Pass the offsets"
            )
        given = given.tolist()
    found = tuple(int(x) for x in given)
    if not found or list(found) != sorted(found) or found[0] < 0 or found[-1] > rows:
        raise InvalidValue(
            "cu_seqlens",
            list(found),
            f"must not decrease, from 0 or more up to at most the {rows} rows of all ranks",
            "Pass the offsets of the whole, not of a shard",
        )
    return found


def _call(
    given: dict[str, Any],
    everyone: Axis,
    dims: tuple[Axis, Axis] | None,
    method: str,
    order: str | None,
    documents: tuple[int, ...] | None,
    options: dict[str, Any],
) -> tuple[Call, dict[str, object]]:
    """The call as it runs, and what every rank must have alike."""
    for name in ("bias", "mask"):
        if given.get(name) is not None:
            raise InvalidValue(
                name,
                "given",
                "has an element for every query and key of the whole, which no rank holds",
                "Use causal, window, alibi_slopes or prefix_lengths, or call kernelseam.attention",
            )
    operands, traced = tensors(given, ("q", "k", "v"))
    if traced:
        raise InvalidValue(
            "q", "a traced tensor", "torch does not trace this function", "Call it uncompiled"
        )
    operands = autocast(operands, ("q", "k", "v"))
    q, k, v = (operands[n] for n in "qkv")
    size = everyone.size
    _check_rows(q, k, v)
    balanced = _balanced(order, options["causal"])
    left, right = _band(options["causal"], options["window"])
    for name, x in (("q", q), ("k", k)):
        if balanced and x.shape[2] % 2:
            whole = x.shape[2] * size
            raise InvalidValue(
                f"{name}.shape[{0 if documents else 2}]",
                x.shape[2],
                "order 'balanced' has two chunks of one length on each rank",
                f"Pad the whole to {-(-whole // (2 * size)) * 2 * size} rows, or shard it with "
                "order='contiguous'",
            )
    if documents is not None and q.shape[2] != k.shape[2]:
        raise InvalidValue(
            "k.shape[0]", k.shape[2], f"must be q's {q.shape[2]} rows", "Pack q and k alike"
        )
    lengths = operands.get("kv_lengths") is not None
    if lengths:
        beside: list[str] = [n for n in ("alibi_slopes", "prefix_lengths") if n in operands]
        beside += ["causal"] if options["causal"] else []
        beside += ["window"] if options["window"] not in (None, (None, None)) else []
        if beside:
            raise InvalidValue(
                "kv_lengths",
                "given",
                f"moves each entry's diagonal, which {beside[0]} counts from",
                "Pack the entries: attention_varlen",
            )
    for name in ("prefix_lengths", "kv_lengths"):
        x = operands.get(name)
        if x is not None and (x.dtype != torch.int32 or tuple(x.shape) != (q.shape[0],)):
            raise InvalidValue(
                name,
                f"{x.dtype} {tuple(x.shape)}",
                f"must be int32 [{q.shape[0]}], one for each entry of the batch",
                "Convert it",
            )
    heads_q = q.shape[1]
    slopes, sinks = operands.get("alibi_slopes"), operands.get("sinks")
    if sinks is not None and tuple(sinks.shape) != (heads_q,):
        raise InvalidValue("sinks", tuple(sinks.shape), f"must be [{heads_q}]", "Reshape it")
    if slopes is not None and (slopes.ndim not in (1, 2) or slopes.shape[-1] != heads_q):
        raise InvalidValue(
            "alibi_slopes", tuple(slopes.shape), f"must end in the {heads_q} heads", "Reshape it"
        )
    for name in ("alibi_slopes", "prefix_lengths", "kv_lengths"):
        if name in operands and operands[name].requires_grad:
            raise InvalidValue(
                f"{name}.requires_grad", True, "gradients do not flow to it", "Pass tensor.detach()"
            )
    check_bwd_implementation(options["bwd_implementation"], "attention_bwd", "q", operands)
    mask = Mask(
        q.shape[2] * size,
        k.shape[2] * size,
        left,
        right,
        slopes is not None,
        "prefix_lengths" in operands,
        lengths,
        documents,
    )
    chosen, outer, inner = _laid_out(method, everyone, dims, mask, balanced, q, k, v)
    scale = options["scale"]
    scale = default_scale(q.shape[3]) if scale is None else finite("scale", scale)
    shared = {"scale": scale, "softcap": options["softcap"], "backend": options["backend"]}
    out_dtype = _out_dtype(options["out_dtype"], q)
    call = Call(
        outer,
        inner,
        chosen,
        balanced,
        mask,
        operands,
        {
            **shared,
            "implementation": options["implementation"],
            "batch_invariant": options["batch_invariant"],
        },
        {
            **shared,
            "implementation": options["bwd_implementation"],
            "deterministic": flag("deterministic", options["deterministic"]),
        },
        out_dtype,
        flag("return_lse", options["return_lse"]),
    )
    said: dict[str, object] = {
        n: f"{str(x.dtype).removeprefix('torch.')} {[*x.shape]}"
        + (" with gradients" if x.requires_grad else "")
        for n, x in operands.items()
    }
    said |= {"method": f"{chosen}, {inner.size} for heads", "order": balanced}
    said |= {n: x for n, x in options.items() if x is not None}
    said["cu_seqlens"] = None if documents is None else _digest(documents)
    return call, said


def _digest(documents: tuple[int, ...]) -> str:
    """Offsets in short: two lists that differ have, but for chance, two of these."""
    import hashlib

    text = ",".join(map(str, documents)).encode()
    return f"{len(documents)} offsets, {hashlib.sha256(text).hexdigest()[:16]}"


def _check_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise InvalidValue(
                name, tuple(x.shape), "must be [B, heads, rows, dim]", "Reshape the array"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise InvalidValue(
                name,
                f"{x.dtype} on {x.device}",
                f"must be as q, {q.dtype} on {q.device}",
                "Convert it",
            )
    for name, x, axis, like, of in (
        ("k", k, 0, q, "q"),
        ("k", k, 3, q, "q"),
        ("v", v, 0, q, "q"),
        ("v", v, 1, k, "k"),
        ("v", v, 2, k, "k"),
    ):
        if x.shape[axis] != like.shape[axis]:
            raise InvalidValue(
                f"{name}.shape[{axis}]",
                x.shape[axis],
                f"must be {like.shape[axis]}, as {of}.shape[{axis}]",
                "Pass shards of one attention",
            )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InvalidValue(
            "q.shape[1]",
            q.shape[1],
            f"must be a multiple of k.shape[1] = {k.shape[1]}",
            "Make the heads a multiple of the KV heads",
        )


def _out_dtype(given: Any, q: Tensor) -> Any:
    if given is None:
        return None
    named = torch_dtype(given)
    kind = named if isinstance(named, torch.dtype) else getattr(torch, DType.of(given).name)
    if kind not in (q.dtype, torch.float32):
        raise InvalidValue(
            "out_dtype", kind, f"must be {q.dtype} or torch.float32", "Leave it out for q's dtype"
        )
    return kind


def _laid_out(
    method: str,
    everyone: Axis,
    dims: tuple[Axis, Axis] | None,
    mask: Mask,
    balanced: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[str, Axis, Axis]:
    """(ring or all_gather, between which ranks, which ranks share heads)."""
    size, counts = everyone.size, (q.shape[1], k.shape[1])
    if dims is not None:
        outer, inner = dims
        if (problem := heads.misfit(*counts, inner.size)) is not None:
            raise problem
        return "ring", outer, inner
    shared = {"ring": 1, "all_gather": 1, "ulysses": size}.get(method, 0)
    if method == "auto":
        made = costs.explain(
            costs.Sizes.of(q, k, v), mask, size, balanced, costs.machine_of(q.device, q.dtype)
        ).best
        method, shared = made.method, made.heads
    elif method == "mesh":
        shared = costs.widest(*counts, size)
    if (problem := heads.misfit(*counts, shared)) is not None:
        raise problem
    return "all_gather" if method == "all_gather" else "ring", *everyone.split(shared)
