"""What the distributed functions refuse: on each rank alike, whichever rank it is that calls
otherwise, and for whatever stands in the place of an argument."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import itemgetter, methodcaller
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="torch is not installed")
import distributed_misuse  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gloo_ranks import Ranks, ranks_of  # noqa: E402
from kernelseam.errors import InvalidValue, KernelSeamError  # noqa: E402
from wrong_values import NEVER, SELDOM  # noqa: E402

FUNCTIONS = list(distributed_misuse.calls(None))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with ranks_of(4, seconds=20) as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def refused(made: list[Any], message: str) -> None:
    """Every rank raised InvalidValue with this message."""
    for error in made:
        assert isinstance(error, InvalidValue), error
        assert re.search(message, str(error)), str(error)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_wrong_argument(alone: Any, function: str) -> None:
    """A value that nothing takes is refused by the parameter's name; one that few parameters take
    is taken, or refused with an error of ours."""
    right = distributed_misuse.calls(alone)[function]
    distributed_misuse.call(alone, function)
    never = {**{n: make() for n, make in NEVER.items()}, **distributed_misuse.strange()}
    seldom = {n: make() for n, make in SELDOM.items()}
    for parameter in right:
        for kind, value in {**never, **seldom}.items():
            taken = (parameter, kind) == ("x", "complex")
            try:
                distributed_misuse.call(alone, function, **{parameter: value})
                assert kind in seldom or taken, "taken"
            except InvalidValue as e:
                root = re.split(r"[.[]", e.field)[0]
                assert kind in seldom or root == parameter, str(e)
            except KernelSeamError:
                assert kind in seldom
            except BaseException as e:
                e.add_note(f"{function}({parameter}={kind})")
                raise


def _later(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _shorter(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, kv_len: Any) -> Any:
    return kv_idx < kv_len - 1


_LEARNT = torch.zeros(2, requires_grad=True)


def _half(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 0.5


DIFFERENT: list[tuple[str, dict[str, Any], str]] = [
    ("attention", dict.fromkeys("qkv", itemgetter((..., slice(2), slice(None)))),
     r"^q = float32 \[1, 2, 4, 8\] on {others}; float32 \[1, 2, 2, 8\] on {odd}: must be the "),
    ("attention", dict.fromkeys("qkv", methodcaller("double")), r"^q = float.*; float(32|64) "),
    ("attention", {"causal": True}, (r"^causal = False on {others}; True on {odd}: must be the "
     r"same on every rank\. Pass the same everywhere\.$")),
    ("attention", {"window": (3, 0)}, r"^window = None on {others}; \[3, 0\] on {odd}: "),
    ("attention", {"q": lambda q: q.clone().requires_grad_()}, r"^q = .* with gradients on {odd}"),
    ("attention", {"q": lambda q: torch.zeros(1, 3, 4, 8)},
     r"^q\.shape\[1\] = 3: {odd} of 3 refuses it: must be a multiple of k\.shape"),
    ("attention", {"method": "rings"}, r"^method = rings: {odd} of 3 refuses it: must be one of "),
    ("attention", {"method": None}, r"^method = None: {odd} of 3 refuses it: must be one of auto"),
    ("attention", {"softcap": 2.0}, r"^softcap = None on {others}; 2\.0 on {odd}: must be the "),
    ("attention", {"mask_mod": lambda _: _later},
     r"^score_mod, mask_mod = None on {others}; mask_mod=le\(kv_idx, q_idx\); .* on {odd}: must "),
    ("attention_varlen", {"cu_seqlens": None}, r"^cu_seqlens = None: {odd} of 3 refuses it: must "),
    ("attention_varlen", {"cu_seqlens": [9, *range(3000)]},
     r"^cu_seqlens = list: {odd} of 3 refuses it: must not decrease, from 0 or more up to "),
    ("attention_varlen", {"cu_seqlens": [0, 4, 6]}, r"^cu_seqlens = 3 offsets, .* on {others}; 3 "),
    ("attention_paged", {"kv_layout": "hdn"}, r"^kv_layout = hdn: {odd} of 3 refuses it: must be "),
    ("attention_paged", {"block_table": lambda x: x + 9},
     r"^block_table\[0, 0\] = 10: {odd} of 3 refuses it: "),
    ("attention_paged", {"k_pages": itemgetter((..., slice(4)))}, r"{odd} of 3 refuses it: "),
    ("attention_paged", {"out_dtype": "float16"}, r"^out_dtype = torch\.float16: {odd} of 3 re"),
    ("qkv_projection", {"rows": "none"}, r"^rows = none: {odd} of 3 refuses it: must be one of "),
    ("grouped_mm", {"capacity": 3}, r"^capacity = None on {others}; 3 on {odd}: must be the same"),
    ("grouped_mm", {"offs": lambda x: x[:-1]}, r"^offs\.shape\[0\] = 2: {odd} of 3 refuses it: "),
    ("output_projection", {"implementation": "x"},
     r"^implementation = None on {others}; x on {odd}: must be the same on every rank"),
]  # fmt: skip


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_what_one_rank_does_otherwise_is_refused_on_every_rank(ranks: Ranks, odd: int) -> None:
    """Whichever rank it is: first, last, or one between."""
    others = [i for i in range(3) if i != odd]
    words = f"ranks {others[0]}, {others[1]}"
    for function, changes, message in DIFFERENT:
        expected = message.replace("{odd}", f"rank {odd}").replace("{others}", words)
        if odd == 0 and "{others}" in message:  # its value comes first
            expected = rf"(?=.* on rank 0[;:])(?=.* on {words}[;:])"
        refused(ranks.run(_by_one, odd, function, _sent(changes), ranks=3), expected)


def _sent(changes: dict[str, Any]) -> int:
    """Functions do not travel; the place of the changes in the table does."""
    return next(i for i, (_, given, _) in enumerate(DIFFERENT) if given is changes)


def _by_one(group: Any, odd: int, function: str, place: int) -> None:
    distributed_misuse.by_one(group, odd, function, **DIFFERENT[place][1])


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("long refusal", r"^x = yyy.*: rank {odd} of 3 refuses it: rule r{9000}\. remedy\.$"),
        ("failure", r"^call = TypeError: rank {odd} of 3 refuses it: no such thing\. Change the "),
        ("long difference", r"^x = y{60}… on rank.*; y{60}… on rank.*: must be the same on every "),
    ],
)
def test_nothing_is_too_long_to_be_exchanged(
    ranks: Ranks, what: str, message: str, odd: int
) -> None:
    made = ranks.run(distributed_misuse.agreeing, odd, what, ranks=3)
    refused(made, message.replace("{odd}", str(odd)))
    assert ranks.run(distributed_misuse.agreeing, odd, "nothing", ranks=3) == ["made"] * 3


def _of_first_and_last(group: Any) -> Any:
    """The check with a fault: only the first and the last rank are compared."""
    from kernelseam.distributed import agreement

    right = agreement._exchanged
    with mock.patch.object(
        agreement, "_exchanged", lambda *given: [(x := right(*given))[0], x[0], x[-1]]
    ):
        return distributed_misuse.agreeing(group, 1, "long difference")


def test_a_check_that_leaves_ranks_out_would_be_seen(ranks: Ranks) -> None:
    assert ranks.run(_of_first_and_last, ranks=3) == ["made"] * 3


def test_many_ranks_are_named_by_spans() -> None:
    from kernelseam.distributed.agreement import _named

    assert _named([3]) == "rank 3"
    assert _named([0, 1]) == "ranks 0, 1"
    assert _named([0, 1, 2, 4, 6, 7, *range(9, 1024)]) == "ranks 0 to 2, 4, 6, 7, 9 to 1023"


NAMES = ("ring", "heads")


@pytest.mark.parametrize(
    ("mesh", "names", "message"),
    [
        (
            [[0, 2], [1, 3]],
            NAMES,
            (
                r"^group = the DeviceMesh \[\[0, 2\], \[1, 3\]\]: must list its ranks in ascending "
                r"order: shards lie on ranks by their number\. Make the mesh of \[\[0, 1\], \["
            ),
        ),
        ([[1, 0], [3, 2]], NAMES, r"Make the mesh of \[\[0, 1\], \[2, 3\]\]\.$"),
        ([[2, 3], [0, 1]], NAMES, r"Make the mesh of \[\[0, 1\], \[2, 3\]\]\.$"),
        ([3, 2, 1, 0], ("ring",), r"Make the mesh of \[0, 1, 2, 3\]\.$"),
        ([[0, 1], [2, 3]], None, r"^group = a DeviceMesh without names: must name its two dimens"),
        ([[[0, 1], [2, 3]]], ("a", "b", "c"), r"^group = a DeviceMesh of 3 dimensions: "),
    ],
    ids=str,
)
def test_a_mesh_whose_order_is_not_the_ranks_is_refused(
    ranks: Ranks, mesh: list[Any], names: tuple[str, ...] | None, message: str
) -> None:
    functions = ["attention"] if isinstance(mesh[0], list) else [
        "attention", "attention_varlen", "attention_paged", "qkv_projection", "shard", "unshard",
        "shard_qkv", "shard_lengths", "explain", "grouped_mm",
    ]  # fmt: skip
    for function in functions:
        refused(ranks.run(distributed_misuse.meshes, mesh, names, function), message)


@pytest.mark.parametrize("check", [False, True])
def test_what_pages_do_not_fit_is_refused(ranks: Ranks, check: bool) -> None:
    q = distributed_misuse.calls(None)["attention_paged"]["q"]
    for changes, message in (
        ({"q": q[0]}, r"^q = \(1, 2, 8\): {by}must be \[B, S_q, H, D\]\. Reshape it\.$"),
        ({"q": q.clone().requires_grad_()}, r"^q\.requires_grad = True: {by}gradients do not flow"),
        ({"block_table": torch.ones(2, 3, dtype=torch.int64)},
         r"^block_table = torch\.int64 \[2, 3\]: {by}must be torch\.int32, of shape \[2, 3\]"),
        ({"kv_lengths": torch.ones(1, dtype=torch.int32)},
         r"^kv_lengths = torch\.int32 \[1\]: {by}must be torch\.int32, of shape \[2\]\. "),
        ({"kv_lengths": torch.tensor([2, -5], dtype=torch.int32)},
         r"^kv_lengths\[1\] = -5: {by}must be from 0 to "),
        ({"out_dtype": torch.int8}, r"^out_dtype = int8: {by}must be one of float16, bfloat16, "),
        ({"out_dtype": ""}, r"^out_dtype = '': {by}must be one of "),
        ({"sinks": torch.zeros(3)},
         r"^sinks = torch\.float32 \[3\]: {by}must be torch\.float32, of shape \[2\]\. Pass one"),
        ({"sinks": torch.zeros(2).double()}, r"^sinks = torch\.float64 \[2\]: {by}must be torch\."),
        ({"return_lse": "no"}, r"^return_lse = no: {by}must be True or False\. Pass a bool\.$"),
    ):  # fmt: skip
        made = ranks.run(
            distributed_misuse.call, "attention_paged", check=check, ranks=2, **changes
        )
        refused(made, message.replace("{by}", "rank 0 of 2 refuses it: " if check else ""))


_FIVE = torch.arange(5, dtype=torch.int32)


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        ("attention_varlen", {"cu_seqlens": [0, 2.9, 6]}, r"^cu_seqlens\[1\] = 2\.9: must be an "),
        ("attention_varlen", {"cu_seqlens": torch.tensor([0, 2.9])}, r"^cu_seqlens\[0\] = 0\.0:"),
        ("attention_varlen", {"cu_seqlens": torch.tensor([False, True])}, r"^cu_seqlens\[0\] = Fa"),
        ("attention_varlen", {"cu_seqlens": "06"}, r"^cu_seqlens = 06: must be a list or a "),
        ("attention_varlen", {"cu_seqlens": [0, 7]}, r"^cu_seqlens = \[0, 7\]: must not decrease"),
        ("attention", {"score_mod": _half, "alibi_slopes": torch.ones(2)},
         r"^alibi_slopes = given: is added to parts of .*\. Add slopes\[h\] \* -abs\(q_id"),
        ("attention", {"mask_mod": _shorter, "kv_lengths": torch.ones(1, dtype=torch.int32)},
         r"^kv_lengths = given: are of entries, and a function that reads q_len or kv_len takes "),
        ("attention", {"score_mod": lambda s, b, h, q, k: s + _LEARNT[h]},
         r"^score_mod = captures a tensor that wants a gradient: over several ranks there is none"),
        ("attention", {"sinks": torch.zeros(2, dtype=torch.int8)}, r"^sinks = torch\.int8 \[2\]:"),
        ("attention", {"alibi_slopes": torch.zeros(2).half()}, r"^alibi_slopes = torch\.float16 "),
        ("attention", {"alibi_slopes": torch.zeros(3, 2)}, r"^alibi_slopes = torch\.float32 \[3"),
        ("attention", {"kv_lengths": torch.tensor([5], dtype=torch.int32)},
         r"^kv_lengths\[0\] = 5: must be from 0 to S_k of all ranks = 4\. "),
        ("attention", {"softcap": 0}, r"^softcap = 0\.0: must be greater than 0\. "),
        ("attention", {"out_dtype": ""}, r"^out_dtype = '': must be one of "),
        ("grouped_mm", {"b": []}, r"^b = 0 steps: must have weights\. Give \[E/n, K, N\]\.$"),
        ("grouped_mm", {"b": torch.zeros(1, 3, 3)},
         r"^b = \(1, 3, 3\): must be \[1, 4, N\], of the experts of one of 1 ranks\. Pass this"),
        ("grouped_mm", {"b": [abs, torch.zeros(2, 3, 3)]}, r"^b\[1\] = .*: must be \[1, K, N\]"),
        ("grouped_mm", {"b": torch.zeros(1, 4, 3).double()}, r"^b = torch\.float64: must be tor"),
        ("grouped_mm", {"b": [torch.zeros(1, 4, 3), lambda x: x[1:]]},
         r"^b\[1\] = a function that makes \[4, 3\] of \[5, 3\]: must return as many rows\. "),
        ("grouped_mm", {"offs": torch.tensor([5])}, r"^offs = torch\.int64: must be int32\. "),
        ("grouped_mm", {"offs": torch.tensor([6], dtype=torch.int32)},
         r"^offs\[0\] = 6: must be from 0, the end before, to T = 5 \(rank 0 of 1\)\. Give asc"),
        ("grouped_mm", {"a": torch.zeros(5, 4, dtype=torch.int8)}, r"^a = torch\.int8: must be "),
        ("grouped_mm", {"capacity": 0}, r"^capacity = 0: must be from 1 to "),
        ("grouped_mm", {"chunks": 0}, r"^chunks = 0: must be from 1 to "),
        ("grouped_mm", {"a_indices": _FIVE, "capacity": 3},
         r"^capacity = 3: is for rows of a, not for tokens'\. Leave out it or a_indices\.$"),
        ("grouped_mm", {"a_indices": _FIVE, "chunks": 3}, r"^chunks = 3: is for rows of a, not "),
        ("grouped_mm", {"out_factors": torch.ones(5)}, r"^out_factors = given: is for tokens'"),
        ("grouped_mm", {"a_indices": _FIVE.long()}, r"^a_indices = torch\.int64 \[5\]: must be to"),
        ("grouped_mm", {"a_indices": _FIVE + 1}, r"^a_indices\[4\] = 5: must be from 0 to 4, a "),
        ("grouped_mm", {"a_indices": _FIVE, "out_factors": torch.ones(4)},
         r"^out_factors = torch\.float32 \[4\]: must be torch\.float32 \[T\] = \[5\]\. Give one"),
        ("grouped_mm", {"a_indices": _FIVE, "b": [torch.zeros(1, 4, 3), abs]},
         r"^b\[1\] = a function: must be weights where a_indices is given: their products' rows"),
        ("grouped_mm", {"a_indices": _FIVE[:3]},
         r"^offs\[0\] = 5: must be from 0, the end before, to T = 3 \(rank 0 of 1\)\. Give asc"),
        ("grouped_mm", {"precision": "tf33"}, r"^precision = tf33: must be one of ieee, "),
        ("explain", {"machine": 0}, r"^machine = 0: must be a Machine\. "),
        ("explain", {"order": ""}, r"^order = '': must be one of contiguous, balanced\. "),
        ("shard", {"x": None}, r"^x = NoneType: must be a torch tensor\. "),
        ("shard", {"causal": "no"}, r"^causal = no: must be True or False\. "),
        ("unshard", {"dim": 1.0}, r"^dim = 1\.0: must be an integer\. "),
        ("unshard", {"dim": 2}, r"^dim = 2: must be from -2 to 1\. Name an axis of x\.$"),
        ("shard_lengths", {"kv_lengths": torch.ones(2)}, r"^kv_lengths = torch\.float32: must be"),
        ("Machine", {"products": 0}, r"^products = 0\.0: must be greater than 0\. Give a rate "),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    alone: Any, function: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValue, match=message):
        distributed_misuse.call(alone, function, **changes)


def test_ranks_of_a_host_that_are_no_number(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelseam.distributed.costs import machine_of

    machine_of.cache_clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "eight")
    with pytest.raises(InvalidValue, match=r"^LOCAL_WORLD_SIZE = eight: must be a number of ranks"):
        distributed_misuse.call(alone, "explain")


def test_calls_like_one_before_are_told_from_others(alone: Any) -> None:
    """What was checked is known by shapes, dtypes and options with their types; no operands beside
    q, k and v are, nor more than the last calls."""
    from kernelseam.distributed import calls

    calls._setups.clear()
    first = distributed_misuse.call(alone, "attention", causal=True)
    assert len(calls._setups) == 1
    again = distributed_misuse.call(alone, "attention", causal=True)
    assert torch.equal(again, first) and len(calls._setups) == 1
    with pytest.raises(InvalidValue, match=r"^causal = 1: must be True or False\. "):
        distributed_misuse.call(alone, "attention", causal=1)
    out, lse = distributed_misuse.call(alone, "attention", causal=True, return_lse=True)
    assert out.shape[:3] == lse.shape and len(calls._setups) == 2
    distributed_misuse.call(alone, "attention", sinks=torch.zeros(2))
    assert len(calls._setups) == 2
    for scale in range(1, 40):
        distributed_misuse.call(alone, "attention", scale=float(scale))
    assert len(calls._setups) == calls._SETUPS


def test_equal_meshes_of_other_groups_are_told_apart(alone: Any) -> None:
    """torch takes meshes of the same ranks for equal; what was destroyed is refused each time."""
    from kernelseam.distributed import calls
    from torch.distributed.device_mesh import DeviceMesh

    groups = [dist.new_group([0]) for _ in range(2)]
    meshes = [DeviceMesh.from_group(x, "cpu") for x in groups]
    assert meshes[0] == meshes[1] and groups[0] != groups[1]
    calls._setups.clear()
    for mesh in meshes * 2:
        distributed_misuse.call(mesh, "attention")
    assert [x.around.axis.group for x in calls._setups.values()] == groups
    distributed_misuse.call(groups[1], "attention")
    dist.destroy_process_group(groups[1])
    for gone in (meshes[1], groups[1]):
        with pytest.raises(InvalidValue, match=r"^group = a group that was destroyed: must be a g"):
            distributed_misuse.call(gone, "attention")
    distributed_misuse.call(meshes[0], "attention")
    both = DeviceMesh.from_group(
        [groups[0], dist.new_group([0])], "cpu", mesh=[[0]], mesh_dim_names=("ring", "heads")
    )
    distributed_misuse.call(both, "attention", method="mesh")
    dist.destroy_process_group(groups[0])
    with pytest.raises(InvalidValue, match=r"^group = a group that was destroyed: "):
        distributed_misuse.call(both, "attention", method="mesh")


@pytest.mark.parametrize(
    ("function", "operand", "changes"),
    [
        *(("attention", "q", {"method": m}) for m in ("ring", "all_gather", "ulysses")),
        ("qkv_projection", "input", {}),
        ("output_projection", "attn_out", {}),
        ("grouped_mm", "a", {}),
        ("unshard", "x", {}),
    ],
)
def test_gradients_are_not_differentiated_again(
    ranks: Ranks, function: str, operand: str, changes: dict[str, Any]
) -> None:
    for error in ranks.run(distributed_misuse.twice, function, operand, ranks=2, **changes):
        assert isinstance(error, InvalidValue), error
        assert f"gradients of kernelseam.distributed.{function} cannot be diff" in str(error)
