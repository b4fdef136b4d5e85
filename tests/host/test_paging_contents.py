"""What stands in a device's block tables and lengths: refused by name, where that is asked for,
before each launch. Lengths that are not looked at never lead beyond the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam import Attention, plan
from kernelseam.errors import InvalidValue
from kernelseam.planning import Plan
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostArray

RNG = np.random.default_rng(8)
PAGES, PAGE, H, D = 12, 16, 2, 16


def normal(*shape: int) -> HostArray:
    return HostArray(RNG.standard_normal(shape).astype(np.float16))


def i32(values: Any) -> HostArray:
    return HostArray(np.array(values, np.int32))


def paged() -> dict[str, HostArray]:
    return {
        "q": normal(2, 5, H, D),
        "k": normal(PAGES, PAGE, H, D),
        "v": normal(PAGES, PAGE, H, D),
        "out": HostArray(np.zeros((2, 5, H, D), np.float16)),
        "block_table": i32([[0, 1, 2, 3, 9], [1, 2, 3, 4, 5]]),
        "kv_lengths": i32([70, 33]),
    }


def planned(hostcpp: Plugins, given: dict[str, HostArray]) -> Plan:
    """On the host as if it were another device, whose memory is not looked at unless that is asked
    for."""
    device = replace(hostcpp.backend("hostcpp").runtime.devices()[0], evidence="measured")
    return plan(Attention.from_arrays(**given, layout="bshd"), device=device)


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("block_table", (0, 4), 12, "block_table[0, 4] = 12: must be a page, from 0 to 11."),
        ("block_table", (1, 2), -1, "block_table[1, 2] = -1: must be a page, from 0 to 11."),
        ("kv_lengths", (1,), 81, "kv_lengths[1] = 81: must be from 0 to S_k = 80."),
    ],
)
def test_a_checked_call_refuses(
    hostcpp: Plugins, name: str, at: Any, value: int, message: str
) -> None:
    given = paged()
    the_plan = planned(hostcpp, given)
    call = the_plan.bind(check=True)
    call()
    given["out"].host[:] = 0
    held = given[name].host[at]
    given[name].host[at] = value
    for ask in (call, lambda: the_plan.bind(check=True), lambda: call.rebind()):
        with kernelseam.trace() as launches, pytest.raises(InvalidValue) as caught:
            ask()
        assert str(caught.value).startswith(message) and launches == []
    the_plan.bind()  # nobody asked: nothing is read
    assert not given["out"].host.any()
    given[name].host[at] = held
    call()
    assert given["out"].host.any()


def test_lengths_beyond_the_table_are_cut_and_negative_ones_are_0(hostcpp: Plugins) -> None:
    given = paged()
    call = planned(hostcpp, given).bind()
    given["kv_lengths"].host[:] = 80, 0
    call()
    wanted = given["out"].host.copy()
    assert wanted[0].any() and not wanted[1].any()
    given["kv_lengths"].host[:] = 2**31 - 1, -(2**31)
    given["block_table"].host[1] = 2**31 - 1
    given["out"].host[:] = np.nan
    call()
    np.testing.assert_array_equal(given["out"].host, wanted)
