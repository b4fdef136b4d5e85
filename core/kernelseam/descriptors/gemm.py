"""The batched GEMM over strided memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from kernelseam.descriptors.attention_problem import default_scale
from kernelseam.descriptors.gemm_problem import GemmProblem, GemmSpec
from kernelseam.descriptors.validation import (
    MAX_EXTENT,
    extent,
    finite,
    flag,
    integer,
    multiple,
    number,
    row_strides,
    vector_bytes,
)
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.planning import Resolved


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchedGemmStrided:
    """C[b,h] = alpha·op(A[b,h])·op(B[b, h // b_head_group]) + beta·C[b,h] for b < batch, h < num_heads.

    C is M×N and K is summed over. In memory A is M×K (K×M where ``a_transposed``) and B is K×N (N×K where
    ``b_transposed``); columns are contiguous. ``A, B, C`` are arrays, addresses (ints), or None until ``bind``.

    Strides count elements. One left out packs row-major around the others, [batch, heads, rows, columns], where
    B has num_heads // b_head_group heads. 0 repeats an input; an output must have memory of its own for each
    element. ``dtype`` (A and B) comes from the arrays where it is left out, ``dtype_c`` from C's array, else it
    is ``dtype``; products are summed in ``dtype.accumulator``.

    beta = 0 never reads C; alpha = 0 or K = 0 gives beta·C and never reads A and B. ``alpha`` and ``beta`` may be
    any float: a NaN or an infinity spreads as IEEE arithmetic says.

    Raises InvalidValue (naming field, value, rule and remedy) where no such problem exists.
    """

    M: int
    N: int
    K: int
    A: object = field(default=None, repr=False)
    B: object = field(default=None, repr=False)
    C: object = field(default=None, repr=False)
    batch: int = 1
    num_heads: int = 1
    stride_a_batch: int | None = None
    stride_a_head: int | None = None
    stride_a_row: int | None = None
    stride_b_batch: int | None = None
    stride_b_head: int | None = None
    stride_b_row: int | None = None
    stride_c_batch: int | None = None
    stride_c_head: int | None = None
    stride_c_row: int | None = None
    a_transposed: bool = False
    b_transposed: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    b_head_group: int = 1
    dtype: DType | str | None = None
    dtype_c: DType | str | None = None
    dtype_acc: DType | str | None = None
    _problem: GemmProblem = field(init=False, repr=False)
    _arrays: Mapping[str, ArrayInfo] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        infos = describe_all(self.operands())
        dtype, dtype_c, dtype_acc = gemm_dtypes(self.dtype, self.dtype_c, self.dtype_acc, infos, ("A", "B"), "C")
        check_numbers(self)
        object.__setattr__(self, "b_head_group", extent("b_head_group", self.b_head_group, 1))
        multiple("num_heads", self.num_heads, "b_head_group", self.b_head_group)
        shapes = {
            "A": (self.num_heads, *((self.K, self.M) if self.a_transposed else (self.M, self.K))),
            "B": (self.num_heads // self.b_head_group, *((self.N, self.K) if self.b_transposed else (self.K, self.N))),
            "C": (self.num_heads, self.M, self.N),
        }
        strides, vectors = [], []
        for name, (heads, rows, columns) in shapes.items():
            kind = dtype_c if name == "C" else dtype
            shape = (self.batch, heads, rows, columns)
            batch_stride, head, row = row_strides(name.lower(), shape, self._strides(name), kind)
            strides.append((batch_stride, head, row))
            vectors.append(vector_bytes(kind, shape, strides[-1], pointer(name, getattr(self, name), infos)))
        a, b, c = strides
        problem = GemmProblem(
            GemmSpec(dtype, dtype_c, dtype_acc, self.a_transposed, self.b_transposed, "strided", *vectors),
            self.M, self.N, self.K, self.batch, self.num_heads, a, b, c, self.b_head_group, self.alpha, self.beta,
        )
        check_layout(problem.operands, infos, self._dense)
        object.__setattr__(self, "_problem", problem)
        object.__setattr__(self, "_arrays", infos)

    def _strides(self, name: str) -> list[int | None]:
        return [getattr(self, f"stride_{name.lower()}_{axis}") for axis in ("batch", "head", "row")]

    @cached_property
    def _dense(self) -> frozenset[str]:
        """Operands whose strides were all left out."""
        return frozenset(n for n in "ABC" if self._strides(n) == [None] * 3)

    @property
    def device(self) -> Device | None:
        """Where the arrays are; None where there are none."""
        return next((i.device for i in self._arrays.values()), None)

    def problem(self) -> GemmProblem:
        """The hashable part, without pointers."""
        return self._problem

    def operands(self) -> dict[str, object]:
        """A, B and C, as far as they are given."""
        return {n: v for n, v in (("A", self.A), ("B", self.B), ("C", self.C)) if v is not None}

    def over(self, addresses: Mapping[str, int]) -> BatchedGemmStrided:
        """The same over addresses in place of arrays: it keeps no memory alive."""
        spec = self._problem.spec
        given: dict[str, Any] = dict(addresses)
        return replace(self, **given, dtype=spec.dtype, dtype_c=spec.dtype_c)

    def simplified(self) -> tuple[BatchedGemmStrided, str]:
        """Itself: there is no simpler way."""
        return self, ""

    def resolve(self, operands: Mapping[str, object], runtime: Runtime, device: Device) -> Resolved:
        """Addresses of A, B and C. Raises InvalidValue where an array does not fit the problem."""
        return resolve(self._problem.operands, operands, self._arrays, self._dense, device)

    @classmethod
    def for_scores(cls, q: object, k: object, scores: object, *, scale: float | None = None) -> BatchedGemmStrided:
        """scores[b,h] = scale·q[b,h]·k[b, h // (H / H_kv)]ᵀ, with scale 1/√D where it is None.

        ``q`` [B, H, S_q, D], ``k`` [B, H_kv, S_k, D], ``scores`` [B, H, S_q, S_k]: arrays with a contiguous last
        axis and any other strides. ``scores`` may be wider than q and k (float32 for float16).
        """
        a, b, c = describe_arrays(q=q, k=k, scores=scores)
        dtype_of("q", None, {"q": a, "k": b}, ("q", "k"))
        batch, heads, s_q, d = axes("q", a, "B H S_q D", {})
        _, kv_heads, s_k, _ = axes("k", b, "B H_kv S_k D", {"B": batch, "D": d})
        axes("scores", c, "B H S_q S_k", {"B": batch, "H": heads, "S_q": s_q, "S_k": s_k})
        alpha = default_scale(d) if scale is None else finite("scale", scale)
        return cls(
            A=a, B=b, C=c, M=s_q, N=s_k, K=d, b_transposed=True, alpha=alpha, batch=batch, num_heads=heads,
            b_head_group=multiple("H", heads, "H_kv", kv_heads), **strides_of(A=a, B=b, C=c),
        )

    @classmethod
    def for_output(cls, scores: object, v: object, out: object) -> BatchedGemmStrided:
        """out[b,h] = scores[b,h]·v[b, h // (H / H_kv)].

        ``scores`` [B, H, S_q, S_k] (the probabilities), ``v`` [B, H_kv, S_k, D_v], ``out`` [B, H, S_q, D_v]: arrays
        with a contiguous last axis and any other strides.
        """
        a, b, c = describe_arrays(scores=scores, v=v, out=out)
        dtype_of("scores", None, {"scores": a, "v": b}, ("scores", "v"))
        batch, heads, s_q, s_k = axes("scores", a, "B H S_q S_k", {})
        _, kv_heads, _, d_v = axes("v", b, "B H_kv S_k D_v", {"B": batch, "S_k": s_k})
        axes("out", c, "B H S_q D_v", {"B": batch, "H": heads, "S_q": s_q, "D_v": d_v})
        return cls(
            A=a, B=b, C=c, M=s_q, N=d_v, K=s_k, batch=batch, num_heads=heads,
            b_head_group=multiple("H", heads, "H_kv", kv_heads), **strides_of(A=a, B=b, C=c),
        )


def gemm_dtypes(
    dtype: object, dtype_c: object, dtype_acc: object, infos: Mapping[str, ArrayInfo], inputs: tuple[str, str],
    output: str,
) -> tuple[DType, DType, DType]:
    """(dtype, dtype_c, dtype_acc) from what is named and from the arrays."""
    kind = required("dtype", dtype_of("dtype", dtype, infos, inputs), f"{inputs[0]} and {inputs[1]}")
    kind_c = dtype_of("dtype_c", dtype_c, infos, (output,)) or kind
    acc = kind.accumulator if dtype_acc is None else DType.of(dtype_acc, "dtype_acc")
    if acc is not kind.accumulator:
        raise InvalidValue(
            "dtype_acc", acc, f"products of {kind} are summed in {kind.accumulator}", "Leave dtype_acc out"
        )
    return kind, kind_c, acc


def check_numbers(gemm: Any) -> None:
    """Replace the extents, flags and factors of a GEMM by plain ints, bools and floats, or refuse them."""
    put = object.__setattr__
    for name in ("M", "N", "K", "batch", "num_heads"):
        put(gemm, name, extent(name, getattr(gemm, name)))
    for name in ("a_transposed", "b_transposed"):
        put(gemm, name, flag(name, getattr(gemm, name)))
    for name in ("alpha", "beta"):
        put(gemm, name, number(name, getattr(gemm, name)))
    integer("batch·num_heads", gemm.batch * gemm.num_heads, 0, MAX_EXTENT, "Split the batch over several calls")


def strides_of(**infos: ArrayInfo) -> dict[str, Any]:
    """The stride arguments of arrays [batch, heads, rows, columns] named A, B and C."""
    return {
        f"stride_{name.lower()}_{axis}": stride
        for name, info in infos.items()
        for axis, stride in zip(("batch", "head", "row"), canonical(info), strict=False)
    }
