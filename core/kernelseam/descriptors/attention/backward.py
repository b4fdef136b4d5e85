"""The attention's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, ClassVar

from kernelseam.contract import Device, OperandRule, Runtime
from kernelseam.descriptors.attention import contents
from kernelseam.descriptors.attention.arrays import gradient_fields
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention.forward import Attention
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.common.operands import (
    check_layout,
    describe_all,
    left_out,
    pointer,
    without_arrays,
)
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.descriptors.common.strided import StridedDescriptor
from kernelseam.descriptors.common.validation import flag, packed
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

_MODELS = {"dout": "out", "dq": "q", "dk": "k", "dv": "v"}
NAMES = ("dout", "dq", "dk", "dv", "dbias", "dsinks", "dscores")


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionBwd(StridedDescriptor[AttentionBwdProblem]):
    """The gradients of an attention by q, k, v (and bias, sinks), given dout, that by its result:

    dp = dout·vᵀ, dx = p·(dp − Σ dout·out), dv = pᵀ·dout, dk = scale·dxᵀ·q, dq = scale·dx·k, dbias =
    dx; under a softcap dk and dq take dx·(1 − tanh²). dk and dv of grouped heads are summed over
    the group; dbias over what the bias repeats along; dsinks[h] = −Σ e^(sink_h − lse)·Σ dout·out
    over the rows of head h.

    ``forward``: the attention that was computed, with its operands, options, out and lse (both
    required). dout is laid out as out, dq, dk, dv, dbias as q, k, v, bias (with extent 1 where the
    bias repeats), each with strides of its own, in elements, which default to row-major (packed
    rows: heads within rows). ``dbias`` and ``dsinks`` are computed where they are given; address 0
    says that ``bind`` will give them. ``dscores`` [batch, num_heads, S_q, S_k], row-major, float32
    (float64 where q is), receives the gradient by a score_mod's result. All sums are float32
    (float64 where q is). Keys that no query sees, and those beyond kv_lengths, get zeros; packed
    rows of no sequence are not written.

    ``deterministic``: the same bits every time. False allows a faster implementation that is not:
    it accumulates dq by atomics, in a workspace of somewhat more than a float32 for each of its
    elements. Raises InvalidValue where no such problem exists.
    """

    forward: Attention
    dout: object = field(default=None, repr=False)
    dq: object = field(default=None, repr=False)
    dk: object = field(default=None, repr=False)
    dv: object = field(default=None, repr=False)
    dbias: object = field(default=None, repr=False)
    dsinks: object = field(default=None, repr=False)
    dscores: object = field(default=None, repr=False)
    deterministic: bool = True
    stride_dout_batch: int | None = None
    stride_dout_head: int | None = None
    stride_dout_row: int | None = None
    stride_dq_batch: int | None = None
    stride_dq_head: int | None = None
    stride_dq_row: int | None = None
    stride_dk_batch: int | None = None
    stride_dk_head: int | None = None
    stride_dk_row: int | None = None
    stride_dv_batch: int | None = None
    stride_dv_head: int | None = None
    stride_dv_row: int | None = None
    stride_dbias_batch: int | None = None
    stride_dbias_head: int | None = None
    stride_dbias_row: int | None = None
    stride_dbias_column: int | None = None

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(_MODELS, ("batch", "head", "row")),
        "dbias": ("batch", "head", "row", "column"),
        "dsinks": (),
        "dscores": (),
    }

    def __post_init__(self) -> None:
        if not isinstance(self.forward, Attention):
            raise InvalidValue(
                "forward",
                type(self.forward).__name__,
                "must be an Attention",
                "Fill in its descriptor",
            )
        by_functions = self.dscores is not None and self.forward.expression is not None
        p = self.forward.problem_by_functions() if by_functions else self.forward.problem()
        if p.spec.dtype_kv is not None:
            raise InvalidValue(
                "forward",
                f"an attention over {p.spec.dtype_kv} keys and values",
                "gradients are of keys and values of q's dtype",
                "Convert k and v",
            )
        if not p.spec.lse:
            raise InvalidValue(
                "forward",
                "an attention without lse",
                "must have one",
                "Give lse, or return_lse=True",
            )
        if self.dbias is not None and p.spec.bias is None:
            raise InvalidValue("dbias", "given", "the attention has no bias", "Leave it out")
        if self.dbias is not None and self.forward.expression is not None:
            raise InvalidValue(
                "dbias",
                "given",
                "of an attention with a score_mod or a mask_mod there is none",
                "Leave it out, or add the bias in the score_mod",
            )
        if self.dscores is not None and self.forward.expression is None:
            raise InvalidValue("dscores", "given", "the attention has no score_mod", "Leave it out")
        if self.dsinks is not None and not p.spec.sinks:
            raise InvalidValue("dsinks", "given", "the attention has no sinks", "Leave it out")
        self._refuse_strides(p)
        infos = describe_all(self._own())
        for name in ("dbias", "dsinks", "dscores"):
            pointer(name, getattr(self, name), infos)
        rules = {r.name: r for r in p.operands}
        strides, vector = {}, p.spec.vector
        for name, model in _MODELS.items():
            rule = rules.get(model) or rules[f"{model}_ptrs"]
            strides[name] = self._row_strides(name, rule, self._view(p, name))
            assert rule.dtype is not None
            wide = self._vector(name, rule.shape, strides[name], rule.dtype, infos)
            vector = min(vector, wide if wide == 16 else p.spec.dtype.itemsize)
        forward = replace(p, spec=replace(p.spec, vector=vector))
        blank = AttentionBwdProblem(
            AttentionBwdSpec(
                forward.spec,
                self.dbias is not None,
                self.dsinks is not None,
                flag("deterministic", self.deterministic),
                self.dscores is not None,
            ),
            forward,
            strides["dout"],
            strides["dq"],
            strides["dk"],
            strides["dv"],
        )
        problem = (
            blank
            if self.dbias is None
            else replace(blank, dbias_strides=self._bias_strides(blank.dbias_shape))
        )
        check_layout([r for r in problem.operands if r.name in NAMES], infos, self._packed_strides)
        object.__setattr__(self, "_problem", problem)
        object.__setattr__(self, "_arrays", {**self.forward._arrays, **infos})

    def _refuse_strides(self, p: AttentionProblem) -> None:
        """Refuse strides of what is not there."""
        for name, axes in self.AXES.items():
            for axis, value in zip(axes, self._given(name), strict=True):
                packed_rows = axis == "batch" and self._view(p, name) == "packed"
                if value is not None and packed_rows:
                    raise InvalidValue(
                        f"stride_{name}_batch", value, "packed rows have no batch", "Leave it out"
                    )
                if value is not None and name == "dbias" and self.dbias is None:
                    raise InvalidValue(
                        f"stride_dbias_{axis}",
                        value,
                        "describes dbias",
                        "Give dbias too (0: it will be bound)",
                    )

    @staticmethod
    def _view(p: AttentionProblem, name: str) -> str:
        return (
            "" if name == "dbias" else p.spec.q_view if name in ("dout", "dq") else p.spec.kv_view
        )

    def _row_strides(self, name: str, rule: OperandRule, view: str) -> tuple[int, int, int]:
        assert rule.dtype is not None
        batch, head, row = self._valid(name, rule.dtype)
        outer, heads, rows, width = rule.shape if len(rule.shape) == 4 else (1, 1, 1, 1)
        if view == "packed":
            _, r, h, _ = packed((outer, rows, heads, width), (batch, row, head, 1))
            return 0, h, r
        b, h, r, _ = packed((outer, heads, rows, width), (batch, head, row, 1))
        return b, h, r

    def _bias_strides(self, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        strides = packed(shape, self._valid("dbias", DType.float32))
        a, b, c, d = (0 if n == 1 else s for n, s in zip(shape, strides, strict=True))
        return a, b, c, d

    def _axis_strides(self, name: str) -> list[Any]:
        packed_rows = name in _MODELS and self._view(self.forward.problem(), name) == "packed"
        return self._given(name)[packed_rows:]

    @cached_property
    def _packed_strides(self) -> dict[str, bool]:
        own = left_out({n: self._axis_strides(n) for n in NAMES})
        return {**own, **self.forward._packed_strides}

    def _own(self) -> dict[str, object]:
        return {n: v for n in NAMES if (v := getattr(self, n)) is not None}

    def operands(self) -> dict[str, object]:
        """The forward's operands and the gradients, as far as they are given."""
        return {**self.forward.operands(), **self._own()}

    def without_arrays(self) -> AttentionBwd:
        """The same over the addresses of its arrays: it keeps no memory alive."""
        own = {n: x for n, x in self._arrays.items() if n in NAMES}
        return without_arrays(self, own, forward=self.forward.without_arrays())

    def check_device(self, resolved: Resolved, runtime: Runtime, device: Device) -> None:
        """Check lengths and offsets against the extents that they index; synchronises."""
        contents.check(self._problem.forward, resolved, runtime, device)

    @classmethod
    def from_arrays(
        cls,
        q: object,
        k: object,
        v: object,
        out: object,
        lse: object,
        dout: object,
        dq: object,
        dk: object,
        dv: object,
        dbias: object = None,
        dsinks: object = None,
        dscores: object = None,
        *,
        layout: str = "bhsd",
        deterministic: bool = True,
        **options: Any,
    ) -> AttentionBwd:
        """The gradients of arrays as they lie in memory: nothing is copied.

        Axes of q, k, v, out and lse, and ``options``, as in ``Attention.from_arrays``; those of
        dout, dq, dk and dv as of out, q, k and v. ``dbias`` has the bias's extents, 1 where that
        repeats by a stride of 0; ``dsinks`` [H].
        """
        forward = Attention.from_arrays(q, k, v, out, lse, layout=layout, **options)
        given = {"dout": dout, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
        given["dscores"] = dscores
        arrays = {n: x for n, x in given.items() if x is not None or n in _MODELS}
        fields = gradient_fields(arrays, forward.problem(), layout)
        return cls(forward=forward, deterministic=deterministic, **fields)
