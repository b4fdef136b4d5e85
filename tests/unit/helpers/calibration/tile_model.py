"""A model of a tile kernel in NumPy, with a GPU's rounding, and faults that can be injected into
it.

It calibrates the constants in ``tolerances`` and shows that every kind of fault is detected by some
case: only the calibration and the tests use it, no plugin registers it. It implements the contract
on host memory, so that addressing faults can be injected too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from kernelseam.contract import Cost, Device, LaunchRecord, PlanParts, host_array
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.oracle.formulas import Array

from calibration.tile_model_gemm import GEMM_FAULTS as GEMM_FAULTS
from calibration.tile_model_gemm import compute
from calibration.tile_model_gemm import gemm as gemm

BLOCK = 64
"""Keys per tile."""
LOG2_E = float(np.log2(np.e))
Single = npt.NDArray[np.float32]

ATTENTION_FAULTS = {
    "dropped-last-key": "the last key is left out",
    "causal-off-by-one": "a query sees one key too many",
    "causal-one-short": "a query does not see its own key",
    "causal-top-left": "the mask is aligned at the top left",
    "wrong-kv-head": "query head h takes KV head h mod H_kv",
    "missed-rescale": "the output is not rescaled when the maximum grows",
    "unmasked-tail": "zero keys that fill the last tile are counted",
    "hidden-times-zero": "hidden values are multiplied with a weight of 0",
    "no-maximum": "scores are exponentiated without subtracting their maximum",
    "empty-row-divides": "a row without weight is divided by 0",
    "half-scores": "scores are rounded to the inputs' dtype",
    "default-scale": "the scale given is ignored",
    "lse-base-2": "the LSE is a logarithm to base 2",
    "writes-past-end": "one more row is written",
}


@dataclass(frozen=True, eq=False)
class Changes:
    """Modifications of one head's scores: a softcap, then slopes and a bias, and a sink."""

    cap: float | None
    slopes: Single
    """slope·|d|, [S_q, S_k]."""
    bias: Single
    sink: float


def attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    scale: float,
    *,
    fault: str = "",
    exp2: Callable[[Single], Single] = np.exp2,
    changes: Changes | None = None,
) -> tuple[Array, Single]:
    """One head, q [S_q,D], k [S_k,D], v [S_k,D_v] → out [S_q,D_v] in q's dtype, LSE [S_q] in
    float32.

    Online softmax over tiles of keys: scores, state and sums in float32, probabilities rounded to
    the dtype of V.
    """
    (S_q, D), S_k = q.shape, k.shape[0]
    shift = 0 if fault == "causal-top-left" else S_k - S_q
    shift += {"causal-off-by-one": 1, "causal-one-short": -1}.get(fault, 0)
    factor = np.float32((D**-0.5 if fault == "default-scale" else scale) * np.log2(np.e))
    end = S_k - (fault == "dropped-last-key")
    Q, K, V = (np.asarray(x, np.float32) for x in (q, k, v))
    out, total = np.zeros((S_q, v.shape[1]), np.float32), np.zeros(S_q, np.float32)
    top = np.full(S_q, -np.inf if changes is None else changes.sink * LOG2_E, np.float32)
    if changes is not None and changes.sink > -np.inf:
        total += 1
    i = np.arange(S_q)[:, None]
    for first in range(0, end, BLOCK):
        last = min(first + BLOCK, end)
        tile_k, tile_v = K[first:last], V[first:last]
        if fault == "unmasked-tail":
            fill = ((0, first + BLOCK - last), (0, 0))
            tile_k, tile_v = np.pad(tile_k, fill), np.pad(tile_v, fill)
        s = (Q @ tile_k.T) * (factor if changes is None else np.float32(1))
        if changes is not None:
            s = _changed(s, changes, first, factor)
        if fault == "half-scores":
            s = s.astype(q.dtype).astype(np.float32)
        visible = (
            (i + shift >= np.arange(first, first + len(tile_k)))
            if causal
            else np.ones(s.shape, bool)
        )
        s = np.where(visible, s, np.float32(-np.inf))
        now = np.maximum(top, s.max(axis=1))
        base = np.where(np.isneginf(now), 0, 0 if fault == "no-maximum" else now).astype(np.float32)
        p, fade = exp2(s - base[:, None]), np.exp2(top - base)
        if fault == "no-maximum":
            fade = np.ones_like(fade)
        total = total * fade + p.sum(axis=1)
        p = p.astype(q.dtype).astype(np.float32)
        if fault != "missed-rescale":
            out *= fade[:, None]
        out += weigh(p, tile_v, visible, fault)
        top = now
    nothing = (total == 0) & (fault != "empty-row-divides")
    out = np.where(nothing[:, None], 0, out / np.where(nothing, 1, total)[:, None])
    base = np.where(np.isneginf(top) | (fault == "no-maximum"), 0, top)
    lse = (base + np.log2(total)) * (1 if fault == "lse-base-2" else np.log(2))
    return out.astype(q.dtype), lse.astype(np.float32)


