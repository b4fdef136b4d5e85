"""An attention's problem and spec: the hashable part of its descriptors. They hold no pointers and
check nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from kernelseam.contract import OperandRule
from kernelseam.descriptors.attention.options import (
    ProblemNumbers,
    SpecNumbers,
    SpecOption,
    names_of,
)
from kernelseam.descriptors.common.captured import captured, captured_rules
from kernelseam.descriptors.common.extents import distinct
from kernelseam.dtypes import DType
from kernelseam.errors import not_supported
from kernelseam.expressions.text import structure_of
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

SLOPES, PREFIXES = "alibi_slopes", "prefix_lengths"
PLAIN = frozenset(
    {"dtype", "head_dim", "value_dim", "vector", "lse", "latent", "slopes", "prefixes"}
)
"""Fields of a spec that are not options: every implementation supports them."""


def scaled_row(head_dim: int, value_dim: int, block: int) -> int:
    """Bytes of a latent key whose values are of 8 bits: these, a float32 scale for each ``block``
    of them, and its other columns in 16 bits."""
    return value_dim + 4 * (value_dim // block) + 2 * (head_dim - value_dim)


def dims_name(head_dim: int, value_dim: int) -> str:
    """Head dims, those of values apart where they differ: "64" or "192/128"."""
    return f"{head_dim}" if head_dim == value_dim else f"{head_dim}/{value_dim}"


@dataclass(frozen=True)
class AttentionSpec(SpecNumbers):
    """The compile-time parameters of an attention forward. ``vector``: as in GemmSpec, one for q,
    k, v and out."""

    dtype: DType
    head_dim: int
    value_dim: int
    causal: bool = False
    lse: bool = False
    vector: int = 16
    window: bool = False
    """Whether there is a window of keys about the diagonal; the problem has its width."""
    prefix: bool = False
    alibi: bool = False
    bias: DType | None = None
    mask: bool = False
    sinks: bool = False
    q_view: str = "strided"
    """"strided", "packed" or "pointers"; out lies as q does."""
    kv_view: str = "strided"
    """"strided", "packed", "paged" or "pointers"."""
    lengths: bool = False
    """Whether the number of keys of each entry is in device memory."""
    dtype_out: DType | None = None
    """None: that of q, k and v."""
    batch_invariant: bool = False
    prefix_groups: bool = False
    """Whether first pages that entries have in common are to be read once."""
    dtype_kv: DType | None = None
    """That of k and v where they are stored in 8 bits; None: that of q."""
    kv_scales: str | None = None
    """What has a scale of k and one of v: "heads" of an entry, or "blocks" of their keys."""
    dtype_q: DType | None = None
    """That of q where it is stored in 8 bits, as k and v then are; None: ``dtype``."""
    q_scales: str | None = None
    """What has a scale of q: "heads", a KV head's group of an entry, or "blocks" of queries."""
    precision: str | None = None
    """How float32 is multiplied; as in GemmSpec."""
    latent: bool = False
    """Whether v is the first columns of k, as in multi-head latent attention: at the same address,
    with the same strides. Who reads v as any other is right, too."""
    row_scale_block: int | None = None
    """Columns of a latent key's values, of 8 bits, that share a scale, which lies in the key's row;
    see ``scaled_row``. None: rows are of ``kv`` alone."""
    expression: str | None = None
    """The text of a score_mod and a mask_mod (``kernelseam.expressions.text``)."""
    slopes: str = SLOPES
    """The operand that has ALiBi's slopes: a captured array where a score_mod said ALiBi. So
    ``prefixes``."""
    prefixes: str = PREFIXES

    operation = "attention"

    @cached_property
    def q(self) -> DType:
        """The element type of q as it lies in memory."""
        return self.dtype_q or self.dtype

    @cached_property
    def kv(self) -> DType:
        """The element type of k and v as they lie in memory; products are of ``dtype``."""
        return self.dtype_kv or self.dtype

    @property
    def renamed(self) -> dict[str, str]:
        """Pointers of kernels whose operands a spec names."""
        return {"slopes": self.slopes, "prefixes": self.prefixes}

    @property
    def key_width(self) -> int:
        """Elements of a row of k as it lies in memory."""
        if not self.row_scale_block:
            return self.head_dim
        return scaled_row(self.head_dim, self.value_dim, self.row_scale_block)

    @property
    def dims(self) -> str:
        """The head dims, as they are named."""
        return dims_name(self.head_dim, self.value_dim)

    def __str__(self) -> str:
        return f"attention {self.words} dim={self.dims}"

    @property
    def words(self) -> str:
        """Dtypes, options and views."""
        dtypes = f"{self.dtype}" if self.dtype_kv is None else f"{self.dtype}/{self.dtype_kv}"
        if self.dtype_q is not None:
            dtypes = f"{self.dtype_q} to {self.dtype}"
        apart = SpecOption.dtype_kv | SpecOption.dtype_q | SpecOption.q_view | SpecOption.kv_view
        apart |= SpecOption.precision
        options = "".join(f" {o}" for o in names_of(self.options & ~apart))
        options += f" precision={self.precision}" * (self.precision is not None)
        if self.expression is not None:
            options += f" {structure_of(self.expression).key}"
        views = "" if self.q_view == self.kv_view == "strided" else f" {self.q_view}/{self.kv_view}"
        latent = " latent" * self.latent
        return f"{dtypes}{options}{latent}{views}"

    @cached_property
    def out(self) -> DType:
        """The element type of the result."""
        return self.dtype_out or self.dtype

    @property
    def dtype_lse(self) -> DType:
        """The element type of the LSE: the accumulator's, so that gradients lose no accuracy by
        it."""
        return self.dtype.accumulator

    @cached_property
    def options(self) -> SpecOption:
        """The options that are set: an implementation must support them all."""
        result = SpecOption(0)
        for f in fields(self):
            if f.name not in PLAIN and getattr(self, f.name) != f.default:
                result |= SpecOption[f.name]
        return result

    @cached_property
    def part(self) -> AttentionSpec:
        """Of a part of the keys, whose result and LSE are float32 for a merge."""
        return replace(self, lse=True, dtype_out=DType.float32)

    def refused_by(self, supported: SpecOption) -> str | None:
        """Why an implementation of these options does not take the spec, or None."""
        unknown = names_of(self.options & ~supported)
        return not_supported(unknown) if unknown else None


