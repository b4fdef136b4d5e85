"""The attention forward over dense, strided memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kernelseam.contract import ArrayInfo, Device, Runtime
from kernelseam.descriptors.operands import (
    axes,
    canonical,
    check_layout,
    describe_all,
    describe_arrays,
    dtype_of,
    pointer,
    required,
    resolve,
)
from kernelseam.descriptors.problems import AttentionProblem, AttentionSpec, default_scale
from kernelseam.descriptors.validation import (
    MAX_EXTENT,
    extent,
    finite,
    flag,
    integer,
    multiple,
    row_strides,
    vector_bytes,
)
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.planning import Resolved

LAYOUTS = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1)}
"""Where batch, head and row stand in an array's shape."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention:
    """out[b,h] = softmax(scale·q[b,h]·k[b,g]ᵀ)·v[b,g] with g = h // (num_heads / kv_heads).

    q is [batch, num_heads, S_q, head_dim], k [batch, kv_heads, S_k, head_dim], v [batch, kv_heads, S_k, value_dim],
    out [batch, num_heads, S_q, value_dim]; ``lse`` [batch, num_heads, S_q], float32, takes
    ln Σ_j exp(scale·q_i·k_j) over the visible keys. ``q, k, v, out, lse`` are arrays, addresses (ints), or None until
    ``bind``; ``return_lse`` says that an lse will be bound (an lse that is given says so too).

    Strides count elements and are those of the axes (batch, head, row) whatever their order in memory; columns
    are contiguous, and so are the rows of lse. One left out packs row-major around the others. 0 repeats an input.

    Causal is aligned at the bottom right: key j is visible to query i iff j ≤ i + (S_k − S_q), so that the last
    query sees every key. A query that sees no key (S_k = 0, or i < S_q − S_k) gives zeros, and an lse of −inf.

    ``kv_heads`` defaults to num_heads, ``value_dim`` to head_dim, ``scale`` to 1/√head_dim, ``dtype`` (of q, k, v and
    out) to the arrays'. Raises InvalidValue (naming field, value, rule and remedy) where no such problem exists.
    """

    batch: int
    num_heads: int
    S_q: int
    S_k: int
    head_dim: int
    kv_heads: int | None = None
    value_dim: int | None = None
    q: object = field(default=None, repr=False)
    k: object = field(default=None, repr=False)
    v: object = field(default=None, repr=False)
    out: object = field(default=None, repr=False)
    lse: object = field(default=None, repr=False)
    return_lse: bool = False
    causal: bool = False
    scale: float | None = None
    dtype: DType | str | None = None
    stride_q_batch: int | None = None
    stride_q_head: int | None = None
    stride_q_row: int | None = None
    stride_k_batch: int | None = None
    stride_k_head: int | None = None
    stride_k_row: int | None = None
    stride_v_batch: int | None = None
    stride_v_head: int | None = None
    stride_v_row: int | None = None
    stride_out_batch: int | None = None
    stride_out_head: int | None = None
    stride_out_row: int | None = None
    stride_lse_batch: int | None = None
    stride_lse_head: int | None = None
    _problem: AttentionProblem = field(init=False, repr=False)
    _arrays: Mapping[str, ArrayInfo] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        dtype = required("dtype", dtype_of("dtype", self.dtype, infos, ("q", "k", "v", "out")), "q, k, v and out")
        batch, heads = extent("batch", self.batch), extent("num_heads", self.num_heads)
        kv_heads = heads if self.kv_heads is None else extent("kv_heads", self.kv_heads)
        s_q, s_k, d = extent("S_q", self.S_q), extent("S_k", self.S_k), extent("head_dim", self.head_dim)
        d_v = d if self.value_dim is None else extent("value_dim", self.value_dim)
        multiple("num_heads", heads, "kv_heads", kv_heads)
        integer("batch·num_heads", batch * heads, 0, MAX_EXTENT, "Split the batch over several calls")
        lse = flag("return_lse", self.return_lse) or self.lse is not None
        shapes = {
            "q": (batch, heads, s_q, d), "k": (batch, kv_heads, s_k, d), "v": (batch, kv_heads, s_k, d_v),
            "out": (batch, heads, s_q, d_v),
        }
        strides, vector = [], 16
        for name, shape in shapes.items():
            batch_stride, head, row = row_strides(name, shape, self._strides(name), dtype)
            strides.append((batch_stride, head, row))
            vector = min(vector, vector_bytes(dtype, shape, strides[-1], pointer(name, getattr(self, name), infos)))
        lse_batch, lse_head = row_strides("lse", (batch, heads, s_q), self._strides("lse"), DType.float32)
        q, k, v, out = strides
        problem = AttentionProblem(
            AttentionSpec(dtype, d, d_v, flag("causal", self.causal), lse, vector), batch, heads, kv_heads, s_q, s_k,
            q, k, v, out, (lse_batch, lse_head) if lse else (0, 0),
            default_scale(d) if self.scale is None else finite("scale", self.scale),
        )
        check_layout(problem.operands, infos, self._dense)
        object.__setattr__(self, "_problem", problem)
        object.__setattr__(self, "_arrays", infos)

    def _strides(self, name: str) -> list[int | None]:
        names = ("batch", "head") if name == "lse" else ("batch", "head", "row")
        return [getattr(self, f"stride_{name}_{axis}") for axis in names]

    @cached_property
    def _dense(self) -> frozenset[str]:
        """Operands whose strides were all left out."""
        return frozenset(n for n in ("q", "k", "v", "out", "lse") if set(self._strides(n)) == {None})

    @property
    def device(self) -> Device | None:
        """Where the arrays are; None where there are none."""
        return next((i.device for i in self._arrays.values()), None)

    def problem(self) -> AttentionProblem:
        """The hashable part, without pointers."""
        return self._problem

    def operands(self) -> dict[str, object]:
        """q, k, v, out and lse, as far as they are given."""
        return {n: v for n in ("q", "k", "v", "out", "lse") if (v := getattr(self, n)) is not None}

    def simplified(self) -> tuple[Attention, str]:
        """Itself: there is no simpler way."""
        return self, ""

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Addresses of the operands. Raises InvalidValue where an array does not fit the problem."""
        return resolve(self._problem.operands, operands, self._arrays, self._dense, device)

    @classmethod
    def from_arrays(
        cls,
        q: object,
        k: object,
        v: object,
        out: object,
        lse: object = None,
        *,
        causal: bool = False,
        scale: float | None = None,
        layout: str = "bhsd",
    ) -> Attention:
        """The attention of four arrays, as they lie in memory: nothing is copied.

        ``layout`` "bhsd": q [B, H, S_q, D], k [B, H_kv, S_k, D], v [B, H_kv, S_k, D_v], out [B, H, S_q, D_v];
        "bshd": the head after the row. Any strides with a contiguous last axis. ``lse`` is [B, H, S_q], float32,
        in both.
        """
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise InvalidValue("layout", layout, f"must be one of {', '.join(LAYOUTS)}", "Name the order of the axes")
        order = LAYOUTS[layout]
        arrays = {"q": q, "k": k, "v": v, "out": out} | ({} if lse is None else {"lse": lse})
        infos = dict(zip(arrays, describe_arrays(**arrays), strict=True))

        def extents(name: str, labels: str, known: dict[str, int]) -> tuple[int, ...]:
            axis = labels.split()
            there = " ".join([*(axis[i] for i in order), axis[3]])
            found = axes(name, infos[name], there, known)
            return (*(found[i] for i in order), found[3])

        batch, heads, s_q, d = extents("q", "B H S_q D", {})
        _, kv_heads, s_k, _ = extents("k", "B H_kv S_k D", {"B": batch, "D": d})
        *_, d_v = extents("v", "B H_kv S_k D_v", {"B": batch, "H_kv": kv_heads, "S_k": s_k})
        extents("out", "B H S_q D_v", {"B": batch, "H": heads, "S_q": s_q, "D_v": d_v})
        strides: dict[str, int] = {}
        for name in ("q", "k", "v", "out"):
            found = canonical(infos[name])
            for axis, place in zip(("batch", "head", "row"), order, strict=True):
                strides[f"stride_{name}_{axis}"] = found[place]
        if lse is not None:
            axes("lse", infos["lse"], "B H S_q", {"B": batch, "H": heads, "S_q": s_q})
            strides["stride_lse_batch"], strides["stride_lse_head"], _ = canonical(infos["lse"])
        fields: dict[str, Any] = {**infos, **strides}
        return cls(
            batch=batch, num_heads=heads, kv_heads=kv_heads, S_q=s_q, S_k=s_k, head_dim=d, value_dim=d_v,
            causal=causal, scale=scale, **fields,
        )
