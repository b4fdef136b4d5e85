"""Benchmarks of several ranks: an error of one rank ends the run, that of all is in the table."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)
from benchmarks.rank_timing import Ranks  # noqa: E402


def test_an_error_is_told_from_that_of_all_ranks() -> None:
    store, soon = torch.distributed.HashStore(), timedelta(seconds=0.2)
    one, other = Ranks(store, 0, 2), Ranks(store, 1, 2)
    one.measured = other.measured = 1
    assert not one.all_failed(soon)
    one.measured = other.measured = 2  # what was said of the first is not of this one
    assert not other.all_failed(soon)
    one.measured = other.measured = 3
    with ThreadPoolExecutor(2) as threads:
        failed = threads.map(lambda r: r.all_failed(timedelta(seconds=10)), (one, other))
    assert list(failed) == [True, True]
