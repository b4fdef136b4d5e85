"""The projection of hidden states to the queries, keys and values of an attention, in one
product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from kernelseam.contract import ArrayInfo, Device, Runtime
from kernelseam.descriptors.common.operands import (
    describe_all,
    dtype_of,
    pointer,
    required,
)
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import WIDE, extent, packed, three, two
from kernelseam.descriptors.gemm.problem import HeadsProblem, HeadsSpec
from kernelseam.descriptors.projection import append, contents
from kernelseam.descriptors.projection.arrays import OPTIONAL, qkv_fields
from kernelseam.descriptors.projection.fields import RotatedRows
from kernelseam.descriptors.projection.problem import QkvProjectionProblem, QkvProjectionSpec
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass


@dataclass(frozen=True, eq=False, kw_only=True)
class QkvProjection(RotatedRows[QkvProjectionProblem]):
    """[q k v] = input·weightᵀ + bias, column by column the heads of q, then of k, then of v, each
    ``head_dim`` wide.

    ``input`` [batch, S, hidden], ``weight`` [(num_heads + 2·kv_heads)·head_dim, hidden] as
    torch.nn.Linear has it, ``bias`` as long as the weight has rows; q [batch, num_heads, S,
    head_dim], k and v [batch, kv_heads, S, head_dim].

    ``cos`` and ``sin`` float32 [max_position, rotary_dim / 2], rows stride_cos_row apart in both,
    rotate the first rotary_dim elements of every head of q and k, after the bias: with n =
    rotary_dim, x_i and x_j become x_i·cos_i − x_j·sin_i and x_j·cos_i + x_i·sin_i, where
    ``rotary_style`` "halves" pairs i < n/2 with j = i + n/2, and "pairs" 2i with 2i + 1 (RoFormer,
    Su et al. 2021, arXiv:2104.09864). cos_i and sin_i are of the row of the token's position: of
    ``positions`` int32 [batch, S], else ``first_position`` + its place in its entry.

    ``block_table`` int32 [batch, table_width]: k and v are [pages, page_size, kv_heads, head_dim]
    (the page's stride is the batch's), and the token at position p of entry b is written to row p %
    page_size of page block_table[b, p // page_size]; where two tokens share a place, either may
    remain.

    With any of the following, k and v are appended to the pages by a second launch, as
    ``PagedCache`` says it: ``slot_mapping`` [batch, S] in place of the block table; ``kv_lengths``
    [batch], the keys of an entry after the call: its tokens are the last of them; ``cu_seqlens``
    [sequences + 1]: rows are packed (batch 1), sequence e has rows cu_seqlens[e] to cu_seqlens[e +
    1] − 1, tables and lengths are [sequences, …]; pages of another dtype than q (``dtype_pages``),
    in e4m3 with ``k_scales`` and ``v_scales``, ``scales`` "heads" (given) or "tokens" (written). A
    token without a place is skipped. Where kv_lengths or cu_seqlens say the positions, q and k are
    rounded before their rotation, too, and q of a token without a place is not rotated.

    Operands are arrays, addresses (ints), or None until ``bind``; an optional one (bias, cos, sin,
    positions, block_table) that ``bind`` will give is announced by address 0. Strides count
    elements; one left out packs row-major around the others (pages: heads within rows). Stride 0
    broadcasts an input.

    ``kv_heads`` defaults to num_heads, ``dtype`` (of input and weight) to the arrays',
    ``dtype_out`` (of q, k and v; ``dtype_pages`` of pages of 8 bits, or beside an array of q) and
    ``dtype_bias`` to theirs, else to dtype. Products are summed
    in float32 (float64 of float64), and rounded once, after the rotation; k and v are rounded to
    ``dtype_out`` and then to the pages' dtype where that is another. Raises InvalidValue
    (naming field, value, rule and remedy) where no such problem exists.
    """

    batch: int
    S: int
    hidden: int
    num_heads: int
    head_dim: int
    kv_heads: int | None = None
    input: object = field(default=None, repr=False)
    weight: object = field(default=None, repr=False)
    bias: object = field(default=None, repr=False)
    first_position: int = 0
    pages: int | None = None
    page_size: int | None = None
    dtype_out: DType | str | None = None
    dtype_bias: DType | str | None = None
    stride_input_batch: int | None = None
    stride_input_row: int | None = None
    stride_weight_row: int | None = None

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "input": ("batch", "row"),
        "weight": ("row",),
        "bias": (),
        **dict.fromkeys("qkv", ("batch", "head", "row")),
        "cos": ("row",),
        "sin": ("row",),
        "positions": ("batch", "row"),
        "block_table": ("row",),
        "slot_mapping": ("batch", "row"),
        **dict.fromkeys(("kv_lengths", "cu_seqlens"), ()),
        **dict.fromkeys(("k_scales", "v_scales"), ("page", "head", "row")),
    }
    CALLED: ClassVar[Mapping[str, str]] = {
        "sin": "cos",
        "block_table": "table",
        "slot_mapping": "slots",
    }

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        dtype = required(
            "dtype", dtype_of("dtype", self.dtype, infos, ("input", "weight")), "input and weight"
        )
        paged = self.block_table is not None or self.slot_mapping is not None
        out, of_pages = self._kinds(paged, dtype, infos)
        batch, S, hidden = (extent(n, getattr(self, n)) for n in ("batch", "S", "hidden"))
        heads, dim = extent("num_heads", self.num_heads, 1), extent("head_dim", self.head_dim, 1)
        kv_heads = heads if self.kv_heads is None else extent("kv_heads", self.kv_heads, 1)
        width = extent("(num_heads + 2·kv_heads)·head_dim", (heads + 2 * kv_heads) * dim)
        extent("batch·S", batch * S)
        self._check_idle(paged)
        style, rotary_dim, max_position = self._rotation(dim)
        pages, page_size, width_of_table = self._paging(paged)
        appended = paged and append.is_appended(self, out, of_pages)
        room = page_size * width_of_table if self.block_table is not None else None
        first = self._first(S, max_position, room, appended)
        lead, rows = (pages, page_size) if paged else (batch, S)
        shapes = {"q": (batch, heads, S, dim), **dict.fromkeys("kv", (lead, kv_heads, rows, dim))}
        strides, vector = {}, WIDE if dim * out.itemsize % WIDE == 0 else out.itemsize
        for name, shape in shapes.items():
            kind, is_page = (of_pages, paged) if name != "q" else (out, False)
            strides[name] = three(self._strides_of(name, shape, kind, (0, 2, 1) if is_page else ()))
            if not (is_page and appended):
                vector = min(vector, self._vector(name, shape, strides[name], out, infos))
        appending = None
        if appended:
            of_entry, of_token, of_head, _ = packed((batch, S, kv_heads, dim), (None,) * 4)
            row = of_entry, of_head, of_token
            appending = append.append_problem(
                self,
                {
                    "batch": batch,
                    "S": S,
                    "num_heads": heads,
                    "kv_heads": kv_heads,
                    "head_dim": dim,
                    "pages": pages,
                    "page_size": page_size,
                },
                out,
                of_pages,
                {**dict.fromkeys("kv", row), **{f"{n}_pages": strides[n] for n in "kv"}}
                | {"q": strides["q"]},
            )
            strides |= dict.fromkeys("kv", row)
            if append.appends_rotate(self):
                style = ""
        for name in OPTIONAL:
            pointer(name, getattr(self, name), infos)
        of_input = two(self._strides_of("input", (batch, S, hidden), dtype))
        (of_weight,) = self._strides_of("weight", (width, hidden), dtype)
        (of_cos,) = self._strides_of("cos", (max_position, rotary_dim // 2), DType.float32)
        (of_table,) = self._strides_of("block_table", (batch, width_of_table), DType.int32)
        of_positions = two(self._strides_of("positions", (batch, S, 1), DType.int32))
        by_epilogue = paged and not appended
        positioned = self.positions is not None and bool(style or by_epilogue)
        problem = QkvProjectionProblem(
            QkvProjectionSpec(
                dtype,
                out,
                None if self.bias is None else self._kind("dtype_bias", ("bias",), dtype, infos),
                HeadsSpec(style, positioned, by_epilogue),
                self._vector("input", (batch, S, hidden), of_input, dtype, infos),
                self._vector("weight", (width, hidden), (of_weight,), dtype, infos),
                vector,
                None if appending is None else appending.spec,
            ),
            batch,
            hidden,
            of_input,
            of_weight,
            HeadsProblem(
                heads,
                kv_heads,
                dim,
                S,
                strides["q"],
                strides["k"],
                strides["v"],
                rotary_dim if style else 0,
                of_cos if style else 0,
                first,
                of_positions if positioned else (0, 0),
                max(page_size, 1) if by_epilogue else 1,
                of_table if by_epilogue else 0,
            ),
            max_position if style else 0,
            pages if by_epilogue else 0,
            width_of_table if by_epilogue else 0,
            appending,
        )
        self._keep(problem, infos)

    def _kinds(
        self, paged: bool, dtype: DType, infos: Mapping[str, ArrayInfo]
    ) -> tuple[DType, DType]:
        """The element types of q and of what k and v are written to."""
        if not paged:
            out = self._kind("dtype_out", "qkv", dtype, infos)
            return out, out
        pages = dtype_of("dtype_pages", self.dtype_pages, infos, ("k", "v"), fp8=True)
        default = dtype if pages is None or pages.is_fp8 else pages
        if self.dtype_out is None and "q" not in infos:
            out = default
        else:
            out = self._kind("dtype_out", ("q",), dtype, infos)
        return out, pages or out

    def _check_idle(self, paged: bool) -> None:
        """Refuse fields that describe operands which are not there."""
        self._refuse_idle("cos", "rotary_style", "rotary_dim", "max_position")
        self._refuse_idle("positions")
        self._refuse_idle("block_table", "table_width")
        if not paged:
            self._refuse_idle("block_table", "pages", "page_size", "dtype_pages")
            append.check_unpaged({n: getattr(self, n) for n in append.OPERANDS})
        self._refuse_idle("slot_mapping", "dtype_slots")
        self._refuse_idle("cu_seqlens", "sequences")
        self._refuse_idle("k_scales", "scales")
        self._refuse_idle("v_scales")
        self._refuse_idle("bias", "dtype_bias")

    def _paging(self, paged: bool) -> tuple[int, int, int]:
        """(pages, page_size, table_width); 0 where nothing is paged."""
        needed = ["pages", "page_size"] * paged
        needed += ["table_width"] * (self.block_table is not None)
        for name in needed:
            if getattr(self, name) is None:
                raise InvalidValue(name, None, "must be given where k and v are pages", "Give it")
        if not paged:
            return 0, 0, 0
        size = extent("page_size", self.page_size, 1)
        width = 0 if self.block_table is None else extent("table_width", self.table_width)
        return extent("pages", self.pages), size, width

    def _first(self, S: int, max_position: int, room: int | None, appended: bool) -> int:
        """first_position, held against what there is for the positions that are numbered from it:
        rows of cosines, and ``room`` of a block table."""
        first = extent("first_position", self.first_position)
        for name, given in (
            ("positions", self.positions is not None),
            ("first_position", first > 0),
        ):
            if given and self.cos is None and room is None:
                value = first if name == "first_position" else "given"
                remedy = "Give cos and sin, or block_table, or leave it out"
                raise InvalidValue(name, value, "nothing asks for it", remedy)
        if self.positions is not None:
            if first:
                raise InvalidValue(
                    "first_position", first, "positions say it already", "Give one of the two"
                )
            return 0
        if first and appended and room is not None:
            rule = "an append by a block table counts from 0, kv_lengths or positions"
            raise InvalidValue("first_position", first, rule, "Give positions or kv_lengths")
        counted = self.kv_lengths is not None or self.cu_seqlens is not None
        bounds = [("max_position", max_position)] * (self.cos is not None)
        bounds += [("table_width·page_size", room)] if room is not None else []
        for name, bound in bounds if not counted else ():
            if S and first + S > bound:
                raise InvalidValue(
                    "first_position",
                    first,
                    f"the last of S = {S} tokens is at {first + S - 1}, beyond {name} = {bound}",
                    "Give longer tables, or correct it",
                )
        return first

    def _found(self) -> dict[str, object]:
        spec = self._problem.spec
        kinds: dict[str, object] = {"dtype": spec.dtype, "dtype_out": spec.dtype_out}
        if spec.append is not None:
            kinds |= {"dtype_pages": spec.append.dtype_pages, "dtype_slots": spec.append.slots}
        return {**kinds, "dtype_bias": spec.bias}

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Check positions, lengths, offsets, slots and the block table against the extents that
        they index; synchronises."""
        contents.check(self._problem, resolved, runtime, device)

    @classmethod
    def from_arrays(
        cls,
        input: object,
        weight: object,
        q: object,
        k: object,
        v: object,
        *,
        layout: str = "bhsd",
        kv_layout: str = "nhd",
        **options: Any,
    ) -> QkvProjection:
        """The projection of arrays as they lie in memory: nothing is copied.

        ``input`` [B, S, hidden]; ``layout`` "bhsd": q [B, H, S, D], k and v [B, H_kv, S, D];
        "bshd": the head after the row. Any strides with a contiguous last axis. Without the first
        axis, of input, results and positions alike: one entry, as packed sequences are. With
        ``block_table`` [B, width]: k and v [pages, page_size, H_kv, D] ("nhd"), or with the head
        before the row ("hnd"); so with ``slot_mapping`` [B, S]. With ``cu_seqlens`` rows are
        packed, without the first axis. Scales [H_kv], one number, or [pages, page_size, H_kv] in
        ``kv_layout``'s order. ``options``: the other operands and fields.
        """
        return cls(
            **qkv_fields(
                {"input": input, "weight": weight, "q": q, "k": k, "v": v},
                layout,
                kv_layout,
                options,
            )
        )
