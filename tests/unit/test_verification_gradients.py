"""``bind(check=True)`` of an attention's gradients and of merges: right ones pass, each that is
wrong is named; what nothing can be said of is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checked_cases import Spoiled, described, off
from kernelseam import Attention, AttentionBwd, AttentionPointers, BatchedGemmStrided, plan
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem
from kernelseam.descriptors.attention.merge_problem import MergeProblem, MergeSpec
from kernelseam.descriptors.gemm.problem import GemmProblem
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue, WrongResult
from kernelseam.oracle import check, formulas, verification_attention
from kernelseam.oracle.gradients import attention_bwd
from kernelseam.oracle.sampled_gradients import Forward, of_bias, of_keys, of_queries, of_sinks
from kernelseam.oracle.verification import VERIFIERS, verifier_of
from kernelseam.parity.matrix import named
from kernelseam.samples.operations import operands

Discovered = Callable[..., Any]
RNG = np.random.default_rng(0)
BACKWARD = "attention-bwd-"


def zeros_forgotten(x: Any) -> None:
    """What no entry reaches holds something else."""
    x[1, :, 50:] = 0.5


WRONG: dict[str, tuple[str, str, Callable[[Any], None], str]] = {
    "dq": ("f16-64-causal", "dq", off(1, 1, 39, 63), "dq[1, 1, 39, 63] is"),
    "dk": ("f16-64-gqa-6-2", "dk", off(0, 1, 69, 5), "dk[0, 1, 69, 5] is"),
    "dv": ("f16-64", "dv", off(1, 0, 0, 0), "dv[1, 0, 0, 0] is"),
    "dbias": ("f16-64-bias", "dbias", off(1, 1, 39, 69), "dbias[1, 1, 39, 69] is"),
    "dbias of keys": ("f16-64-bias-by-key", "dbias", off(0, 0, 0, 7), "dbias[0, 0, 0, 7] is"),
    "dbias, one number": ("f16-64-bias-one", "dbias", off(0, 0, 0, 0), "dbias[0, 0, 0, 0] is"),
    "dsinks": ("f16-64-sinks", "dsinks", off(1), "dsinks[1] is"),
    "no dq at all": ("f16-64", "dq", lambda x: x.fill(0), "dq["),
    "NaN in dk": ("f16-64", "dk", lambda x: x[0, 0, 3].fill(np.nan), "dk[0, 0, 3, 0] is nan"),
    "keys beyond the lengths": (
        "f16-64-causal-lengths-bias-sinks",
        "dv",
        zeros_forgotten,
        "dv[1, 0, 50, 0] is 0.5, the oracle says 0,",
    ),
    "packed dq": (
        "f16-64-causal-sequences-everything",
        "dq",
        off(0, 3, 73, 63),
        "dq[2, 3, 39, 63] is",
    ),
    "packed dk": (
        "f16-64-causal-sequences-everything",
        "dk",
        off(0, 1, 41, 0),
        "dk[1, 1, 1, 0] is",
    ),
    "any order": (
        "f16-64-causal-any-order",
        "dv",
        off(0, 1, 128, 63),
        "dv[0, 1, 128, 63] is",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_gradient_that_is_off_is_found(name: str, discovered: Discovered) -> None:
    case, result, spoil, where = WRONG[name]
    discovered().registry.implementations.append(Spoiled("attention_bwd", result, spoil))
    descriptor, kept = described(BACKWARD + case)
    chosen = plan(descriptor, implementation="spoiled")
    with pytest.raises(WrongResult) as caught:
        chosen.bind(check=True)()
    e = caught.value
    assert e.finding.startswith(where) and "error/tolerance" in e.finding
    assert (e.implementation, e.problem) == ("spoiled", chosen.problem)
    chosen.bind()()  # unasked, nothing is looked at
    del kept


@pytest.mark.parametrize(
    ("case", "result", "at", "where"),
    [
        ("f32-f16", "out", (1, 2, 16, 63), "out[1, 2, 16, 63] is"),
        ("f64-f64", "lse", (0, 1, 2), "lse[0, 1, 2] is"),
        ("f32-f16-parts-0", "out", (0, 0, 3, 1), "out[0, 0, 3, 1] is 0.0999755859"),
    ],
)
def test_a_merge_that_is_off_is_found(
    case: str, result: str, at: tuple[int, ...], where: str, discovered: Discovered
) -> None:
    discovered().registry.implementations.append(Spoiled("merge_states", result, off(*at)))
    descriptor, kept = described(f"merge-states-{case}")
    with pytest.raises(WrongResult) as caught:
        plan(descriptor, implementation="spoiled").bind(check=True)()
    assert caught.value.finding.startswith(where)
    del kept


def test_sampled_elements_are_those_of_the_whole_oracle() -> None:
    """Given the result and the LSE of an exact forward, in float64."""
    case: Any = named("attention-bwd-f64-32-everything")
    x, f = operands.values(case), case.forward
    operands_of_scores = ("prefix_lengths", "alibi_slopes", "bias", "mask", "sinks")
    variant = formulas.Variant(
        window=f.window, softcap=f.softcap, **{n: x[n] for n in operands_of_scores}
    )
    exact = formulas.attention(x["q"], x["k"], x["v"], f.causal, f.scale_used, None, variant)
    forward = Forward(
        x["q"], x["k"], x["v"], exact.out, exact.lse, x["dout"], f.causal, f.scale_used, variant
    )
    for shape in ((2, 4, 33, 70), (2, 1, 33, 70), (1, 4, 1, 70), (2, 4, 33, 1), (1, 1, 1, 1)):
        whole = attention_bwd(
            x["q"], x["k"], x["v"], x["dout"], f.causal, f.scale_used, variant, shape
        )

        def sample(total: int, pairs: int) -> Any:
            return np.arange(0, total, 3)

        columns = np.arange(0, shape[3], 2)
        actual = {
            "dq": of_queries(forward, sample),
            **dict(zip(("dk", "dv"), of_keys(forward, sample), strict=True)),
            "dbias": of_bias(forward, shape, np.arange(0, int(np.prod(shape[:3])), 2), columns),
            "dsinks": of_sinks(forward),
        }
        for name, some in actual.items():
            for part in ("value", "rounded", "single", "outs", "lses", "vanished"):
                expected = getattr(whole[name], part)[some.index].astype(np.float64)
                result = getattr(some.gradient, part).astype(np.float64)
                np.testing.assert_allclose(
                    result, expected, rtol=1e-9, atol=1e-12, err_msg=name + part
                )
            assert not some.undefined.any()


def test_gradients_of_a_part_of_the_keys_are_held_against_what_the_whole_left() -> None:
    """As where keys are spread over devices: out and lse are of all keys, k and v some of them."""
    q, dout = (RNG.standard_normal((1, 2, 9, 16)).astype("f4") for _ in range(2))
    k, v = (RNG.standard_normal((1, 2, 20, 16)).astype("f4") for _ in range(2))
    out, lse = np.empty_like(q), np.empty((1, 2, 9), "f4")
    plan(Attention.from_arrays(q, k, v, out, lse)).bind()()
    half = k[:, :, :10].copy(), v[:, :, :10].copy()
    grads = [np.empty_like(x) for x in (q, *half)]
    forward = Attention.from_arrays(q, *half, out, lse)
    given = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    plan(AttentionBwd(forward=forward, dout=dout, **given)).bind(check=True)()
    expected = attention_bwd(q, k, v, dout, False, 0.25)["dk"].value[:, :, :10]
    np.testing.assert_allclose(grads[1], expected, atol=1e-5)


def test_hidden_values_that_are_not_finite_may_reach_a_sum_or_not(discovered: Discovered) -> None:
    """0·NaN: docs/accuracy.md wants them finite; both answers pass, and other elements are
    compared."""
    q, k, v, dout, out = (RNG.standard_normal((1, 1, 8, 16)).astype("f4") for _ in range(5))
    lse = np.empty((1, 1, 8), "f4")
    k[0, 0, 7, 3] = np.nan
    dout[0, 0, 0, 2] = np.inf
    forward = Attention.from_arrays(q, k, v, out, lse, causal=True)
    plan(forward).bind()()
    loaded = discovered()

    def bound(spoil: Callable[[Any], None]) -> Any:
        loaded.registry.implementations[:] = [
            i for i in loaded.registry.implementations if i.name != "spoiled"
        ]
        loaded.registry.implementations.append(Spoiled("attention_bwd", "dq", spoil))
        grads = {n: np.empty_like(q) for n in ("dq", "dk", "dv")}
        from kernelseam.planning import forget

        forget()
        return plan(
            AttentionBwd(forward=forward, dout=dout, **grads), implementation="spoiled"
        ).bind(check=True)

    bound(lambda x: None)()
    bound(lambda x: x[0, 0, :, 3].fill(np.nan))()
    with pytest.raises(WrongResult, match=r"dq\[0, 0, 3, 4\] is"):
        bound(off(0, 0, 3, 4))()


def test_an_attention_over_lists_without_an_lse_is_looked_at(discovered: Discovered) -> None:
    discovered()
    heads = {
        f"{n}_ptrs": [RNG.standard_normal((5, 8)).astype("f4") for _ in range(2)]
        for n in ("q", "k", "v", "out")
    }
    descriptor = AttentionPointers(
        batch=1, num_heads=2, S_q=5, S_k=5, head_dim=8, dtype="float32", **heads
    )
    requested: list[check.Verdict] = []
    real = check.attention
    with pytest.MonkeyPatch.context() as m:
        m.setattr(
            check, "attention", lambda *a, **k: requested.append(real(*a, **k)) or requested[-1]
        )
        plan(descriptor).bind(check=True)()
    (verdict,) = requested
    assert verdict.passed and verdict.checked == 2 * 5 * 8


# ---------------------------------------------------------------- refused


def refused(problem: Any) -> str:
    with pytest.raises(InvalidValue) as caught:
        verifier_of(problem)
    return str(caught.value)


def test_an_operation_without_an_oracle_is_refused_at_bind(
    discovered: Discovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    discovered()
    a, c = np.ones((2, 2), "f4"), np.zeros((2, 2), "f4")
    product = plan(BatchedGemmStrided(A=a, B=a, C=c, M=2, N=2, K=2))
    checked = product.bind(check=True)
    monkeypatch.delitem(VERIFIERS, GemmProblem)
    expected = (
        f"check = True for {product.problem}: cannot be checked: the oracle has no formula of gemm."
        " Bind without check, and compare the results with your own."
    )
    for bind in (lambda: product.bind(check=True), lambda: checked.rebind(C=np.empty_like(c))):
        with pytest.raises(InvalidValue) as caught:
            bind()
        assert str(caught.value) == expected
    assert not c.any()
    product.bind()()
    assert (c == 2).all()


def test_a_gradient_that_the_oracle_cannot_compute_is_refused_at_bind(
    discovered: Discovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    discovered()
    descriptor, memory = described("attention-bwd-f16-64-bias-one")
    gradients = plan(descriptor)
    monkeypatch.setattr(verification_attention, "MOST_OPERATIONS", 1e5)
    with pytest.raises(InvalidValue, match="cannot be checked: one element of dbias takes"):
        gradients.bind(check=True)
    gradients.bind()()
    del memory


@pytest.mark.parametrize("view", ["pointers", "packed"])
def test_a_merge_within_an_attention_is_refused_by_itself(view: str) -> None:
    spec = MergeSpec(DType.float32, DType.float16, 8, **{view: True})
    problem = MergeProblem(spec, 2, 1, 1, 3, (24, 24, 24, 8), (3, 3, 3), (24, 24, 8))
    assert (
        "cannot be checked: a merge into lists or packed rows is verified as part of its attention "
        "alone. Bind without check" in refused(problem)
    )


def test_a_sum_that_the_oracle_would_take_minutes_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descriptor, kept = described("attention-bwd-f16-64-bias-one")
    problem = descriptor.problem()
    assert isinstance(problem, AttentionBwdProblem)
    verifier_of(problem)
    monkeypatch.setattr(verification_attention, "MOST_OPERATIONS", 1e7)
    assert (
        "cannot be checked: one element of dbias takes 1.7e+07 operations, and the oracle does up "
        "to 1e+07. Bind without check" in refused(problem)
    )
    verifier_of(described("attention-bwd-f16-64-bias")[0].problem())  # each element is one pair
    del kept
