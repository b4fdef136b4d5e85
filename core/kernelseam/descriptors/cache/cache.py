"""Rows of k and v between tokens and the pages of a cache: append, gather, copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, ClassVar

from kernelseam.contract import ArrayInfo, Device, Runtime
from kernelseam.descriptors.cache import contents
from kernelseam.descriptors.cache.arrays import cache_fields
from kernelseam.descriptors.cache.problem import PagedCacheProblem, PagedCacheSpec
from kernelseam.descriptors.cache.rules import check_operands
from kernelseam.descriptors.common.operands import (
    describe_all,
    dtype_of,
    pointer,
    required,
)
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import WIDE, choice, extent, positive, three, two
from kernelseam.descriptors.projection.fields import RotatedRows
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

_MATRIX = ("batch", "head", "row")
_PAGES = ("page", "head", "row")


@dataclass(frozen=True, eq=False, kw_only=True)
class PagedCache(RotatedRows[PagedCacheProblem]):
    """Rows of k and v, moved between tokens and the pages of a cache in one launch.

    ``k`` [batch, kv_heads, S, head_dim] and ``v`` [batch, kv_heads, S, value_dim] are the tokens'
    rows, ``k_pages`` [pages, kv_heads, page_size, head_dim] and ``v_pages`` the pages (the axes'
    order in memory is that of the strides); ``value_dim`` 0: there is no v. ``direction``:
    "append" writes the tokens' rows to pages, "gather" the pages' rows to tokens, "copy" whole
    pages to pages: then k and v are the pages themselves, S the page size, and entry b is page
    ``sources`` [batch] b.

    The place of token s of entry b is slot ``slot_mapping`` [batch, S] (page · page_size + row),
    int32 or int64, or position p of the entry: row p % page_size of page ``block_table`` [batch,
    table_width] p // page_size. p is ``positions`` [batch, S]; or with ``kv_lengths`` [batch], the
    keys that an entry has *after* an append, p = kv_lengths[b] − S + s; or s. To gather, p = s, for
    s below kv_lengths[b] where they are given. With ``cu_seqlens`` [sequences + 1] the rows are
    packed (batch 1): sequence e has rows cu_seqlens[e] to cu_seqlens[e + 1] − 1, tables and lengths
    are [sequences, …]. A token without a place is skipped: a slot below 0, a position below 0 or
    beyond the table, a row of no sequence. Where two tokens share a place, either may remain.

    To append, in this order, in float32: ``q_norm`` and ``k_norm`` [head_dim] x ← x·weight/√(mean
    x² + eps), over each head of q and k (RMS norm; Zhang, Sennrich 2019, arXiv:1910.07467); ``cos``
    and ``sin`` float32 [max_position, rotary_dim / 2] rotate q and k by p (with slots, by
    ``positions``) as in ``QkvProjection``; pages in e4m3 hold k / scale and v / scale, rounded to
    nearest and saturated: ``k_scales`` and ``v_scales`` float32 [kv_heads] with ``scales`` "heads"
    are given (1 where scales is None), those with "tokens", [pages, kv_heads, page_size], are
    written: the largest magnitude of the row over e4m3's largest number. ``q`` [batch, num_heads,
    S, head_dim] goes to ``q_out``, which may be q itself. Gathering multiplies by the scales.

    Operands are arrays, addresses (ints), or None until ``bind``; an optional one that ``bind``
    will give is announced by address 0. Strides count elements; those left out pack row-major.
    Raises InvalidValue.
    """

    batch: int
    S: int
    kv_heads: int
    head_dim: int
    pages: int
    page_size: int
    direction: str = "append"
    value_dim: int | None = None
    num_heads: int | None = None
    q_out: object = field(default=None, repr=False)
    k_pages: object = field(default=None, repr=False)
    v_pages: object = field(default=None, repr=False)
    sources: object = field(default=None, repr=False)
    q_norm: object = field(default=None, repr=False)
    k_norm: object = field(default=None, repr=False)
    eps: float | None = None
    dtype_norm: DType | str | None = None
    stride_q_out_batch: int | None = None
    stride_q_out_head: int | None = None
    stride_q_out_row: int | None = None
    stride_k_pages_page: int | None = None
    stride_k_pages_head: int | None = None
    stride_k_pages_row: int | None = None
    stride_v_pages_page: int | None = None
    stride_v_pages_head: int | None = None
    stride_v_pages_row: int | None = None

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("q", "q_out", "k", "v"), _MATRIX),
        **dict.fromkeys(("k_pages", "v_pages", "k_scales", "v_scales"), _PAGES),
        **dict.fromkeys(("slot_mapping", "positions"), ("batch", "row")),
        **dict.fromkeys(("block_table", "cos", "sin"), ("row",)),
        **dict.fromkeys(("kv_lengths", "cu_seqlens", "sources", "q_norm", "k_norm"), ()),
    }
    CALLED: ClassVar[Mapping[str, str]] = {
        "sin": "cos",
        "block_table": "table",
        "slot_mapping": "slots",
    }

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        check_operands(self)
        dtype = dtype_of("dtype", self.dtype, infos, ("k", "v", "q", "q_out"), fp8=True)
        pages_dtype = dtype_of("dtype_pages", self.dtype_pages, infos, ("k_pages", "v_pages"), True)
        dtype = required("dtype", dtype, "k and v")
        pages_dtype = pages_dtype or dtype
        batch, S = extent("batch", self.batch), extent("S", self.S)
        extent("batch·S", batch * S)
        kv_heads, heads = extent("kv_heads", self.kv_heads, 1), 0
        if self.q is not None:
            heads = extent("num_heads", self.num_heads, 1)
        dim = extent("head_dim", self.head_dim, 1)
        dim_v = dim if self.value_dim is None else extent("value_dim", self.value_dim)
        pages, size = extent("pages", self.pages), extent("page_size", self.page_size, 1)
        rotary, rotary_dim, max_position = self._rotation(dim)
        if rotary and batch * S and not max_position:  # tokens without a place read a row, too
            rule = "must be 1 or more, as there are tokens"
            raise InvalidValue("max_position", 0, rule, "Give a row of cos for each position")
        scales = self._scales(dtype, pages_dtype)
        norm = None
        if self.k_norm is not None:
            given = dtype_of("dtype_norm", self.dtype_norm, infos, ("q_norm", "k_norm"))
            norm = given or dtype
        spec = PagedCacheSpec(
            dtype,
            pages_dtype,
            dim,
            dim_v,
            self.direction,
            self.q is not None,
            self._slots(infos),
            self._positions(),
            self.cu_seqlens is not None,
            rotary,
            rotary_dim,
            norm,
            scales,
        )
        self._check_numbers(spec)
        problem = self._described(spec, batch, S, heads, kv_heads, pages, size, max_position, infos)
        self._keep(problem, infos, by_axes=True)

    def _scales(self, dtype: DType, pages: DType) -> str:
        if self.scales is None:
            return ""
        scales = choice("scales", self.scales, ("heads", "tokens"), "Say what has a scale")
        if not pages.is_fp8 or dtype.is_fp8:
            rule = f"are for rows of {dtype} in pages of 8 bits, these are of {pages}"
            raise InvalidValue("scales", scales, rule, "Leave them out")
        return scales

    def _slots(self, infos: Mapping[str, ArrayInfo]) -> DType | None:
        if self.slot_mapping is None:
            return None
        given = infos["slot_mapping"].dtype if "slot_mapping" in infos else DType.int32
        if self.dtype_slots is not None:
            given = DType.of(self.dtype_slots, "dtype_slots", floating=False)
        if given not in (DType.int32, DType.int64):
            remedy = "Convert the array"
            raise InvalidValue("slot_mapping.dtype", given, "must be int32 or int64", remedy)
        return given

    def _positions(self) -> str:
        if self.positions is not None:
            return "given"
        return "" if self.kv_lengths is None else "lengths"

    def _check_numbers(self, spec: PagedCacheSpec) -> None:
        """What is done in e4m3 and in float64."""
        s = spec
        if s.dtype.is_fp8 and not s.exact:
            raise InvalidValue(
                "dtype",
                s.dtype,
                "rows of 8 bits are copied as they are, to pages of their dtype, without norms, "
                "rotation and scales",
                "Give rows of 16 or 32 bits",
            )
        if s.direction == "copy" and s.dtype is not s.dtype_pages:
            raise InvalidValue(
                "dtype_pages", s.dtype_pages, f"must be dtype = {s.dtype}", "Pages are copied"
            )

    def _described(
        self,
        spec: PagedCacheSpec,
        batch: int,
        S: int,
        heads: int,
        kv_heads: int,
        pages: int,
        size: int,
        max_position: int,
        infos: Mapping[str, ArrayInfo],
    ) -> PagedCacheProblem:
        packed = spec.packed
        sequences = extent("sequences", self.sequences or 0) if packed else 0
        width = 0 if spec.slots else extent("table_width", self.table_width)
        copy = spec.direction == "copy"
        lead, dims = pages if copy else batch, {"k": spec.head_dim, "v": spec.value_dim}
        shapes: dict[str, tuple[int, ...]] = {}
        if spec.q:
            shapes |= dict.fromkeys(("q", "q_out"), (batch, heads, S, spec.head_dim))
        for name, dim in dims.items():
            if dim:
                shapes[name] = (lead, kv_heads, S, dim)
                shapes[f"{name}_pages"] = (pages, kv_heads, size, dim)
        strides: dict[str, Any] = {}
        vector = WIDE
        for name, shape in shapes.items():
            dtype = spec.dtype_pages if name.endswith("_pages") else spec.dtype
            steps = three(self._strides_of(name, shape, dtype))
            vector = min(vector, self._vector(name, shape, steps, dtype, infos))
            strides[f"{name}_strides"] = steps
        for name in ("k_scales", "v_scales")[: 1 + bool(spec.value_dim)] if spec.scaled else ():
            extents = (pages, kv_heads, size, 1) if spec.scaled == "tokens" else (1, kv_heads, 1, 1)
            strides[f"{name}_strides"] = three(self._strides_of(name, extents, DType.float32))
        for name, what, kind in (
            ("slots_strides", "slot_mapping", spec.slots),
            ("positions_strides", "positions", DType.int32 if spec.position == "given" else None),
        ):
            if kind:
                strides[name] = two(self._strides_of(what, (batch, S, 1), kind))
        rows = sequences if packed else batch
        (table,) = self._strides_of("block_table", (rows, width), DType.int32)
        (cos,) = self._strides_of("cos", (max_position, spec.rotary_dim // 2), DType.float32)
        if spec.rotary:
            for name in ("cos", "sin"):
                shape = (max_position, spec.rotary_dim // 2)
                found = self._vector(name, shape, (cos,), DType.float32, infos)
                vector = vector if found == WIDE else min(vector, spec.dtype.itemsize)
        if spec.norm:
            for name in ("q_norm", "k_norm"):
                found = self._vector(name, (spec.head_dim,), (), spec.norm, infos)
                vector = vector if found == WIDE else min(vector, spec.dtype.itemsize)
        for name in self.AXES:
            pointer(name, getattr(self, name), infos)
        return PagedCacheProblem(
            replace(spec, vector=vector),
            batch,
            S,
            heads,
            kv_heads,
            pages,
            size,
            **{"v_strides": (0, 0, 0), "v_pages_strides": (0, 0, 0), **strides},
            table_width=width,
            table_stride=0 if spec.slots else table,
            sequences=sequences,
            max_position=max_position,
            cos_stride=cos if spec.rotary else 0,
            eps=self._eps() if spec.norm else 0.0,
        )

    def _eps(self) -> float:
        return 1e-6 if self.eps is None else positive("eps", self.eps, "Give a small number")

    def _found(self) -> dict[str, object]:
        s = self._problem.spec
        kinds = {"dtype": s.dtype, "dtype_pages": s.dtype_pages, "dtype_norm": s.norm}
        return {**kinds, "dtype_slots": s.slots}

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Check slots, positions, lengths, offsets and tables against the extents that they index;
        synchronises."""
        contents.check(self._problem, resolved, runtime, device)

    @classmethod
    def from_arrays(
        cls,
        k: object,
        v: object,
        k_pages: object,
        v_pages: object,
        *,
        layout: str = "bshd",
        kv_layout: str = "nhd",
        **options: Any,
    ) -> PagedCache:
        """The same of arrays as they lie in memory: nothing is copied.

        ``layout`` "bshd": k and v [B, S, H_kv, D], q [B, S, H, D]; "bhsd": the head before the row;
        without the first axis one entry, as packed rows are. ``kv_layout`` "nhd": pages [pages,
        page_size, H_kv, D]; "hnd": the head before the row; scales of tokens alike, without the
        last axis. v and v_pages may be None. ``options``: the other operands and fields.
        """
        arrays = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages}
        return cls(**cache_fields(arrays, layout, kv_layout, options))
