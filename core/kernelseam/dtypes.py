"""Element types and the arithmetic facts that tolerances and kernels need."""

from __future__ import annotations

import enum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.errors import UnknownName, format_value
from kernelseam.forking import cached_property


class DType(enum.Enum):
    """An element type, named as in NumPy and ml_dtypes. Data are floating-point; lengths, offsets
    and tables are int32, masks are bool; arrays that scores and masks of users capture may be any
    integers. Numbers of 8 bits are stored: attention converts keys and
    values, exactly, to the dtype that it computes in, and a GEMM multiplies them into float32 sums,
    and rounds to them, saturating."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"
    int32 = "int32"
    boolean = "bool"
    int64 = "int64"
    int16 = "int16"
    int8 = "int8"
    uint8 = "uint8"
    float8_e4m3fn = "float8_e4m3fn"
    """4 bits of exponent, 3 of mantissa; no infinities, 448 at most (OCP 8-bit floating point)."""
    float8_e4m3fnuz = "float8_e4m3fnuz"
    """The same with half the values, 240 at most, one NaN and no −0: gfx942's."""

    @classmethod
    def of(
        cls, value: object, field: str = "dtype", floating: bool = True, fp8: bool = False
    ) -> DType:
        """The element type of a name, a dtype of NumPy or torch, a scalar type (``numpy.float32``),
        or a DType.

        ``floating``: accept floating-point types only; ``fp8``: those of 8 bits among them.
        With ``fp8`` alone all types are known, and a refusal lists floating-point ones.
        Raises UnknownName (naming ``field``) for anything else.
        """
        name = value if isinstance(value, str) else _name(value)
        dtype = value if isinstance(value, cls) else _NAMED.get(name)
        if dtype is None or (floating and not (dtype.floating or (fp8 and dtype.is_fp8))):
            raise UnknownName(
                field,
                name,
                dtype_rule(floating or fp8, fp8),
                "Convert the array or name one of these",
            )
        return dtype

    @property
    def floating(self) -> bool:
        """Whether it is a floating-point type that operations compute in."""
        return self in _COMPUTED

    @property
    def is_fp8(self) -> bool:
        """Whether it is a floating-point type of 8 bits, in which numbers are stored."""
        return self in E4M3

    # members are singletons; Enum's own hash is slow enough to show in a call's time
    __hash__ = object.__hash__

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _FACTS[self][0]

    @cached_property
    def unit_roundoff(self) -> float:
        """Half the spacing of 1: 2⁻¹¹, 2⁻⁸, 2⁻²⁴, 2⁻⁵³; 2⁻⁴ of 8 bits."""
        return _FACTS[self][1]

    @cached_property
    def smallest_subnormal(self) -> float:
        """The smallest positive value."""
        return _FACTS[self][2]

    @cached_property
    def smallest_normal(self) -> float:
        """The smallest positive normal value."""
        return _FACTS[self][3]

    @property
    def accumulator(self) -> DType:
        """The dtype that products are accumulated in: float64 for float64, else float32."""
        return DType.float64 if self is DType.float64 else DType.float32

    @property
    def numpy(self) -> npt.DTypeLike:
        """The NumPy dtype; bfloat16's and those of 8 bits come from ml_dtypes."""
        return _numpy_dtype(self)

    def __str__(self) -> str:
        return self.value


def dtype_rule(floating: bool = True, fp8: bool = False) -> str:
    """The rule text of errors about dtypes; ``floating`` and ``fp8`` as in ``DType.of``."""
    named = [d for d in DType if d not in CAPTURED]
    kinds = [d.value for d in named if d.floating or not floating or (fp8 and d.is_fp8)]
    return f"must be one of {', '.join(kinds)}"


def _name(value: object) -> str:
    """The name of a NumPy dtype, a scalar type or a torch dtype ("torch.float32")."""
    name = value.__name__ if isinstance(value, type) else None
    if isinstance(value, np.dtype):
        name = value.name
    return name if isinstance(name, str) else format_value(value).removeprefix("torch.")


_FACTS = {
    DType.float16: (2, 2.0**-11, 2.0**-24, 2.0**-14),
    DType.bfloat16: (2, 2.0**-8, 2.0**-133, 2.0**-126),
    DType.float32: (4, 2.0**-24, 2.0**-149, 2.0**-126),
    DType.float64: (8, 2.0**-53, 2.0**-1074, 2.0**-1022),
    DType.int32: (4, 0.0, 1.0, 1.0),
    DType.boolean: (1, 0.0, 1.0, 1.0),
    DType.int64: (8, 0.0, 1.0, 1.0),
    DType.int16: (2, 0.0, 1.0, 1.0),
    DType.int8: (1, 0.0, 1.0, 1.0),
    DType.uint8: (1, 0.0, 1.0, 1.0),
    DType.float8_e4m3fn: (1, 2.0**-4, 2.0**-9, 2.0**-6),
    DType.float8_e4m3fnuz: (1, 2.0**-4, 2.0**-10, 2.0**-7),
}
LARGEST = {DType.float8_e4m3fn: 448.0, DType.float8_e4m3fnuz: 240.0}
"""The largest numbers of 8 bits: conversions to them saturate."""
_COMPUTED = frozenset({DType.float16, DType.bfloat16, DType.float32, DType.float64})
E4M3 = (DType.float8_e4m3fn, DType.float8_e4m3fnuz)
"""The types of 8 bits."""
CAPTURED = frozenset({DType.int64, DType.int16, DType.int8, DType.uint8})
"""The types that only arrays have which scores and masks of users capture."""
_NAMED = {d.value: d for d in DType}
FLOATING = tuple(d for d in DType if d.floating)
"""The floating-point types that operations compute in."""
OPERAND_DTYPES = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "prefix_lengths"), DType.int32),
    **dict.fromkeys(("block_table", "positions", "offsets", "offs"), DType.int32),
    **dict.fromkeys(("slot_mapping", "sources", "cu_seqlens"), DType.int32),
    **dict.fromkeys(("a_indices", "c_indices", "out_indices"), DType.int32),
    "mask": DType.boolean,
}
"""The dtype of each operand that is not floating-point."""
OF_64_BITS = frozenset(("slot_mapping",))
"""Operands of integers that may be int64."""
OF_8_BITS = frozenset(
    (
        *("a", "b", "A", "B", "A_ptrs", "B_ptrs", "out", "C", "C_ptrs", "preactivation"),
        *("q", "k", "v", "k_pages", "v_pages"),
    )
)
"""Operands that some operations take in 8 bits."""


@cache
def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    if dtype is DType.bfloat16 or dtype.is_fp8:
        import ml_dtypes

        narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.value))
        return narrow
    native: np.dtype[Any] = np.dtype(dtype.value)
    return native
