"""Generated device code of scores and masks against NumPy's evaluation, element by element and
block by block."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from expression_program import ExpressionProgram
from kernelseam.contract import SourceBundle
from kernelseam.descriptors import Attention, AttentionBwd
from kernelseam.expressions.bounds import bounds
from kernelseam.expressions.derivatives import array_gradients, slope
from kernelseam.expressions.evaluation import evaluate
from kernelseam.expressions.lowering import device_struct
from kernelseam.expressions.scores import MaskMod, ScoreExpression, ScoreMod, score_expression
from kernelseam.kernels import kernel
from kernelseam.oracle import check as oracle
from kernelseam.oracle.formulas import Variant
from kernelseam.plugins import Plugins
from kernelseam_hostcpp.runtime import HostArray

torch = pytest.importorskip("torch", reason="torch is missing: the mods are torch's")
from torch_mods import MODS, B, H  # noqa: E402

SHAPE = (B, H, 32, 48)
SIZE = 16
SLOW = pytest.mark.slow("each mod is compiled: those of every kind of node run in .ci/run")
SLOPES = np.arange(64, dtype=np.float32) / 8
FIRST = ("t5", "neighbourhood", "tree", "sandwich", "soft_mask", "packed_documents", "scalars")


def check(e: ScoreExpression, planted: tuple[str, str] | None = None) -> None:
    arrays = [np.asarray(a.detach()) if isinstance(a, torch.Tensor) else a for a in e.arrays]
    program = ExpressionProgram(e, arrays, planted)
    at: dict[str, Any] = {
        name: np.arange(n).reshape([-1 if i == j else 1 for j in range(4)])
        for i, (name, n) in enumerate(zip(("b", "h", "q_idx", "kv_idx"), SHAPE, strict=True))
    }
    scores = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
    at |= {"score": scores, "q_len": SHAPE[2], "kv_len": SHAPE[3]}
    roots = {"score": e.structure.score, "visible": e.structure.visible}
    roots |= {"slope": slope(e.structure.score)}
    roots |= {f"factor{i}": g.factor for i, g in enumerate(array_gradients(e.structure.score))}
    roots |= {f"{name} by distance": roots[name] for name in ("score", "visible")}
    got = program.elements(scores)
    assert set(got) == set(roots)
    for name, root in roots.items():
        (want,) = evaluate([root], at, e.numbers, arrays)
        if name.startswith("visible"):
            np.testing.assert_array_equal(got[name], np.broadcast_to(want, SHAPE))
        else:
            near = {"rtol": 1e-5, "atol": 1e-5}
            np.testing.assert_allclose(got[name], np.broadcast_to(want, SHAPE), **near)
    for name, count, shape in (("q", SHAPE[2], (-1, 1)), ("kv", SHAPE[3], (1, -1))):
        starts = np.arange(0, count, SIZE)
        at[f"{name}_first"] = starts.reshape(shape)
        at[f"{name}_last"] = (np.minimum(starts + SIZE, count) - 1).reshape(shape)
    low, high = evaluate(bounds(e.structure.visible), at, e.numbers, arrays)
    some, every = program.blocks(SHAPE, SIZE)
    np.testing.assert_array_equal(some, np.broadcast_to(high, some.shape))
    np.testing.assert_array_equal(every, np.broadcast_to(low, every.shape))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FIRST else SLOW) for n in MODS])
def test_device_code_of_mods(name: str) -> None:
    check(score_expression(*MODS[name](SHAPE[2], SHAPE[3])))


def test_device_code_of_operations() -> None:
    """Those that no mod has: integers divided by negative ones and by 0, shifts, large ones, floats
    divided by what goes into them almost a whole number of times, indices made of scores."""
    zero, n = 0, np.arange(-4, 60, dtype=np.int64) * 2**33
    half = np.full(128, np.nan, np.float16)[64:]  # what lies before it is not read
    half[:] = np.linspace(-2, 2, 64)

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = (q - kv) // -3 + (q - kv) % -5 + (q - kv) // zero + (q * kv ^ 5) + (kv << 2)
        y = np.exp2(half[q]) + np.minimum(s, half[kv]) + np.floor(s) + np.log1p(s * s)
        z = (1e30 * half[q]).astype(int) + np.sign(s) + abs(s) ** 1.5 + (s % 0.7)
        f = (kv - 20) // 0.1 + (kv - 20.0) % 0.1 + (s // 1.0) + (q - 9.0) % math.inf
        f = np.minimum(f, 1e3) + (q - 9.5) // math.inf + half[(4 * s).astype(int)]
        overflown = half[(q * 46341 * (kv // 47 * 46341)) % 64] + half[(7 * s).astype(np.int64)]
        return x + y + z / (1 + z * z) + 1 / np.sqrt(1 + s * s) + f + overflown * 0

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = (n[q - kv] < 0) & (half[abs(q - kv)] < 0.5)  # of a block's distances
        return (n[kv] // 2**33 < q) | ~(n[q] > n[kv]) & (half[kv].astype(bool)) | near

    check(score_expression(score, mask))


ALL_OF_DISTANCE: dict[str, tuple[ScoreMod | None, MaskMod | None, tuple[object, ...]]] = {
    "a load": (lambda s, b, h, q, kv: s + SLOPES[q - kv], None, (True, False, 3, 1)),
    "a bit": (None, lambda b, h, q, kv: (q >= kv) & ((kv - q) % 4 == 0), (True, True, 5, 2)),
    "two numbers": (
        lambda s, b, h, q, kv: s - SLOPES[h] * abs(q - kv),
        lambda b, h, q, kv: (q - kv) % 3 < q,
        (True, False, 7, 2),
    ),
    "a product": (lambda s, b, h, q, kv: s * (q - kv), None, (False, False, 3, 3)),
    "three numbers": (
        lambda s, b, h, q, kv: (s * abs(q - kv) + (q - kv) // 3) * s + (kv - q) % 5,
        None,
        (False, False, 12, 12),
    ),
}


@pytest.mark.parametrize("name", ALL_OF_DISTANCE)
def test_what_a_distance_says_is_computed_apart(name: str) -> None:
    """Up to two numbers, and not what an element has as fast."""
    score, mask, want = ALL_OF_DISTANCE[name]
    e = score_expression(score, mask)
    check(e)
    text = device_struct(e.structure)
    said = [f"{n} = true" in text for n in ("HAS_DIAGONAL", "DIAGONAL_IS_BIT")]
    assert (*said, *map(int, re.findall(r"OPERATIONS\w* = (\d+)", text))) == want


FAULTS = {
    "a hoisted value of the next row": (
        "array1.base[inside_of(q_idx,",
        "array1.base[inside_of(q_idx + 1,",
    ),
    "the wrong array's element of a tile": ("array0.base[inside_of(h,", "array0.base[inside_of(b,"),
    "a block wrongly empty": (
        "rows.q_first - columns.kv_last",
        "rows.q_last - columns.kv_last",
    ),
    "a number baked in": ("x2 < number0;\n    const bool x4", "x2 < 17;\n    const bool x4"),
    "what belongs to the next distance": ("= -distance;", "= -distance + 1;"),
    "the sign of an array's factor": ("return x1;", "return -x1;"),
}


def faulty(w: int) -> ScoreExpression:
    slopes, doc = np.array([0.5, 0.25, 2.0], np.float32), np.repeat(np.arange(4), 20)
    return score_expression(
        lambda s, b, h, q, kv: s + slopes[h] * (kv - q),
        lambda b, h, q, kv: (q >= kv) & (q - kv < w) & (doc[q] == doc[kv]),
    )


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name: str) -> None:
    """In the generated text. A number that is a constant is right for the function that was
    traced, and wrong for another of its code."""
    check(faulty(9))
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(faulty(9), FAULTS[name])


def test_gradients_by_scores(hostcpp: Plugins) -> None:
    """What captured arrays' gradients begin with: NumPy's, on the shared kernel too."""
    shape = (2, 2, 40, 64)
    q, k, v, dout = (np.random.default_rng(n).standard_normal(shape) for n in range(4))
    inputs = [x.astype(np.float32) for x in (q, k, v, dout)]
    t = np.array([0.5, 1.5], np.float32)

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return np.tanh(s) * t[h] + 0.1 * (q - kv)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv < 9

    functions: dict[str, Any] = {"score_mod": score, "mask_mod": mask}
    out, lse = ks.attention(*inputs[:3], return_lse=True, **functions)
    want = ks.attention_bwd(inputs[3], *inputs[:3], out, lse, score_gradient=True, **functions)
    e = replace(score_expression(score, mask), arrays=(HostArray(t),))
    found = [np.empty(x.shape, x.dtype) for x in (*want[:3], want.dscores)]
    to = [HostArray(x) for x in found]
    given = [HostArray(x) for x in (*inputs[:3], out, lse, inputs[3])]
    ks.plan(AttentionBwd.from_arrays(*given, *to[:3], dscores=to[3], expression=e)).bind()()
    for x, y in zip(found, (*want[:3], want.dscores), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    assert np.abs(want.dscores).max() > 0.1


def test_slopes_and_prefixes_lie_where_functions_captured_them(hostcpp: Plugins) -> None:
    """Forward and gradients by options; neither array lies as the options' own would."""
    shape = (2, 3, 40, 64)
    q, k, v, dout = (np.random.default_rng(n).standard_normal(shape) for n in range(4))
    inputs = [x.astype(np.float32) for x in (q, k, v, dout)]
    slopes = np.array([[0.5, 1.5], [0.1, 0.3], [0.0, 1.0]], np.float32)
    lengths = np.array([7, 30, 1], np.int32)

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s - slopes[h, b] * abs(q - kv)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) | (kv < lengths[b])

    e = replace(score_expression(score, mask), arrays=(HostArray(slopes), HostArray(lengths)))
    out, lse = np.zeros(shape, np.float32), np.zeros(shape[:3], np.float32)
    given = [HostArray(x) for x in (*inputs[:3], out, lse)]
    forward = Attention.from_arrays(*given, expression=e)
    assert forward.problem().spec.expression is None
    ks.plan(forward).bind()()
    variant = Variant(score_mod=score, mask_mod=mask)
    assert oracle.attention(*inputs[:3], out, causal=False, variant=variant)
    found = [HostArray(np.empty(shape, np.float32)) for _ in range(3)]
    backward = AttentionBwd.from_arrays(*given, HostArray(inputs[3]), *found, expression=e)
    ks.plan(backward).bind()()
    functions: dict[str, Any] = {"score_mod": score, "mask_mod": mask}
    want = ks.attention_bwd(inputs[3], *inputs[:3], out, lse, score_gradient=True, **functions)
    for x, y in zip(found, want[:3], strict=True):
        np.testing.assert_allclose(x.host, y, rtol=1e-4, atol=1e-5)


