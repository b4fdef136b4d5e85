"""The attention forward over lists of addresses: every head of q, k, v and out in memory of its
own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any, cast

from kernelseam.contract import ArrayInfo, Device, Runtime
from kernelseam.descriptors.attention import contents
from kernelseam.descriptors.attention.forward import Attention
from kernelseam.descriptors.attention.forward_fields import CommonFields
from kernelseam.descriptors.attention.options import ScoreOperands
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.common.address_lists import AddressList, Matrix
from kernelseam.descriptors.common.lists import (
    ListDescriptor,
    Lists,
    arrays_of,
    completed,
    first_arrays,
    given_row,
    plain,
    read_lists,
    row_field,
    vector_of,
)
from kernelseam.descriptors.common.operands import dtype_of, required, resolve
from kernelseam.descriptors.common.options import operands_of
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.validation import extent
from kernelseam.errors import InvalidValue
from kernelseam.frozen import dataclass

NAMES = ("q_ptrs", "k_ptrs", "v_ptrs", "out_ptrs")
OTHERS = ("lse", *operands_of(ScoreOperands))
"""Operands that are not lists."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionPointers(CommonFields, ListDescriptor[AttentionProblem]):
    """out[b,h] = softmax(x[b,h])·v[b,g] as in Attention, over lists of matrices.

    ``q_ptrs`` and ``out_ptrs`` have batch·num_heads entries, ``k_ptrs`` and ``v_ptrs``
    batch·kv_heads, batch-major (entry b·num_heads + h): q [S_q, head_dim], k [S_k, head_dim], v
    [S_k, value_dim], out [S_q, value_dim] of one head. Each is a host list — a list or tuple of
    two-dimensional arrays or of addresses, or a NumPy array of integers — or an array of 64-bit
    integers on the device, or None until ``bind``. Host lists are copied to the device by ``bind``,
    which keeps them alive. Matrices of one list share their dtype and their row stride
    (``stride_q_row``, …, in elements; left out: the arrays', else packed).

    All else is as in Attention: masks, score options, ``lse`` [batch, num_heads, S_q] with strides.
    With ``kv_lengths`` the matrices of k and v may have fewer rows than S_k, entry b's at least
    kv_lengths[b].

    ``alignment``: bytes, a power of two, of which all addresses are multiples. Left out, it is
    found from host lists, and is the element size for lists that the host cannot read. Promise 16
    for 16-byte accesses.

    Host lists are checked for null, misaligned and equal (or overlapping) addresses;
    ``bind(check=True)`` copies device lists to the host, which synchronises, and checks them too.
    Lists that turn out evenly spaced are served as strided memory (not with ``kv_lengths``).

    Raises InvalidValue (naming field, value, rule and remedy) where no such problem exists.
    """

    q_ptrs: object = field(default=None, repr=False)
    k_ptrs: object = field(default=None, repr=False)
    v_ptrs: object = field(default=None, repr=False)
    out_ptrs: object = field(default=None, repr=False)
    alignment: int | None = None
    _rest: Attention = field(init=False, repr=False)
    """The operands that are not lists."""

    def __post_init__(self) -> None:
        blank = self._blank()
        given = read_lists(self.operands(), blank)
        infos = first_arrays(given)
        dtype = required(
            "dtype", dtype_of("dtype", self.dtype, infos, NAMES[:3]), "the entries of the lists"
        )
        dtype_out = dtype_of("dtype_out", self.dtype_out, infos, NAMES[3:])
        rest = Attention(**{**self._shared(), "dtype": dtype, "dtype_out": dtype_out})
        self._check_device(infos, given, rest)
        p = rest.problem()
        kinds = {n: p.spec.out if n == "out_ptrs" else dtype for n in NAMES}
        matrices = {n: completed(n, blank[n], given.get(n), kinds[n]) for n in NAMES}
        wide = all(vector_of(m, given.get(n), self.alignment) == 16 for n, m in matrices.items())
        vector = 16 if wide else dtype.itemsize
        q, k, v, out = ((0, 0, cast(int, m.row_stride)) for m in matrices.values())
        problem = replace(
            p,
            spec=replace(p.spec, q_view="pointers", kv_view="pointers", vector=vector),
            q_strides=q,
            k_strides=k,
            v_strides=v,
            out_strides=out,
        )
        vectors = {n: max(vector, kind.itemsize) for n, kind in kinds.items()}
        object.__setattr__(self, "_problem", problem)
        object.__setattr__(self, "_rest", rest)
        object.__setattr__(
            self, "_lists", Lists.of(problem, matrices, given, vectors, self.alignment is not None)
        )

    def _blank(self) -> dict[str, Matrix]:
        """The matrices of each list by the extents; dtypes and row strides may follow from the
        arrays."""
        batch, heads, s_q, s_k, d = (
            extent(n, getattr(self, n)) for n in ("batch", "num_heads", "S_q", "S_k", "head_dim")
        )
        kv_heads = heads if self.kv_heads is None else extent("kv_heads", self.kv_heads)
        d_v = d if self.value_dim is None else extent("value_dim", self.value_dim)
        queries, keys = (batch * heads, "batch·num_heads"), (batch * kv_heads, "batch·kv_heads")
        ragged = self.kv_lengths is not None
        rows = {n: given_row(n, getattr(self, row_field(n))) for n in NAMES}
        return {
            "q_ptrs": Matrix(s_q, d, rows["q_ptrs"], None, *queries),
            "k_ptrs": Matrix(s_k, d, rows["k_ptrs"], None, *keys, ragged=ragged),
            "v_ptrs": Matrix(s_k, d_v, rows["v_ptrs"], None, *keys, ragged=ragged),
            "out_ptrs": Matrix(s_q, d_v, rows["out_ptrs"], None, *queries, written=True),
        }

    def _shared(self) -> dict[str, Any]:
        """The fields that Attention has, too; row strides are the lists' own."""
        own = {row_field(n) for n in NAMES}
        names = {f.name for f in fields(Attention) if f.init} - own
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in names}

    def _check_device(
        self, infos: Mapping[str, ArrayInfo], given: Mapping[str, AddressList], rest: Attention
    ) -> None:
        where = next((d for one in given.values() if (d := one.device)), None)
        if where is not None and rest.device not in (None, where):
            name = next(n for n, x in rest.operands().items() if not isinstance(x, int))
            raise InvalidValue(
                name, f"on {rest.device}", f"the lists are on {where}", "Move all to one device"
            )

    @property
    def device(self) -> Device | None:
        """The device of the arrays; None where there are only addresses."""
        return self._lists.device or self._rest.device

    def operands(self) -> dict[str, object]:
        """The lists, lse and the optional ones, as far as they are given."""
        return {n: v for n in (*NAMES, *OTHERS) if (v := getattr(self, n)) is not None}

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Lists in device memory and addresses of the rest. Raises InvalidValue for what ``read``
        refuses, and for arrays that do not fit the problem."""
        lists = self.read(operands, device)
        rest = {n: x for n, x in operands.items() if n not in lists}
        resolved = resolve(
            self._problem.operands, rest, self._rest._arrays, self._rest._packed_strides, device
        )
        self._lists.check_beside(lists, resolved.pointers, self._problem.operands)
        pointers, staged = self._lists.stage(lists, runtime, device)
        return Resolved(
            {**resolved.pointers, **pointers},
            (lists, *staged, *resolved.keep),
            (*arrays_of(lists), *resolved.arrays),
        )

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Check lists in device memory as host lists are, and lengths against S_k and the rows of
        the lists' arrays; synchronises."""
        lists = cast(Mapping[str, AddressList], resolved.keep[0])
        if self._lists.check_device(lists, runtime):
            self._lists.check_beside(lists, resolved.pointers, self._problem.operands, runtime)
        rows = {
            n: x.rows
            for n in ("k_ptrs", "v_ptrs")
            if n in lists and (x := lists[n]).rows is not None
        }
        contents.check(self._problem, resolved, runtime, device, rows)

    def _steps(self) -> dict[str, int] | None:
        # Under lengths a strided k would be taken to have rows that the matrices of a list may
        # lack.
        return None if self._problem.spec.lengths else super()._steps()

    def _as_strided(self, steps: Mapping[str, int]) -> Attention:
        p = self._problem
        where: dict[str, Any] = {}
        for name, step in steps.items():
            x, heads = plain(name), p.kv_heads if name in ("k_ptrs", "v_ptrs") else p.num_heads
            where[x] = self._lists.first(name)
            where[row_field(name)] = self.matrix(name).row_stride
            if p.batch * heads > 1:
                where[f"stride_{x}_batch"], where[f"stride_{x}_head"] = heads * step, step
        try:
            return replace(self._rest, **where)
        except InvalidValue as e:
            raise InvalidValue(
                "out_ptrs",
                f"{p.batch * p.num_heads} matrices, {steps['out_ptrs']} elements apart",
                "they share elements",
                "Give every output memory of its own",
            ) from e
