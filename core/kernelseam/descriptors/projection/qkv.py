"""The projection of hidden states to the queries, keys and values of an attention, in one
product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kernelseam.contract import ArrayInfo, Device, Runtime
from kernelseam.descriptors.common.operands import (
    describe_all,
    dtype_of,
    pointer,
    required,
    without_arrays,
)
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import WIDE, choice, extent, three, two
from kernelseam.descriptors.gemm.problem import HeadsProblem, HeadsSpec
from kernelseam.descriptors.projection import contents
from kernelseam.descriptors.projection.arrays import OPTIONAL, qkv_fields
from kernelseam.descriptors.projection.fields import RotatedRows
from kernelseam.descriptors.projection.problem import QkvProjectionProblem, QkvProjectionSpec
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue

STYLES = ("halves", "pairs")


def rotation_style(field: str, value: object) -> str:
    """Which elements a rotary embedding pairs. Raises InvalidValue."""
    return choice(field, value, STYLES, "Name what is paired")


@dataclass(frozen=True, eq=False, kw_only=True)
class QkvProjection(RotatedRows[QkvProjectionProblem]):
    """[q k v] = input·weightᵀ + bias, column by column the heads of q, then of k, then of v, each
    ``head_dim`` wide.

    ``input`` [batch, S, hidden], ``weight`` [(num_heads + 2·kv_heads)·head_dim, hidden] as
    torch.nn.Linear has it, ``bias`` as long as the weight has rows; q [batch, num_heads, S,
    head_dim], k and v [batch, kv_heads, S, head_dim].

    ``cos`` and ``sin`` float32 [max_position, rotary_dim / 2], rows stride_cos_row apart in both,
    turn the first rotary_dim elements of every head of q and k, after the bias: with n =
    rotary_dim, x_i and x_j become x_i·cos_i − x_j·sin_i and x_j·cos_i + x_i·sin_i, where
    ``rotary_style`` "halves" pairs i < n/2 with j = i + n/2, and "pairs" 2i with 2i + 1 (RoFormer,
    Su et al. 2021, arXiv:2104.09864). cos_i and sin_i are of the row of the token's position: of
    ``positions`` int32 [batch, S], else ``first_position`` + its place in its entry.

    ``block_table`` int32 [batch, table_width]: k and v are [pages, page_size, kv_heads, head_dim]
    (the page's stride is the batch's), and the token at position p of entry b is written to row p %
    page_size of page block_table[b, p // page_size]; of two tokens at one place either stays.

    Operands are arrays, addresses (ints), or None until ``bind``; an optional one (bias, cos, sin,
    positions, block_table) that ``bind`` will give is announced by address 0. Strides count
    elements; one left out packs row-major around the others (pages: heads within rows). 0 repeats
    an input.

    ``kv_heads`` defaults to num_heads, ``dtype`` (of input and weight) to the arrays',
    ``dtype_out`` (of q, k and v) and ``dtype_bias`` to theirs, else to dtype. Products are summed
    in float32 (float64 of float64), and rounded once, after the rotation. Raises InvalidValue
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
    _problem: QkvProjectionProblem = field(init=False, repr=False)
    _arrays: Mapping[str, ArrayInfo] = field(init=False, repr=False)

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "input": ("batch", "row"),
        "weight": ("row",),
        "bias": (),
        **dict.fromkeys("qkv", ("batch", "head", "row")),
        "cos": ("row",),
        "sin": ("row",),
        "positions": ("batch", "row"),
        "block_table": ("row",),
    }
    CALLED: ClassVar[Mapping[str, str]] = {"sin": "cos", "block_table": "table"}

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        dtype = required(
            "dtype", dtype_of("dtype", self.dtype, infos, ("input", "weight")), "input and weight"
        )
        out = self._kind("dtype_out", "qkv", dtype, infos)
        batch, S, hidden = (
            extent("batch", self.batch),
            extent("S", self.S),
            extent("hidden", self.hidden),
        )
        heads, dim = extent("num_heads", self.num_heads, 1), extent("head_dim", self.head_dim, 1)
        kv_heads = heads if self.kv_heads is None else extent("kv_heads", self.kv_heads, 1)
        width = extent("(num_heads + 2·kv_heads)·head_dim", (heads + 2 * kv_heads) * dim)
        extent("batch·S", batch * S)
        self._refuse_idle("cos", "rotary_style", "rotary_dim", "max_position")
        self._refuse_idle("positions")
        self._refuse_idle("block_table", "pages", "page_size", "table_width")
        self._refuse_idle("bias", "dtype_bias")
        style, rotary_dim, max_position = self._rotation(dim)
        pages, page_size, width_of_table = self._paging(S)
        first = self._first(S, max_position, page_size * width_of_table)
        paged = self.block_table is not None
        lead, rows = (pages, page_size) if paged else (batch, S)
        shapes = {"q": (batch, heads, S, dim), **dict.fromkeys("kv", (lead, kv_heads, rows, dim))}
        strides, vector = {}, WIDE if dim * out.itemsize % WIDE == 0 else out.itemsize
        for name, shape in shapes.items():
            strides[name] = three(
                self._strides_of(name, shape, out, (0, 2, 1) if paged and name in "kv" else ())
            )
            vector = min(vector, self._vector(name, shape, strides[name], out, infos))
        for name in OPTIONAL:
            pointer(name, getattr(self, name), infos)
        of_input = two(self._strides_of("input", (batch, S, hidden), dtype))
        (of_weight,) = self._strides_of("weight", (width, hidden), dtype)
        (of_cos,) = self._strides_of("cos", (max_position, rotary_dim // 2), DType.float32)
        (of_table,) = self._strides_of("block_table", (batch, width_of_table), DType.int32)
        of_positions = two(self._strides_of("positions", (batch, S, 1), DType.int32))
        problem = QkvProjectionProblem(
            QkvProjectionSpec(
                dtype,
                out,
                None if self.bias is None else self._kind("dtype_bias", ("bias",), dtype, infos),
                HeadsSpec(style, self.positions is not None, paged),
                self._vector("input", (batch, S, hidden), of_input, dtype, infos),
                self._vector("weight", (width, hidden), (of_weight,), dtype, infos),
                vector,
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
                rotary_dim,
                of_cos if style else 0,
                first,
                of_positions if self.positions is not None else (0, 0),
                max(page_size, 1),
                of_table if paged else 0,
            ),
            max_position,
            pages,
            width_of_table,
        )
        self._keep(problem, infos)

    def _rotation(self, dim: int) -> tuple[str, int, int]:
        """(style, rotary_dim, max_position); "" and 0 without rotary embedding."""
        for name, other in (("cos", "sin"), ("sin", "cos")):
            if getattr(self, name) is None and getattr(self, other) is not None:
                raise InvalidValue(
                    name, None, f"belongs to {other}", f"Give both, or leave {other} out"
                )
        if self.cos is None:
            return "", 0, 0
        style = "halves" if self.rotary_style is None else self.rotary_style
        style = rotation_style("rotary_style", style)
        for name in ("rotary_dim", "max_position"):
            if getattr(self, name) is None:
                raise InvalidValue(
                    name, None, "must be given where elements are turned", "Give the extents of cos"
                )
        turned = extent("rotary_dim", self.rotary_dim, 2)
        if turned % 2 or turned > dim:
            raise InvalidValue(
                "rotary_dim",
                turned,
                f"must be even and at most head_dim = {dim}",
                "cos has rotary_dim / 2 columns",
            )
        return style, turned, extent("max_position", self.max_position)

    def _paging(self, S: int) -> tuple[int, int, int]:
        """(pages, page_size, table_width); 0 where nothing is paged."""
        if self.block_table is None:
            return 0, 0, 0
        for name in ("pages", "page_size", "table_width"):
            if getattr(self, name) is None:
                raise InvalidValue(name, None, "must be given where k and v are pages", "Give it")
        size = extent("page_size", self.page_size, 1)
        return extent("pages", self.pages), size, extent("table_width", self.table_width)

    def _first(self, S: int, max_position: int, room: int) -> int:
        """first_position, held against what there is for the positions that are numbered from
        it."""
        first = extent("first_position", self.first_position)
        unused = self.cos is None and self.block_table is None
        for name, given in (
            ("positions", self.positions is not None),
            ("first_position", first > 0),
        ):
            if given and unused:
                value = first if name == "first_position" else "given"
                remedy = "Give cos and sin, or block_table, or leave it out"
                raise InvalidValue(name, value, "nothing asks for it", remedy)
        if self.positions is not None:
            if first:
                raise InvalidValue(
                    "first_position", first, "positions say it already", "Give one of the two"
                )
            return 0
        bounds = [("max_position", max_position)] * (self.cos is not None)
        bounds += [("table_width·page_size", room)] * (self.block_table is not None)
        for name, bound in bounds:
            if S and first + S > bound:
                raise InvalidValue(
                    "first_position",
                    first,
                    f"the last of S = {S} tokens is at {first + S - 1}, beyond {name} = {bound}",
                    "Give longer tables, or correct it",
                )
        return first

    def without_arrays(self) -> QkvProjection:
        """The same over the addresses of its arrays: it keeps no memory alive."""
        spec = self._problem.spec
        return without_arrays(
            self, self._arrays, dtype=spec.dtype, dtype_out=spec.dtype_out, dtype_bias=spec.bias
        )

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Check positions and the block table against the extents that they index; synchronises."""
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
        before the row ("hnd"). ``options``: bias, cos, sin, positions, block_table and the
        descriptor's other fields.
        """
        return cls(
            **qkv_fields(
                {"input": input, "weight": weight, "q": q, "k": k, "v": v},
                layout,
                kv_layout,
                options,
            )
        )