def test_another_function_of_known_code_compiles_nothing(
    hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a training loop makes one a step: other arrays, numbers and lengths are arguments."""
    binaries: set[str] = set()
    whole = kernel.compiled

    def counted(toolchain: Any, source: SourceBundle, arch: str) -> Any:
        binaries.add(repr((source.files, source.defines)))
        return whole(toolchain, source, arch)

    monkeypatch.setattr(kernel, "compiled", counted)

    def attend(step: int, length: int) -> None:
        table, w = np.full((2, 64), step, np.float32), 20 + step

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return s + table[h, kv] * abs(q - kv)

        q, k, v = (np.random.default_rng(n).standard_normal((1, 2, length, 64)) for n in range(3))
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
        arrays = [HostArray(x) for x in (q, k, v, table)]
        e = replace(score_expression(score, lambda b, h, q, kv: q - kv < w), arrays=(arrays[3],))
        out = np.zeros_like(q)
        ks.plan(Attention.from_arrays(*arrays[:3], HostArray(out), expression=e)).bind()()
        variant = Variant(score_mod=score, mask_mod=lambda b, h, q, kv: q - kv < w)
        assert oracle.attention(q, k, v, out, causal=False, variant=variant)

    attend(0, 50)
    assert len(binaries) == 1
    for step in range(1, 4):
        attend(step, 50 + step)
    assert len(binaries) == 1


def test_normal_distribution() -> None:
    """Within 5·2^-24 everywhere, and in size where it is small; 0 and 1 far away."""
    ends = [-np.inf, -1e30, -15, 15, 1e30, np.inf]
    scores = np.linspace(-8, 8, B * H * 32 * 48).astype(np.float32)
    scores[: len(ends)] = ends
    got = ExpressionProgram(
        score_expression(lambda s, *_: torch.special.ndtr(s), None), []
    ).elements(scores.reshape(SHAPE))["score"]
    want = torch.special.ndtr(torch.from_numpy(scores).double()).numpy()
    error = np.abs(got.ravel() - want)
    assert error.max() < 5 * 2**-24
    left = (scores > -6) & (scores < 0)
    assert (error[left] / want[left]).max() < 5e-4
    np.testing.assert_array_equal(got.ravel()[[0, 1, 4, 5]], [0, 0, 1, 1])
