"""What a distributed attention's operands and options must be, before anything is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kernelseam.descriptors.attention.options import Window, band
from kernelseam.descriptors.common.extents import default_scale
from kernelseam.descriptors.common.validation import flag, integer
from kernelseam.distributed import costs, heads
from kernelseam.distributed.mods import checked_mods, in_words
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
from kernelseam.distributed.options import shared
from kernelseam.distributed.order import ORDERS
from kernelseam.distributed.plan import Mask
from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.running import ShardedAttention
from kernelseam.errors import InvalidValue
from kernelseam.expressions.scores import MaskMod, ScoreMod
from kernelseam.interop.torch_function import autocast, check_bwd_implementation

Tensor = Any
METHODS = ("auto", "ring", "all_gather", "ulysses", "mesh")


def is_balanced(order: str | None, causal: bool) -> bool:
    if order is None:
        return flag("causal", causal)
    return one_of("order", order, ORDERS) == "balanced"


def band_of(causal: bool, window: Window) -> tuple[int | None, int | None]:
    left, right = (None, None) if window is None else band("window", window)
    return left, 0 if flag("causal", causal) else right


def offsets_of(given: Sequence[int] | Tensor, rows: int) -> tuple[int, ...]:
    """Offsets of the whole, of ``rows`` rows, as the host's integers."""
    if isinstance(given, torch.Tensor):
        check_own({"cu_seqlens": given}, ())
    if isinstance(given, torch.Tensor | np.ndarray):
        if given.ndim != 1 or getattr(given, "is_meta", False):
            raise InvalidValue(
                "cu_seqlens", list(given.shape), "must be integers [B + 1]", "Pass the offsets"
            )
        given = given.tolist()
    elif not isinstance(given, list | tuple | range):
        raise InvalidValue(
            "cu_seqlens", given, "must be a list or a tensor of integers", "Pass the offsets"
        )
    result = tuple(
        x if type(x) is int else integer(f"cu_seqlens[{i}]", x, 0, rows, "Pass the offsets")
        for i, x in enumerate(given)
    )
    if not result or list(result) != sorted(result) or result[0] < 0 or result[-1] > rows:
        raise InvalidValue(
            "cu_seqlens",
            list(result),
            f"must not decrease, from 0 or more up to at most the {rows} rows of all ranks",
            "Pass the offsets of the whole, not of a shard",
        )
    return result


def checked(
    given: dict[str, Any],
    everyone: Axis,
    dims: tuple[Axis, Axis] | None,
    method: str,
    order: str | None,
    documents: tuple[int, ...] | None,
    mods: tuple[ScoreMod | None, MaskMod | None],
    options: dict[str, Any],
) -> tuple[ShardedAttention, dict[str, object]]:
    """The call as it runs, and what every rank must have alike."""
    for name in ("bias", "mask"):
        if given.get(name) is not None:
            raise InvalidValue(
                name,
                "given",
                "has an element for every query and key of the whole, which no rank holds",
                "Use causal, window, score_mod or mask_mod, or call kernelseam.attention",
            )
    one_of("method", method, METHODS)
    if dims is not None and method != "mesh":
        raise InvalidValue(
            "group",
            "a DeviceMesh of 2 dimensions",
            "must have one dimension (two with method='mesh': ring, heads)",
            "Name the one that the sequence is sharded over: mesh['…']",
        )
    operands = autocast(own_tensors(given, ("q", "k", "v")), ("q", "k", "v"))
    q, k, v = (operands[n] for n in "qkv")
    size = everyone.size
    check_rows(q, k, v)
    balanced = is_balanced(order, options["causal"])
    left, right = band_of(options["causal"], options["window"])
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
    batch, heads_q = q.shape[:2]
    for name in ("prefix_lengths", "kv_lengths"):
        check_operand(name, operands.get(name), q, [torch.int32], (batch,))
    if lengths:
        check_lengths("kv_lengths", operands["kv_lengths"], k.shape[2] * size, "S_k of all ranks")
    slopes = operands.get("alibi_slopes")
    check_operand("alibi_slopes", slopes, q, [torch.float32], (heads_q,), (batch, heads_q))
    check_operand("sinks", operands.get("sinks"), q, [torch.float32], (heads_q,))
    for name in ("alibi_slopes", "prefix_lengths", "kv_lengths"):
        if name in operands and operands[name].requires_grad:
            raise InvalidValue(
                f"{name}.requires_grad", True, "gradients do not flow to it", "Pass tensor.detach()"
            )
    expression = checked_mods(*mods, operands)
    check_names(backend=options["backend"], implementation=options["implementation"])
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
        expression is not None,
    )
    chosen, outer, inner = _laid_out(method, everyone, dims, mask, balanced, q, k, v)
    numbers = shared(options)
    if numbers["scale"] is None:
        numbers["scale"] = default_scale(q.shape[3])
    alike = {**numbers, "backend": options["backend"]}
    out_dtype = out_dtype_of(options["out_dtype"], q)
    call = ShardedAttention(
        outer,
        inner,
        chosen,
        balanced,
        mask,
        operands,
        {
            **alike,
            "implementation": options["implementation"],
            "batch_invariant": flag("batch_invariant", options["batch_invariant"]),
        },
        {
            **alike,
            "implementation": options["bwd_implementation"],
            "deterministic": flag("deterministic", options["deterministic"]),
        },
        out_dtype,
        flag("return_lse", options["return_lse"]),
        expression,
    )
    said = described(operands) | in_words(expression)
    said |= {"method": f"{chosen}, {inner.size} for heads", "order": balanced}
    said |= {n: x for n, x in options.items() if x is not None}
    said |= {
        "scale": numbers["scale"],
        "out_dtype": str(out_dtype or q.dtype).removeprefix("torch."),
    }
    said["cu_seqlens"] = None if documents is None else _digest(documents)
    return call, said


def _digest(documents: tuple[int, ...]) -> str:
    """Offsets in short: two lists that differ have, but for chance, two of these."""
    text = ",".join(map(str, documents)).encode()
    return f"{len(documents)} offsets, {hashlib.sha256(text).hexdigest()[:16]}"


def check_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_axes(name, x, "B, heads, rows, dim")
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
        result = costs.explain(
            costs.Sizes.of(q, k, v), mask, size, balanced, costs.machine_of(q.device, q.dtype)
        ).best
        method, shared = result.method, result.heads
    elif method == "mesh":
        shared = costs.widest(*counts, size)
    if (problem := heads.misfit(*counts, shared)) is not None:
        raise problem
    return "all_gather" if method == "all_gather" else "ring", *everyone.split(shared)
