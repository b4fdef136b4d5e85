"""Pages that entries share, and drafts that form a tree: what is refused, the parts of
the plan, and what the functions compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.absent import product
from kernelseam.contract import ArchRow, Device, DeviceLimits
from kernelseam.descriptors import Attention
from kernelseam.errors import InvalidValue
from kernelseam.kernels.attention.prefix_groups import PREFIX_GROUPS, shared_part
from kernelseam_cuda import archs
from kernelseam_cuda.sm90.attention_prefix import PREFIX_GROUPS as HOPPER_GROUPS

H, H_KV, D, PAGE = 4, 2, 16, 4
RNG = np.random.default_rng(5)
ROW: ArchRow = archs.ROWS["sm_90a"]


def described(**changes: Any) -> Attention:
    """64 requests that a server decodes."""
    fields: dict[str, Any] = {
        "batch": 64,
        "num_heads": 32,
        "kv_heads": 8,
        "S_q": 1,
        "S_k": 8448,
        "head_dim": 128,
        "dtype": "bfloat16",
        "causal": True,
        "block_table": 0,
        "kv_lengths": 0,
        "pages": 20000,
        "page_size": 16,
        "table_width": 528,
        "prefix_groups": 1,
    }
    return Attention(**{**fields, **changes})


def test_refused_without_pages() -> None:
    words = "prefix_groups = 1: is about pages that entries have in common. Give a block_table"
    with pytest.raises(InvalidValue, match=words):
        Attention(batch=1, num_heads=1, S_q=1, S_k=8, head_dim=8, dtype="float32", prefix_groups=1)
    with pytest.raises(InvalidValue, match="prefix_groups = 0: must be from 1 to"):
        described(prefix_groups=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix_groups": None}, "prefix_groups is not given: it computes the groups apart"),
        ({"window": (100, 0)}, "window is not supported by this kernel"),
        ({"mask": 0}, "mask is not supported by this kernel"),
        ({"batch_invariant": True}, "batch_invariant is not supported by this kernel"),
        ({"batch": 0}, "there are no queries"),
        (
            {"S_q": 2, "stride_q_batch": 4 * 4096},
            "queries of entries lie 16384 elements apart: it takes S_q·row, 256",
        ),
        (
            {"dtype_kv": "float8_e4m3fn", "k_scales": 0, "v_scales": 0},
            "scales are of entries: it takes those of heads, of one number, or of blocks",
        ),
        ({"dtype": "float64"}, "the shared part: it has no float64"),
    ],
)
def test_refusals_have_reasons(changes: dict[str, Any], words: str) -> None:
    assert PREFIX_GROUPS.refuse(described(**changes).problem(), ROW) == words


def test_parts_of_a_plan() -> None:
    """The shared part has the rows of all entries, in parts of the keys that fill the device; own
    parts are decoded; nothing of the workspace overlaps."""
    p, device = described().problem(), Device("cuda", 0, "sm_90a", limits=DeviceLimits(132))
    for composition, kernel in (
        (PREFIX_GROUPS, "attention_forward"),
        (HOPPER_GROUPS, "attention_forward_sm90"),
    ):
        assert composition.refuse(p, ROW) is None
        tile = composition.tile(p, ROW, device)
        assert composition.takes(p, tile, ROW, device)
        launches = composition.launches(p, tile, device)
        assert [x.kernel.entry for x in launches.kernels] == [
            *("common_pages", "prefix_groups", kernel),
            *("merge_states", "attention_decode", "merge_states"),
        ]
        forward, decode = launches.kernels[2].problem, launches.kernels[4].problem
        assert (forward.batch, forward.S_q, forward.total_q) == (3, 64, 64)
        assert (decode.batch, decode.S_q, decode.S_k) == (64, 1, 8448)
        tables = launches.kernels[1].workspace
        assert launches.kernels[2].workspace["q_offsets"] == tables["shared_rows"]
        assert launches.kernels[2].workspace["table"] == tables["shared_table"]
        assert launches.kernels[4].workspace["table"] == tables["own_table"]
        assert launches.kernels[4].workspace["lengths"] == tables["own_lengths"]
        assert "q_offsets" not in launches.kernels[4].workspace
        more = composition.tile(replace(p, prefix_groups=4), ROW, device)
        assert more.shared == tile.shared, "the choice is that of one group"


@pytest.mark.parametrize("batch", [2, 16, 64])
@pytest.mark.parametrize("keys", [1280, 8448])
def test_parts_for_another_merge_are_of_no_cluster(batch: int, keys: int) -> None:
    p, device = described(batch=batch, S_k=keys).problem(), product("H100")
    tile = HOPPER_GROUPS.tile(p, ROW, device)
    assert HOPPER_GROUPS.takes(p, tile, ROW, device)
    for x in HOPPER_GROUPS.launches(p, tile, device).kernels:
        config = x.kernel.config(x.problem, x.tile, ROW, device)
        assert config.cluster == (1, 1, 1)
        assert config.refuse(ROW) is None


def test_groups_leave_the_class_its_tile() -> None:
    whole = shared_part(described(prefix_groups=7).problem())
    assert whole.batch == 15 and not whole.spec.causal and whole.spec.lse
    assert product("H100").arch == "sm_90a"


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_numpy_computes_the_same() -> None:
    k, v, q = draw(20, PAGE, H_KV, D), draw(20, PAGE, H_KV, D), draw(3, 1, H, D)
    table = np.array([[1, 2, 3], [1, 2, 4], [1, 2, 5]], np.int32)
    lengths = np.array([9, 12, 10], np.int32)
    plain = kernelseam.attention_paged(q, k, v, table, lengths)
    shared, lse = kernelseam.attention_paged(
        q, k, v, table, lengths, prefix_groups=2, return_lse=True
    )
    np.testing.assert_array_equal(shared, plain)
    assert lse.shape == (3, H, 1)


def test_torchs_operator_takes_groups() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    k, v, q = (torch.tensor(draw(*s)) for s in ((20, PAGE, H_KV, D),) * 2 + ((2, 1, H, D),))
    table = torch.tensor([[1, 2], [1, 3]], dtype=torch.int32)
    lengths = torch.tensor([7, 8], dtype=torch.int32)
    args = (q, k, v, table, lengths)
    from kernelseam.interop.torch_library import attention  # noqa: F401

    out, _ = torch.ops.kernelseam.attention_paged(*args, prefix_groups=1, return_lse=False)
    torch.testing.assert_close(out, kernelseam.attention_paged(*args))


PARENTS = [[-1, 0, 0, 2, 1], [-1, -1, 0, 1, 3]]


def test_ancestors_follow_parents() -> None:
    bits = kernelseam.tree_ancestors(PARENTS)
    assert bits.dtype == np.int32 and bits.tolist() == [[1, 3, 5, 13, 19], [1, 2, 5, 10, 26]]
    chain = kernelseam.tree_ancestors(np.arange(32) - 1)
    assert chain[0] == 1 and chain[31] == -1, "32 drafts take the sign, too"
    assert kernelseam.tree_ancestors(np.zeros((2, 0), int)).shape == (2, 0)
    long = kernelseam.tree_ancestors([[-1] * 32 + [31] * 32])
    assert long.dtype == np.int64 and long[0, 31] == 1 << 31
    assert long[0, 32] == 1 << 31 | 1 << 32 and long[0, 63] == (1 << 31) - (1 << 63)


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ([0], r"parents\[0\] = 0: must be −1 or a draft before it"),
        ([[-1, 0], [-1, -2]], r"parents\[1, 1\] = -2: must be −1 or a draft before it"),
        ([-1] * 65, r"parents = int64 of shape \[65\]: must be integers \[n\] or \[B, n\], n up"),
        ([0.5], r"parents = float64 of shape \[1\]: must be integers"),
        ([[-1, 0], [-1]], r"parents = list: must be rows of one length. Pad shorter ones with −1"),
    ],
)
def test_parents_are_checked(parents: Any, words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        kernelseam.tree_ancestors(parents)


def test_ancestors_are_checked() -> None:
    lengths = np.zeros(2, np.int32)
    with pytest.raises(InvalidValue, match=r"an array of shape \[5\]: must be \[B, n\]"):
        kernelseam.tree_mask(np.zeros(5, np.int32), lengths)
    with pytest.raises(InvalidValue, match=r"must be \[T\] with cu_seqlens_q"):
        kernelseam.tree_mask(np.zeros((2, 5), np.int32), lengths, np.zeros(3, np.int32))
    for dtype, most in ((np.int32, 32), (np.int64, 64)):
        kernelseam.tree_mask(np.zeros((2, most), dtype), lengths)
        with pytest.raises(InvalidValue, match=rf"\[2, {most + 1}\]: must be .* n up to {most} of"):
            kernelseam.tree_mask(np.zeros((2, most + 1), dtype), lengths)
    with pytest.raises(InvalidValue, match=r"^ancestors = of int16: must be an array of int"):
        kernelseam.tree_mask(np.zeros((2, 5), np.int16), lengths)
    ancestors = np.zeros((2, 5), np.int32)
    for wrong, kind in (([3, 4], "list"), (None, "NoneType"), (lengths * 1.0, "float64")):
        with pytest.raises(InvalidValue, match=f"^kv_lengths = of {kind}: must be an array of int"):
            kernelseam.tree_mask(ancestors, wrong)
    with pytest.raises(InvalidValue, match="^ancestors = of list: must be an array of int32"):
        kernelseam.tree_mask([[1, 3]], lengths)
    with pytest.raises(InvalidValue, match="^cu_seqlens_q = of list: must be an array of int32"):
        kernelseam.tree_mask(ancestors[0], lengths, [0, 2, 5])


def test_a_tree_of_other_drafts_than_the_queries_is_refused() -> None:
    lengths, table = np.array([11, 9], np.int32), np.zeros((2, 3), np.int32)
    k, v, q = draw(6, PAGE, H_KV, D), draw(6, PAGE, H_KV, D), draw(2, 5, H, D)
    for shape in ((2, 4), (2, 6), (1, 5), (3, 5)):
        tree = kernelseam.tree_mask(np.ones(shape, np.int32), lengths)
        rule = rf"^mask_mod = a tree_mask of ancestors \[{shape[0]}, {shape[1]}\]: must be of q's "
        rule += r"batch and queries, \[2, 5\]. Give a word for each query"
        with pytest.raises(InvalidValue, match=rule):
            kernelseam.attention_paged(q, k, v, table, lengths, causal=False, mask_mod=tree)
        with pytest.raises(InvalidValue, match=rule):
            kernelseam.attention(
                q.swapaxes(1, 2), q.swapaxes(1, 2), q.swapaxes(1, 2), mask_mod=tree
            )
    offsets = np.array([0, 5, 10], np.int32)
    tree = kernelseam.tree_mask(np.ones(9, np.int32), lengths, offsets)
    with pytest.raises(InvalidValue, match=r"ancestors \[9\]: must be of q's rows, \[10\]"):
        kernelseam.attention_paged(
            q.reshape(10, H, D),
            *(k, v, table, lengths),
            cu_seqlens_q=offsets,
            max_seqlen_q=5,
            causal=False,
            mask_mod=tree,
        )


def test_drafts_beyond_32_see_their_ancestors() -> None:
    """The paths of a comb: draft i follows draft i − 2."""
    count, lengths = 40, np.array([43], np.int32)
    k, v, q = draw(1, 43, H_KV, D), draw(1, 43, H_KV, D), draw(1, count, H, D)
    ancestors = kernelseam.tree_ancestors([np.maximum(np.arange(count) - 2, -1)])
    tree = kernelseam.tree_mask(ancestors, lengths)
    out = kernelseam.attention(q, k, v, layout="bshd", mask_mod=tree)
    for i in range(count):
        seen = [0, 1, 2, *(3 + j for j in range(i % 2, i + 1, 2))]
        alone = kernelseam.attention(q[:, i : i + 1], k[:, seen], v[:, seen], layout="bshd")
        np.testing.assert_allclose(out[0, i], alone[0, 0], atol=1e-5)


def test_drafts_see_their_ancestors() -> None:
    """Each draft's result is that of the path to it, decoded alone."""
    lengths, table = np.array([11, 9], np.int32), np.array([[3, 0, 4], [5, 1, 2]], np.int32)
    k, v, q = draw(6, PAGE, H_KV, D), draw(6, PAGE, H_KV, D), draw(2, 5, H, D)
    ancestors = kernelseam.tree_ancestors(PARENTS)
    out = kernelseam.attention_paged(
        *(q, k, v, table, lengths), causal=False, mask_mod=kernelseam.tree_mask(ancestors, lengths)
    )
    for b, n in enumerate(lengths):
        keys, values = (x[table[b]].reshape(1, -1, H_KV, D) for x in (k, v))
        for i in range(5):
            path, at = [], i
            while at >= 0:
                path, at = [at, *path], PARENTS[b][at]
            seen = [*range(n - 5), *(n - 5 + j for j in path)]
            alone = kernelseam.attention(
                q[b : b + 1, i : i + 1], keys[:, seen], values[:, seen], layout="bshd"
            )
            np.testing.assert_allclose(out[b, i], alone[0, 0], atol=1e-5)
    offsets = np.array([0, 5, 10], np.int32)
    packed = kernelseam.attention_paged(
        q.reshape(10, H, D),
        *(k, v, table, lengths),
        cu_seqlens_q=offsets,
        max_seqlen_q=5,
        causal=False,
        mask_mod=kernelseam.tree_mask(ancestors.reshape(-1), lengths, offsets),
    )
    np.testing.assert_allclose(packed.reshape(out.shape), out, atol=1e-6)
