"""Keys that are split over blocks for several batches and heads, whose parts' LSEs lie one after
the other: on a host with more units than the matrix's, which is too small to split them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from kernelseam import trace
from kernelseam.kernels.attention.forward import AttentionDefinition
from kernelseam.kernels.attention.merge import MergeDefinition
from kernelseam.parity.matrix import named
from kernelseam.parity.running.run import Outcome, Target, run_case
from kernelseam.plugins import Plugins

CASE = named("attention-f16-64-split-batches")


def _run(hostcpp: Plugins) -> Outcome:
    device = hostcpp.backend("hostcpp").runtime.devices()[0]
    wide = replace(device, limits=replace(device.limits, compute_units=64))
    return run_case(CASE, Target(wide, "shared", CASE.operation, builtin=True))


def test_keys_of_several_batches_and_heads_are_split(hostcpp: Plugins) -> None:
    with trace() as launches:
        _run(hostcpp).require()
    assert {r.kernel for r in launches} == {"attention_forward", "merge_states"}


@pytest.mark.parametrize(
    ("kernel", "name", "factor"),
    [
        (AttentionDefinition, "lse_split", 2),
        (AttentionDefinition, "lse_batch", 4),
        (AttentionDefinition, "lse_head", 3),
        (MergeDefinition, "lses_part", 2),
        (MergeDefinition, "lses_batch", 4),
        (MergeDefinition, "lses_head", 3),
    ],
)
def test_a_stride_of_their_lse_that_is_too_short_is_seen(
    hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch, kernel: type, name: str, factor: int
) -> None:
    """As if an axis were forgotten in it: in what the kernel is given, of the parts' LSEs."""
    values = kernel.values  # type: ignore[attr-defined]

    def short(self: object, *arguments: object) -> Mapping[str, int | float]:
        actual = dict(values(self, *arguments))
        assert actual[name] >= factor
        return {**actual, name: actual[name] // factor}

    monkeypatch.setattr(kernel, "values", short)
    outcome = _run(hostcpp)
    assert outcome.status == "failed", outcome.detail
