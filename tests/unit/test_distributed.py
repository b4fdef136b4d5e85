"""Attention over 2, 3 and 4 processes on the NumPy backend, over gloo, against the float64 oracle
of the whole sequence: results, LSEs and gradients. Faults that are planted are seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
import distributed_calls  # noqa: E402
from distributed_calls import Case, worst  # noqa: E402
from gloo_ranks import Ranks, ranks_of  # noqa: E402
from kernelseam.errors import InvalidValue  # noqa: E402

EXACT = 1e-13
"""Of float64: what differs is the order of sums."""
SLOW = pytest.mark.slow("the fast ones cover each method, mask and number of ranks once")


def run(ranks: Ranks, case: Case, size: int, fault: str | None = None, **more: Any) -> list[Any]:
    made = ranks.run(distributed_calls.attention, case, fault, ranks=size, **more)
    for x in made:
        if isinstance(x, Exception):
            raise x
    return made


def check(ranks: Ranks, case: Case, size: int, bound: float = EXACT) -> None:
    found = worst(case, run(ranks, case, size))
    sinks = found.pop("dsinks", 0.0)  # always of float32
    if case.mods:  # of which the oracle takes differences
        assert max(found.pop("dq"), found.pop("dk")) < 1e-9, found
    assert max(found.values()) < bound and sinks < max(bound, 1e-7), (found, sinks)


MASKS = {
    "full": Case(causal=False, order="contiguous"),
    "full balanced": Case(causal=False),
    "causal": Case(),
    "causal contiguous": Case(order="contiguous"),
    "window": Case(causal=False, window=(9, 4), order="contiguous"),
    "causal window": Case(window=(10, None)),
    "causal window contiguous": Case(window=(5, None), order="contiguous"),
    "softcap and sinks": Case(softcap=3.0, sinks=True),
    "alibi": Case(alibi=True),
    "alibi full": Case(alibi=True, causal=False, order="contiguous", sinks=True),
    "alibi window": Case(alibi=True, window=(13, None), softcap=4.0),
    "prefix": Case(prefix=(17, 30)),
    "prefix alibi window": Case(prefix=(0, 41), alibi=True, window=(6, None)),
    "kv lengths": Case(kv_lengths=(48, 11), causal=False, order="contiguous"),
    "more keys": Case(rows_k=72),
    "fewer keys": Case(rows_k=24, alibi=True),
    "lse": Case(lse=True, sinks=True, softcap=3.0),
    "lse alibi": Case(lse=True, alibi=True, sinks=True),
    "documents": Case(documents=(0, 5, 5, 31, 48)),
    "documents full": Case(documents=(3, 20, 44), causal=False, order="contiguous"),
    "documents and rows of none": Case(documents=(3, 20, 20, 41), sinks=True),
    "documents window": Case(documents=(0, 33, 48), window=(7, None), alibi=True, sinks=True),
    "mods": Case(mods=True),
    "mods full": Case(mods=True, causal=False, order="contiguous", rows_k=72, sinks=True),
    "mods window prefix": Case(mods=True, window=(11, None), prefix=(3, 30), softcap=3.0),
    "mods documents": Case(mods=True, documents=(2, 5, 13, 13, 31, 48)),
    "mods documents full": Case(
        mods=True, documents=(0, 40, 45), causal=False, order="contiguous", sinks=True
    ),
    "one head": Case(heads=4, kv_heads=1, dim=7, value_dim=8, batch=1),
}
QUICK = {
    ("causal", 2), ("causal", 3), ("causal", 4), ("full", 3), ("full balanced", 4),
    ("causal contiguous", 3), ("window", 4), ("causal window", 3), ("alibi window", 3),
    ("causal window contiguous", 4), ("softcap and sinks", 2), ("alibi", 4), ("alibi full", 2),
    ("prefix", 3), ("prefix alibi window", 4), ("kv lengths", 3), ("more keys", 3),
    ("fewer keys", 2), ("lse", 3), ("lse alibi", 2), ("documents", 3), ("documents full", 4),
    ("documents and rows of none", 2),
    ("documents window", 3), ("one head", 4), ("mods", 4), ("mods full", 2),
    ("mods window prefix", 3), ("mods documents", 3), ("mods documents full", 2),
}  # fmt: skip
GRID = [
    pytest.param(name, size, marks=() if (name, size) in QUICK else SLOW)
    for name in MASKS
    for size in (2, 3, 4)
]


@pytest.mark.parametrize(("name", "size"), GRID)
def test_ring(ranks: Ranks, name: str, size: int) -> None:
    check(ranks, MASKS[name], size)


@pytest.mark.parametrize(("name", "size"), GRID)
def test_all_gather(ranks: Ranks, name: str, size: int) -> None:
    check(ranks, replaced(MASKS[name], method="all_gather"), size)


@pytest.mark.parametrize(("name", "size"), GRID)
def test_ulysses(ranks: Ranks, name: str, size: int) -> None:
    heads = 6 if size == 3 else 4
    case = replaced(MASKS[name], method="ulysses", heads=heads)
    kv_heads = 3 if size == 3 and case.kv_heads > 1 else case.kv_heads
    check(ranks, replaced(case, kv_heads=kv_heads), size)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if (n, 4) in QUICK else SLOW) for n in MASKS]
)
def test_mesh(ranks: Ranks, name: str) -> None:
    check(ranks, replaced(MASKS[name], method="mesh"), 4)


def test_a_device_mesh_names_ring_and_heads(ranks: Ranks) -> None:
    check(ranks, Case(method="mesh", mesh=(2, 2)), 4)
    check(ranks, Case(mesh=(4,)), 4)  # a mesh of one dimension is a group


@pytest.mark.parametrize(
    "name", [n for n, x in MASKS.items() if not (x.mods or (x.documents and x.sinks))]
)
def test_what_gpus_are_held_to_is_the_oracle(name: str) -> None:
    want = distributed_calls.expected(MASKS[name])
    have = distributed_calls.expected_by_torch(MASKS[name])
    for result, x in want.items():
        if x is None:
            assert have[result] is None
        else:
            np.testing.assert_allclose(have[result], x, rtol=0, atol=1e-12)


def test_auto_takes_one_of_them(ranks: Ranks) -> None:
    check(ranks, Case(method="auto"), 3)


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 3e-6), ("bfloat16", 3e-2)])
def test_narrow_dtypes(ranks: Ranks, method: str, dtype: str, bound: float) -> None:
    case = Case(method=method, dtype=dtype, lse=True, sinks=True)
    made = run(ranks, case, 2)
    found = worst(case, made)
    assert max(found.values()) < bound, found
    kind, wide = f"torch.{dtype}", "torch.float32"
    assert made[0]["dtypes"] == [kind, wide, kind, kind, kind]


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_states_that_are_rounded_early_are_joined_in_float32(ranks: Ranks, method: str) -> None:
    case = Case(method=method, dtype="bfloat16", sinks=True, causal=False)
    early = worst(case, run(ranks, case, 3, "states rounded early"))
    whole = worst(case, run(ranks, case, 3))
    assert max(early.values()) < 3e-2, early
    assert whole["out"] <= early["out"] < 2.5 * whole["out"]  # two roundings, not four


def test_results_in_float32_are_not_rounded(ranks: Ranks) -> None:
    case = Case(dtype="bfloat16")
    made = run(ranks, case, 2, out_dtype="float32")
    assert made[0]["dtypes"][0] == "torch.float32"
    assert worst(case, made)["out"] < 1e-3  # rounding to bfloat16 alone is 4e-3


FAULTS = {
    "skipped chunk": Case(),
    "wrong merge": Case(),
    "lost wait": Case(causal=False, order="contiguous"),
    "chunks in the wrong order": Case(alibi=True),
    "the wrong keys": Case(),
    "sums not sent home": Case(),
    "keys' gradients counted twice": Case(),
    "sink counted by every rank": Case(sinks=True),
    "window of the shard": Case(window=(10, None)),
    "indices of the shard": Case(mods=True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(ranks: Ranks, fault: str) -> None:
    case = FAULTS[fault]
    made = run(ranks, case, 3, fault)
    assert max(worst(case, made).values()) > 1e-3
    check(ranks, case, 3)  # and is gone


def refused(ranks: Ranks, message: str, task: Callable[..., Any], *given: Any, size: int) -> None:
    """Every rank raises InvalidValue with this message."""
    for error in ranks.run(task, *given, ranks=size):
        assert isinstance(error, InvalidValue), error
        assert re.search(message, str(error)), str(error)


def test_what_does_not_fit_is_refused_with_a_remedy(ranks: Ranks) -> None:
    for change, message in (
        ("shard", r"^x\.shape\[2\] = 10: must be a multiple of 6, two chunks for each of 3 ranks"),
        ("unshard", r"^x\.shape\[2\] = 3: has two chunks of one length where causal=True\. "),
        ("odd", (r"^q\.shape\[2\] = 3: order 'balanced' has two chunks of one length on each rank"
                r"\. Pad the whole to 12 rows, or shard it with order='contiguous'\.$")),
        ("bias", r"^bias = given: has an element for every query and key of the whole, which no "),
        ("mask", r"^mask = given: has an element for every query and key of the whole, which no "),
        ("lengths", r"^kv_lengths = given: moves each entry's diagonal, which causal counts from"),
        ("method", r"^method = rings: must be one of auto, ring, all_gather, ulysses, mesh\. "),
        ("order", r"^order = zigzag: must be one of contiguous, balanced\. "),
        ("ulysses", r"^H = 2: must be a multiple of the 3 ranks that share the heads\. Choose "),
        ("group", r"^group = str: must be a ProcessGroup that this process is part of, or a dim"),
        ("tensor", r"^q = ndarray: must be a torch tensor\. "),
        ("documents", (r"^cu_seqlens = \[0, 30\]: must not decrease, from 0 or more up to at most "
                      r"the 24 rows of all ranks\. Pass the offsets of the whole, not of a ")),
    ):  # fmt: skip
        refused(ranks, message, distributed_calls.misfit, change, size=3)


def test_a_group_that_is_not_initialised_is_refused() -> None:
    from kernelseam import distributed

    with pytest.raises(InvalidValue) as caught:
        distributed.shard(None, dim=0, group=None)
    assert str(caught.value) == (
        "group = not initialised: torch.distributed has no process group yet. Call "
        "torch.distributed.init_process_group() in every process, started by torchrun."
    )


def test_shards_and_their_gradients(ranks: Ranks) -> None:
    for made in ranks.run(distributed_calls.sharded, ranks=3):
        assert made is True


def test_explain_says_which_and_why(ranks: Ranks) -> None:
    few, many, text = ranks.run(distributed_calls.explained, ranks=4)[0]
    assert few == "all_gather"
    assert many in ("ring", "ulysses", "mesh")
    assert re.search(r"^ring +[\d.]+ ms: products [\d.]+ ms, waiting \d+%, sends ", text, re.M)
    assert "refused: H_kv must divide" in text or "ulysses" in text


def test_bytes_and_waits_are_counted(ranks: Ranks) -> None:
    for sent, waited in ranks.run(distributed_calls.counted, ranks=3):
        # Two steps of K and V: [1, 2, 8, 4] twice, of float64.
        assert sent == 2 * 2 * 2 * 8 * 4 * 8
        assert 0 < waited < 30


@pytest.mark.parametrize(
    ("how", "method"), [("killed", "ring"), ("stalled", "all_gather"), ("killed", "ulysses")]
)
def test_a_rank_that_is_lost_ends_the_others(how: str, method: str) -> None:
    with ranks_of(2, seconds=2) as lost:
        lost.run(distributed_calls.attention, Case(method=method))
        lost.start(1, distributed_calls.lost, 2, how)
        lost.start(0, distributed_calls.alone, 2, method)
        kind, message, logged = lost.answer(0)
        assert kind == "RankLost"
        step = {
            "ring": "ring attention on rank 0 of 2, step 1 of 2: keys and values",
            "all_gather": "all-gather of keys and values on rank 0 of 2",
            "ulysses": "all-to-all of rows on rank 0 of 2",
        }[method]
        assert message.startswith(f"{step}: another rank died, or did not come within the group's")
        assert [x.startswith(f"{step} did not come to an end: ") for x in logged] == [True]
        lost.processes[1].kill()


def replaced(case: Case, **changes: Any) -> Case:
    return Case(**{**case.__dict__, **changes})
