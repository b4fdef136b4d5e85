"""Whether arrays that a caller gives for results lie apart. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
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
    layout pass, as torch's compilers make one array of two of equal contents: operators return
    both, and ``check_distinct`` refuses them where they are the caller's."""
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
                    raise _overlap(second, first)
            before.append((place, name))


def check_distinct(given: Mapping[str, Tensor]) -> None:
    """Raise InvalidValue for one array that is given for two results, also while Dynamo follows the
    call; uncompiled for two of one address and layout, too."""
    names: dict[Any, str] = {}
    for name, x in given.items():
        memory = x if torch.compiler.is_compiling() else _memory(x)
        if memory in names:
            raise _overlap(name, names[memory])
        names[memory] = name


def _overlap(name: str, other: str) -> InvalidValue:
    return InvalidValue(name, "given", f"overlaps {other}", "Give the output memory of its own")


def _memory(x: Tensor) -> Any:
    """Address and layout, where a tensor has an address or, a fake, a storage; else the tensor."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x):
        return x
    if isinstance(x, FakeTensor) or x.is_meta:
        # by its text, as symbols have no hash
        return x.untyped_storage()._cdata, str((x.storage_offset(), x.stride()))
    if type(x) not in (torch.Tensor, torch.nn.Parameter):  # those of wrappers are no addresses
        return x
    at = x.data_ptr()  # none of an empty one
    return (at, x.stride()) if at else x


def _place(name: str, x: Tensor, in_storage: bool) -> tuple[int, OperandRule]:
    """Where an array is, and its layout; of its dtype only the size matters."""
    kind = DType.of(f"float{8 * x.itemsize}" if x.itemsize > 1 else "float8_e4m3fn", name, fp8=True)
    shape, strides = tuple(map(int, x.shape)), tuple(map(int, x.stride()))
    at = _BASE + int(x.storage_offset()) * x.itemsize if in_storage else x.data_ptr()
    return at, OperandRule(name, kind, shape, strides, x.itemsize, True)
