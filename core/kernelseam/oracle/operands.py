"""A call's operands copied to the host, as [batch, head, row, column]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam.contract import Device, OperandRule, Runtime
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.gemm.grouped_pointers_problem import GroupedGemmPointersProblem
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType

Array = npt.NDArray[Any]


class Operands:
    """The operands of one call, by name; each is copied to the host on request."""

    def __init__(self, pointers: Mapping[str, int], runtime: Runtime, device: Device) -> None:
        self._pointers, self._runtime, self._device = pointers, runtime, device

    def strided(self, rule: OperandRule, batch: int, inner: int = 2) -> Array:
        """An operand by the shape and strides of its rule; zeros for one without elements, which
        may have no memory.

        Its matrices, the last ``inner`` axes, are copied by themselves where there are gaps between
        them. Entries of a list that are evenly spaced are described so, but each may lie in an
        allocation of its own: nothing need be mapped between them.
        """
        dtype, shape, strides = rule.dtype or DType.float64, rule.shape, rule.strides
        if not rule.span:
            return np.broadcast_to(np.zeros((), dtype.numpy), (batch, *shape[1:]))
        start, apart = self._pointers[rule.name], _apart(shape, strides, inner)
        if not apart:
            return self._read_strided(start, shape, strides, dtype)
        piece = tuple([1 if axis in apart else n for axis, n in enumerate(shape)])
        whole = np.empty(shape, dtype.numpy)
        for places in product(*(range(shape[axis]) for axis in apart)):
            at, where = start, [slice(None)] * len(shape)
            for axis, i in zip(apart, places, strict=True):
                at += i * strides[axis] * dtype.itemsize
                where[axis] = slice(i, i + 1)
            whole[tuple(where)] = self._read_strided(at, piece, strides, dtype)
        return whole

    def gemm(self, p: GemmProblem, name: str) -> Array:
        """One of its operands, by strides or by its list; a bias as [batch, head, column]."""
        spec, c = p.spec, (p.M, p.N)
        lead = (
            (p.batch, p.num_heads)
            if name in "AB"
            else (p.batch // p.c_batch_group, p.num_heads // p.c_head_group)
        )
        layouts: dict[str, tuple[DType | None, tuple[int, ...], int]] = {
            "A": (spec.dtype, p.a_shape, p.a_strides[2]),
            "B": (spec.dtype, p.b_shape, p.b_strides[2]),
            "C": (spec.dtype_c, c, p.c_strides[2]),
            "residual": (spec.residual, c, p.residual_strides[2]),
            "bias": (spec.bias, (p.N,), 0),
            "a_scales": (DType.float32, (p.M,), 0),
            "b_scales": (DType.float32, (p.N,), 0),
        }
        dtype, shape, row = layouts[name]
        assert dtype is not None
        rules = {rule.name: rule for rule in p.operands}
        if name in rules:
            return self.strided(rules[name], lead[0], len(rules[name].shape) - len(lead))
        if not (rule := rules[f"{name}_ptrs"]).span:
            return np.broadcast_to(np.zeros((), dtype.numpy), (*lead, *shape))
        places = self._read_strided(
            self._pointers[rule.name], rule.shape, (1,), DType.float64
        ).view(np.uint64)
        strides = (row, 1)[-len(shape) :]
        return np.stack(
            [self._read_strided(int(at), shape, strides, dtype) for at in places]
        ).reshape(*lead, *shape)

    def listed(self, p: GroupedGemmPointersProblem, name: str, g: int) -> Array:
        """A, B or C of group g; zeros for one that is not read."""
        rule = p.rule(name, g)
        dtype = rule.dtype or DType.float64
        if not rule.span:
            shape = {"A": p.a_shape(g), "B": p.b_shape(g), "C": p.sizes[g][:2]}[name]
            return np.zeros(shape, dtype.numpy)
        entry = self._pointers[f"{name}_ptrs"] + 8 * g
        at = self._read_strided(entry, (1,), (1,), DType.float64).view(np.uint64)[0]
        return self._read_strided(int(at), rule.shape, rule.strides, dtype)

    def attention_rows(
        self,
        p: AttentionProblem,
        name: str,
        arrays: Mapping[str, Array],
        lengths: Sequence[int] | None,
        like: str = "",
    ) -> Array:
        """q, k, v, out, or an operand with the layout of one (``like``), as [batch, head, row,
        column], or lse without columns, from any view. Rows after an entry's length are 0."""
        like = like or name
        of_keys = like in "kv"
        view, most = (p.spec.kv_view, p.S_k) if of_keys else (p.spec.q_view, p.S_q)
        if view == "strided" or (view == "pointers" and name == "lse"):
            return arrays[name]
        heads = p.kv_heads if of_keys else p.num_heads
        dtype = p.spec.out if like == "out" else p.spec.dtype_lse if name == "lse" else p.spec.q
        if of_keys:
            dtype = p.spec.kv
        width = p.spec.head_dim if like in "qk" else p.spec.value_dim
        whole = np.zeros((p.batch, heads, most, width)[: 3 if name == "lse" else 4], dtype.numpy)
        rules = {rule.name: rule for rule in p.operands}
        for b in range(p.batch):
            n = most if lengths is None else lengths[b]
            if view == "packed":
                first = int(arrays["cu_seqlens_k" if of_keys else "cu_seqlens_q"][b])
                whole[b, :, :n] = arrays[name][0, :, first : first + n]
            elif view == "paged":
                for j in range(0, n, p.page_size):
                    stop, page = min(j + p.page_size, n), arrays["block_table"][b, j // p.page_size]
                    whole[b, :, j:stop] = arrays[name][page][:, : stop - j]
            else:
                listed = self._read_strided(
                    self._pointers[f"{name}_ptrs"], rules[f"{name}_ptrs"].shape, (1,), DType.float64
                )
                row = {"q": p.q_strides, "k": p.k_strides, "v": p.v_strides, "out": p.out_strides}[
                    name
                ][2]
                for h in range(heads if n else 0):
                    at = int(listed.view(np.uint64)[b * heads + h])
                    whole[b, h, :n] = self._read_strided(at, (n, width), (row, 1), dtype)
        return whole

    def _read_strided(
        self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType
    ) -> Array:
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = self._runtime.read(pointer, span * dtype.itemsize, self._device).view(dtype.numpy)
        return np.lib.stride_tricks.as_strided(
            flat, shape, [s * dtype.itemsize for s in strides], writeable=False
        )


def _apart(shape: tuple[int, ...], strides: tuple[int, ...], inner: int) -> tuple[int, ...]:
    """The axes before the last ``inner`` whose steps leave gaps.

    Matrices whose rows interleave have none between them: each lies in one allocation, and so they
    lie in the same.
    """
    outer = max(len(shape) - inner, 0)
    covered = 1 + sum((n - 1) * s for n, s in zip(shape[outer:], strides[outer:], strict=True))
    apart = []
    for axis in sorted(range(outer), key=lambda axis: strides[axis]):
        if shape[axis] > 1 and strides[axis] > covered:
            apart.append(axis)
        else:
            covered += (shape[axis] - 1) * strides[axis]
    return tuple(apart)
