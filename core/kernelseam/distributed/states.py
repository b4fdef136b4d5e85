"""Of which dtype a call's result is before it is joined with others: float32, where an
implementation writes that about as fast. Some fast ones write q's dtype alone; their results are
rounded once more each, and joined in float32 all the same."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from kernelseam.arrays import describe
from kernelseam.contract import Device
from kernelseam.descriptors import Attention
from kernelseam.dispatch import consider
from kernelseam.distributed.plan import Mask

Tensor = Any
_SLOWER = 1.25
"""By how much a result in float32 may be slower."""


def states_dtype(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: dict[str, Any]) -> Any:
    """torch.float32 (float64 of float64), or q's dtype."""
    if q.dtype in (torch.float32, torch.float64):
        return q.dtype
    device = describe(q[:0].detach(), "q").device
    if device.is_host:
        return torch.float32
    shape = (*q.shape[:3], k.shape[2], q.shape[3], k.shape[1], v.shape[3])
    features = (mask.alibi, mask.prefix, mask.lengths, options.get("softcap") is not None)
    name = str(q.dtype).removeprefix("torch.")
    faster = _rounded_is_faster(device, name, shape, features, options.get("implementation"))
    return q.dtype if faster else torch.float32


@lru_cache(maxsize=256)
def _rounded_is_faster(
    device: Device,
    dtype: str,
    shape: tuple[int, ...],
    features: tuple[bool, ...],
    implementation: str | None,
) -> bool:
    batch, heads, rows_q, rows_k, dim, kv_heads, value_dim = shape
    alibi, prefix, lengths, capped = features

    def seconds(dtype_out: str) -> float:
        """The least that is predicted of a call over all of a rank's rows."""
        described = Attention(
            batch=batch,
            num_heads=heads,
            S_q=rows_q,
            S_k=rows_k,
            head_dim=dim,
            kv_heads=kv_heads,
            value_dim=value_dim,
            dtype=dtype,
            dtype_out=dtype_out,
            return_lse=True,
            softcap=1.0 if capped else None,
            alibi_slopes=0 if alibi else None,
            prefix_lengths=0 if prefix else None,
            kv_lengths=0 if lengths else None,
        )
        return min(
            (
                c.cost.seconds
                for c in consider(described.problem(), device)
                if c.cost is not None
                and c.refusal is None
                and (implementation is None or c.implementation.name == implementation)
            ),
            default=math.inf,
        )

    return seconds("float32") > _SLOWER * seconds(dtype)
