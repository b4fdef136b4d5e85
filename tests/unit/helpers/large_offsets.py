"""Parity cases of which one operand spans more than 2³¹ elements, from batch to batch, head to
head, row to row or page to page, over memory that is only reserved: a few pages of it are touched.
What 32-bit offsets would reach is reserved as well, so that a wrong one reads zeros, or leaves them
where a result belongs, and fails no process."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam.contract import Device
from kernelseam.dtypes import DType
from kernelseam.oracle.check import Verdict
from kernelseam.parity.running.stages import verdict
from kernelseam.planning import plan
from kernelseam.plugins import plugins
from kernelseam.samples.attention_bwd_case import BackwardCase
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.case import Case
from kernelseam.samples.data.memory import Placement
from kernelseam.samples.merge_case import MergeCase
from kernelseam.samples.operand_layout import OperandLayout
from kernelseam.samples.operations import operands
from kernelseam.samples.operations.operands import describe
from kernelseam.samples.projection_case import ProjectionCase

Array = npt.NDArray[Any]
FAR = 2**31
"""Elements: no 32-bit offset reaches so far."""
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

_BATCHES, _HEADS = OperandLayout(gaps=(FAR, 0, 0)), OperandLayout(gaps=(0, FAR, 0))
_ROWS = OperandLayout(gaps=(0, 0, FAR // 2))
"""Their stride is 32-bit: the third row is beyond 2³¹."""
_TWO_BATCHES: dict[str, Any] = {"batch": 2, "num_heads": 1, "kv_heads": 1}
_TWO_HEADS: dict[str, Any] = {"batch": 1, "num_heads": 2, "kv_heads": 2}
_ONE: dict[str, Any] = {"batch": 1, "num_heads": 1, "kv_heads": 1}
_AXES: dict[str, tuple[OperandLayout, dict[str, Any]]] = {
    "batches": (_BATCHES, _TWO_BATCHES),
    "heads": (_HEADS, _TWO_HEADS),
    "rows": (_ROWS, _ONE),
}


def _attention(name: str, **fields: Any) -> AttentionCase:
    return AttentionCase(f"far-{name}", DType.float16, **{"S_q": 3, "S_k": 4, **fields})


def _gradients(
    name: str, operand_layouts: Mapping[str, Any], any_order: bool = False, **fields: Any
) -> BackwardCase:
    """The walks of dq, dk, dv, dout and dbias; the rest are the forward's fields."""
    forward = _attention(name, **fields)
    return BackwardCase(
        f"far-{name}",
        forward,
        **operand_layouts,
        bias_gradient=forward.bias is not None,
        deterministic=not any_order,
    )


def _cases() -> Iterator[tuple[str, Case]]:
    f16, f32 = DType.float16, DType.float32
    for axis, (operand_layout, shape) in _AXES.items():
        for operand in ("q", "k", "v", "out"):
            yield operand, _attention(f"{operand}-{axis}", **{operand: operand_layout}, **shape)
        for operand, more in (("bias", {"bias": f16}), ("mask", {"mask": "random"})):
            yield (
                operand,
                _attention(
                    f"{operand}-{axis}", **{f"{operand}_layout": operand_layout}, **more, **shape
                ),
            )
        for operand in ("dq", "dk", "dv", "dout"):
            yield operand, _gradients(f"bwd-{operand}-{axis}", {operand: operand_layout}, **shape)
        for operand in ("q", "k", "v"):
            yield (
                operand,
                _gradients(f"bwd-{operand}-{axis}", {}, **shape | {operand: operand_layout}),
            )
        for short, dtype in (("", f16), ("-f32", f32)):  # the latter needs no sums in a workspace
            yield (
                "dbias",
                _gradients(
                    f"bwd-dbias{short}-{axis}", {"dbias": operand_layout}, bias=dtype, **shape
                ),
            )
        yield (
            "bias",
            _gradients(f"bwd-bias-{axis}", {}, bias=f16, bias_layout=operand_layout, **shape),
        )
        for operand in ("dq", "dk", "dout"):
            yield (
                operand,
                _gradients(
                    f"bwd-any-order-{operand}-{axis}",
                    {operand: operand_layout},
                    any_order=True,
                    **shape,
                ),
            )
    for axis, shape in (("batches", _TWO_BATCHES), ("heads", _TWO_HEADS)):
        yield "lse", _attention(f"lse-{axis}", lse_gap=FAR, **shape)
        yield "lse", _gradients(f"bwd-lse-{axis}", {}, lse_gap=FAR, **shape)
    # Pages as long as they are, several of them unused: each begins 2³¹ elements and more after
    # the one before.
    paged = {"kv_lengths": (4, 2), "page_size": 2, **_TWO_BATCHES}
    for operand in "kv":
        yield operand, _attention(f"{operand}-pages", **{operand: _BATCHES}, **paged)
    packed: dict[str, Any] = {"q_sequences": (3, 2), "k_sequences": (2, 4), **_TWO_BATCHES}
    for operand in ("q", "k", "v", "out"):
        yield operand, _attention(f"{operand}-packed", **{operand: _ROWS}, **packed)
    yield "q", _attention("q-of-a-list", q=_ROWS, view="host", scattered=True, **_ONE)
    for name, operand_layout, heads in (("batches", _BATCHES, 1), ("heads", _HEADS, 2)):
        merge: dict[str, Any] = {"batch": 3 - heads, "num_heads": heads, "rows": 3, "parts": 2}
        for operand in ("outs", "out"):
            yield (
                operand,
                MergeCase(
                    f"far-merge-{operand}-{name}", f32, f16, **merge | {operand: operand_layout}
                ),
            )
    yield (
        "outs",
        MergeCase("far-merge-parts", f32, f16, parts=2, batch=1, num_heads=1, rows=3, part_gap=FAR),
    )
    for operand in "kv":
        yield (
            operand,
            ProjectionCase(
                f"far-qkv-{operand}-pages",
                "qkv_projection",
                f16,
                batch=2,
                S=3,
                hidden=16,
                page_size=2,
                operand_layouts=((operand, _BATCHES),),
            ),
        )