@dataclass(frozen=True)
class AttentionProblem(ProblemNumbers):
    """out = softmax(scores)·v with query head h on KV head h // (num_heads / kv_heads). Strides in
    elements.

    Query i, of S_q, meets key j, of S_k, at the distance d = j − i − (S_k − S_q): 0 on the diagonal
    that ends at the bottom right. Causal: key j is visible iff d ≤ 0. A window: iff −left ≤ d ≤
    right. Keys before ``prefix`` are visible in any case, masked ones in none.

    Where a view is packed or has lengths, S_q and S_k are the most that an entry of the batch may
    have.
    """

    spec: AttentionSpec
    batch: int
    num_heads: int
    kv_heads: int
    S_q: int
    S_k: int
    q_strides: tuple[int, int, int]
    """(batch, head, row); so for k, v and out. Of paged keys and values (page, head, row). Packed
    rows have no batch, and pointer lists neither batch nor head: 0."""
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]
    lse_strides: tuple[int, int] = (0, 0)
    """(batch, head); rows are contiguous."""
    scale: float = 1.0
    left: int | None = None
    """Window to the left of the diagonal; None: no limit. ``right`` likewise."""
    right: int | None = None
    bias_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    """(batch, head, query, key); so for the mask. 0 repeats."""
    mask_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    alibi_strides: tuple[int, int] = (0, 0)
    """(batch, head)"""
    total_q: int = 0
    """Rows of packed q and out; so of packed k and v."""
    total_k: int = 0
    pages: int = 0
    page_size: int = 0
    table_width: int = 0
    """Pages per row of the block table."""
    table_stride: int = 0
    prefix_groups: int = 0
    """Groups of neighbouring entries, at most, whose common first pages are read once."""
    k_scale_strides: tuple[int, int, int] = (0, 0, 0)
    """(batch, head, block); so of v. Blocks of paged keys are counted in each page, which stands
    for the batch; of packed keys over all rows, and there is no batch."""
    v_scale_strides: tuple[int, int, int] = (0, 0, 0)
    q_scale_strides: tuple[int, int, int] = (0, 0, 0)
    """(batch, head, block); heads are KV heads where a head has one scale, else query heads."""
    q_scale_block: int = 0
    """Queries that share a scale, from the first of an entry's or of all packed rows on; 0: all of
    an entry."""
    scale_block: int = 0
    """Keys that share a scale, from the first of an entry's, of a page's or of all packed rows on;
    0: all of an entry."""
    captured_numbers: tuple[float, ...] = ()
    """What the expression's functions captured: numbers, and extents and strides of arrays, the
    operands captured_0, captured_1, …"""
    captured_extents: tuple[tuple[int, ...], ...] = ()
    captured_strides: tuple[tuple[int, ...], ...] = ()

    operation = "attention"

    @cached_property
    def head_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // max(self.kv_heads, 1)

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        return tuple(self._operands())

    def _operands(self) -> Iterator[OperandRule]:
        s, f32, i32 = self.spec, DType.float32, DType.int32
        b, h, g = self.batch, self.num_heads, self.kv_heads
        reads = int((b > 0 and h > 0 and self.S_q > 0 and s.value_dim > 0) or s.lse)
        # Packed rows of no sequence are not written.
        query_rows = {
            "strided": (b, self.S_q),
            "packed": (int(b > 0 and self.S_q > 0), self.total_q),
        }
        key_rows = self._key_rows

        def rows(
            name: str,
            dtype: DType,
            view: str,
            heads: int,
            width: int,
            strides: tuple[int, int, int],
            written: bool = False,
            same_as: str = "",
        ) -> OperandRule:
            used = 1 if written else reads
            if view == "pointers":
                return OperandRule(
                    f"{name}_ptrs", None, (b * heads * reads * min(self.S_q, 1),), (1,), 8
                )
            outer, inner = (key_rows if name in "kv" else query_rows)[view]
            return OperandRule(
                name,
                dtype,
                (outer * used, heads, inner, width),
                (*strides, 1),
                s.vector if s.vector >= 16 else dtype.itemsize,
                written,
                same_as=same_as,
            )

        yield rows("q", s.q, s.q_view, h, s.head_dim, self.q_strides)
        yield rows("k", s.kv, s.kv_view, g, s.key_width, self.k_strides)
        same_as = "k" if s.latent else ""
        yield rows("v", s.kv, s.kv_view, g, s.value_dim, self.v_strides, same_as=same_as)
        yield rows("out", s.out, s.q_view, h, s.value_dim, self.out_strides, True)
        if s.lse:
            outer, inner = query_rows.get(s.q_view, (b, self.S_q))
            kind = s.dtype_lse
            yield OperandRule(
                "lse", kind, (outer, h, inner), (*self.lse_strides, 1), kind.itemsize, True
            )
        if s.bias:
            yield OperandRule(
                "bias",
                s.bias,
                (b * reads, h, self.S_q, self.S_k),
                self.bias_strides,
                s.bias.itemsize,
            )
        if s.mask:
            yield OperandRule(
                "mask", DType.boolean, (b * reads, h, self.S_q, self.S_k), self.mask_strides, 1
            )
        if s.alibi and s.slopes == SLOPES:
            yield OperandRule(SLOPES, f32, (b * reads, h), self.alibi_strides, 4)
        if s.sinks:
            yield OperandRule("sinks", f32, (h * reads,), (1,), 4)
        if s.q_scales:
            extents = self.q_scale_extents
            shape = (extents[0] * reads, *extents[1:])
            yield OperandRule("q_scales", f32, shape, self.q_scale_strides, 4)
        if s.kv_scales:
            outer, blocks = self.scale_extents
            for name, walk in (
                ("k_scales", self.k_scale_strides),
                ("v_scales", self.v_scale_strides),
            ):
                yield OperandRule(name, f32, (outer * reads, g, blocks), walk, 4)
        if s.prefix and s.prefixes == PREFIXES:
            yield OperandRule(PREFIXES, i32, (b * reads,), (1,), 4)
        if s.lengths:
            yield OperandRule("kv_lengths", i32, (b,), (1,), 4)
        if s.q_view == "packed":
            yield OperandRule("cu_seqlens_q", i32, ((b + 1) * min(b, 1),), (1,), 4)
        if s.kv_view == "packed":
            yield OperandRule("cu_seqlens_k", i32, ((b + 1) * min(b, 1),), (1,), 4)
        yield from captured_rules(self, self._captured, reads)
        if s.kv_view == "paged":
            yield OperandRule("block_table", i32, (b, self.table_width), (self.table_stride, 1), 4)

    @property
    def _captured(self) -> Sequence[tuple[str, int]]:
        """(dtype, rank) of captured arrays; without an expression, those that options take."""
        if self.spec.expression is not None:
            return structure_of(self.spec.expression).arrays
        return [
            ("float32" if captured(i) == self.spec.slopes else "int32", len(extents))
            for i, extents in enumerate(self.captured_extents)
        ]

    @property
    def _key_rows(self) -> dict[str, tuple[int, int]]:
        """(outer axis, rows) of k and v by view."""
        return {
            "strided": (self.batch, self.S_k),
            "packed": (1, self.total_k),
            "paged": (self.pages, self.page_size),
        }

    @property
    def scale_extents(self) -> tuple[int, int]:
        """(batch or pages, blocks): how many scales a KV head has."""
        if not self.scale_block:
            return self.batch, 1
        outer, rows = self._key_rows[self.spec.kv_view]
        return outer, -(-rows // self.scale_block)

    @property
    def q_scale_extents(self) -> tuple[int, int, int]:
        """(batch, heads, blocks) of the scales of q."""
        if not self.q_scale_block:
            return self.batch, self.kv_heads, 1
        packed = self.spec.q_view == "packed"
        outer, rows = (1, self.total_q) if packed else (self.batch, self.S_q)
        return outer, self.num_heads, -(-rows // self.q_scale_block)

    @cached_property
    def visible(self) -> int:
        """Query-key pairs of one head that a causal mask or a window leaves, at the full
        lengths."""
        left, right = self.left, 0 if self.spec.causal else self.right
        if left is None and right is None:
            return self.S_q * self.S_k

        def before(bound: int) -> int:
            """Pairs with d < bound."""
            # Query i has j ≤ i + shift + bound − 1: an arithmetic series, cut at 0 and S_k.
            shift = self.S_k - self.S_q + bound
            first, full = max(0, -shift), min(max(0, self.S_k - shift), self.S_q)
            rows = max(full - first, 0)
            return (
                rows * (first + shift)
                + rows * (rows - 1) // 2
                + max(self.S_q - max(full, first), 0) * self.S_k
            )

        return (self.S_q * self.S_k if right is None else before(right + 1)) - (
            0 if left is None else before(-left)
        )

    @property
    def operations(self) -> int:
        return (
            2
            * self.batch
            * self.num_heads
            * self.visible
            * (self.spec.head_dim + self.spec.value_dim)
        )

    @property
    def plane_bytes(self) -> int:
        """Those of the bias and the mask."""
        s, extents, read = self.spec, (self.batch, self.num_heads, self.S_q, self.S_k), 0
        for dtype, strides in (
            (s.bias, self.bias_strides),
            (DType.boolean if s.mask else None, self.mask_strides),
        ):
            if dtype:
                read += dtype.itemsize * math.prod(
                    distinct(n, x) for n, x in zip(extents, strides, strict=True)
                )
        return read

    @cached_property
    def bytes_moved(self) -> int:
        s, b, h = self.spec, self.batch, self.num_heads
        queries = self.total_q if s.q_view == "packed" else b * self.S_q
        keys = {"packed": self.total_k, "paged": b * self.S_k}.get(s.kv_view)
        if keys is None:
            keys = (distinct(b, self.k_strides[0]) if s.kv_view == "strided" else b) * self.S_k
        kv_h = (
            distinct(self.kv_heads, self.k_strides[1]) if s.kv_view != "pointers" else self.kv_heads
        )
        read = queries * h * s.head_dim * s.q.itemsize
        width = s.key_width if s.latent else s.head_dim + s.value_dim
        read += keys * kv_h * width * s.kv.itemsize
        if self.q_scale_block:
            read += 4 * (queries // self.q_scale_block) * h
        if self.scale_block:
            read += 8 * (keys // self.scale_block) * kv_h
        written = s.value_dim * s.out.itemsize + (s.dtype_lse.itemsize if s.lse else 0)
        return read + self.plane_bytes + queries * h * written

    @property
    def compute_dtype(self) -> DType:
        return self.spec.q

    def __str__(self) -> str:
        s = self.spec
        heads = (
            f"{self.num_heads}"
            if self.kv_heads == self.num_heads
            else f"{self.num_heads}/{self.kv_heads}"
        )
        return (
            f"attention {s.words} batch={self.batch} heads={heads} "
            f"S_q={self.S_q} S_k={self.S_k} dim={s.dims}"
        )
