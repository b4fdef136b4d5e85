"""A result that is right for another variant than the case's is caught: a window one wider, a sink
left out, …"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from kernelseam.oracle import formulas
from kernelseam.oracle.formulas import Variant
from kernelseam.parity.matrix import named
from kernelseam.parity.running.stages import verdict
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.data import attention as attention_data
from kernelseam.samples.operations import operands

Change = Callable[[Variant], Variant]


def _wider(left: int, right: int) -> Change:
    def change(v: Variant) -> Variant:
        a, b = v.window
        return replace(
            v, window=(None if a is None else a + left, None if b is None else b + right)
        )

    return change


def _longer(by: int) -> Change:
    return lambda v: replace(v, kv_lengths=[min(max(n + by, 0), 129) for n in v.kv_lengths or ()])


WRONG: dict[str, tuple[str, Change]] = {
    "window-left": ("f16-64-window-16-0", _wider(1, 0)),
    "window-right": ("f16-64-window-any-5", _wider(0, 1)),
    "window-right-short": ("f16-64-window-any-5", _wider(0, -1)),
    "window-left-short": ("bf16-128-window-100-0-gqa", _wider(-1, 0)),
    "window-ignored": ("f16-64-window-33-12", lambda v: replace(v, window=(None, None))),
    "prefix-short": (
        "f16-64-causal-prefix",
        lambda v: replace(v, prefix_lengths=np.array(v.prefix_lengths) - 1),
    ),
    "prefix-long": (
        "f16-64-causal-prefix",
        lambda v: replace(v, prefix_lengths=np.array(v.prefix_lengths) + 1),
    ),
    "prefix-of-the-first-entry": (
        "f16-64-prefix-window",
        lambda v: replace(v, prefix_lengths=np.array(v.prefix_lengths)[[0, 0]]),
    ),
    "softcap-ignored": ("f16-64-softcap-5", lambda v: replace(v, softcap=None)),
    "softcap-huge-lost": ("f16-64-softcap-huge", lambda v: replace(v, softcap=1e-9)),
    "alibi-towards-0": (
        "f16-64-alibi",
        lambda v: replace(v, alibi_slopes=-np.array(v.alibi_slopes)),
    ),
    "alibi-of-the-first-entry": (
        "f16-64-alibi-batch-negative",
        lambda v: replace(v, alibi_slopes=np.array(v.alibi_slopes)[[0, 0]]),
    ),
    "alibi-of-another-head": (
        "f16-64-causal-alibi-gqa",
        lambda v: replace(v, alibi_slopes=np.array(v.alibi_slopes)[:, ::-1]),
    ),
    "bias-of-another-head": ("f16-64-bias", lambda v: replace(v, bias=np.array(v.bias)[:, ::-1])),
    "bias-transposed": ("f32-64-bias", lambda v: replace(v, bias=np.roll(np.array(v.bias), 1, 2))),
    "bias-one-key-on": (
        "f16-64-bias-by-key",
        lambda v: replace(v, bias=np.roll(np.array(v.bias), 1, 3)),
    ),
    "mask-upside-down": ("f16-64-mask", lambda v: replace(v, mask=~np.array(v.mask))),
    "mask-ignored": ("f16-64-mask-rows", lambda v: replace(v, mask=None)),
    "sinks-ignored": ("f16-64-sinks", lambda v: replace(v, sinks=None)),
    "sinks-of-another-head": ("f16-64-sinks", lambda v: replace(v, sinks=np.array(v.sinks)[::-1])),
    "lengths-one-more": ("f16-64-lengths-ramp", _longer(1)),
    "lengths-one-less": ("f16-64-causal-lengths", _longer(-1)),
    "sequences-one-less": ("f16-64-sequences-ramp", _longer(-1)),
}
"""Fault → the case that catches it, and the variant that it computes."""


def _results(made: AttentionCase, variant: Variant) -> dict[str, np.ndarray]:
    x = operands.values(made)
    result = formulas.attention(x["q"], x["k"], x["v"], made.causal, made.scale_used, None, variant)
    return {"out": result.out.astype(made.out_dtype.numpy), "lse": result.lse.astype(np.float32)}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_variant_is_caught(fault: str) -> None:
    name, change = WRONG[fault]
    parity_case = named(f"attention-{name}")
    assert isinstance(parity_case, AttentionCase)
    right = attention_data.variant(parity_case, operands.values(parity_case))
    assert verdict(parity_case, _results(parity_case, right)).passed
    wrong = verdict(parity_case, _results(parity_case, change(right)))
    assert not wrong.passed and wrong.worst > 4, wrong.message
    without = _results(parity_case, change(right))
    del without["lse"]
    assert not verdict(parity_case, without).passed, "the result shows it too, not the LSE alone"


def test_merged_states_that_are_weighed_wrongly_are_caught() -> None:
    parity_case = named("merge-states-f32-f16")
    x = operands.values(parity_case)
    outs, lses = x["outs"], x["lses"]
    right = formulas.merge_states(outs, lses)
    assert verdict(
        parity_case, {"out": right.out.astype(np.float16), "lse": right.lse.astype(np.float32)}
    ).passed
    for o, s in ((outs, lses * np.float32(np.log2(np.e))), (outs[:-1], lses[:-1])):
        outcome = verdict(parity_case, {"out": formulas.merge_states(o, s).out.astype(np.float16)})
        assert not outcome.passed and outcome.worst > 4
