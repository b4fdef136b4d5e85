"""What a distributed attention's operands and options must be, before anything is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from kernelseam.descriptors.attention.forward import band
from kernelseam.descriptors.common.extents import default_scale
from kernelseam.descriptors.common.validation import finite, flag
from kernelseam.distributed import costs, heads
from kernelseam.distributed.order import ORDERS
from kernelseam.distributed.plan import Mask
from kernelseam.distributed.ranks import Axis, axis_of
from kernelseam.distributed.running import Call
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import autocast, check_bwd_implementation, tensors
from kernelseam.interop.torch_library.dtypes import torch_dtype

Tensor = Any
METHODS = ("auto", "ring", "all_gather", "ulysses", "mesh")


def ranks_of(group: Any, method: str) -> tuple[Axis, tuple[Axis, Axis] | None]:
    """All ranks, and (ring, heads) where a mesh of two dimensions has them."""
    if method not in METHODS:
        raise InvalidValue("method", method, f"must be one of {', '.join(METHODS)}", "Choose one")
    if isinstance(group, DeviceMesh) and group.ndim == 2 and method == "mesh":
        outer, inner = axis_of(group.get_group(0)), axis_of(group.get_group(1))
        return axis_of(group._flatten().get_group()), (outer, inner)
    return axis_of(group), None


def is_balanced(order: str | None, causal: bool) -> bool:
    if order is None:
        return flag("causal", causal)
    if order not in ORDERS:
        raise InvalidValue("order", order, f"must be one of {', '.join(ORDERS)}", "Choose one")
    return order == "balanced"


def band_of(
    causal: bool, window: tuple[int | None, int | None] | None
) -> tuple[int | None, int | None]:
    left, right = (None, None) if window is None else band("window", window)
    return left, 0 if flag("causal", causal) else right


def offsets_of(given: Sequence[int] | Tensor, rows: int) -> tuple[int, ...]:
    if isinstance(given, torch.Tensor):
        if given.ndim != 1 or given.is_floating_point():
            raise InvalidValue(
                "cu_seqlens", tuple(given.shape), "must be integers [B + 1]", "Pass the offsets"
            )
        given = given.tolist()
    result = tuple(int(x) for x in given)
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
        result = costs.explain(
            costs.Sizes.of(q, k, v), mask, size, balanced, costs.machine_of(q.device, q.dtype)
        ).best
        method, shared = result.method, result.heads
    elif method == "mesh":
        shared = costs.widest(*counts, size)
    if (problem := heads.misfit(*counts, shared)) is not None:
        raise problem
    return "all_gather" if method == "all_gather" else "ring", *everyone.split(shared)
