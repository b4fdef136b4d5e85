"""Random batched GEMMs: dtypes × scales × transposes × lists × what is added × sums × ragged sizes
× strides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelseam.dtypes import DType
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.operand_layout import OperandLayout

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

E4M3 = DType.float8_e4m3fn
DTYPES = (F16, BF16, E4M3, F32, F16, F64, E4M3, BF16, F32)
"""As many of them as have no divisor in common with the transposes and the lists."""
RESULTS = {
    E4M3: (BF16, BF16, F32, F16),
    F16: (F16, F16, F32, BF16),
    BF16: (BF16, BF16, F32, F16),
    F32: (F32, F32, F16, F64),
    F64: (F64,),
}
"""What C may be. Sums of float64 are stored as float64 alone."""
ADDED = {**dict.fromkeys((E4M3, F16, BF16, F32), (F16, BF16, F32)), F64: (F16, F32, F64)}
"""What a bias and a residual may be beside C's dtype: no wider than the accumulator."""
VIEWS = ("strided", "strided", "scattered", "strided", "strided", "even", "strided")
SCALES = ("", "tensor", "matrices", "rows", "blocks", "blocks", "blocks")
"""Of A and B of 8 bits; those of lists have rows' or none."""
SCALE_BLOCKS = (
    (1, 128, 128),
    (1, 128, 128),
    (128, 128, 128),
    (1, 1, 32),
    (5, 7, 64),
    (1, 64, 128),
    (64, 256, 128),
    (128, 128, 256),
)
EXACT = 300
"""The most values of K whose products, scaled by powers of 2 in blocks, float32 sums exactly."""
GROUPS = ((2, 1), (1, 2), (3, 2), (1, 6), (5, 1), (2, 3))
SMALL, USUAL, LONG, LARGE = (16, 20), (2, 8, 40, 130, 200), 3000, 1100
"""Extents at most: of small matrices, which teams of warps share a block for; of most; of K; of M
and N."""

MAY_REFUSE = frozenset({"shared"})
"""An arch may have no products of 8 bits, or in TF32."""


