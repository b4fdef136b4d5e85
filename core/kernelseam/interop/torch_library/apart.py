"""Whether arrays that a caller gives for results lie apart. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch._subclasses import FakeTensor

from kernelseam.contract import OperandRule
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.overlap import proven_overlap

Tensor = Any
_BASE = 1 << 20
"""Where a fake's storage begins: anywhere but at 0."""


def check_apart(given: Mapping[str, Tensor]) -> None:
    """Raise InvalidValue for two arrays, by name, that share elements: each result is copied to its
    own, one after the other. Fakes share some where they are views of one. Two of one address and
    layout pass, as torch's compilers make one array of two of equal contents."""
    if len(given) < 2:
        return
    names = list(given)
    memory: dict[int, list[str]] = {}
    for name, x in given.items():
        of = x.untyped_storage()._cdata if isinstance(x, FakeTensor) or x.is_meta else 0
        memory.setdefault(of, []).append(name)
    for of, some in memory.items():
        if len(some) < 2:
            continue
        places = sorted(((_place(x, given[x], of != 0), x) for x in some), key=lambda x: x[0][0])
        before: list[tuple[tuple[int, OperandRule], str]] = []
        for place, name in places:
            at, rule = place
            before = [x for x in before if x[0][0] + x[0][1].span * given[x[1]].itemsize > at]
            for (there, its), other in before:
                alike = (there, its.shape, its.strides) == (at, rule.shape, rule.strides)
                if not alike and proven_overlap(there, its, at, rule):
                    first, second = sorted((other, name), key=names.index)
                    raise InvalidValue(
                        second, "given", f"overlaps {first}", "Give the output memory of its own"
                    )
            before.append((place, name))


def _place(name: str, x: Tensor, in_storage: bool) -> tuple[int, OperandRule]:
    """Where an array is, and its layout; of its dtype only the size matters."""
    kind = DType.of(f"float{8 * x.itemsize}" if x.itemsize > 1 else "float8_e4m3fn", name, fp8=True)
    shape, strides = tuple(map(int, x.shape)), tuple(map(int, x.stride()))
    at = _BASE + int(x.storage_offset()) * x.itemsize if in_storage else x.data_ptr()
    return at, OperandRule(name, kind, shape, strides, x.itemsize, True)