CASES: dict[str, tuple[str, Case]] = {
    c.name.removeprefix("far-"): (operand, c) for operand, c in _cases()
}
"""Name → the operand that is far, and the case."""


class Memory:
    """One operand's block on the host, reserved and not taken."""

    def __init__(self, before: int, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._reserved = mmap.mmap(-1, before + size, flags=flags)
        self._flat = np.ndarray((before + size,), np.uint8, self._reserved)
        self._before = before
        self.address = int(self._flat.ctypes.data) + before

    def write(self, placement: Placement, value: Array) -> None:
        """Put a logical array where the place says."""
        for index, view in placement.views(self._flat, self._before):
            view[...] = value[index]

    def read(self, placement: Placement) -> Array:
        """The logical array that is there."""
        result = np.zeros(placement.shape, placement.dtype.numpy)
        for index, view in placement.views(self._flat, self._before):
            result[index] = view
        return result

    def close(self) -> None:
        del self._flat
        self._reserved.close()


@contextmanager
def memory(before: int, size: int) -> Iterator[Memory]:
    created = Memory(before, size)
    try:
        yield created
    finally:
        created.close()


def verdict_of(
    case: Case,
    operand: str,
    device: Device,
    implementation: str,
    memory: Callable[[int, int], AbstractContextManager[Any]] = memory,
) -> Verdict:
    """The oracle's verdict on a case that is computed over ``memory(bytes before, bytes)`` an
    operand."""
    runtime = plugins().backend(device.backend).runtime
    layout, values = operands.layout(case, separate=True), operands.values(case)
    assert _reach(layout.placements[operand]) > FAR, f"{operand} is not far"
    sizes = {
        p.block: max(q.bytes for q in layout.placements.values() if q.block == p.block)
        for p in layout.placements.values()
    }
    with ExitStack() as stack, np.errstate(all="ignore"):
        blocks = {}
        for block, size in sizes.items():
            far = size > 2**30
            wide = max(p.dtype.itemsize for p in layout.placements.values() if p.block == block)
            blocks[block] = stack.enter_context(
                memory(FAR * wide if far else 0, -(-size // 16) * 16)
            )
        for name, value in values.items():
            blocks[layout.placements[name].block].write(layout.placements[name], value)
        addresses = {
            n: blocks[p.block].address + p.offset * p.dtype.itemsize
            for n, p in layout.placements.items()
        }
        call = plan(
            describe(case, layout, addresses, runtime, device),
            device=device,
            implementation=implementation,
        ).bind()
        call()
        runtime.synchronize(device)
        results = {
            name: blocks[layout.placements[name].block].read(layout.placements[name])
            for name in operands.outputs(case)
        }
        return verdict(case, results)


def _reach(placement: Placement) -> int:
    """Elements from the first to the last."""
    return placement.bytes // placement.dtype.itemsize