@dataclass(frozen=True)
class Kind:
    """What shapes a binary."""

    dtype: DType
    dtype_c: DType
    a_transposed: bool
    b_transposed: bool
    view: str
    """"strided"; or pointer lists: "scattered", "even" (which are served as strides)."""
    summed: bool = False
    bias: DType | None = None
    residual: DType | None = None
    narrow: frozenset[str] = frozenset()
    """Of a, b, c and residual: those whose rows begin at odd addresses."""
    precision: str | None = None
    scales: str = ""
    scale_block: tuple[int, int, int] | None = None

    operation = "gemm"

    @property
    def features(self) -> Iterator[str]:
        """Names of what all its problems have."""
        yield self.operation
        yield f"gemm {self.dtype}→{self.dtype_c}"
        yield "gemm " + "".join("T" if x else "N" for x in (self.a_transposed, self.b_transposed))
        flags = {
            f"gemm {self.view} lists": self.view != "strided",
            "gemm summed": self.summed,
            "gemm bias": self.bias is not None,
            "gemm residual": self.residual is not None,
            "gemm unaligned": bool(self.narrow),
            f"gemm {self.precision}": self.precision is not None,
            f"gemm scales of {self.scales}": bool(self.scales),
        }
        yield from (name for name, there in flags.items() if there)

    def draw(self, name: str, rng: Random) -> GemmCase:
        """A problem of the kind; its name seeds its data."""
        batch_group, head_group = one(rng, GROUPS) if self.summed else (1, 1)
        extents = _extents(rng, batch_group, head_group)
        data = one(rng, ("normal",) * 7 + ("integers", "integers", "positive", "tiny", "huge"))
        if self.dtype.is_fp8 and data in ("tiny", "huge"):
            data = "normal"  # nothing is left of the others in 8 bits
        if self.scales == "blocks" and extents["K"] > EXACT and data == "integers":
            data = "normal"
        exact = data == "integers"  # sums of which must stay exact
        alpha = one(rng, (1, 1, 2, -1) if exact else (1, 1, 1, 0.5, -1, 2.5, 0))
        beta = one(rng, (0, 0, 0, 1, -1) if exact else (0, 0, 0, 0, 1, 0.5, -0.5))
        fields: dict[str, Any] = {}
        if self.view == "strided":
            heads = extents["num_heads"]
            fields["b_head_group"] = one(
                rng, [1, 1] + [n for n in range(2, heads + 1) if heads % n == 0]
            )
        else:
            fields |= {"view": "host", "scattered": self.view == "scattered"}
            # one promise of alignment for all lists
            alike = len(self.narrow) in (0, 3 + bool(self.residual))
            # fewer may be even by chance, as the host sees
            several = extents["batch"] * extents["num_heads"] > 4
            if self.view == "scattered" and alike and several:
                fields["view"] = one(rng, ("host", "device"))
        a, b = (self._operand_layout(operand, self.dtype, rng) for operand in "ab")
        if (
            self.a_transposed
            and not self.b_transposed
            and "r" in a.broadcast
            and "r" in b.broadcast
            and not exact
        ):
            # all products of an element are one: the bound of sums of zero mean is not theirs
            data = "positive"
        c = self._operand_layout("c", self.dtype_c, rng)
        if self.bias:
            operand_layout = self._bias_layout(rng)
            if fields.get("view") == "device" and not self.narrow:
                # or the promise is that of the narrowest
                operand_layout = replace(operand_layout, aligned=True, offset=0)
            fields |= {"bias": self.bias, "bias_layout": operand_layout}
        if self.residual:
            alike = self.residual is self.dtype_c and ("c" in self.narrow) == (
                "residual" in self.narrow
            )
            fields |= {
                "residual": self.residual,
                "residual_layout": self._operand_layout("residual", self.residual, rng),
                "in_place": alike and beta == 0 and rng.random() < 0.4,
            }
        case = GemmCase(
            name,
            self.dtype,
            a_transposed=self.a_transposed,
            b_transposed=self.b_transposed,
            alpha=alpha,
            beta=beta,
            c_batch_group=batch_group,
            c_head_group=head_group,
            dtype_c=self.dtype_c,
            precision=self.precision,
            scales=self.scales,
            scale_block=self.scale_block,
            may_refuse=MAY_REFUSE if self.precision or self.dtype.is_fp8 else frozenset(),
            a=a,
            b=b,
            c=c,
            data=data,
            **extents,
            **fields,
        )
        scales = ("a_scales", "b_scales") if self.scales in ("rows", "blocks") else ()
        read = {
            "A": case.a,
            "B": case.b,
            "bias": case.bias_layout,
            "residual": case.residual_layout,
        }
        return planted(
            case,
            rng,
            [*(n for n, w in read.items() if not w.broadcast), *["C"] * (beta != 0), *scales],
        )

    def about(self, case: GemmCase) -> Iterator[str]:
        """Names of what one of its problems has beside that."""
        operand_layouts = (
            case.a,
            case.b,
            *[case.bias_layout] * bool(case.bias),
            *[case.residual_layout] * bool(case.residual),
        )
        flags = {
            "small matrices": max(case.M, case.N) <= SMALL[1],
            "large matrices": min(case.M, case.N) > 800,
            "K over 500": case.K > 500,
            "nothing, or nothing to sum": 0 in (*case.lead, case.M, case.N, case.K),
            "alpha or beta": (case.alpha, case.beta) != (1, 0),
            "heads share a B": case.b_head_group > 1,
            "heads straddle a B's": case.b_head_group > 1 < case.c_head_group
            and case.c_head_group % case.b_head_group != 0 != case.b_head_group % case.c_head_group,
            "repeated operands": any(w.broadcast for w in operand_layouts),
            "exact integers": case.exact,
            "a NaN or an infinity": bool(case.injected),
            "residual in place": case.in_place,
            "lists on the device": case.view == "device",
        }
        yield from (f"gemm {name}" for name, there in flags.items() if there)

    def _operand_layout(self, operand: str, dtype: DType, rng: Random) -> OperandLayout:
        order = one(rng, ("bhr", "bhr", "brh", "rbh", "hbr")) if self.view == "strided" else "bhr"
        apart = gaps(rng)
        if self.view == "even":
            apart = (0, *apart[1:])
        repeats = ""
        if operand != "c" and self.view != "even" and rng.random() < 0.2:
            repeats = one(rng, ("b", "h", "bh", "r"))
        if operand in self.narrow:
            return OperandLayout(order, apart, aligned=False, offset=1, broadcast=repeats)
        return OperandLayout(
            order, apart, offset=int(rng.integers(3)) * 16 // dtype.itemsize, broadcast=repeats
        )

    def _bias_layout(self, rng: Random) -> OperandLayout:
        """Of a row each; at any address."""
        batch, head, row = gaps(rng)
        if self.view == "even":
            return OperandLayout(gaps=(0, head, 0), aligned=False, offset=int(rng.integers(4)))
        repeats = one(rng, ("", "", "", "b", "h", "bh"))
        return OperandLayout(
            gaps=(batch, head, row), aligned=False, offset=int(rng.integers(4)), broadcast=repeats
        )


