"""The attention forward: dense, packed and paged memory, masks and changes of the scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelseam.contract import ArrayInfo, Device, Runtime
from kernelseam.descriptors.attention import contents
from kernelseam.descriptors.attention.arrays import fields_of
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.descriptors.common.extents import default_scale
from kernelseam.descriptors.common.operands import (
    check_layout,
    describe_all,
    dtype_of,
    pointer,
    required,
    resolve,
    without_arrays,
)
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import (
    MAX_EXTENT,
    extent,
    finite,
    flag,
    integer,
    multiple,
    packed,
    stride,
    vector_bytes,
)
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.forking import cached_property

ROWS = ("q", "k", "v", "out")
OPTIONAL = (
    "bias",
    "mask",
    "alibi_slopes",
    "sinks",
    "prefix_lengths",
    "kv_lengths",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "block_table",
)
"""Operands that take part where they are given; address 0 says that they will be bound."""
_STRIDES = {
    **{n: tuple(f"stride_{n}_{axis}" for axis in ("batch", "head", "row")) for n in ROWS},
    "lse": ("stride_lse_batch", "stride_lse_head"),
    **{
        n: tuple(f"stride_{n}_{axis}" for axis in ("batch", "head", "row", "column"))
        for n in ("bias", "mask")
    },
    "alibi_slopes": ("stride_alibi_batch", "stride_alibi_head"),
    "block_table": ("stride_table_row",),
}
"""Operand → its stride fields."""


def band(field: str, value: object) -> tuple[int | None, int | None]:
    """A window's (left, right), validated."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidValue(field, value, "must be (left, right)", "For example (127, 0)")
    left, right = (None if x is None else extent(f"{field}[{i}]", x) for i, x in enumerate(value))
    return left, right


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention:
    """out[b,h] = softmax(x[b,h])·v[b,g] with g = h // (num_heads / kv_heads) and, for query i and
    key j,

    x = softcap·tanh(scale·q_i·k_j / softcap) − slope_h·|d| + bias[b,h,i,j]

    where key j is visible, else −inf; d = j − i − (S_k − S_q) is the distance from the diagonal
    that ends at the bottom right: the last query meets the last key at 0. Without a softcap the
    first term is scale·q_i·k_j; the others are there where they are given. ``sinks`` [H], float32,
    adds e^sink_h to each row's sum of e^x, as a key of value 0 would.

    Key j is visible to query i iff mask[b,h,i,j] allows it and (j < prefix_lengths[b], or d is in
    the band): ``causal`` takes d ≤ 0, ``window = (left, right)`` takes −left ≤ d ≤ right, None
    meaning no bound; both together, both. A query that sees no key gives zeros, and an lse of −inf
    (of its sink, where there is one).

    q is [batch, num_heads, S_q, head_dim], k [batch, kv_heads, S_k, head_dim], v [batch, kv_heads,
    S_k, value_dim], out [batch, num_heads, S_q, value_dim]; ``lse`` [batch, num_heads, S_q],
    float32 (float64 where q is), takes ln Σ_j e^x. ``bias`` (of q's dtype or float32) and ``mask``
    (bool, True where a key may be seen) are [batch, num_heads, S_q, S_k] with strides of any kind,
    0 to repeat; ``alibi_slopes`` float32 [batch, num_heads], ``prefix_lengths`` int32 [batch].

    Sequences of different lengths:
    * ``kv_lengths`` int32 [batch]: entry b has so many keys, at most S_k, which then stand for S_k
    in d.
    * ``cu_seqlens_q`` int32 [batch + 1]: q and out (and lse) hold the rows of all entries one after
    the other, entry
      b's from cu_seqlens_q[b] to cu_seqlens_q[b+1], ``total_q`` rows in all; S_q is the longest.
      ``cu_seqlens_k`` likewise.
    * ``block_table`` int32 [batch, table_width] with ``kv_lengths``: k and v are [pages, page_size,
    kv_heads, dim] (the
      page's stride is the batch's), and key j of entry b is row j % page_size of page
      block_table[b, j // page_size].

    Operands are arrays, addresses (ints), or None until ``bind``; ``return_lse`` says that an lse
    will be bound (an lse that is given says so too). An optional one (bias … block_table) that
    ``bind`` will give is announced by address 0. Strides count elements and are those of the axes
    (batch, head, row) whatever their order in memory; columns are contiguous, and so are the rows
    of lse. One left out packs row-major around the others (packed and paged rows: heads within
    rows). 0 repeats an input.

    ``kv_heads`` defaults to num_heads, ``value_dim`` to head_dim, ``scale`` to 1/√head_dim,
    ``dtype`` (of q, k and v) to the arrays', ``dtype_out`` to dtype (float32 keeps partial results
    for ``merge_states``), ``dtype_bias`` to the array's, else to dtype. ``batch_invariant``: a
    row's bits do not depend on what else is in the batch. Raises InvalidValue (naming field, value,
    rule and remedy) where no such problem exists.
    """

    batch: int
    num_heads: int
    S_q: int
    S_k: int
    head_dim: int
    kv_heads: int | None = None
    value_dim: int | None = None
    q: object = field(default=None, repr=False)
    k: object = field(default=None, repr=False)
    v: object = field(default=None, repr=False)
    out: object = field(default=None, repr=False)
    lse: object = field(default=None, repr=False)
    return_lse: bool = False
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: object = field(default=None, repr=False)
    mask: object = field(default=None, repr=False)
    alibi_slopes: object = field(default=None, repr=False)
    sinks: object = field(default=None, repr=False)
    prefix_lengths: object = field(default=None, repr=False)
    kv_lengths: object = field(default=None, repr=False)
    cu_seqlens_q: object = field(default=None, repr=False)
    cu_seqlens_k: object = field(default=None, repr=False)
    block_table: object = field(default=None, repr=False)
    total_q: int | None = None
    total_k: int | None = None
    pages: int | None = None
    page_size: int | None = None
    table_width: int | None = None
    dtype: DType | str | None = None
    dtype_out: DType | str | None = None
    dtype_bias: DType | str | None = None
    batch_invariant: bool = False
    stride_q_batch: int | None = None
    stride_q_head: int | None = None
    stride_q_row: int | None = None
    stride_k_batch: int | None = None
    stride_k_head: int | None = None
    stride_k_row: int | None = None
    stride_v_batch: int | None = None
    stride_v_head: int | None = None
    stride_v_row: int | None = None
    stride_out_batch: int | None = None
    stride_out_head: int | None = None
    stride_out_row: int | None = None
    stride_lse_batch: int | None = None
    stride_lse_head: int | None = None
    stride_bias_batch: int | None = None
    stride_bias_head: int | None = None
    stride_bias_row: int | None = None
    stride_bias_column: int | None = None
    stride_mask_batch: int | None = None
    stride_mask_head: int | None = None
    stride_mask_row: int | None = None
    stride_mask_column: int | None = None
    stride_alibi_batch: int | None = None
    stride_alibi_head: int | None = None
    stride_table_row: int | None = None
    _problem: AttentionProblem = field(init=False, repr=False)
    _arrays: Mapping[str, ArrayInfo] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        dtype = required(
            "dtype", dtype_of("dtype", self.dtype, infos, ("q", "k", "v")), "q, k, v and out"
        )
        self._refuse_idle()
        dtype_out = self._dtype_or_float32("out", dtype, infos)
        batch, heads = extent("batch", self.batch), extent("num_heads", self.num_heads)
        kv_heads = heads if self.kv_heads is None else extent("kv_heads", self.kv_heads)
        s_q, s_k, d = (
            extent("S_q", self.S_q),
            extent("S_k", self.S_k),
            extent("head_dim", self.head_dim),
        )
        d_v = d if self.value_dim is None else extent("value_dim", self.value_dim)
        multiple("num_heads", heads, "kv_heads", kv_heads)
        integer(
            "batch·num_heads", batch * heads, 0, MAX_EXTENT, "Split the batch over several calls"
        )
        lse = flag("return_lse", self.return_lse) or self.lse is not None
        q_view, kv_view = self._views()
        total_q, total_k = self._total("q", q_view), self._total("k", kv_view)
        pages, page_size, width = self._paging(kv_view, s_k)
        query_rows = (1, total_q) if q_view == "packed" else (batch, s_q)
        key_rows = {"packed": (1, total_k), "paged": (pages, page_size)}.get(kv_view, (batch, s_k))
        shapes = {
            "q": (query_rows[0], heads, query_rows[1], d),
            "k": (key_rows[0], kv_heads, key_rows[1], d),
            "v": (key_rows[0], kv_heads, key_rows[1], d_v),
            "out": (query_rows[0], heads, query_rows[1], d_v),
        }
        strides, vector = [], 16
        for name, shape in shapes.items():
            kind = dtype_out if name == "out" else dtype
            found = self._row_strides(name, shape, kv_view if name in "kv" else q_view, kind)
            strides.append(found)
            wide = vector_bytes(kind, shape, found, pointer(name, getattr(self, name), infos))
            vector = min(vector, wide if wide == 16 else dtype.itemsize)
        for name in ("lse", *OPTIONAL):
            pointer(name, getattr(self, name), infos)
        lse_batch, lse_head, _ = packed(
            (query_rows[0], heads, query_rows[1]), (*self._known("lse", dtype.accumulator), 1)
        )
        if q_view == "packed":
            lse_batch = self._no_batch("lse", lse_batch)
        bias = None if self.bias is None else self._dtype_or_float32("bias", dtype, infos)
        causal = flag("causal", self.causal)
        left, right = self._band(causal)
        windowed = left is not None or (right is not None and right != 0)
        plane = (batch, heads, s_q, s_k)
        q, k, v, out = strides
        problem = AttentionProblem(
            AttentionSpec(
                dtype,
                d,
                d_v,
                right == 0 and not windowed,
                lse,
                vector,
                windowed,
                self.prefix_lengths is not None,
                self.alibi_slopes is not None,
                self.softcap is not None,
                bias,
                self.mask is not None,
                self.sinks is not None,
                q_view,
                kv_view,
                self.kv_lengths is not None,
                None if dtype_out is dtype else dtype_out,
                flag("batch_invariant", self.batch_invariant),
            ),
            batch,
            heads,
            kv_heads,
            s_q,
            s_k,
            q,
            k,
            v,
            out,
            (lse_batch, lse_head) if lse else (0, 0),
            default_scale(d) if self.scale is None else finite("scale", self.scale),
            left,
            right,
            self._cap(),
            self._plane_strides("bias", plane, bias),
            self._plane_strides("mask", plane, DType.boolean if self.mask is not None else None),
            self._slope_strides(batch, heads),
            total_q,
            total_k,
            pages,
            page_size,
            width,
            0
            if kv_view != "paged"
            else width
            if self.stride_table_row is None
            else stride("stride_table_row", self.stride_table_row, DType.int32),
        )
        check_layout(problem.operands, infos, self._dense)
        object.__setattr__(self, "_problem", problem)
        object.__setattr__(self, "_arrays", infos)

    def _refuse_idle(self) -> None:
        """Refuse fields of an operand that is not there."""
        for name in ("bias", "mask", "alibi_slopes", "block_table"):
            for field_name in (*_STRIDES[name], *(("dtype_bias",) if name == "bias" else ())):
                if getattr(self, name) is None and (value := getattr(self, field_name)) is not None:
                    raise InvalidValue(
                        field_name,
                        value,
                        f"describes {name}",
                        f"Give {name} too (0: it will be bound)",
                    )

    def _dtype_or_float32(self, name: str, dtype: DType, infos: Mapping[str, ArrayInfo]) -> DType:
        """The element type of out or bias: q's, or float32."""
        found = dtype_of(f"dtype_{name}", getattr(self, f"dtype_{name}"), infos, (name,)) or dtype
        if found not in (dtype, DType.float32):
            rule = "must be float32" if dtype is DType.float32 else f"must be {dtype} or float32"
            if name in infos:
                raise InvalidValue(name, f"an array of {found}", rule, "Convert the array")
            raise InvalidValue(f"dtype_{name}", found, rule, "Leave it out for q's dtype")
        return found

    def _views(self) -> tuple[str, str]:
        if self.block_table is not None and self.cu_seqlens_k is not None:
            raise InvalidValue(
                "cu_seqlens_k",
                "given",
                "pages have their own lengths",
                "Give kv_lengths in its place",
            )
        if self.block_table is not None and self.kv_lengths is None:
            raise InvalidValue(
                "kv_lengths", None, "must tell how many keys each row of block_table has", "Give it"
            )
        if self.kv_lengths is not None and self.cu_seqlens_k is not None:
            raise InvalidValue(
                "kv_lengths",
                "given",
                "cu_seqlens_k tells the lengths already",
                "Give one of the two",
            )
        kv = (
            "paged"
            if self.block_table is not None
            else "strided"
            if self.cu_seqlens_k is None
            else "packed"
        )
        return "strided" if self.cu_seqlens_q is None else "packed", kv

    def _total(self, letter: str, view: str) -> int:
        name = f"total_{letter}"
        value = getattr(self, name)
        if view != "packed":
            if value is not None:
                raise InvalidValue(
                    name,
                    value,
                    f"counts the rows of packed {letter}",
                    f"Give cu_seqlens_{letter} too",
                )
            return 0
        if value is None:
            raise InvalidValue(name, None, f"must say how many rows packed {letter} has", "Give it")
        return extent(name, value)

    def _paging(self, view: str, s_k: int) -> tuple[int, int, int]:
        """(pages, page_size, table_width)"""
        given = {n: getattr(self, n) for n in ("pages", "page_size", "table_width")}
        for name, value in given.items():
            if view != "paged" and value is not None:
                raise InvalidValue(name, value, "describes paged keys", "Give block_table too")
            if view == "paged" and value is None and name != "table_width":
                raise InvalidValue(name, None, "must be given for paged keys", "Give it")
        if view != "paged":
            return 0, 0, 0
        size = extent("page_size", self.page_size, 1)
        needed = -(-s_k // size)
        width = needed if self.table_width is None else extent("table_width", self.table_width)
        if width < needed:
            raise InvalidValue(
                "table_width",
                width,
                f"must have room for S_k = {s_k} keys in pages of {size}: {needed}",
                "Make the table wider, or S_k smaller",
            )
        return extent("pages", self.pages), size, width

    def _band(self, causal: bool) -> tuple[int | None, int | None]:
        """How far a query sees to the left and right of the diagonal; None: as far as there are
        keys."""
        left, right = (None, None) if self.window is None else band("window", self.window)
        return left, 0 if causal else right

    def _cap(self) -> float:
        if self.softcap is None:
            return 0.0
        cap = finite("softcap", self.softcap)
        if cap <= 0:
            raise InvalidValue("softcap", cap, "must be greater than 0", "Leave it out for no cap")
        return cap

    def _given(self, name: str) -> list[int | None]:
        return [getattr(self, field_name) for field_name in _STRIDES.get(name, ())]

    def _known(self, name: str, dtype: DType) -> list[int | None]:
        """The strides that are given, validated."""
        return [
            None if s is None else stride(field_name, s, dtype)
            for field_name, s in zip(_STRIDES[name], self._given(name), strict=True)
        ]

    def _row_strides(
        self, name: str, shape: tuple[int, int, int, int], view: str, dtype: DType
    ) -> tuple[int, int, int]:
        """(batch, head, row). Where left out, heads of packed and paged memory pack within rows."""
        batch, head, row = self._known(name, dtype)
        if view == "strided":
            outer, head, row, _ = packed(shape, (batch, head, row, 1))
            return outer, head, row
        outer, row, head, _ = packed(
            (shape[0], shape[2], shape[1], shape[3]), (batch, row, head, 1)
        )
        return self._no_batch(name, outer) if view == "packed" else outer, head, row

    def _no_batch(self, name: str, stride_batch: int) -> int:
        """0, the stride of an axis that packed rows do not have; refused where it is given."""
        if self._given(name)[0] is not None:
            raise InvalidValue(
                f"stride_{name}_batch", stride_batch, "packed rows have no batch", "Leave it out"
            )
        return 0

    def _plane_strides(
        self, name: str, shape: tuple[int, int, int, int], dtype: DType | None
    ) -> tuple[int, int, int, int]:
        if dtype is None:
            return (0, 0, 0, 0)
        a, b, c, d = packed(shape, self._known(name, dtype))
        return a, b, c, d

    def _slope_strides(self, batch: int, heads: int) -> tuple[int, int]:
        if self.alibi_slopes is None:
            return 0, 0
        outer, inner = packed((batch, heads), self._known("alibi_slopes", DType.float32))
        return outer, inner

    @cached_property
    def _dense(self) -> frozenset[str]:
        """Operands whose strides were all left out."""
        return frozenset(
            n for n in (*ROWS, "lse", *OPTIONAL) if all(s is None for s in self._given(n))
        )

    @property
    def device(self) -> Device | None:
        """Where the arrays are; None where there are none."""
        return next((i.device for i in self._arrays.values()), None)

    def problem(self) -> AttentionProblem:
        """The hashable part, without pointers."""
        return self._problem

    def operands(self) -> dict[str, object]:
        """q, k, v, out, lse and the optional ones, as far as they are given."""
        return {n: v for n in (*ROWS, "lse", *OPTIONAL) if (v := getattr(self, n)) is not None}

    def without_arrays(self) -> Attention:
        """The same over the addresses of its arrays: it keeps no memory alive."""
        spec = self._problem.spec
        return without_arrays(
            self, self._arrays, dtype=spec.dtype, dtype_out=spec.dtype_out, dtype_bias=spec.bias
        )

    def simplified(self) -> tuple[Attention, str]:
        """Itself: there is no simpler way."""
        return self, ""

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Addresses of the operands. Raises InvalidValue where an array does not fit the
        problem."""
        return resolve(self._problem.operands, operands, self._arrays, self._dense, device)

    def check_device(self, found: Resolved, runtime: Runtime, device: Device) -> None:
        """Hold lengths, offsets and the block table against the memory that they point into;
        synchronises."""
        contents.check(self._problem, found, runtime, device)

    @classmethod
    def from_arrays(
        cls,
        q: object,
        k: object,
        v: object,
        out: object,
        lse: object = None,
        *,
        layout: str = "bhsd",
        kv_layout: str = "nhd",
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **options: Any,
    ) -> Attention:
        """The attention of arrays as they lie in memory: nothing is copied.

        ``layout`` "bhsd": q [B, H, S_q, D], k [B, H_kv, S_k, D], v [B, H_kv, S_k, D_v], out [B, H,
        S_q, D_v]; "bshd": the head after the row. Any strides with a contiguous last axis. ``lse``
        is [B, H, S_q] in both. With ``cu_seqlens_q``: q [T, H, D], out [T, H, D_v], lse [H, T], and
        ``max_seqlen_q`` in place of S_q; with ``cu_seqlens_k``: k [T_k, H_kv, D], v [T_k, H_kv,
        D_v] and ``max_seqlen_k``. With ``block_table`` [B, width]: k and v [pages, page_size, H_kv,
        D] ("nhd"), or with the head before the row ("hnd").

        ``options``: the descriptor's other fields. ``bias``, ``mask`` and ``alibi_slopes`` repeat
        along axes of extent 1 and along those that they lack from the left.
        """
        given = {
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "lse": lse,
            **{n: options.pop(n, None) for n in OPTIONAL},
        }
        arrays = {n: x for n, x in given.items() if x is not None or n in ROWS}
        return cls(
            **{**fields_of(arrays, layout, kv_layout, max_seqlen_q, max_seqlen_k), **options}
        )
