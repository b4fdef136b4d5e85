"""Attention's options, defined once: names, types, defaults and rules.

The public functions name theirs one by one, for editors and readers; a test holds them to these.
What stands for them elsewhere (keys of planned calls, torch's schemas, JAX's static arguments) is
made of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelseam.descriptors.attention.arrays import KV_LAYOUTS, LAYOUTS, order
from kernelseam.descriptors.attention.forward_problem import band
from kernelseam.descriptors.common.validation import extent, finite, flag
from kernelseam.dtypes import DType
from kernelseam.ops.signatures import Window


class Options(NamedTuple):
    """All that ``attention``, ``attention_varlen`` and ``attention_paged`` take beside operands and
    where to run: each takes a part, and leaves the others at their defaults. Hashable."""

    out_dtype: DType | str | None = None
    return_lse: bool = False
    causal: bool = False
    window: Window = None
    scale: float | None = None
    softcap: float | None = None
    layout: str = "bhsd"
    q_scale_block: int | None = None
    scale_block: int | None = None
    batch_invariant: bool = False
    latent: bool = False
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    kv_layout: str = "nhd"

    def of_descriptor(self) -> dict[str, Any]:
        """Those that ``Attention.from_arrays`` takes, checked. Raises InvalidValue."""
        return _checked(self, ("out_dtype", "return_lse"))


if TYPE_CHECKING:
    ordered = Options
else:

    def ordered(*values):
        """The first values of ``Options``, as a plain tuple: to type checkers they are Options. A
        call on arrays has them in its key, and making Options of them costs it as much as reading
        a tensor."""
        return values


PAGED = Options(causal=True, layout="bshd")
"""The defaults of ``attention_paged``."""


class GradientOptions(NamedTuple):
    """All that ``attention_bwd`` takes beside operands and where to run. Hashable."""

    bias_gradient: bool = False
    sink_gradient: bool = False
    deterministic: bool = True
    causal: bool = False
    window: Window = None
    scale: float | None = None
    softcap: float | None = None
    layout: str = "bhsd"
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    def of_forward(self) -> dict[str, Any]:
        """Those of the attention whose gradients they are, as ``Attention.from_arrays`` takes them,
        checked. Raises InvalidValue."""
        return _checked(self, ("bias_gradient", "sink_gradient", "deterministic"))


def _checked(options: NamedTuple, without: tuple[str, ...]) -> dict[str, Any]:
    """Options by name, converted as descriptors take them."""
    return {
        n: x if x is None and n in _NULLABLE else RULES[n](n, x)
        for n, x in options._asdict().items()
        if n not in without
    }


_NULLABLE = (
    *("window", "scale", "softcap", "max_seqlen_q", "max_seqlen_k"),
    *("scale_block", "q_scale_block"),
)
RULES: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(("causal", "batch_invariant", "latent"), flag),
    "window": band,
    "scale": finite,
    "softcap": finite,
    "max_seqlen_q": extent,
    "max_seqlen_k": extent,
    **dict.fromkeys(("scale_block", "q_scale_block"), lambda n, x: extent(n, x, 1)),
    "layout": lambda n, x: order(n, x, LAYOUTS),
    "kv_layout": lambda n, x: order(n, x, KV_LAYOUTS),
}
"""``rule(name, value)``: what an option must be."""
