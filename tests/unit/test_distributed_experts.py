"""Products whose experts lie on 2, 3 and 4 gloo processes, forward and backward, against the whole
by torch in float64."""

from __future__ import annotations

import re
from itertools import product

import pytest

pytest.importorskip("torch", reason="torch is not installed")
import distributed_experts  # noqa: E402
from gloo_ranks import Ranks  # noqa: E402
from kernelseam.errors import InvalidValue  # noqa: E402

WAYS = list(product([False, True], repeat=2))
"""Whether all tokens go to each rank, and own ones' rows are multiplied apart."""


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("capacity", [None, 6, 2])
@pytest.mark.parametrize(("form", "chunks"), [("one", 2), ("layer", 1), ("led", 99)])
def test_results_and_gradients(
    ranks: Ranks, form: str, chunks: int, capacity: int | None, size: int
) -> None:
    """With a capacity of 6 no row is dropped, with 2 many are."""
    for made in ranks.run(distributed_experts.layer, form, chunks, capacity, ranks=size):
        assert isinstance(made, dict), made
        assert max(made.values()) < 1e-13, made


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("form", "factors"), [("one", False), ("layer", True), ("led", True)])
def test_tokens_go_once_and_their_sums_come_back(
    ranks: Ranks, form: str, factors: bool, way: tuple[bool, bool], size: int
) -> None:
    for made in ranks.run(distributed_experts.of_tokens, form, factors, way, ranks=size):
        assert isinstance(made, dict), made
        single = made.pop("d_factors", 0.0)  # float32
        assert max(made.values()) < 1e-13 and single < 1e-6, (made, single)


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_dtypes(ranks: Ranks, dtype: str, within: float) -> None:
    for way in (("layer", 2, None), *(("of_tokens", True, w) for w in WAYS)):
        name, *given = way
        function = getattr(distributed_experts, name)
        for made in ranks.run(function, "layer", *given, dtype, check=True, ranks=3):
            assert isinstance(made, dict), made
            assert max(made.values()) < within, made


def test_functions_that_learn_see_no_memory_of_free_slots(ranks: Ranks) -> None:
    for error in ranks.run(distributed_experts.learnt, ranks=2):
        assert isinstance(error, float) and error < 1e-12, error


def test_chunks_travel_while_others_are_multiplied(ranks: Ranks) -> None:
    """Of three chunks, forward and backward: what is begun, waited for, multiplied, in order."""
    for forward, backward in ranks.run(distributed_experts.order_of_steps, 3, ranks=2):
        assert forward == [
            *("begin 1", "begin 2", "end 1", "product", "begin back 1"),
            *("begin 3", "end 2", "product", "begin back 2"),
            *("end 3", "product", "begin back 3", "end back 1", "end back 2", "end back 3"),
        ]
        first = backward.index("product")
        assert backward.count("product") == 3
        # all results' gradients are under way before the first product, and after each the next
        # chunk's rows are waited for only when the one before has been multiplied
        assert sum(x.startswith("begin back") for x in backward[:first]) == 3
        assert backward.index("begin 3") < backward.index("product", first + 1)
        assert backward.index("begin 3") < backward.index("end 3")


def test_one_exchange_tells_how_many_rows_come(ranks: Ranks) -> None:
    """Bytes sent: the ends of all experts, and the rows, there and back; nothing for own rows."""
    for sent, expected in ranks.run(distributed_experts.bytes_sent, ranks=3):
        assert sent == expected


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_token_is_sent_once_to_a_rank(ranks: Ranks, way: tuple[bool, bool]) -> None:
    """Bytes sent: counts, the token and the factor of each row, and a token there and back for each
    rank that has any of its experts, or for each rank."""
    for sent, expected in ranks.run(distributed_experts.bytes_of_tokens, *way, ranks=3):
        assert sent == expected


def test_sums_of_a_token_are_rounded_once() -> None:
    """Of rows that were received and of own ones, on a host; with and without memory for them."""
    import torch
    from kernelseam.interop.torch_library.bags import Bags

    made = torch.Generator().manual_seed(0)
    x = torch.randint(-255, 256, (64, 8), generator=made).bfloat16()  # sums are exact in float32
    plus = torch.randint(-255, 256, (2, 5, 8), generator=made).bfloat16()
    place, out = torch.arange(64) % 5, torch.empty(5, 8, dtype=torch.bfloat16)
    wanted = plus.double().sum(0).index_add(0, place, x.double()).bfloat16()
    bags = Bags.of(place, 5)
    assert torch.equal(bags.added(x, plus=plus), wanted)
    assert bags.added(x, out, plus) is out and torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("ranks_", "rows", "share"),
    [(2, 6, 0.984), (4, 6, 0.822), (8, 6, 0.551), (2, 1, 0.5), (3, 0, 0)],
)
def test_share_of_tokens_that_a_rank_is_expected_to_have(
    ranks_: int, rows: int, share: float
) -> None:
    from kernelseam.distributed.tokens import _expected_share

    assert _expected_share(ranks_, 10 * rows, 10) == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize(
    "fault",
    [
        *("experts of other rows", "results of the row before", "gradients not sent back"),
        *("a token of the row before", "tokens of another rank"),
        *("own sums left out", "another rank's sums left out"),
    ],
)
def test_a_planted_fault_is_seen(ranks: Ranks, fault: str) -> None:
    made = ranks.run(distributed_experts.faulty, fault, ranks=2)
    assert max(max(m.values()) for m in made if isinstance(m, dict)) > 1e-2, made


def test_offsets_of_one_rank_are_refused_on_all(ranks: Ranks) -> None:
    for error in ranks.run(distributed_experts.odd_offsets, ranks=3):
        assert isinstance(error, InvalidValue), error
        assert re.search(
            r"^offs\[2\] = 1: must be from 2, the end before, to T = 4 \(rank 1 of 3\)\. ",
            str(error),
        )
