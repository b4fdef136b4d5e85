"""The batched GEMM over strided memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar

from kernelseam.contract import ArrayInfo, OperandRule
from kernelseam.descriptors.common.captured import bare, captured_operands, epilogue_fields
from kernelseam.descriptors.common.extents import default_scale
from kernelseam.descriptors.common.operands import (
    axes,
    canonical,
    describe_all,
    describe_arrays,
    dtype_of,
    pointer,
)
from kernelseam.descriptors.common.precision import precision_of
from kernelseam.descriptors.common.strided import StridedDescriptor
from kernelseam.descriptors.common.validation import AXES as ROWS
from kernelseam.descriptors.common.validation import (
    WIDE,
    extent,
    finite,
    multiple,
    packed,
    row_strides,
    shared_axis,
    three,
    two,
    vector_bytes,
)
from kernelseam.descriptors.common.wording import Wording
from kernelseam.descriptors.gemm.fields import (
    ADDED,
    SCALES,
    BatchFields,
    OperandFields,
    added_dtype,
    are_scaled,
    check_batch,
    gemm_dtypes,
    narrow_halves,
    scale_block_of,
    traced_epilogue_of,
)
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.epilogues import Epilogue
from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import EpilogueExpression, epilogue_text
from kernelseam.expressions.reductions import reduction, reduction_operands
from kernelseam.frozen import dataclass


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchedGemmStrided(OperandFields, BatchFields, StridedDescriptor[GemmProblem]):
    """C[b', h'] = alpha·Σ op(A[b,h])·op(B[b, h // b_head_group]) + beta·C[b', h'] + bias[b', h'] +
    residual[b', h'], for b < batch and h < num_heads, the sum over those with b // c_batch_group =
    b' and h // c_head_group = h'.

    Every C is M×N and K is summed over. In memory A is M×K (K×M where ``a_transposed``) and B is
    K×N (N×K where ``b_transposed``); columns are contiguous. With a group larger than 1, that many
    consecutive batches or heads of products are summed into one C. ``bias``, N long, is added to
    every row, ``residual`` [M, N] to the whole; neither is scaled. Operands are arrays, addresses
    (ints), or None until ``bind``; a bias or a residual that ``bind`` will give is announced by
    address 0. The residual may be C itself, where beta is 0.

    Strides count elements. One left out packs row-major around the others, [batch, heads, rows,
    columns], where B has num_heads // b_head_group heads, and C, bias (without rows) and residual
    have batch // c_batch_group batches and num_heads // c_head_group heads; an array then must have
    those axes, which may be merged, and axes of extent 1 do not count. Stride 0 broadcasts an
    input; each element of an output must have memory of its own. ``dtype`` (A and B) comes from the
    arrays where it is left out, ``dtype_c`` from C's array, else it is ``dtype``, ``dtype_bias``
    and ``dtype_residual`` from theirs, else they are ``dtype_c``. All sums are accumulated in
    ``dtype.accumulator``, products by b, then by h, and rounded once.

    beta = 0 never reads C; alpha = 0 or K = 0 never reads A and B. ``alpha`` and ``beta`` may be
    any float: NaN and infinity propagate as in IEEE arithmetic.

    A and B may be of 8 bits, both float8_e4m3fn (float8_e4m3fnuz on gfx942): ``dtype_c`` is then
    float32 where neither it nor C's array is given. ``a_scales`` [batch, num_heads, M] and
    ``b_scales`` [batch, num_heads // b_head_group, N], float32, both or none (1): a number x of
    row m of op(A) stands for a_scales[m]·x, one of column n of op(B) for b_scales[n]·x. Strides of
    0 repeat them: all three for one scale of a tensor, the last for one of a matrix. Not where
    products are summed into one C. ``scale_block`` = (m, n, k): scales are of blocks of m rows of
    op(A) or n columns of op(B) by k values of k, a_scales [batch, num_heads, ⌈M/m⌉, ⌈K/k⌉] and
    b_scales [batch, num_heads // b_head_group, ⌈N/n⌉, ⌈K/k⌉]; DeepSeek-V3's are (1, 128, 128).

    ``epilogue`` (``kernelseam.epilogues``): a function (acc, m, n, batch), or a name, applied to
    each element of that sum, in float32, before it is rounded; batch is C's index, row-major over
    batches and heads. A gated one (``gated``), of pairs of columns, makes C half as wide, M×N/2,
    and takes no beta and no residual. ``preactivation`` [M, N] of C's dtype: a second result, the
    epilogue's input. Sums and maxima in it (``row_sums``, ``column_sums``, ``amax``) are of
    ``dtype_acc``, before the rounding to ``dtype_c``; their arrays are overwritten, and have the
    strides that they come with.

    ``precision`` says how float32 is multiplied. None or "ieee": as float32. "tf32": A and B are
    rounded to TF32, 10 bits of mantissa, to nearest (vendors' libraries may truncate), and their
    products are summed in float32. "tf32x3": A and B are split into two such parts, three of whose
    four products are summed, within twice float32's bound; NumPy computes it in float32.
    Implementations without such products refuse.

    Raises InvalidValue (naming field, value, rule and remedy) where no such problem exists.
    """

    bias: object = field(default=None, repr=False)
    residual: object = field(default=None, repr=False)
    preactivation: object = field(default=None, repr=False)
    stride_a_batch: int | None = None
    stride_a_head: int | None = None
    stride_b_batch: int | None = None
    stride_b_head: int | None = None
    stride_c_batch: int | None = None
    stride_c_head: int | None = None
    stride_bias_batch: int | None = None
    stride_bias_head: int | None = None
    stride_residual_batch: int | None = None
    stride_residual_head: int | None = None
    stride_preactivation_batch: int | None = None
    stride_preactivation_head: int | None = None
    stride_preactivation_row: int | None = None
    stride_a_scales_batch: int | None = None
    stride_a_scales_head: int | None = None
    stride_b_scales_batch: int | None = None
    stride_b_scales_head: int | None = None
    b_head_group: int = 1
    epilogue: EpilogueExpression | Epilogue | None = None

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("A", "B", "C"), ROWS),
        "bias": ROWS[:2],
        "residual": ROWS,
        "a_scales": (*ROWS, "k"),
        "b_scales": ("batch", "head", "column", "k"),
        "preactivation": ROWS,
    }

    def __post_init__(self) -> None:
        expression = traced_epilogue_of(self, "residual", "preactivation")
        infos = describe_all(self.operands())
        dtype, dtype_c, dtype_acc = gemm_dtypes(
            self.dtype, self.dtype_c, self.dtype_acc, infos, ("A", "B"), "C", True
        )
        check_batch(self)
        object.__setattr__(self, "b_head_group", extent("b_head_group", self.b_head_group, 1))
        multiple("num_heads", self.num_heads, "b_head_group", self.b_head_group)
        for name in ADDED:
            self._refuse_idle(name, f"dtype_{name}")
        bias, residual = (
            added_dtype(self, name, name, infos, dtype_c, dtype_acc) for name in ADDED
        )
        for name in SCALES:
            self._refuse_idle(name)
        scaled = are_scaled(self, dtype, SCALES, self.c_batch_group * self.c_head_group > 1)
        blocks = scale_block_of(self.scale_block, scaled)
        kinds = {"A": dtype, "B": dtype, "C": dtype_c, "bias": bias, "residual": residual}
        kinds["preactivation"] = None if self.preactivation is None else dtype_c
        pairs = expression is not None and bool(expression.structure.pairs)
        results = (self.batch // self.c_batch_group, self.num_heads // self.c_head_group)
        shapes = {
            "A": (
                self.batch,
                self.num_heads,
                *((self.K, self.M) if self.a_transposed else (self.M, self.K)),
            ),
            "B": (
                self.batch,
                self.num_heads // self.b_head_group,
                *((self.N, self.K) if self.b_transposed else (self.K, self.N)),
            ),
            "C": (*results, self.M, self.N // 2 if pairs else self.N),
            "bias": (*results, self.N),
            "residual": (*results, self.M, self.N),
            "preactivation": (*results, self.M, self.N),
        }
        strides: dict[str, tuple[int, ...]] = {}
        vectors: dict[str, int] = {}
        for name, shape in shapes.items():
            if (kind := kinds[name]) is not None:
                strides[name] = row_strides(name.lower(), shape, self._given(name), kind)
                vectors[name] = vector_bytes(
                    kind, shape, strides[name], pointer(name, getattr(self, name), infos)
                )
        for name in SCALES:
            pointer(name, getattr(self, name), infos)
            if blocks is None and (step := getattr(self, f"stride_{name}_k")) is not None:
                raise InvalidValue(
                    f"stride_{name}_k", step, "describes blocks of k", "Give scale_block too"
                )
        if pairs:
            narrow_halves(vectors, self.N, self.b_transposed, dtype, dtype_c)
        counts = {"m": self.M, "n": shapes["C"][-1], "batch": math.prod(results)}
        problem = GemmProblem(
            GemmSpec(
                dtype,
                dtype_c,
                dtype_acc,
                self.a_transposed,
                self.b_transposed,
                "strided",
                vectors["A"],
                vectors["B"],
                vectors["C"],
                bias,
                residual,
                vectors.get("residual", WIDE),
                self.c_batch_group * self.c_head_group > 1,
                precision=precision_of(self.precision, dtype, "A and B"),
                scales=scaled,
                scale_block=blocks,
                epilogue=None if expression is None else epilogue_text(expression.structure),
                preactivation=self.preactivation is not None,
                vector_p=vectors.get("preactivation", WIDE),
            ),
            self.M,
            self.N,
            self.K,
            self.batch,
            self.num_heads,
            three(strides["A"]),
            three(strides["B"]),
            three(strides["C"]),
            self.b_head_group,
            self.alpha,
            self.beta,
            self.c_batch_group,
            self.c_head_group,
            two(strides.get("bias", (0, 0))),
            three(strides.get("residual", (0, 0, 0))),
            **epilogue_fields(expression, infos, counts),
            preactivation_strides=three(strides.get("preactivation", (0, 0, 0))),
        )
        if scaled:
            problem = self._with_scale_strides(problem)
        self._keep(with_reductions(problem, infos), infos)

    def _with_scale_strides(self, problem: GemmProblem) -> GemmProblem:
        walks = []
        for name, extents in zip(SCALES, problem.scale_extents, strict=True):
            known = self._valid(name, DType.float32)
            walks.append((*packed(extents, known[: len(extents)]), 0))
        a, b = walks
        return replace(
            problem,
            a_scale_strides=three(a[:3]),
            b_scale_strides=three(b[:3]),
            scale_k_strides=(a[3], b[3]),
        )

    def _axis_strides(self, name: str) -> list[int | None]:
        unblocked = name in SCALES and self.scale_block is None
        return self._given(name)[: 3 if unblocked else None]

    def operands(self) -> dict[str, object]:
        """A, B, C, bias, residual, scales, preactivation, what the epilogue captured and what it
        writes sums and maxima to, as far as they are given."""
        own = super().operands()
        return own | captured_operands(self.epilogue) | reduction_operands(self.epilogue)

    def _found(self) -> dict[str, object]:
        s, arrays = self._problem.spec, self._arrays
        kinds = {"dtype": s.dtype, "dtype_c": s.dtype_c, "dtype_bias": s.bias}
        epilogue = None if s.epilogue is None else bare(self.epilogue, arrays, function=None)
        return {**kinds, "dtype_residual": s.residual, "epilogue": epilogue}

    @classmethod
    def for_scores(
        cls, q: object, k: object, scores: object, *, scale: float | None = None
    ) -> BatchedGemmStrided:
        """scores[b,h] = scale·q[b,h]·k[b, h // (H / H_kv)]ᵀ, with scale 1/√D where it is None.

        ``q`` [B, H, S_q, D], ``k`` [B, H_kv, S_k, D], ``scores`` [B, H, S_q, S_k]: arrays with a
        contiguous last axis and any other strides. ``scores`` may be wider than q and k (float32
        for float16).
        """
        a, b, c = describe_arrays(q=q, k=k, scores=scores)
        dtype_of("q", None, {"q": a, "k": b}, ("q", "k"))
        batch, heads, s_q, d = axes("q", a, "B H S_q D", {})
        _, kv_heads, s_k, _ = axes("k", b, "B H_kv S_k D", {"B": batch, "D": d})
        axes("scores", c, "B H S_q S_k", {"B": batch, "H": heads, "S_q": s_q, "S_k": s_k})
        alpha = default_scale(d) if scale is None else finite("scale", scale)
        return cls._of(
            {"A": "q", "B": "k", "C": "scores"},
            (a, b, c),
            M=s_q,
            N=s_k,
            K=d,
            b_transposed=True,
            alpha=alpha,
            batch=batch,
            num_heads=heads,
            b_head_group=group_of("k", b, heads, kv_heads),
        )

    @classmethod
    def for_output(cls, scores: object, v: object, out: object) -> BatchedGemmStrided:
        """out[b,h] = scores[b,h]·v[b, h // (H / H_kv)].

        ``scores`` [B, H, S_q, S_k] (the probabilities), ``v`` [B, H_kv, S_k, D_v], ``out`` [B, H,
        S_q, D_v]: arrays with a contiguous last axis and any other strides.
        """
        a, b, c = describe_arrays(scores=scores, v=v, out=out)
        dtype_of("scores", None, {"scores": a, "v": b}, ("scores", "v"))
        batch, heads, s_q, s_k = axes("scores", a, "B H S_q S_k", {})
        _, kv_heads, _, d_v = axes("v", b, "B H_kv S_k D_v", {"B": batch, "S_k": s_k})
        axes("out", c, "B H S_q D_v", {"B": batch, "H": heads, "S_q": s_q, "D_v": d_v})
        return cls._of(
            {"A": "scores", "B": "v", "C": "out"},
            (a, b, c),
            M=s_q,
            N=d_v,
            K=s_k,
            batch=batch,
            num_heads=heads,
            b_head_group=group_of("v", b, heads, kv_heads),
        )

    @classmethod
    def _of(
        cls, names: Mapping[str, str], infos: Sequence[ArrayInfo], **fields: Any
    ) -> BatchedGemmStrided:
        """The product of arrays, refused under the names that the caller has for A, B and C."""
        arrays: dict[str, Any] = dict(zip("ABC", infos, strict=True))
        try:
            return cls(**arrays, **fields, **strides_of(**arrays))
        except InvalidValue as e:
            raise Wording(names).reworded(e) from None


def group_of(name: str, info: ArrayInfo, heads: int, fewer: int) -> int:
    """How many of ``heads`` meet each of the ``fewer`` of an array."""
    if (fewer == 0 and heads) or (fewer and heads % fewer):
        raise InvalidValue(
            name,
            f"an array of shape {list(info.shape)}",
            f"{heads} heads must be a multiple of its {fewer}",
            "Check the order of the axes of all arrays",
        )
    return max(heads // fewer, 1) if fewer else 1


def strides_of(**infos: ArrayInfo) -> dict[str, Any]:
    """The stride arguments of arrays [batch, heads, rows, columns] named A, B and C."""
    return {
        f"stride_{name.lower()}_{axis}": stride
        for name, info in infos.items()
        for axis, stride in zip(("batch", "head", "row"), canonical(info), strict=False)
    }


def with_reductions(problem: GemmProblem, infos: Mapping[str, ArrayInfo]) -> GemmProblem:
    """The problem with the strides of these arrays. Raises InvalidValue for one of another shape or
    dtype than what is written to it."""
    strides = []
    for i, (one, shape) in enumerate(
        zip(problem.spec.reductions, problem.reduction_shapes, strict=True)
    ):
        info, acc = infos[reduction(i)], problem.spec.dtype_acc
        if info.shape != shape:
            raise InvalidValue(
                "epilogue",
                f"{one.operation} into an array of shape {list(info.shape)}",
                f"must be [{one.axes}], {list(shape)}",
                "Give an array of that shape",
            )
        if info.dtype is not acc:
            raise InvalidValue(
                "epilogue",
                f"{one.operation} into an array of {info.dtype}",
                f"must be {acc}, in which it is computed",
                f"Give an array of {acc}, and convert it",
            )
        rule = OperandRule(reduction(i), acc, shape, info.strides, acc.itemsize, True)
        if rule.span and shared_axis(rule) is not None:
            raise InvalidValue(
                "epilogue",
                f"{one.operation} into an array of strides {list(info.strides)}",
                "must have memory of its own for each element",
                "Give an array that is not broadcast and does not overlap itself",
            )
        strides.append(info.strides)
    return replace(problem, reduction_strides=tuple(strides)) if strides else problem
