"""Attention's options: names, types, defaults, rules and words, in groups.

Descriptors, the functions on arrays, torch's operators, JAX, the distributed functions, the command
line, samples and the oracle's input take them from here; ``docs/add-an-option.md`` says how one is
added.
"""

from __future__ import annotations

from enum import Flag, auto
from typing import Any, TypedDict

from kernelseam.descriptors.common.layouts import KV_LAYOUTS, LAYOUTS, order
from kernelseam.descriptors.common.options import operand, scalar
from kernelseam.descriptors.common.precision import precision_name
from kernelseam.descriptors.common.validation import (
    MAX_EXTENT,
    extent,
    finite,
    flag,
    integer,
    positive,
)
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

Window = tuple[int | None, int | None] | None


def band(field: str, value: object) -> tuple[int | None, int | None]:
    """A window's (left, right), validated."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidValue(field, value, "must be (left, right)", "For example (127, 0)")
    remedy = "Give keys beside a query's; None, flash-attn's -1: no bound"
    left, right = (
        None if x is None else integer(f"{field}[{i}]", x, 0, MAX_EXTENT, remedy)
        for i, x in enumerate(value)
    )
    return left, right


def _count(name: str, value: object) -> int:
    return extent(name, value, 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class BandAndScale:
    """Band and scale, which every attention has; by default no band."""

    causal: bool = scalar(False, flag, "Query i sees no key after its own.")
    window: Window = scalar(
        None, band, "LEFT,RIGHT: a sliding window; a side left out has no bound."
    )
    scale: float | None = scalar(None, finite, "What q*k is multiplied by. [1/sqrt(head dim)]")


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreNumbers:
    """Numbers that change scores. Whether one is given is part of the spec (and the binary), its
    value part of the problem (an argument)."""

    softcap: float | None = scalar(
        None,
        lambda n, x: positive(n, x, "Leave it out for no cap"),
        "Scores are softcap*tanh(x/softcap).",
    )


@dataclass(frozen=True, kw_only=True)
class SpecNumbers:
    """Fields of a spec: which of ``ScoreNumbers`` are given."""

    softcap: bool = False


@dataclass(frozen=True, kw_only=True)
class ProblemNumbers:
    """Fields of a problem: the values of ``ScoreNumbers``, 0 for one that is not given."""

    softcap: float = 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class PrecisionOption:
    """How float32 is multiplied, as in a GEMM."""

    precision: str | None = scalar(
        None, precision_name, "How float32 is multiplied: ieee, tf32 or tf32x3. [ieee]"
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreScalars(PrecisionOption, ScoreNumbers, BandAndScale):
    """Scalar options of scores and masks."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreOperands:
    """Operands that change scores and masks."""

    bias: object = operand("BHSL", "Is added to scores.")
    mask: object = operand("BHSL", "bool: True where a key may be seen.")
    alibi_slopes: object = operand("BH", "float32: scores lose slope*|distance|.")
    sinks: object = operand("H", "float32: a key of value 0 with this score.")
    prefix_lengths: object = operand("B", "int32: leading keys that every query sees.")
    kv_lengths: object = operand("B", "int32: keys of each entry.")


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaleOptions:
    """Scales of 8-bit operands."""

    q_scales: object = operand("", "float32: what q of 8 bits is multiplied by.")
    k_scales: object = operand("", "float32: what k of 8 bits is multiplied by.")
    v_scales: object = operand("", "float32: what v of 8 bits is multiplied by.")
    q_scale_block: int | None = scalar(None, _count, "Queries that share a scale.")
    scale_block: int | None = scalar(None, _count, "Keys that share a scale.")


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedOperands:
    """Offsets and lengths of packed sequences."""

    cu_seqlens_q: object = operand("", "int32 [B + 1]: where the queries of entries begin.")
    cu_seqlens_k: object = operand("", "int32 [B + 1]: where the keys of entries begin.")


@dataclass(frozen=True, eq=False, kw_only=True)
class PageOperands:
    """Page tables."""

    block_table: object = operand("", "int32 [B, width]: pages of each entry.")


