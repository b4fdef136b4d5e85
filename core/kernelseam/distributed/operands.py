"""Checks that all distributed functions share: a rank's own tensors, and options. Each refuses with
the field's name, the value, the rule and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernelseam.dispatch import check_name
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import tensors
from kernelseam.interop.torch_library.dtypes import torch_dtype

Tensor = Any


def own_tensors(given: Mapping[str, Any], needed: Sequence[str]) -> dict[str, Tensor]:
    """Those that are given, which must be this rank's own, and none that stands for others where
    torch traces."""
    check_own(given, needed)
    operands, traced = tensors(given, needed)
    if traced:
        raise InvalidValue(
            needed[0], "a traced tensor", "torch does not trace this function", "Call it uncompiled"
        )
    return operands


def check_own(given: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Refuse what is no tensor or no strided one, where one of ``needed`` is None, and a DTensor,
    which is of all ranks."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for name, x in given.items():
        if isinstance(x, dtensor):
            raise InvalidValue(
                name,
                "a DTensor",
                "must be this rank's own tensor",
                f"Pass {name}.to_local(), or DTensors to kernelseam.interop.torch",
            )
        if not (isinstance(x, torch.Tensor) or (x is None and name not in needed)):
            raise InvalidValue(
                name, type(x).__name__, "must be a torch tensor", "Pass torch.as_tensor(…)"
            )
        if x is not None and (x.layout is not torch.strided or x.is_nested or x.is_quantized):
            kind = "quantized" if x.is_quantized else f"{'nested, ' * x.is_nested}{x.layout}"
            raise InvalidValue(name, kind, "must be a strided tensor", "Convert it")


def check_axes(name: str, x: Tensor, axes: str) -> None:
    """Refuse an operand of another number of axes than these, "B, rows, hidden" say."""
    if x.ndim != len(axes.split(", ")):
        raise InvalidValue(name, tuple(x.shape), f"must be [{axes}]", "Reshape it")


def one_of(field: str, value: object, known: Sequence[str]) -> str:
    """A name among those that are known."""
    if not isinstance(value, str) or value not in known:
        raise InvalidValue(field, value, f"must be one of {', '.join(known)}", "Choose one")
    return value


def check_operand(
    name: str, x: Tensor | None, like: Tensor, dtypes: Sequence[Any], *shapes: tuple[int, ...]
) -> None:
    """Refuse an operand that is given and is not of one of these dtypes and shapes, on the device
    of ``like``."""
    if x is None:
        return
    if x.dtype not in dtypes or tuple(x.shape) not in shapes:
        kinds = " or ".join(dict.fromkeys(map(str, dtypes)))
        rule = " or ".join(str(list(s)) for s in shapes)
        raise InvalidValue(
            name,
            f"{x.dtype} {list(x.shape)}",
            f"must be {kinds}, of shape {rule}",
            "Pass one that is",
        )
    if x.device != like.device:
        raise InvalidValue(name, f"on {x.device}", f"must be on {like.device}", "Move it there")


def check_lengths(name: str, lengths: Tensor, most: int, what: str) -> None:
    """Refuse lengths on the host that are negative or above ``most``; those on a device are not
    read."""
    if lengths.device.type != "cpu":
        return
    for b, length in enumerate(lengths.tolist()):
        if not 0 <= length <= most:
            raise InvalidValue(
                f"{name}[{b}]", length, f"must be from 0 to {what} = {most}", "Correct it"
            )


def check_names(**names: object) -> None:
    """Refuse what is no name, of a backend or an implementation."""
    for field, name in names.items():
        if name is not None:
            check_name(field, name)


def out_dtype_of(given: object, q: Tensor) -> Any:
    """torch's dtype of a result: q's or float32; None where none is asked for."""
    if given is None:
        return None
    kind = torch_dtype(given)
    known = dict.fromkeys((q.dtype, torch.float32))
    if kind not in known:
        rule = f"must be {' or '.join(map(str, known))}"
        raise InvalidValue("out_dtype", kind, rule, "Leave it out for q's dtype")
    return kind


def described(operands: Mapping[str, Tensor]) -> dict[str, object]:
    """Dtypes and shapes, which every rank must have alike."""
    return {
        n: f"{str(x.dtype).removeprefix('torch.')} {[*x.shape]}"
        + (" with gradients" if x.requires_grad else "")
        for n, x in operands.items()
    }
