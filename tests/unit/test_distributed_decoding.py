"""Decoding over pages on 2, 3 and 4 gloo processes, against the float64 oracle of all keys."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
import distributed_calls  # noqa: E402
from distributed_calls import Decoding  # noqa: E402
from gloo_ranks import Ranks  # noqa: E402


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "case",
    [
        Decoding(),
        Decoding(rows=3, lengths=(29, 2, 3, 64), sinks=True),
        Decoding(rows=2, causal=False, page_size=16, softcap=2.0, kv_layout="hnd"),
        Decoding(page_size=1, lengths=(3, 7), sinks=True),
        Decoding(rows=3, lengths=()),
        Decoding(lengths=(), sinks=True),
    ],
    ids=["one token", "several tokens", "not causal", "pages of one", "none", "none of one token"],
)
def test_states_of_pages_are_joined(ranks: Ranks, case: Decoding, size: int) -> None:
    want = distributed_calls.expected_decoding(case)
    made = ranks.run(distributed_calls.decoded, case, ranks=size)
    for x in made:
        if isinstance(x, Exception):
            raise x
        np.testing.assert_allclose(x["out"], want["out"], rtol=0, atol=1e-13)
        np.testing.assert_allclose(x["lse"], want["lse"], rtol=0, atol=1e-13)
        np.testing.assert_array_equal(x["out"], made[0]["out"])


def test_halves_are_joined_in_float32(ranks: Ranks) -> None:
    case = Decoding(dtype="bfloat16", sinks=True)
    want = distributed_calls.expected_decoding(case)
    for x in ranks.run(distributed_calls.decoded, case, ranks=3):
        assert x["dtype"] == "torch.bfloat16"
        np.testing.assert_allclose(x["out"], want["out"], rtol=0, atol=1e-2)
        np.testing.assert_allclose(x["lse"], want["lse"], rtol=0, atol=2e-5)