@dataclass(frozen=True, eq=False, kw_only=True)
class ResultOptions:
    """What is returned, and on what its bits may depend."""

    return_lse: bool = scalar(False, flag, "Return the log-sum-exp of the scores, too.")
    batch_invariant: bool = scalar(
        False, flag, "A row's bits do not depend on the rest of the batch."
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentOption:
    """Latent attention (MLA), over strided, packed and paged memory, not over lists of
    addresses."""

    latent: bool = scalar(False, flag, "v is the first columns of k, a view of it.")
    row_scale_block: int | None = scalar(
        None, _count, "Columns of a latent key that share a scale in its row (FlashMLA's: 128)."
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefixOption:
    """Shared prefixes of paged memory."""

    prefix_groups: int | None = scalar(
        None, _count, "Groups of entries, at most, whose common first pages are read once."
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayOptions:
    """Layouts that no shape tells."""

    layout: str = scalar("bhsd", lambda n, x: order(n, x, LAYOUTS), "The order of the axes.")
    max_seqlen_q: int | None = scalar(None, extent, "At least the queries of each packed sequence.")
    max_seqlen_k: int | None = scalar(None, extent, "At least the keys of each entry.")


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(
    ArrayOptions,
    ResultOptions,
    LatentOption,
    PrefixOption,
    PageOperands,
    PackedOperands,
    ScaleOptions,
    ScoreOperands,
    ScoreScalars,
):
    """All that ``attention``, ``attention_varlen`` and ``attention_paged`` take beside q, k and v
    and where to run: each takes a part, and leaves the others at their defaults."""

    out_dtype: DType | str | None = scalar(None, None, "The result's dtype. [q's]")
    kv_layout: str = scalar(
        "nhd", lambda n, x: order(n, x, KV_LAYOUTS), "The order of the axes of a page."
    )


PAGED = AttentionOptions(causal=True, layout="bshd")
"""The defaults of ``attention_paged``."""


@dataclass(frozen=True, kw_only=True)
class GradientOptions(ArrayOptions, PackedOperands, ScoreOperands, ScoreScalars):
    """All that ``attention_bwd`` takes beside q, k, v, results and where to run."""

    bias_gradient: bool = scalar(False, flag, "Compute the bias's gradient.")
    sink_gradient: bool = scalar(False, flag, "Compute the sinks' gradient.")
    deterministic: bool = scalar(True, flag, "The same bits every time.")


class SpecOption(Flag):
    """Options of a spec beyond dtypes and head dims, as flags: those that a problem has, and those
    that an implementation supports."""

    causal = auto()
    window = auto()
    prefix = auto()
    alibi = auto()
    softcap = auto()
    bias = auto()
    mask = auto()
    sinks = auto()
    q_view = auto()
    kv_view = auto()
    lengths = auto()
    dtype_out = auto()
    batch_invariant = auto()
    prefix_groups = auto()
    dtype_kv = auto()
    kv_scales = auto()
    dtype_q = auto()
    q_scales = auto()
    expression = auto()
    precision = auto()
    row_scale_block = auto()


ANY_VIEW = SpecOption.q_view | SpecOption.kv_view | SpecOption.lengths
"""Packed, paged and listed memory, and keys of given lengths."""
STORED = SpecOption.dtype_kv | SpecOption.kv_scales | SpecOption.dtype_q | SpecOption.q_scales
"""Operands of 8 bits."""


def names_of(options: SpecOption) -> list[str]:
    """The flags' names, sorted."""
    return sorted(o.name or "" for o in options)


class Scores(TypedDict, total=False):
    """Types of the options of ``ScoreScalars`` and ``ScoreOperands``, for overloads that take them
    by name."""

    causal: bool
    window: Window
    scale: float | None
    softcap: float | None
    precision: str | None
    bias: Any
    mask: Any
    alibi_slopes: Any
    sinks: Any
    prefix_lengths: Any
