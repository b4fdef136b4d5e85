"""Functions on arrays that need a workspace, on a stream that the arrays' library does not know of:
it is awaited before the library gets the workspace back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.contract import Device
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostArray
from kernelseam_hostcpp.library import Library
from kernelseam_hostcpp.runtime import HostCppRuntime

CURRENT = 3
"""The stream that the library uses now."""
SPLIT, WHOLE = 1500, 40
"""Keys that are split over blocks, whose results meet in a workspace, and keys that are not."""


@pytest.fixture
def happened(hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Launches, by their stream, and synchronisations, in order."""
    results: list[object] = []
    prepare = Library.prepare

    def prepared(self: Library, *arguments: Any) -> Callable[[int], None]:
        launch = prepare(self, *arguments)

        def noted(stream: int) -> None:
            results.append(stream)
            launch(stream)

        return noted

    def synchronize(self: HostCppRuntime, device: Device) -> None:
        results.append("synchronized")

    monkeypatch.setattr(Library, "prepare", prepared)
    monkeypatch.setattr(HostCppRuntime, "synchronize", synchronize)
    monkeypatch.setattr(HostCppRuntime, "current_stream", lambda *arguments: CURRENT)
    return results


def _attend(keys: int, stream: object) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        HostArray(rng.standard_normal((1, 1, n, 64)).astype(np.float16)) for n in (1, keys, keys)
    )
    kernelseam.attention(q, k, v, stream=stream)


@pytest.mark.parametrize(
    "stream", [7, SimpleNamespace(__cuda_stream__=lambda: (0, 7))], ids=["handle", "object"]
)
def test_a_stream_that_the_library_does_not_know_is_awaited(
    happened: list[object], stream: object
) -> None:
    _attend(SPLIT, stream)
    assert happened == [7, 7, "synchronized"], "the parts, their merge, and then the end of both"
    _attend(SPLIT, stream)
    assert happened[3:] == [7, 7, "synchronized"], "a remembered call, too"


@pytest.mark.parametrize("stream", [None, CURRENT])
def test_the_library_s_own_stream_is_not(happened: list[object], stream: object) -> None:
    _attend(SPLIT, stream)
    assert happened == [CURRENT, CURRENT]


def test_nothing_is_awaited_where_there_is_no_workspace(happened: list[object]) -> None:
    _attend(WHOLE, 7)
    assert happened == [7]
