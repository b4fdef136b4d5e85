"""Decoding where the pages of K and V lie on several ranks: each looks at its own, and the states
are joined by one collective."""

from __future__ import annotations

from typing import Any

import torch

from kernelseam.descriptors.common.validation import extent, flag
from kernelseam.distributed.agreement import agree
from kernelseam.distributed.pieces import wider
from kernelseam.distributed.ranks import Axis, axis_of
from kernelseam.distributed.transfers import all_gather
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import tensors, wanted
from kernelseam.interop.torch_library.dtypes import torch_dtype
from kernelseam.ops.attention import attention_paged as paged
from kernelseam.ops.merge import merge_states

Tensor = Any
_NEEDED = ("q", "k_pages", "v_pages", "block_table", "kv_lengths")


def shard_lengths(kv_lengths: Tensor, *, page_size: int, group: Any) -> Tensor:
    """How many keys of each entry lie on this rank, of kv_lengths keys in all: page p of an entry
    is on rank p % n, as its page p // n there. Any integers, and as many of the same dtype."""
    return _on_rank(kv_lengths, extent("page_size", page_size), axis_of(group))


def _on_rank(lengths: Tensor, page_size: int, axis: Axis) -> Tensor:
    whole, rest = lengths // page_size, lengths % page_size
    mine = (whole + (axis.size - 1 - axis.index)) // axis.size * page_size
    return mine + torch.where(whole % axis.size == axis.index, rest, 0).to(lengths.dtype)


def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    group: Any,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "nhd",
    out_dtype: Any = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
    implementation: str | None = None,
    check: bool = False,
) -> Any:
    """``kernelseam.attention_paged`` where page p of every entry lies on rank p % n of ``group``.

    q [B, S_q, H, D], ``kv_lengths`` int32 [B], the keys of each entry on all ranks, and ``sinks``
    are the same on every rank; k_pages and v_pages are this rank's, and row b of ``block_table``
    int32 [B, width] names its pages of entry b: element s is that of the entry's page s·n + rank.
    A rank may have none. ``shard_lengths`` says how many keys it has.

    With ``causal`` the last query is the entry's last token. Windows, slopes and prefixes are not
    taken: between a rank's pages lie others'. No gradients flow. Each rank's state is of float32
    (float64 where q is), and one all-gather of S_q·H·(D_v + 1) elements an entry joins them, in
    the order of ranks: every rank has the same bits.

    Returns the result [B, S_q, H, D_v], or (result, lse [B, H, S_q]). Raises InvalidValue for what
    does not fit together, RankLost where another rank does not answer.
    """
    axis = axis_of(group)
    given = {
        "q": q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_table": block_table,
        "kv_lengths": kv_lengths,
        "sinks": sinks,
    }
    if kv_layout not in ("nhd", "hnd"):
        raise InvalidValue("kv_layout", kv_layout, "must be one of nhd, hnd", "Choose one")

    def make() -> tuple[dict[str, Tensor], dict[str, object]]:
        operands, traced = tensors(given, _NEEDED)
        if traced:
            raise InvalidValue(
                "q", "a traced tensor", "torch does not trace this function", "Call it uncompiled"
            )
        wanted(operands, ())
        for name, labels in (
            ("q", "B S_q H D"),
            ("k_pages", "pages page_size H_kv D"),
            ("v_pages", "pages page_size H_kv D_v"),
            ("block_table", "B width"),
            ("kv_lengths", "B"),
        ):
            x = operands[name]
            if x.ndim != len(labels.split()):
                raise InvalidValue(
                    name, tuple(x.shape), f"must be [{labels.replace(' ', ', ')}]", "Reshape it"
                )
        batch = q.shape[0]
        for name in ("block_table", "kv_lengths"):
            if operands[name].shape[0] != batch or operands[name].dtype != torch.int32:
                raise InvalidValue(
                    name,
                    f"{operands[name].dtype} {tuple(operands[name].shape)}",
                    f"must be int32 with a row for each of q's {batch} entries",
                    "Convert it",
                )
        said: dict[str, object] = {
            n: f"{str(x.dtype).removeprefix('torch.')} {[*x.shape]}"
            for n, x in operands.items()
            if n in ("q", "kv_lengths", "sinks")
        }
        said |= {
            "pages": f"{[*k_pages.shape[1:]]} and {[*v_pages.shape[1:]]}",
            "causal": flag("causal", causal),
            "scale": scale,
            "softcap": softcap,
            "kv_layout": kv_layout,
        }
        return operands, said

    operands = agree(axis, flag("check", check), make)
    q, lengths = operands["q"], operands["kv_lengths"]
    batch, rows, heads, _ = q.shape
    page_size = k_pages.shape[1 if kv_layout == "nhd" else 2]
    # Each query sees keys up to its own: an entry of its own, with so many keys.
    if causal and rows > 1:
        each = lengths[:, None] - rows + 1 + torch.arange(rows, device=q.device, dtype=torch.int32)
        lengths = each.clamp_(min=0).reshape(-1)
        block_table = block_table.repeat_interleave(rows, 0)
        q = q.reshape(batch * rows, 1, heads, q.shape[3])
    wide = wider(q.dtype)
    out, lse = paged(
        q,
        k_pages,
        v_pages,
        block_table,
        _on_rank(lengths, page_size, axis),
        causal=False,
        scale=scale,
        softcap=softcap,
        kv_layout=kv_layout,
        out_dtype=None if wide == torch.float64 else "float32",
        return_lse=True,
        batch_invariant=batch_invariant,
        backend=backend,
        implementation=implementation,
    )
    out = out.view(batch, rows, heads, -1)
    if lse.shape[0] != batch:
        lse = lse.view(batch, rows, heads).transpose(1, 2)
    split = out.numel()
    step = f"join of decoded states on rank {axis.index} of {axis.size}"
    gathered = all_gather(axis, torch.cat([out.reshape(-1), lse.reshape(-1)]), step)
    outs = gathered[:, :split].view(axis.size, *out.shape).transpose(2, 3)
    lses = gathered[:, split:].view(axis.size, batch, heads, rows)
    result, total = merge_states(outs, lses, backend=backend)
    if sinks is not None:
        with_sink = torch.logaddexp(total, sinks.detach().to(wide).view(1, -1, 1))
        share = torch.exp(total - with_sink).masked_fill_(total == -torch.inf, 0)
        result, total = result * share.unsqueeze(-1), with_sink
    result = result.transpose(1, 2).to(torch_dtype(out_dtype) or q.dtype)
    return (result, total) if return_lse else result