def kind(rng: Random, turn: int) -> Kind:
    """The kind of a turn: dtypes, transposes and lists in turn, the rest by chance."""
    dtype, view = DTYPES[turn % len(DTYPES)], VIEWS[turn % len(VIEWS)]
    dtype_c = one(rng, RESULTS[dtype])
    kept = dtype_c if dtype_c in ADDED[dtype] else dtype
    bias, residual = (
        one(rng, (kept, kept, *ADDED[dtype])) if rng.random() < 0.4 else None for _ in range(2)
    )
    narrow = narrowed(rng, ("a", "b", "c", *["residual"] * bool(residual)))
    precision = one(rng, (None, "tf32", "tf32x3")) if dtype is F32 else None
    scales = one(rng, SCALES if view == "strided" else ("", "rows")) if dtype.is_fp8 else ""
    return Kind(
        dtype,
        dtype_c,
        turn % 4 in (2, 3),
        turn % 4 in (1, 2),
        view,
        not scales and rng.random() < 0.35,
        bias,
        residual,
        narrow,
        precision,
        scales,
        one(rng, SCALE_BLOCKS) if scales == "blocks" else None,
    )


def _extents(rng: Random, batch_group: int, head_group: int) -> dict[str, Any]:
    """As the case's fields."""
    extents: dict[str, Any]
    way, lead = rng.random(), (1, 1)
    if way < 0.35:
        extents = {n: extent(rng, SMALL) for n in "MNK"}
        lead = extent(rng, (8, 8, 100)), extent(rng, (6, 6, 16))
    elif way < 0.75:
        extents = {n: extent(rng, USUAL) for n in "MNK"}
        lead = extent(rng, (3,)), extent(rng, (3,))
    elif way < 0.82:
        extents = {
            "M": extent(rng, (40,)),
            "N": extent(rng, (40,)),
            "K": int(rng.integers(500, LONG)),
        }
    elif way < 0.94:  # so many tiles that larger ones pay
        extents = {n: int(rng.integers(100, 500)) for n in "MN"} | {"K": extent(rng, (40, 130))}
        lead = extent(rng, (3,)), extent(rng, (2,))
    else:  # or the largest
        extents = {n: int(rng.integers(900, LARGE)) for n in "MN"} | {
            "K": extent(rng, (40, 130)),
            "sample": 300,
        }
    extents |= {"batch": lead[0] * batch_group, "num_heads": lead[1] * head_group}
    if rng.random() < 0.06:
        extents[one(rng, ("M", "N", "K", "K", "batch", "num_heads"))] = 0
    return extents
