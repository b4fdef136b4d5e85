"""Attention over a sequence that lies on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from kernelseam.descriptors.attention.options import Window
from kernelseam.descriptors.common.options import (
    by_name,
    operands_of,
    options_of,
    refuse_others,
    scalars_of,
    spelled_out,
    taken,
)
from kernelseam.descriptors.common.validation import flag
from kernelseam.distributed import costs
from kernelseam.distributed.agreement import agree
from kernelseam.distributed.checks import band_of, check_rows, checked, is_balanced, offsets_of
from kernelseam.distributed.operands import check_axes, check_own
from kernelseam.distributed.options import DistributedOptions
from kernelseam.distributed.plan import Mask
from kernelseam.distributed.ranks import axes_of, current_group
from kernelseam.distributed.running import Setup, ShardedAttention
from kernelseam.errors import InvalidValue
from kernelseam.expressions.scores import MaskMod, ScoreMod
from kernelseam.interop.torch_function import plain_kind
from kernelseam.ops.array_call import put
from kernelseam.ops.signatures import Sharded

Tensor = Any
_OPERANDS = operands_of(DistributedOptions)
_SETUPS = 16
_setups: dict[Any, Setup] = {}
"""Of calls that were checked, by what tells them from others."""
_PACKED = ("alibi_slopes", "sinks", *scalars_of(DistributedOptions))
"""Options of packed documents."""


@spelled_out(DistributedOptions())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    method: str = "auto",
    order: str | None = None,
    check: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    **options: Unpack[Sharded],
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
    ``score_mod`` and ``mask_mod`` are ``kernelseam.attention``'s and count in the whole: indices,
    heads, ``q_len`` and ``kv_len``; what they capture is whole, and the same on every rank. A
    score_mod beside ``alibi_slopes`` is refused, and so are functions of lengths beside
    ``kv_lengths``.

    Gradients flow to q, k, v and ``sinks`` (not to what functions capture), of the sum of all
    ranks' losses; that of ``sinks`` is this rank's part, to be summed over ranks as that of every
    parameter. States are joined in float32 (float64 where q is), and rounded once.

    ``check``: one small exchange, so that shapes, dtypes or options that differ between ranks, and
    what one rank refuses, raise the same InvalidValue on every rank; without it such ranks end by
    the group's timeout. The contents of whole operands are not compared.

    Returns the rank's rows of the result [B, H, S_q/n, D_v], or (result, lse [B, H, S_q/n]).
    Raises InvalidValue for what does not fit together, RankLost where another rank does not answer.
    """
    chosen: dict[str, Any] = {**options}
    key = None
    if check is False and score_mod is None and mask_mod is None:
        key = _key((q, k, v), (group, method, order), chosen)
        if (setup := _setups.get(key)) is not None:
            result = setup.run(q, k, v)
            return result if chosen.get("return_lse") else result[0]
    refuse_others("attention", chosen, options_of(DistributedOptions))
    given = {"q": q, "k": k, "v": v, **taken(_OPERANDS, chosen)}
    everyone, dims = axes_of(group)

    def make() -> tuple[ShardedAttention, dict[str, object]]:
        return checked(
            given,
            everyone,
            dims,
            method,
            order,
            documents=None,
            mods=(score_mod, mask_mod),
            options=by_name(DistributedOptions(**chosen)),
        )

    call = agree(everyone, flag("check", check), make)
    if key is not None and call.inner.size == 1:
        put(_setups, key, call.setup(q, k, v), _SETUPS)
    return call.run()


def _key(operands: tuple[Any, ...], of: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What tells a call of q, k and v alone from others, where torch neither traces nor casts."""
    if plain_kind(*operands) is None or any(options.get(n) is not None for n in _OPERANDS):
        return None
    if (known := current_group(of[0])) is None:
        return None
    key = (
        *of,
        known,
        *[(x.shape, x.dtype, x.device) for x in operands],
        *[(n, type(x), x) for n, x in options.items()],
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


@spelled_out(DistributedOptions(), *_PACKED)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    *,
    group: Any,
    method: str = "auto",
    order: str | None = None,
    check: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    **options: Unpack[Sharded],
) -> Any:
    """Packed documents over several ranks: q [T/n, H, D], k [T/n, H_kv, D], v [T/n, H_kv, D_v] are
    this rank's rows of T, wherever documents begin.

    Document b has rows cu_seqlens[b] … cu_seqlens[b + 1] − 1 of the whole, of queries and keys
    alike. The offsets are the same on every rank, a list or an integer tensor; one on a device is
    read, which synchronises. ``alibi_slopes`` is [H]. ``score_mod`` and ``mask_mod`` count within a
    document. The rest is as in ``attention``.

    Returns the rank's rows of the result [T/n, H, D_v], or (result, lse [H, T/n]). Rows of no
    document are 0, and −inf in the LSE.
    """
    chosen: dict[str, Any] = {**options}
    refuse_others("attention_varlen", chosen, _PACKED)
    operands = taken(_OPERANDS, chosen)
    everyone, dims = axes_of(group)

    def make() -> tuple[ShardedAttention, dict[str, object]]:
        given: dict[str, Any] = {"q": q, "k": k, "v": v}
        check_own(given, tuple(given))
        for name, x in given.items():
            check_axes(name, x, "T/n, heads, dim")
            given[name] = x.transpose(0, 1).unsqueeze(0)
        rows = q.shape[0] * everyone.size
        return checked(
            {**given, **operands},
            everyone,
            dims,
            method,
            order,
            documents=offsets_of(cu_seqlens, rows),
            mods=(score_mod, mask_mod),
            options=by_name(DistributedOptions(**chosen)),
        )

    result = agree(everyone, flag("check", check), make).run()
    if chosen.get("return_lse"):
        return result[0][0].transpose(0, 1), result[1][0]
    return result[0].transpose(0, 1)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    order: str | None = None,
    causal: bool = False,
    window: Window = None,
    machine: costs.Machine | None = None,
) -> costs.Explanation:
    """Which method "auto" takes for such operands, and what the model of bytes, links and products
    expects of each. Nothing is launched or sent, and q, k and v may be on the meta device."""
    axis, _ = axes_of(group)
    check_own({"q": q, "k": k, "v": v}, ("q", "k", "v"))
    check_rows(q, k, v)
    left, right = band_of(causal, window)
    balanced = is_balanced(order, causal)
    mask = Mask(q.shape[2] * axis.size, k.shape[2] * axis.size, left, right)
    if machine is None:
        machine = costs.machine_of(q.device, q.dtype)
    elif not isinstance(machine, costs.Machine):
        raise InvalidValue("machine", machine, "must be a Machine", "Leave it out for this one's")
    return costs.explain(costs.Sizes.of(q, k, v), mask, axis.size, balanced, machine)
