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
from kernelseam.descriptors.attention.options import ScoreNumbers
from kernelseam.descriptors.common.options import scalars_of
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
    name = str(q.dtype).removeprefix("torch.")
    fields = {
        "batch": q.shape[0],
        "num_heads": q.shape[1],
        "S_q": q.shape[2],
        "S_k": k.shape[2],
        "head_dim": q.shape[3],
        "kv_heads": k.shape[1],
        "value_dim": v.shape[3],
        "dtype": name,
        "alibi_slopes": 0 if mask.alibi else None,
        "prefix_lengths": 0 if mask.prefix else None,
        "kv_lengths": 0 if mask.lengths else None,
        **{n: None if options.get(n) is None else 1.0 for n in scalars_of(ScoreNumbers)},
    }
    faster = _rounded_is_faster(device, tuple(fields.items()), options.get("implementation"))
    return q.dtype if faster else torch.float32


@lru_cache(maxsize=256)
def _rounded_is_faster(
    device: Device, fields: tuple[tuple[str, Any], ...], implementation: str | None
) -> bool:
    """``fields``: those of the descriptor of a call over all of a rank's rows."""
    given = dict(fields)

    def seconds(dtype_out: str) -> float:
        """The least that is predicted."""
        described = Attention(**given, dtype_out=dtype_out, return_lse=True)
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

    return seconds("float32") > _SLOWER * seconds(given["dtype"])
