"""Options of paged caches on arrays: names, types, defaults, rules and words."""

from __future__ import annotations

from kernelseam.descriptors.common.layouts import KV_LAYOUTS, LAYOUTS, order
from kernelseam.descriptors.common.options import scalar
from kernelseam.descriptors.common.validation import extent, positive
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass


def _positive(name: str, value: object) -> float:
    return positive(name, value, "Give a small number")


@dataclass(frozen=True, kw_only=True)
class CacheLayouts:
    layout: str = scalar("bshd", lambda n, x: order(n, x, LAYOUTS), "The order of the axes.")
    kv_layout: str = scalar(
        "nhd", lambda n, x: order(n, x, KV_LAYOUTS), "The order of the axes of a page."
    )


@dataclass(frozen=True, kw_only=True)
class AppendOptions(CacheLayouts):
    """All that ``append_paged`` takes beside operands and where to run."""

    rotary_style: str = scalar("halves", None, "Which elements rotate together: halves or pairs.")
    norm_eps: float = scalar(1e-6, _positive, "What is added to the mean of squares.")


@dataclass(frozen=True, kw_only=True)
class GatherOptions(CacheLayouts):
    """All that ``gather_paged`` takes beside operands and where to run."""

    total_k: int | None = scalar(None, extent, "Rows of packed results.")
    max_seqlen_k: int | None = scalar(
        None, extent, "Rows of an entry. [what the table has room for]"
    )
    out_dtype: DType | str | None = scalar(None, None, "The results' dtype. [that of the pages]")
