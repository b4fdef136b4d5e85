"""torch's nested tensors of layout torch.jagged, as packed sequences with offsets. Imports
torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernelseam.errors import InvalidValue

Tensor = Any


def is_jagged(x: Tensor) -> bool:
    """Whether it is a nested tensor whose rows are packed."""
    return bool(x.is_nested and x.layout is torch.jagged)


def attention(
    operands: Mapping[str, Tensor],
    options: Mapping[str, Any],
    chosen: Mapping[str, Any],
    varlen: Callable[..., Any],
) -> Tensor:
    """``varlen`` of nested q, k and v, as a tensor that is nested as q is."""
    given, heads_first = dict(operands), options["layout"] == "bhsd"
    packed = {}
    for name in ("q", "k", "v"):
        packed[name] = _packed(name, given.pop(name), heads_first)
    if "kv_lengths" in given:
        raise InvalidValue(
            "kv_lengths",
            "given",
            "sequences have their own lengths where k is nested",
            "Leave it out",
        )
    if options["return_lse"]:
        raise InvalidValue(
            "return_lse",
            True,
            "the LSE of packed rows is [H, T], no nested tensor",
            "Call attention_varlen with x.values() and x.offsets()",
        )
    q, k = packed["q"], packed["k"]
    offsets = [x.offsets().to(torch.int32) for x in (q, k)]
    longest = [_longest(x) for x in (q, k)]
    left_out = ("layout", "return_lse")
    result = varlen(
        *(x.values() for x in packed.values()),
        *offsets,
        *longest,
        **given,
        **{n: x for n, x in options.items() if n not in left_out},
        **chosen,
    )
    out = torch.nested.nested_tensor_from_jagged(result, q.offsets())
    return out.transpose(1, 2) if heads_first else out


def _packed(name: str, x: Tensor, heads_first: bool) -> Tensor:
    """[B, rows, H, D]."""
    if not is_jagged(x):
        raise InvalidValue(
            f"{name}.layout",
            x.layout,
            "must be torch.jagged as q's is",
            "Nest all of q, k and v, or none",
        )
    if x.dim() != 4:
        raise InvalidValue(
            name,
            f"a nested tensor of {x.dim()} axes",
            "must have 4",
            "Add the heads with unflatten(-1, (H, D)).transpose(1, 2)",
        )
    result = x.transpose(1, 2) if heads_first else x
    if result._ragged_idx != 1:
        raise InvalidValue(
            name,
            f"ragged along axis {x._ragged_idx}",
            f"must be ragged along axis {2 if heads_first else 1}, as layout says",
            "Check layout, or transpose",
        )
    if result.lengths() is not None:
        raise InvalidValue(
            name,
            "with gaps between its rows",
            "must lie without",
            f"Pass torch.nested.as_nested_tensor({name}.unbind(), layout=torch.jagged)",
        )
    return result


def _longest(x: Tensor) -> int:
    """At least the longest sequence's rows."""
    return int(x._get_max_seqlen())
