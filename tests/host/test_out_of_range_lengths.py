"""Shared kernels clamp key lengths in device memory that are out of range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kernelseam.kernels import definition, kernel
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostArray
from mutant import ATTENTION, Mutant
from out_of_range_lengths import Array, check_clamped


class Sliced(HostArray):
    """A host array that can be sliced."""

    def __getitem__(self, index: Any) -> Sliced:
        return Sliced(self.host[index])


def into(array: Sliced, values: Array) -> None:
    array.host[...] = values


def _hold(hostcpp: Plugins) -> None:
    """On the host as if it were another device, whose memory is not looked at before each
    launch."""
    device = replace(hostcpp.backend("hostcpp").runtime.devices()[0], evidence="measured")
    check_clamped(Sliced, lambda x: x.host.copy(), into, device)


def test_lengths_beyond_the_keys_are_cut_and_negative_ones_are_0(hostcpp: Plugins) -> None:
    _hold(hostcpp)


def test_a_length_that_is_not_cut_is_seen(
    hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key too many is in its memory, and NaN."""
    planted = Mutant(
        "length-not-cut",
        ATTENTION,
        "s.S_k = min_of(lengths[batch], s.S_k);",
        "s.S_k = lengths[batch] > s.S_k ? s.S_k + 1 : lengths[batch];",
        "",
        "",
        "",
    ).planted(kernel.shared_sources())
    for module in (definition, kernel):
        monkeypatch.setattr(module, "shared_sources", lambda: planted)
    with pytest.raises(AssertionError):
        _hold(hostcpp)
