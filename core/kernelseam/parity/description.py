"""A case's descriptor over memory that is there: addresses, strides, and lists of addresses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from kernelseam.contract import Device, Runtime
from kernelseam.descriptors import (
    Attention,
    AttentionBwd,
    AttentionPointers,
    BatchedGemmPointers,
    BatchedGemmStrided,
)
from kernelseam.descriptors.attention.merge import MergeStates
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.parity import attention_data, projection_data
from kernelseam.parity.cases import AttentionCase, BackwardCase, Case, MergeCase
from kernelseam.parity.memory import Layout
from kernelseam.parity.projection_case import ProjectionCase

_MATRIX, _PLANE = ("batch", "head", "row"), ("batch", "head", "row", "column")
_FIELDS = {
    **{
        n: (n.lower(), _MATRIX)
        for n in ("A", "B", "C", "residual", "q", "k", "v", "out", "dout", "dq", "dk", "dv")
    },
    **{n: (n, _PLANE) for n in ("bias", "mask", "dbias")},
    "lse": ("lse", ("batch", "head")),
    "alibi_slopes": ("alibi", ("batch", "head")),
    "block_table": ("table", ("row",)),
    "outs": ("outs", ("part", *_MATRIX)),
    "lses": ("lses", ("part", "batch", "head")),
}
"""Operand → how the descriptors' stride fields name it, and its axes that have one."""


def describe(
    case: Case, layout: Layout, addresses: Mapping[str, Any], runtime: Runtime, device: Device
) -> Descriptor:
    """The descriptor of a case over addresses."""
    if isinstance(case, MergeCase):
        return MergeStates(
            **addresses,
            **_strides(layout),
            parts=case.parts,
            batch=case.batch,
            num_heads=case.num_heads,
            rows=case.rows,
            value_dim=case.value_dim,
            dtype=case.dtype,
            dtype_out=case.dtype_out,
        )
    if isinstance(case, BackwardCase):
        own = {n: p for n, p in layout.places.items() if n in _OWN}
        rest = {n: at for n, at in addresses.items() if n not in _OWN}
        forward = _attention(
            case.forward, Layout({n: layout.places[n] for n in rest}), rest, runtime, device
        )
        assert isinstance(forward, Attention)
        given: dict[str, Any] = {n: addresses[n] for n in own}
        given |= _strides(Layout(own), {n for n in own if _OWN[n] in _packed(case.forward)})
        return AttentionBwd(forward=forward, **given, deterministic=case.deterministic)
    if isinstance(case, AttentionCase):
        return _attention(case, layout, addresses, runtime, device)
    if isinstance(case, ProjectionCase):
        return projection_data.describe(case, layout, addresses)
    options: dict[str, Any] = {
        "M": case.M,
        "N": case.N,
        "K": case.K,
        "batch": case.batch,
        "num_heads": case.num_heads,
        "alpha": case.alpha,
        "beta": case.beta,
        "a_transposed": case.a_transposed,
        "b_transposed": case.b_transposed,
        "dtype": case.dtype,
        "dtype_c": case.out_dtype,
        "dtype_bias": case.bias,
        "dtype_residual": case.residual,
        "c_batch_group": case.c_batch_group,
        "c_head_group": case.c_head_group,
        "precision": case.precision,
    }
    strides = {
        n: s
        for n, s in _strides(layout).items()
        if n not in ("stride_bias_row", "stride_bias_column")
    }
    if case.view != "strided":
        rows: dict[str, Any] = {n: s for n, s in strides.items() if n.endswith("_row")}
        for name, at in addresses.items():
            options[name + "_ptrs"] = _list(case.view, layout, name, at, runtime, device)
        if case.view == "device":
            widest = max(p.dtype.itemsize for p in layout.places.values())
            options["alignment"] = 16 if all(at % 16 == 0 for at in addresses.values()) else widest
        return BatchedGemmPointers(**rows, **options)
    return BatchedGemmStrided(**addresses, **strides, **options, b_head_group=case.b_head_group)


_OWN = {"dout": "out", "dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsinks": "sinks"}
"""A backward's own operands, and which of the forward's each is like."""


def _attention(
    case: AttentionCase,
    layout: Layout,
    addresses: Mapping[str, Any],
    runtime: Runtime,
    device: Device,
) -> Attention | AttentionPointers:
    options: dict[str, Any] = {
        n: getattr(case, n)
        for n in (
            "batch",
            "num_heads",
            "kv_heads",
            "S_q",
            "S_k",
            "head_dim",
            "value_dim",
            "causal",
            "window",
            "scale",
            "softcap",
            "dtype",
            "dtype_out",
            "batch_invariant",
        )
    }
    options["dtype_bias"] = case.bias
    if case.view == "strided":
        return Attention(
            **addresses, **_strides(layout, _packed(case)), **dict(_views(case)), **options
        )
    listed = [n for n in addresses if n in ("q", "k", "v", "out")]
    strides = {
        n: s
        for n, s in _strides(layout).items()
        if n.endswith("_row") or not n.startswith(tuple(f"stride_{x}_" for x in listed))
    }
    lists: dict[str, Any] = {
        f"{n}_ptrs": _list(case.view, layout, n, addresses[n], runtime, device) for n in listed
    }
    if case.view == "device":
        options["alignment"] = (
            16 if all(addresses[n] % 16 == 0 for n in listed) else case.dtype.itemsize
        )
    return AttentionPointers(
        **{n: at for n, at in addresses.items() if n not in listed}, **lists, **strides, **options
    )


def _views(case: AttentionCase) -> Iterator[tuple[str, Any]]:
    """How much memory packed rows and pages have."""
    for letter, lengths in (("q", case.q_sequences), ("k", case.k_sequences)):
        if lengths is not None:
            yield f"total_{letter}", sum(lengths) + 2 * case.margin
    if case.page_size:
        yield "pages", attention_data.pages(case)
        yield "page_size", case.page_size
        yield "table_width", attention_data.block_table(case).shape[1]


def _packed(case: AttentionCase) -> set[str]:
    """Operands whose rows are packed."""
    queries = set() if case.q_sequences is None else {"q", "out", "lse"}
    return queries | (set() if case.k_sequences is None else {"k", "v"})


def _strides(layout: Layout, packed: Collection[str] = ()) -> dict[str, Any]:
    """The descriptors' stride arguments; what is packed has none of the batch."""
    return {
        f"stride_{_FIELDS[name][0]}_{axis}": stride
        for name, p in layout.places.items()
        if name in _FIELDS
        for axis, stride in zip(_FIELDS[name][1], p.strides, strict=False)
        if not (axis == "batch" and name in packed)
    }


class _DeviceList:
    """The same memory as a device's array of float64, as 64-bit integers."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {**owner.__cuda_array_interface__, "typestr": "<u8"}


def _list(
    view: str, layout: Layout, name: str, address: int, runtime: Runtime, device: Device
) -> object:
    """The addresses of every matrix, batch-major: a host list, or an array where the runtime's say
    that they are on a device."""
    p = layout.places[name]
    starts = p.starts or [b * p.strides[0] + h * p.strides[1] for b, h in np.ndindex(*p.shape[:2])]
    found = [address + s * p.dtype.itemsize for s in starts]
    if view == "host" or not found:
        return found
    staged = runtime.from_host(np.array(found, np.uint64).view(np.float64), device)
    return _DeviceList(staged) if hasattr(staged, "__cuda_array_interface__") else found
