"""Axes that products run over, folded into two: every folding walks what the axes walk."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam.ops.folding import SUMMED, Axis, fold


def axis(extent: int, a: int, b: int, c: int | None, **more: int) -> Axis:
    return Axis(extent, {"A": a, "B": b, "C": c, **more})


def walked(folded: dict[str, Any], names: str = "ABC") -> set[tuple[int, ...]]:
    """Offsets of A, B and C for every product of a descriptor's batches and heads."""
    get = folded.get
    result = set()
    for b, h in itertools.product(range(folded["batch"]), range(folded["num_heads"])):
        at = {
            "A": (b, h),
            "B": (b, h // folded["b_head_group"]),
            "C": (b // folded["c_batch_group"], h // folded["c_head_group"]),
        }
        result.add(
            tuple(
                at[n][0] * (get(f"stride_{n.lower()}_batch") or 0)
                + at[n][1] * (get(f"stride_{n.lower()}_head") or 0)
                for n in names
            )
        )
    return result


def meant(axes: list[Axis], names: str = "ABC") -> set[tuple[int, ...]]:
    return {
        tuple(sum(i * (a.strides[n] or 0) for i, a in zip(index, axes, strict=True)) for n in names)
        for index in itertools.product(*(range(a.extent) for a in axes))
    }


def test_batches_and_heads_are_what_they_are() -> None:
    actual = fold([axis(2, 60, 30, 24), axis(3, 20, 10, 8)])
    assert actual is not None and (actual["batch"], actual["num_heads"]) == (2, 3)
    assert [actual[f"stride_{n}_{x}"] for n in "abc" for x in ("batch", "head")] == [
        60,
        20,
        30,
        10,
        24,
        8,
    ]
    assert (actual["b_head_group"], actual["c_batch_group"], actual["c_head_group"]) == (1, 1, 1)


def test_heads_that_share_a_b_or_a_c() -> None:
    grouped = [axis(2, 120, 30, 48), axis(2, 60, 10, 24), axis(3, 20, 0, 8)]
    actual = fold(grouped)
    assert actual is not None and (
        actual["batch"],
        actual["num_heads"],
        actual["b_head_group"],
    ) == (
        2,
        6,
        3,
    )
    summed = [axis(2, 120, 120, 48), axis(2, 60, 60, 24), axis(3, 20, 20, SUMMED)]
    actual = fold(summed)
    assert actual is not None and (
        actual["num_heads"],
        actual["c_head_group"],
        actual["stride_c_head"],
    ) == (6, 3, 24)
    actual = fold([axis(5, 60, 30, SUMMED), axis(3, 20, 10, SUMMED)])
    assert actual is not None and (actual["c_batch_group"], actual["c_head_group"]) == (5, 3)
    assert actual["stride_c_batch"] is None and actual["stride_c_head"] is None


def test_more_axes_than_two_are_merged_where_they_step_evenly() -> None:
    actual = fold([axis(2, 120, 0, SUMMED), axis(3, 40, 0, SUMMED), axis(4, 10, 0, SUMMED)])
    assert actual is not None and actual["batch"] * actual["num_heads"] == 24
    assert fold([axis(2, 120, 7, 1000), axis(3, 41, 5, 100), axis(4, 10, 3, 10)]) is None


def test_what_is_added_to_c_must_step_evenly_too() -> None:
    axes = [(6, 120, 120, 60), (2, 60, 60, 30), (3, 20, 20, 10)]
    with_bias = [axis(*x, bias=s) for x, s in zip(axes, (0, 4, 0), strict=True)]
    assert fold([axis(*x) for x in axes]) is not None
    assert fold(with_bias) is None
    assert fold([axis(*x, bias=s) for x, s in zip(axes, (0, 12, 4), strict=True)]) is not None


def test_nothing_to_run_over() -> None:
    assert fold([axis(0, 1, 1, 1), axis(3, 1, 1, 1)]) == {"batch": 0}
    actual = fold([])
    assert actual is not None and (actual["batch"], actual["num_heads"]) == (1, 1)
    actual = fold([axis(1, 99, 99, SUMMED)])
    assert actual is not None and actual["stride_a_head"] is None and actual["c_head_group"] == 1


steps = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24])


@settings(max_examples=400)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), steps, steps, st.one_of(st.just(SUMMED), steps)),
        min_size=0,
        max_size=4,
    )
)
def test_a_folding_walks_exactly_what_the_axes_walk(
    given_axes: list[tuple[int, int, int, int | None]],
) -> None:
    axes = [axis(*x) for x in given_axes]
    actual = fold(axes)
    if actual is None:
        assert len([a for a in axes if a.extent > 1]) > 1, "one axis is always one of the two"
        return
    assert walked(actual) == meant(axes)
    assert actual["batch"] * actual["num_heads"] == len(
        list(itertools.product(*(range(a.extent) for a in axes)))
    )
