"""Products of which one operand spans more than 2³¹ elements, over memory that is only reserved: a
few pages of it are touched. What 32-bit offsets would reach is reserved as well, so that a wrong
one reads zeros and fails no process."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from kernelseam import BatchedGemmStrided
from kernelseam.contract import OperandRule

Array = npt.NDArray[Any]
ROW = 2**30 + 8
"""Elements from row to row, which kernels count in 32 bits: the third row is beyond 2³¹."""
ENTRY = 2**31 + 8
"""Elements from a batch or head to the next."""
REACH = 2**32
"""Bytes before an operand that offsets of 16-bit elements reach where they wrap around."""
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

_HEADS = {"batch": 1, "num_heads": 3}
_BATCHES = {"batch": 2, "num_heads": 1}
_SUMS = {"batch": 4, "num_heads": 1, "c_batch_group": 2}
FAR: dict[str, tuple[str, dict[str, Any]]] = {
    "A-rows": ("A", {"stride_a_row": ROW}),
    "A-transposed-rows": ("A", {"stride_a_row": ROW, "a_transposed": True, "K": 3}),
    "A-heads": ("A", {**_HEADS, "stride_a_head": ROW}),
    "A-batches": ("A", {**_BATCHES, "stride_a_batch": ENTRY}),
    "A-batches-summed": ("A", {**_SUMS, "stride_a_batch": ENTRY}),
    "B-rows": ("B", {"stride_b_row": ROW, "K": 3}),
    "B-heads-shared": ("B", {"num_heads": 6, "b_head_group": 2, "stride_b_head": ROW}),
    "B-batches": ("B", {**_BATCHES, "stride_b_batch": ENTRY}),
    "C-rows": ("C", {"stride_c_row": ROW}),
    "C-rows-beta": ("C", {"stride_c_row": ROW, "beta": -1.0}),
    "C-heads": ("C", {**_HEADS, "stride_c_head": ROW}),
    "C-batches-summed": ("C", {**_SUMS, "stride_c_batch": ENTRY}),
    "bias-heads": ("bias", {**_HEADS, "bias": 0, "stride_bias_head": ROW}),
    "bias-batches": ("bias", {**_BATCHES, "bias": 0, "stride_bias_batch": ENTRY}),
    "residual-rows": ("residual", {"residual": 0, "stride_residual_row": ROW}),
    "residual-batches": ("residual", {**_BATCHES, "residual": 0, "stride_residual_batch": ENTRY}),
    "residual-in-place": ("C", {"residual": 0, "stride_residual_row": ROW, "stride_c_row": ROW}),
}
"""Name → the operand that is far, and the descriptor's fields; all else is packed."""


@contextmanager
def memory(rule: OperandRule) -> Iterator[Array]:
    """An operand of zeros, as its rule walks over it."""
    assert rule.dtype is not None
    size = rule.dtype.itemsize
    far = rule.span * size > 2**31
    start = REACH if far else 0
    with mmap.mmap(
        -1, start + rule.span * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    ) as reserved:
        yield np.ndarray(
            rule.shape, rule.dtype.numpy, reserved, start, [s * size for s in rule.strides]
        )


def hold(
    name: str,
    bind: Callable[..., Callable[[], None]],
    memory: Callable[[OperandRule], AbstractContextManager[Any]] = memory,
    to_host: Callable[[Any], Array] = np.array,
    from_host: Callable[[Array], Any] = np.asarray,
) -> None:
    """Compute a product by ``bind(descriptor, **arrays)()`` over arrays in ``memory``."""
    operand, fields = FAR[name]
    d = BatchedGemmStrided(**{"M": 3, "N": 16, "K": 16, "dtype": "float16", **fields})
    rules = {r.name: r for r in d.problem().operands}
    assert rules[operand].span > 2**31
    rng = np.random.default_rng(0)
    with ExitStack() as held:
        x = {
            n: held.enter_context(memory(r))
            for n, r in rules.items()
            if not (n == "residual" and operand == "C")
        }
        for array in x.values():
            array[...] = from_host(rng.integers(-3, 4, array.shape).astype(array.dtype))
        x.setdefault("residual", x["C"])
        expected = _formula(d, {n: to_host(array).astype(np.float64) for n, array in x.items()})
        bind(d, **{n: x[n] for n in rules})()
        actual = to_host(x["C"])
        x.clear()
        array = None
    np.testing.assert_array_equal(actual, expected)


def _formula(d: BatchedGemmStrided, x: dict[str, Array]) -> Array:
    a = x["A"].swapaxes(2, 3) if d.a_transposed else x["A"]
    product = a @ np.repeat(x["B"], d.b_head_group, axis=1)
    expected: Array = (
        product.reshape(-1, d.c_batch_group, *product.shape[1:]).sum(1) + d.beta * x["C"]
    )
    if d.bias is not None:
        expected = expected + x["bias"][:, :, None]
    return expected + (x["residual"] if d.residual is not None else 0)
