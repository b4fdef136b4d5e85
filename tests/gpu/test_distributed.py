"""On two GPUs of one host: attention over both, against the whole sequence by torch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kernelseam
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
    pytest.skip("two GPUs are missing: torch sees fewer here", allow_module_level=True)
if {d.backend for d in kernelseam.devices()} <= {"numpy"}:
    pytest.skip("gpu is missing: no plugin here knows torch's device", allow_module_level=True)
import distributed_calls  # noqa: E402
import distributed_experts  # noqa: E402
from distributed_calls import Case, Decoding, expected_by_torch, worst  # noqa: E402
from gloo_ranks import Ranks, ranks_of  # noqa: E402

LIMITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5}
LARGE: dict[str, Any] = {"rows": 512, "heads": 4, "kv_heads": 2, "dim": 64, "value_dim": 64}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(2, device="cuda") as found:
        yield found


CASES = {
    "causal": {},
    "contiguous": {"order": "contiguous"},
    "full": {"causal": False, "order": "contiguous"},
    "window": {"window": (200, None)},
    "softcap, sinks, lse": {"softcap": 3.0, "sinks": True, "lse": True},
    "alibi": {"alibi": True},
    "prefix": {"prefix": (100, 400)},
    "lengths": {"kv_lengths": (512, 300), "causal": False, "order": "contiguous"},
    "documents": {"documents": (0, 5, 5, 300, 512)},
    "documents window": {"documents": (0, 133, 512), "window": (99, None)},
}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("name", CASES)
def test_two_gpus(ranks: Ranks, name: str, method: str, dtype: str) -> None:
    case = Case(**{**LARGE, **CASES[name], "method": method, "dtype": dtype})
    made = ranks.run(distributed_calls.attention, case)
    for x in made:
        if isinstance(x, Exception):
            raise x
    found = worst(case, made, expected_by_torch)
    lse = found.pop("lse")  # absolute
    assert max(found.values()) < LIMITS[dtype] and lse < 1e-2, (found, lse)


@pytest.mark.parametrize("rows", [1, 3])
def test_decoding(ranks: Ranks, rows: int) -> None:
    case = Decoding(dtype="float16", rows=rows, lengths=(900, 3, 64), page_size=16, sinks=True)
    want = distributed_calls.expected_decoding(case)
    for x in ranks.run(distributed_calls.decoded, case):
        if isinstance(x, Exception):
            raise x
        assert abs(x["out"] - want["out"]).max() < 4e-3
        assert abs(x["lse"] - want["lse"]).max() < 1e-3


def test_projections(ranks: Ranks) -> None:
    for made in ranks.run(distributed_calls.layer, "sharded", "balanced", 2, "float32"):
        assert isinstance(made, dict), made
        assert max(made.values()) < 1e-4, made


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_experts(ranks: Ranks, dtype: str, within: float, capacity: int | None) -> None:
    for made in ranks.run(distributed_experts.layer, "layer", 3, capacity, dtype):
        assert isinstance(made, dict), made
        assert max(made.values()) < within, made


@pytest.mark.parametrize(
    "way", [(False, False), (False, True), (True, False), (True, True)], ids=str
)
@pytest.mark.parametrize("form", ["one", "layer"])
@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_experts_of_tokens(
    ranks: Ranks, dtype: str, within: float, form: str, way: tuple[bool, bool]
) -> None:
    for made in ranks.run(distributed_experts.of_tokens, form, True, way, dtype):
        assert isinstance(made, dict), made
        assert max(made.values()) < within, made
