"""Random projections before and after an attention, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernelseam.dtypes import DType
from kernelseam.samples.operand_layout import OperandLayout
from kernelseam.samples.projection_case import ProjectionCase

from benchmarks.drawing.common import (
    BF16,
    F16,
    F32,
    F64,
    Random,
    extent,
    gaps,
    narrowed,
    one,
    planted,
)

QKV, OUT, QKV_BWD, OUT_BWD = (
    "qkv_projection",
    "output_projection",
    "qkv_projection_bwd",
    "output_projection_bwd",
)
DTYPES = (F16, BF16, F32, F16, F64)
HEADS = {
    QKV: ("q", "k", "v"),
    OUT: ("attn_out",),
    QKV_BWD: ("dq", "dk", "dv"),
    OUT_BWD: ("attn_out", "d_attn_out"),
}
"""Operands that have heads."""
ROWS = {
    QKV: ("input", "weight"),
    OUT: ("weight", "residual", "out"),
    QKV_BWD: ("input", "weight", "d_input", "d_weight"),
    OUT_BWD: ("d_output", "weight", "d_weight"),
}
WRITTEN = {
    QKV: ("q", "k", "v"),
    OUT: ("out",),
    QKV_BWD: ("d_input", "d_weight"),
    OUT_BWD: ("d_attn_out", "d_weight"),
}
COUNTS = ((1, 1), (2, 2), (4, 2), (4, 1), (6, 3), (8, 1), (5, 5), (3, 1))
"""Heads of q, and of k and v."""
DIMS, ODD_DIMS, EVEN_DIMS = (8, 16, 32, 40, 64, 80, 128), (1, 5, 9, 33, 50), (2, 6, 18, 34, 50)
"""Of rows that begin at multiples of 16 bytes; of others; of others that are rotated."""
USUAL, WIDE = 400, 1100
"""Columns of all heads of q at most: of most, and of some."""
GRADIENTS = (("d_input", "d_weight"), ("d_input", "d_weight"), ("d_weight",), ("d_input",), ())


@dataclass(frozen=True)
class Kind:
    """What shapes binaries."""

    operation: str
    dtype: DType
    dtype_out: DType | None = None
    bias: DType | None = None
    residual: DType | None = None
    rotary: str = ""
    positions: bool = False
    paged: bool = False
    gradients: tuple[str, ...] = ("d_input", "d_weight")
    apart: frozenset[str] = frozenset()
    """Operands the heads of whose tokens lie apart from each other, of a projection of an
    attention's result."""
    entries_apart: bool = False
    """Of gradients: the batch's entries are matrices of their own, whose products are summed."""
    narrow: frozenset[str] = frozenset()
    """Operands whose rows begin at odd addresses; q, k and v all do or none, and so dq, dk and
    dv."""

    @property
    def backward(self) -> bool:
        """Whether it is gradients."""
        return self.operation.endswith("_bwd")

    @property
    def features(self) -> Iterator[str]:
        """Names of what all its problems have."""
        yield self.operation
        yield f"projection {self.dtype}→{self.dtype_out or self.dtype}"
        flags = {
            "bias gradient" if self.backward else "projection bias": self.bias is not None,
            "projection residual": self.residual is not None,
            f"rotary {self.rotary}": bool(self.rotary),
            "positions in memory": self.positions,
            "pages": self.paged,
            "bias gradient alone": self.backward and not self.gradients,
            "heads apart": bool(self.apart),
            "entries apart": self.entries_apart,
            "projection unaligned": bool(self.narrow),
        }
        yield from (name for name, there in flags.items() if there)

    def draw(self, name: str, rng: Random) -> ProjectionCase:
        """A problem of the kind; its name seeds its data."""
        fields = self._extents(rng)
        folded = fields["batch"] > 1 and self.backward and not self.entries_apart
        operand_layouts = {n: self._heads_layout(n, folded, rng) for n in HEADS[self.operation]}
        operand_layouts |= {
            n: self._rows_layout(n, folded, rng)
            for n in ROWS[self.operation]
            if n != "residual" or self.residual
        }
        if self.operation in (QKV, QKV_BWD) and not self.paged and not self.entries_apart:
            fields["packed"] = (
                bool(self.narrow & {"q", "dq"}) == bool(fields["head_dim"] % 8)
                and rng.random() < 0.2
            )
        if self.rotary:
            fields["rotary_dim"] = one(
                rng, (None, 2 * int(rng.integers(1, fields["head_dim"] // 2 + 1)))
            )
        if self.paged:
            fields["page_size"] = one(rng, (1, 3, 16, 24, 64))
        if (self.paged or self.rotary) and not self.positions:
            fields["first_position"] = one(rng, (0, int(rng.integers(1, 60))))
        if self.residual:
            alike = self.residual is (self.dtype_out or self.dtype)
            alike = alike and ("out" in self.narrow) == ("residual" in self.narrow)
            fields["in_place"] = alike and rng.random() < 0.4
        data = one(rng, ("normal",) * 8 + ("positive",) + ("integers",) * (2 * (not self.rotary)))
        if (
            data == "normal"
            and self.backward
            and any("r" in w.broadcast for w in operand_layouts.values())
        ):
            # the bound of sums of zero mean is not that of a token summed again and again
            data = "positive"
        case = ProjectionCase(
            name,
            self.operation,
            self.dtype,
            bias=self.bias,
            residual=self.residual,
            dtype_out=self.dtype_out,
            operand_layouts=tuple(operand_layouts.items()),
            rotary=self.rotary,
            positions=self.positions,
            gradients=self.gradients,
            data=data,
            **fields,
        )
        read = [
            n
            for n, w in operand_layouts.items()
            if n not in WRITTEN[self.operation] and not w.broadcast
        ]
        return planted(case, rng, read)

    def about(self, case: ProjectionCase) -> Iterator[str]:
        """Names of what one of its problems has beside that."""
        orders = {case.operand_layout(n).order for n in HEADS[self.operation]}
        flags = {
            "token-major": orders <= {"brh", "rbh"} or case.packed,
            "packed q, k and v": case.packed,
            "grouped KV heads": self.operation in (QKV, QKV_BWD) and case.kv_heads < case.num_heads,
            "one token an entry": case.S == 1,
            "more than 300 tokens": case.batch * case.S > 300,
            "nothing, or nothing to sum": 0 in (case.batch, case.S, case.hidden),
            "part of a head rotated": 0 < case.rotated < case.head_dim,
            "repeated operands": any(w.broadcast for _, w in case.operand_layouts),
            "exact integers": case.exact,
            "a NaN or an infinity": bool(case.injected),
            "residual in place": case.in_place,
        }
        yield from (f"projection {name}" for name, there in flags.items() if there)

    def _extents(self, rng: Random) -> dict[str, Any]:
        """As the case's fields."""
        heads, kv_heads = one(rng, COUNTS[1:] if self.apart else COUNTS)
        dims: tuple[int, ...] = DIMS
        way = rng.random()
        if set(HEADS[self.operation]) <= self.narrow:
            dims = EVEN_DIMS if self.rotary else ODD_DIMS
        dim = one(rng, [d for d in dims if d * heads <= (WIDE if way >= 0.85 else USUAL)])
        batch, S = (
            int(rng.integers(2 if self.entries_apart else 1, 5)),
            extent(rng, (2, 8, 40, 130)),
        )
        hidden = extent(rng, (8, 40, 130, 300))
        if way < 0.15 and not self.entries_apart:  # decoding
            batch, S = int(rng.integers(1, 20)), 1
        elif way >= 0.93:  # so many tiles that larger ones pay
            batch, S, hidden = 2, int(rng.integers(200, 550)), extent(rng, (64,))
        elif way >= 0.85:
            batch, S, hidden = 2, extent(rng, (40,)), int(rng.integers(900, WIDE))
        if self.entries_apart:
            S = max(S, 2)
        extents = {
            "batch": batch,
            "S": S,
            "hidden": hidden,
            "num_heads": heads,
            "kv_heads": kv_heads,
            "head_dim": dim,
        }
        if rng.random() < 0.05:
            extents[one(rng, ("batch", "S", "hidden"))] = 0
        return extents

    def _heads_layout(self, operand: str, folded: bool, rng: Random) -> OperandLayout:
        batch, head, row = gaps(rng)
        order, repeats = one(rng, ("bhr", "brh", "brh", "rbh", "hbr")), ""
        if self.operation in (OUT, OUT_BWD) and operand not in self.apart:
            order, head = one(rng, ("brh", "rbh")), 0
        elif operand in self.apart and order in ("brh", "rbh"):
            head += 8
        if folded:
            batch, order = 0, "brh"
            head = head + 8 if operand in self.apart else head
        elif self.entries_apart and order != "rbh":
            batch += 8
        if operand not in WRITTEN[self.operation] and not folded and rng.random() < 0.1:
            repeats = one(rng, ("b", "r", "h") if operand in self.apart else ("b", "r"))
        return self._placed(operand, order, (batch, head, row), repeats, rng)

    def _rows_layout(self, operand: str, folded: bool, rng: Random) -> OperandLayout:
        """Of [batch, 1, row, column]."""
        batch, _, row = gaps(rng)
        order, repeats = one(rng, ("bhr", "bhr", "rbh")), ""
        if folded:
            batch, order = 0, "bhr"
        elif self.entries_apart and order != "rbh":
            batch += 8
        free = operand not in (*WRITTEN[self.operation], "weight") and not folded
        if free and rng.random() < 0.15:
            repeats = one(rng, ("b", "r"))
        return self._placed(operand, order, (batch, 0, row), repeats, rng)

    def _placed(
        self, operand: str, order: str, apart: tuple[int, int, int], repeats: str, rng: Random
    ) -> OperandLayout:
        if operand in self.narrow:
            return OperandLayout(order, apart, aligned=False, offset=1, broadcast=repeats)
        forward = operand in WRITTEN[self.operation] and not self.backward
        dtype = (
            self.dtype_out if forward else self.residual if operand == "residual" else None
        ) or self.dtype
        return OperandLayout(
            order, apart, offset=int(rng.integers(3)) * 16 // dtype.itemsize, broadcast=repeats
        )


def kind(rng: Random, operation: str, turn: int) -> Kind:
    """The kind of a turn: dtypes, rotation and pages in turn, the rest by chance."""
    dtype = DTYPES[turn % len(DTYPES)]
    wide = dtype is F64
    bias = one(rng, (dtype, dtype, F32)) if rng.random() < 0.6 else None
    heads = HEADS[operation]
    narrow = set(narrowed(rng, ("heads", *ROWS[operation])))
    fields: dict[str, Any] = {}
    if operation == QKV:
        fields = {"rotary": ("halves", "", "pairs")[turn % 3], "paged": turn % 4 in (1, 2)}
        fields["positions"] = bool(fields["rotary"] or fields["paged"]) and rng.random() < 0.5
    if operation == OUT:
        fields["residual"] = one(rng, (dtype, dtype, F32)) if rng.random() < 0.6 else None
    if operation in (QKV, OUT) and not wide and rng.random() < 0.25:
        fields["dtype_out"] = F32
    if operation in (QKV_BWD, OUT_BWD):
        fields |= {
            "gradients": GRADIENTS[int(rng.integers(len(GRADIENTS)))],
            "entries_apart": rng.random() < 0.5,
        }
        bias = (
            (F64 if wide else F32)
            if bias is None and not fields["gradients"]
            else F64
            if bias and wide
            else bias
        )
    if operation in (OUT, OUT_BWD):
        fields["apart"] = frozenset(n for n in heads if rng.random() < 0.5)
    if "heads" in narrow:
        narrow = (narrow - {"heads"}) | set(heads)
    return Kind(operation, dtype, bias=bias, narrow=frozenset(narrow), **fields)