def _changed(s: Single, changes: Changes, first: int, factor: np.float32) -> Single:
    """Scores in base 2 of a tile's products, step by step as a kernel makes them."""
    at = slice(first, first + s.shape[1])
    if changes.cap is None:
        s = s * factor
    else:
        s = np.float32(changes.cap * LOG2_E) * np.tanh(
            s * np.float32(factor / LOG2_E / changes.cap)
        )
    s = s - changes.slopes[:, at] * np.float32(LOG2_E)
    return s + changes.bias[:, at] * np.float32(LOG2_E)


def weigh(p: Single, v: Single, visible: npt.NDArray[np.bool_], fault: str = "") -> Single:
    """p·v, where masked values influence no row even if they are not finite."""
    if np.isfinite(v).all() or fault == "hidden-times-zero":
        return p @ v
    return np.stack([p[i, seen] @ v[seen] for i, seen in enumerate(visible)])


@dataclass(frozen=True)
class TileModel:
    """contract.Implementation over host memory."""

    operation: str
    fault: str = ""
    backend: str = "numpy"
    head: Callable[..., tuple[Array, Single]] = attention
    """How a head of an attention is computed."""

    @property
    def name(self) -> str:
        return f"model-{self.fault or 'right'}"

    def supports(self, problem: GemmProblem | AttentionProblem, device: Device) -> str | None:
        if isinstance(problem, GemmProblem) and problem.spec.view != "strided":
            return "takes strided memory only"
        if isinstance(problem, AttentionProblem) and (unknown := problem.spec.options - {"causal"}):
            return f"does not know {', '.join(sorted(unknown))}"
        return None

    def cost(self, problem: object, device: Device) -> Cost:
        return Cost(0, 0, 1e3)

    def build(self, problem: GemmProblem | AttentionProblem, device: Device) -> PlanParts:
        record = LaunchRecord(self.name, (1, 1, 1), (1, 1, 1), 0, device.arch)
        return PlanParts((_Step(problem, self.fault, self.head, record),))


@dataclass(frozen=True)
class _Step:
    problem: GemmProblem | AttentionProblem
    fault: str
    head: Callable[..., tuple[Array, Single]]
    record: LaunchRecord = field(compare=False)

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        def launch(stream: int) -> None:
            with np.errstate(all="ignore"):
                if isinstance(self.problem, GemmProblem):
                    compute(self.problem, pointers, self.fault)
                else:
                    _attention(self.problem, pointers, self.fault, self.head)

        return launch


def _attention(
    p: AttentionProblem,
    at: Mapping[str, int],
    fault: str,
    head: Callable[..., tuple[Array, Single]],
) -> None:
    x = {
        r.name: host_array(at.get(r.name, 0), r.shape, r.strides, r.dtype or p.spec.dtype)
        for r in p.operands
    }
    for b, h in np.ndindex(p.batch, p.num_heads):
        g = h % p.kv_heads if fault == "wrong-kv-head" else h // p.head_group
        out, lse = head(
            x["q"][b, h], x["k"][b, g], x["v"][b, g], p.spec.causal, p.scale, fault=fault
        )
        x["out"][b, h] = out
        if p.spec.lse:
            x["lse"][b, h] = lse
        if fault == "writes-past-end" and p.S_q:
            past = b * p.out_strides[0] + h * p.out_strides[1] + p.S_q * p.out_strides[2]
            host_array(
                at["out"] + past * p.spec.dtype.itemsize, (p.spec.value_dim,), (1,), p.spec.dtype
            )[...] = 0
