"""Decoding where the pages of K and V lie on several ranks: each looks at its own, and the states
are joined by one collective."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernelseam.descriptors.attention.options import PAGED
from kernelseam.descriptors.common.options import refuse_others, spelled_out
from kernelseam.descriptors.common.validation import MAX_EXTENT, extent, flag
from kernelseam.distributed.agreement import agree
from kernelseam.distributed.operands import (
    check_axes,
    check_lengths,
    check_names,
    check_operand,
    check_own,
    described,
    one_of,
    out_dtype_of,
    own_tensors,
)
from kernelseam.distributed.options import SAME_EVERYWHERE
from kernelseam.distributed.ranks import Axis, axis_of
from kernelseam.distributed.transfers import all_gather
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import wanted
from kernelseam.ops.attention import attention_paged as paged
from kernelseam.ops.merge import merge_states

Tensor = Any
_TAKEN = (
    *("causal", *SAME_EVERYWHERE, "sinks", "kv_layout"),
    *("out_dtype", "return_lse", "batch_invariant"),
)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LABELS = {
    "q": "B, S_q, H, D",
    "k_pages": "pages, page_size, H_kv, D",
    "v_pages": "pages, page_size, H_kv, D_v",
    "block_table": "B, width",
    "kv_lengths": "B",
}


def shard_lengths(kv_lengths: Tensor, *, page_size: int, group: Any) -> Tensor:
    """How many keys of each entry lie on this rank, of kv_lengths keys in all: page p of an entry
    is on rank p % n, as its page p // n there. Any integers, and as many of the same dtype."""
    axis = axis_of(group)
    check_own({"kv_lengths": kv_lengths}, ("kv_lengths",))
    if kv_lengths.dtype not in _INTEGERS:
        raise InvalidValue("kv_lengths", kv_lengths.dtype, "must be integers", "Convert it")
    return _on_rank(kv_lengths, extent("page_size", page_size, 1), axis)


def _on_rank(lengths: Tensor, page_size: int, axis: Axis) -> Tensor:
    whole, rest = lengths // page_size, lengths % page_size
    mine = (whole + (axis.size - 1 - axis.index)) // axis.size * page_size
    return mine + torch.where(whole % axis.size == axis.index, rest, 0).to(lengths.dtype)


@spelled_out(PAGED, *_TAKEN)
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    *,
    group: Any,
    backend: str | None = None,
    implementation: str | None = None,
    check: bool = False,
    **options: Any,
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
    refuse_others("attention_paged", options, _TAKEN)
    sinks = options.get("sinks")
    axis = axis_of(group)
    given = {
        "q": q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_table": block_table,
        "kv_lengths": kv_lengths,
        "sinks": sinks,
    }
    chosen = {n: options.get(n, getattr(PAGED, n)) for n in _TAKEN if n != "sinks"}
    chosen |= {"backend": backend, "implementation": implementation}

    def make() -> tuple[_State, dict[str, object]]:
        checked = _checked(axis, given, chosen)
        return _own_state(axis, *checked), _said(*checked)

    own = agree(axis, flag("check", check), make)
    batch, heads, rows = own.lse.shape
    split = own.out.numel()
    step = f"join of decoded states on rank {axis.index} of {axis.size}"
    gathered = all_gather(axis, torch.cat([own.out.reshape(-1), own.lse.reshape(-1)]), step)
    outs = gathered[:, :split].view(axis.size, *own.out.shape).transpose(2, 3)
    lses = gathered[:, split:].view(axis.size, batch, heads, rows)
    result, total = merge_states(outs, lses, backend=backend)
    if sinks is not None:
        with_sink = torch.logaddexp(total, sinks.detach().to(total.dtype).view(1, -1, 1))
        share = torch.exp(total - with_sink).masked_fill_(total == -torch.inf, 0)
        result, total = result * share.unsqueeze(-1), with_sink
    result = result.transpose(1, 2).to(own.dtype)
    return (result, total) if chosen["return_lse"] else result


class _State(NamedTuple):
    """What this rank's pages give: out [B, S_q, H, D_v] and lse [B, H, S_q], and the dtype of the
    joined result."""

    out: Tensor
    lse: Tensor
    dtype: Any


def _checked(
    axis: Axis, given: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Operands and options that fit together."""
    operands = own_tensors(given, tuple(_LABELS))
    wanted(operands, ())
    for name, labels in _LABELS.items():
        check_axes(name, operands[name], labels)
    q, lengths, table = operands["q"], operands["kv_lengths"], operands["block_table"]
    batch, heads = q.shape[0], q.shape[2]
    check_operand("block_table", table, q, [torch.int32], (batch, table.shape[1]))
    check_operand("kv_lengths", lengths, q, [torch.int32], (batch,))
    check_operand("sinks", operands.get("sinks"), q, [torch.float32], (heads,))
    one_of("kv_layout", options["kv_layout"], ("nhd", "hnd"))
    for name in ("causal", "return_lse", "batch_invariant"):
        flag(name, options[name])
    options = {**options, "out_dtype": out_dtype_of(options["out_dtype"], q) or q.dtype}
    check_names(backend=options["backend"], implementation=options["implementation"])
    page_size = operands["k_pages"].shape[1 if options["kv_layout"] == "nhd" else 2]
    if page_size == 0:
        raise InvalidValue("k_pages", "pages of no rows", "must have rows", "Pass real pages")
    check_lengths("kv_lengths", lengths, MAX_EXTENT, "the largest")
    return operands, options


def _said(operands: dict[str, Tensor], options: dict[str, Any]) -> dict[str, object]:
    """What every rank must have alike; a rank has pages and a table of its own."""
    same = {n: x for n, x in operands.items() if n in ("q", "kv_lengths", "sinks")}
    k_pages, v_pages = operands["k_pages"], operands["v_pages"]
    pages = f"{[*k_pages.shape[1:]]} and {[*v_pages.shape[1:]]}"
    dtype = str(options["out_dtype"]).removeprefix("torch.")
    return {**described(same), "pages": pages, **options, "out_dtype": dtype}


def _own_state(axis: Axis, operands: dict[str, Tensor], options: dict[str, Any]) -> _State:
    """The state over this rank's pages; nothing is sent."""
    q, lengths, table = (operands[n] for n in ("q", "kv_lengths", "block_table"))
    batch, rows, heads, dim = q.shape
    page_size = operands["k_pages"].shape[1 if options["kv_layout"] == "nhd" else 2]
    # Each query sees keys up to its own: an entry of its own, with so many keys.
    apart = options["causal"] and rows > 1
    if apart:
        each = lengths[:, None] - rows + 1 + torch.arange(rows, device=q.device, dtype=torch.int32)
        lengths = each.clamp_(min=0).reshape(-1)
        table = table.repeat_interleave(rows, 0)
        q = q.reshape(batch * rows, 1, heads, dim)
    kept = (*SAME_EVERYWHERE, "kv_layout", "batch_invariant", "backend", "implementation")
    out, lse = paged(
        q,
        operands["k_pages"],
        operands["v_pages"],
        table,
        _on_rank(lengths, page_size, axis),
        causal=False,
        out_dtype=None if q.dtype == torch.float64 else "float32",
        return_lse=True,
        **{n: options[n] for n in kept},
    )
    if apart:
        out = out.view(batch, rows, heads, out.shape[-1])
        lse = lse.view(batch, rows, heads).transpose(1, 2)
    return _State(out, lse, options["out_dtype"])
