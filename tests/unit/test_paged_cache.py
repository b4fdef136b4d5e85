"""append_paged, gather_paged and copy_pages on host arrays, their descriptor's refusals, and what
is checked at each launch. The numbers are the parity matrix's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernelseam
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam import DType, PagedCache
from kernelseam.contract import Device, DeviceLimits
from kernelseam.descriptors.cache import contents
from kernelseam.errors import InvalidValue
from kernelseam.kernels.cache.cache import CACHE
from kernelseam.parity.running.run import Target, run_case
from kernelseam.plugins import plugins
from kernelseam.samples.cache_case import CacheCase
from kernelseam.tuned.classes import problem_class, representative

B, S, H, G, D, PAGES, SIZE = 2, 3, 4, 2, 8, 5, 4
TABLE, LENGTHS = np.array([[3, 1], [0, 4]], np.int32), np.array([5, 3], np.int32)
E4M3: Any = ml_dtypes.float8_e4m3fn


def normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def pages(dtype: Any = np.float32) -> Any:
    return np.zeros((PAGES, SIZE, G, D), dtype)


def tables() -> tuple[Any, Any]:
    angles = np.arange(2 * SIZE)[:, None] / 10.0 ** np.arange(D // 2)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def test_new_tokens_are_an_entrys_last() -> None:
    k, v, k_pages, v_pages = normal(B, S, G, D), normal(B, S, G, D) + 1, pages(), pages()
    with kernelseam.trace() as launches:
        assert (
            kernelseam.append_paged(k, v, k_pages, v_pages, block_table=TABLE, kv_lengths=LENGTHS)
            is None
        )
    assert len(launches) == 1
    for into, x in ((k_pages, k), (v_pages, v)):
        np.testing.assert_array_equal(into[3, 2:], x[0, :2])
        np.testing.assert_array_equal(into[1, 0], x[0, 2])
        np.testing.assert_array_equal(into[0, :3], x[1])
        assert not into[2].any() and not into[4].any() and not into[3, :2].any()
    found = kernelseam.gather_paged(k_pages, v_pages, block_table=TABLE, kv_lengths=LENGTHS)
    assert found[0].shape == (B, 2 * SIZE, G, D)
    np.testing.assert_array_equal(found[0][0, 2:5], k[0])
    np.testing.assert_array_equal(found[1][1, :3], v[1])


def test_slots_of_64_bits_and_those_that_are_negative() -> None:
    k, v, k_pages, v_pages = normal(5, G, D), normal(5, G, D) + 1, pages(), pages()
    slots = np.array([7, -1, 0, 19, -1])
    kernelseam.append_paged(k, v, k_pages, v_pages, slot_mapping=slots)
    flat = k_pages.reshape(-1, G, D)
    np.testing.assert_array_equal(flat[slots[slots >= 0]], k[slots >= 0])
    assert np.count_nonzero(flat.any((1, 2))) == 3
    gathered, _ = kernelseam.gather_paged(k_pages, v_pages, slot_mapping=slots)
    np.testing.assert_array_equal(gathered[slots >= 0], k[slots >= 0])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
def test_the_orders_of_axes(layout: str, kv_layout: str) -> None:
    k, q = normal(B, S, G, D), normal(B, S, H, D)
    k_pages = pages()
    places: dict[str, Any] = {"block_table": TABLE, "kv_lengths": LENGTHS}
    given: dict[str, Any] = {**places, "rotary": tables(), "k_norm": normal(D), "q_norm": normal(D)}
    wanted = kernelseam.append_paged(k, k, k_pages, pages(), q=q, **given)
    if layout == "bhsd":
        k, q = k.swapaxes(1, 2), q.swapaxes(1, 2)
    into = pages().swapaxes(1, 2) if kv_layout == "hnd" else pages()
    orders = {"layout": layout, "kv_layout": kv_layout}
    found = kernelseam.append_paged(k, k, into, into.copy(), q=q, **given, **orders)
    np.testing.assert_array_equal(found.swapaxes(1, 2) if layout == "bhsd" else found, wanted)
    np.testing.assert_array_equal(into.swapaxes(1, 2) if kv_layout == "hnd" else into, k_pages)


def test_q_may_be_written_over() -> None:
    q, k = normal(B, S, H, D), normal(B, S, G, D)
    given: dict[str, Any] = {"block_table": TABLE, "kv_lengths": LENGTHS, "rotary": tables()}
    wanted = kernelseam.append_paged(k, None, pages(), None, q=q, **given)
    assert kernelseam.append_paged(k, None, pages(), None, q=q, out=q, **given) is q
    np.testing.assert_array_equal(q, wanted)


def test_scales_of_tokens_are_those_that_attention_takes() -> None:
    k, v, q = normal(B, S, G, D), normal(B, S, G, D) * 9, normal(B, 1, H, D).astype("f2")
    eight, scales = (pages(E4M3), pages(E4M3)), (np.zeros((PAGES, SIZE, G), np.float32),) * 2
    scales = scales[0], scales[0].copy()
    whole = pages("f2"), pages("f2")
    places: dict[str, Any] = {"block_table": TABLE, "kv_lengths": LENGTHS}
    of = dict(zip(("k_scales", "v_scales"), scales, strict=True))
    kernelseam.append_paged(k, v, *eight, **places, **of)
    np.testing.assert_allclose(scales[1][0, :3], np.abs(v[1]).max(-1) / 448, rtol=1e-6)
    kernelseam.append_paged(k, v, *whole, **places)
    lengths = np.array([0, 3], np.int32)
    found = kernelseam.attention_paged(q, *eight, TABLE, lengths, scale_block=1, **of)
    wanted = kernelseam.attention_paged(q, *whole, TABLE, lengths)
    np.testing.assert_allclose(found, wanted, atol=0.7)
    back = kernelseam.gather_paged(*eight, **places, **of, out_dtype="float32", max_seqlen_k=5)
    np.testing.assert_allclose(back[1][1, :3], v[1], atol=np.abs(v).max() / 16)


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**-121, np.nan, np.inf])
def test_given_scales_that_rows_cannot_be_divided_by(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused where they are read; where not, what is less than the least counts as it."""
    k, eight = normal(B, S, G, D), (pages(E4M3), pages(E4M3))
    k[0, 0, 0] = 0
    scales, ones = np.array([scale, 2.0], np.float32), np.ones(G, np.float32)
    of: dict[str, Any] = {"block_table": TABLE, "kv_lengths": LENGTHS, "v_scales": scales}
    for name, first in (("k_scales", scales), ("v_scales", ones)):
        rule = re.escape(
            f"{name}[0] = {scale}: must be finite and at least 2⁻¹²⁰: rows are divided"
        )
        with pytest.raises(InvalidValue, match=rule):
            kernelseam.append_paged(k, k, *eight, **of, k_scales=first)
    assert not eight[0].astype("f4").any()
    monkeypatch.setattr(contents, "read_numbers", lambda *operands: {})
    kernelseam.append_paged(k, k, *eight, **of, k_scales=scales)
    used = np.fmax(scales, np.float32(2.0**-120))[:, None]
    for x in eight:
        np.testing.assert_array_equal(x[3, 2:], np.clip(k[0, :2] / used, -448, 448).astype(E4M3))
        assert not x[3, 2, 0].astype("f4").any()


def test_keys_beside_values_as_vllm_has_them() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    both = torch.zeros(PAGES, G, SIZE, 2 * D)
    k, v = (torch.from_numpy(normal(6, G, D) + i) for i in range(2))
    slots = torch.tensor([5, 0, -1, 19])
    kernelseam.append_paged(
        k[:4], v[:4], both[..., :D], both[..., D:], slot_mapping=slots, kv_layout="hnd"
    )
    rows = both.transpose(1, 2).flatten(0, 1)
    assert torch.equal(rows[slots[slots >= 0]], torch.cat([k, v], -1)[:4][slots >= 0])
    assert int(rows.any(-1).any(-1).sum()) == 3


def test_the_guide_runs_and_its_tree_is_a_mask() -> None:
    """Shared parts are compared on the page itself."""
    page = (Path(__file__).parents[2] / "docs" / "paged-caches.md").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(compile(block, "docs/paged-caches.md", "exec"), found)
    ancestors, lengths, table = found["ancestors"], found["lengths"], found["table"]
    mask = np.zeros((3, 1, 4, 48), bool)
    for b, n in enumerate(lengths):
        mask[b, :, :, : n - 4] = True
        for i in range(4):
            mask[b, 0, i, n - 4 : n] = [bool(ancestors[b, i] >> j & 1) for j in range(4)]
    pages = found["k_pages"], found["v_pages"]
    wanted = kernelseam.attention_paged(
        found["drafted"], *pages, table, lengths, causal=False, mask=mask
    )
    np.testing.assert_allclose(found["out"], wanted, atol=1e-6)
    assert not np.allclose(
        wanted, kernelseam.attention_paged(found["drafted"], *pages, table, lengths)
    )


def test_pages_are_copied() -> None:
    k_pages, v_pages = normal(PAGES, SIZE, G, D), normal(PAGES, SIZE, G, D).astype(E4M3)
    before = k_pages.copy(), v_pages.copy()
    pairs = np.array([3, 0], np.int32), np.array([2, 4], np.int32)
    kernelseam.copy_pages(k_pages, None, *pairs)
    kernelseam.copy_pages(v_pages, v_pages.copy(), *pairs)
    for after, was in ((k_pages, before[0]), (v_pages, before[1])):
        np.testing.assert_array_equal(after[[2, 4]], was[[3, 0]])
        np.testing.assert_array_equal(after[[0, 1, 3]], was[[0, 1, 3]])


def test_contents_are_read_at_each_launch() -> None:
    k, k_pages, lengths = normal(B, 1, G, D), pages(), LENGTHS.copy()
    call = kernelseam.plan(
        PagedCache.from_arrays(k, None, k_pages, None, block_table=TABLE, kv_lengths=lengths)
    ).bind(check=True)
    for n in (1, 4, 8):
        lengths[:] = n
        k[:] = n
        call()
        np.testing.assert_array_equal(k_pages[TABLE[0, (n - 1) // SIZE], (n - 1) % SIZE], k[0, 0])
    lengths[1] = 9
    with pytest.raises(InvalidValue, match=r"kv_lengths\[1\] = 9: must be from 0 to 8"):
        call()


def refused(**changed: Any) -> Callable[[], Any]:
    fields: dict[str, Any] = {
        "k": normal(B, S, G, D),
        "v": normal(B, S, G, D),
        "k_pages": pages(),
        "v_pages": pages(),
        "block_table": TABLE,
    }
    fields |= changed
    first = [fields.pop(n) for n in ("k", "v", "k_pages", "v_pages")]
    return lambda: kernelseam.append_paged(*first, **fields)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (refused(block_table=None), "slot_mapping = None: one of the two says the places"),
        (refused(slot_mapping=np.zeros((B, S), np.int32)), "slot_mapping = given: one of the two"),
        (refused(q=normal(B, S, H, D)), "q = given: is neither rotated nor normalised"),
        (refused(out=normal(B, S, H, D)), "out = given: is for q. Give q"),
        (refused(v=None), "v = None: belongs to v_pages"),
        (refused(q_norm=normal(D), k_norm=normal(D)), "q_norm = given: there is no q"),
        (refused(k_pages=pages()[..., :4]), r"k_pages = an array of shape \[5, 4, 2, 4\]: must be"),
        (refused(k_pages=pages()[:, :, :1]), r"\[5, 4, 1, 8\]: must be \[P, N, H_kv=2, D=8\]"),
        (refused(k=normal(B, S, G)), "v = an array of shape"),
        (refused(norm_eps=0.0), "norm_eps = 0.0: must be greater than 0"),
        (refused(norm_eps=1e-5), "norm_eps = 1e-05: has no effect without k_norm. Give k_norm, or"),
        (refused(rotary_style="pairs"), "rotary_style = pairs: has no effect without rotary"),
        (refused(k_scales=np.ones(G, np.float32)), "v_scales = None: belongs to k_scales"),
        (
            refused(k_scales=np.ones(G, np.float32), v_scales=np.ones(G, np.float32)),
            "scales = heads: are for rows of float32 in pages of 8 bits",
        ),
        (
            refused(slot_mapping=np.zeros((B, S), np.int32), block_table=None, rotary=tables()),
            r"positions = None: rotation needs positions, which slots do not tell\. Give it\.$",
        ),
        (
            refused(k=normal(6, G, D), v=normal(6, G, D)),
            r"cu_seqlens_q = None: must say which rows an entry has: block_table is of 2\. Give it",
        ),
        (
            refused(k=normal(6, G, D), v=normal(6, G, D), block_table=np.array(0, np.int32)),
            r"block_table = an array of shape \[\]: must be \[B=1, width\]",
        ),
        (
            refused(positions=np.zeros((B, S), np.int32), kv_lengths=LENGTHS),
            "kv_lengths = given: positions say it",
        ),
        (
            refused(cu_seqlens_q=np.array([0, 6], np.int32)),
            r"block_table = an array of shape \[2, 2\]: must be \[sequences=1, width\]",
        ),
        (
            refused(slot_mapping=np.zeros((B, S), np.float32), block_table=None),
            "slot_mapping.dtype = float32: must be int32 or int64",
        ),
        (
            refused(slot_mapping=np.full((B, S), 20), block_table=None),
            r"slot_mapping\[0, 0\] = 20: must be a slot, below pages·page_size = 20",
        ),
        (
            refused(block_table=np.array([[3, 1], [5, 4]], np.int32)),
            r"block_table\[1, 0\] = 5: must be a page, from 0 to 4",
        ),
        (
            refused(
                positions=np.full((B, S), 8, np.int32), rotary=(tables()[0], tables()[1][:, :2])
            ),
            "rotary",
        ),
        (refused(rotary=tuple(x[:0] for x in tables())), "rotary.* 0: must be 1 or more, as there"),
        (
            refused(rotary=tuple(x[:2] for x in tables())),
            r"the position of token\[0, 2\] = 2: must be from 0 to 1, as rotary",
        ),
    ],
)
def test_what_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((InvalidValue, kernelseam.errors.UnknownName), match=message):
        call()


def test_results_of_a_gather_that_are_refused() -> None:
    packed = {"block_table": TABLE, "cu_seqlens_k": np.array([0, 5, 8], np.int32)}
    with pytest.raises(InvalidValue, match="total_k = None: must say how many rows"):
        kernelseam.gather_paged(pages(), pages(), **packed)
    k, v = kernelseam.gather_paged(pages(), pages(), **packed, total_k=8)
    assert k.shape == v.shape == (8, G, D)
    with pytest.raises(
        InvalidValue, match="out_dtype = float16: the array of out.0. is of float32"
    ):
        kernelseam.gather_paged(pages(), pages(), **packed, out=(k, v), out_dtype="float16")
    with pytest.raises(InvalidValue, match=r"cu_seqlens_k\[2\] = 8: must not exceed the 7 rows"):
        kernelseam.gather_paged(pages(), pages(), **packed, total_k=7)
    short = {"block_table": TABLE, "kv_lengths": LENGTHS}
    with pytest.raises(
        InvalidValue,
        match=r"kv_lengths\[0\] = 5: must be at most S = 4, .* raise S \(max_seqlen_k\)",
    ):
        kernelseam.gather_paged(pages(), pages(), **short, max_seqlen_k=4)
    nothing = kernelseam.gather_paged(pages(), None, block_table=TABLE, max_seqlen_k=0)
    assert nothing[0].shape == (B, 0, G, D)
    few = {**packed, "cu_seqlens_k": np.array([0, 5, 7], np.int32), "total_k": 8}
    with pytest.raises(
        InvalidValue, match=r"kv_lengths\[1\] = 3: exceeds the rows that cu_seqlens_k gives"
    ):
        kernelseam.gather_paged(pages(), pages(), **few, kv_lengths=LENGTHS)
    for idle, message in (
        ({**packed, "total_k": 8, "max_seqlen_k": 5}, "max_seqlen_k = 5: is for entries of a b"),
        ({**short, "total_k": 8}, "total_k = 8: is for rows that cu_seqlens_k packs. Leave it"),
        ({"slot_mapping": TABLE, "max_seqlen_k": 2}, "max_seqlen_k = 2: is for entries of a bl"),
        (
            {**packed, "out": (k, v), "total_k": 9},
            r"total_k = 9: the array of out\[0\] is of shape",
        ),
        ({**short, "out_dtype": E4M3}, "out_dtype = float8_e4m3fn: pages are of float32: rows are"),
    ):
        with pytest.raises(InvalidValue, match=message):
            kernelseam.gather_paged(pages(), pages(), **idle)
    scales: dict[str, Any] = dict.fromkeys(("k_scales", "v_scales"), np.ones(G, np.float32))
    with pytest.raises(InvalidValue, match=r"out_dtype = float8_e4m3fn: pages are multiplied by"):
        kernelseam.gather_paged(pages(E4M3), pages(E4M3), block_table=TABLE, **scales)
    with pytest.raises(InvalidValue, match=r"sources = an array of shape \[1\]: must be as long"):
        kernelseam.copy_pages(pages(), None, TABLE[0, :1].copy(), TABLE[0].copy())
    with pytest.raises(InvalidValue, match=r"destinations\[0\] = 7: must be a page.*Correct it"):
        kernelseam.copy_pages(pages(), None, TABLE[0, :1].copy(), np.array([7], np.int32))


@pytest.mark.parametrize(("sources", "twice"), [([0, 1], [3, 3]), ([0, 1], [2, 0])])
def test_pages_that_are_written_twice_or_read_too(sources: list[int], twice: list[int]) -> None:
    """They would be what launches happen to do first."""
    message = rf"destinations\[1\] = {twice[1]}: must differ from those before it, and be no sou"
    with pytest.raises(InvalidValue, match=message):
        kernelseam.copy_pages(pages(), None, *(np.array(x, np.int32) for x in (sources, twice)))


def test_a_class_chooses() -> None:
    def problem(**changed: Any) -> Any:
        fields: dict[str, Any] = {"batch": 1, "S": 4000, "kv_heads": 8, "head_dim": 128}
        fields |= {"pages": 700, "page_size": 16, "slot_mapping": 0, "dtype": "bfloat16"}
        return PagedCache(**{**fields, "k": 256, "v": 256, **changed}).problem()

    assert representative(problem()) == representative(problem(S=4030))
    assert representative(problem()) != representative(problem(page_size=32))
    assert problem_class(problem()) != problem_class(problem(kv_heads=4))


@settings(max_examples=40)
@given(
    direction=st.sampled_from(["append", "gather"]),
    packed=st.lists(st.integers(0, 9), max_size=4),
    dims=st.tuples(st.integers(1, 40), st.integers(0, 40)),
    page_size=st.integers(3, 9),
    places=st.sampled_from(["table", "slots", "slots64"]),
    style=st.sampled_from(["", "halves", "pairs"]),
    norm=st.sampled_from([None, DType.float32, DType.bfloat16]),
    scaled=st.sampled_from([None, "", "heads", "tokens"]),
)
def test_random_problems(
    direction: str,
    packed: list[int],
    dims: tuple[int, int],
    page_size: int,
    places: str,
    style: str,
    norm: DType | None,
    scaled: str | None,
) -> None:
    """``scaled`` None: pages of the tokens' dtype."""
    device = plugins().backend("numpy").runtime.devices()[0]
    appends = direction == "append"
    style, norm = (style, norm) if appends and dims[0] > 1 else ("", None)
    position = "lengths" if places == "table" and appends else "given" if style else ""
    case = CacheCase(
        "random",
        DType.bfloat16,
        direction,
        None if scaled is None else DType.float8_e4m3fn,
        packed=tuple(packed),
        num_heads=3 if style or norm else 0,
        head_dim=dims[0],
        value_dim=dims[1],
        page_size=page_size,
        places=places,
        position=position,
        rotary=style,
        rotary_dim=dims[0] // 2 * 2 if style else None,
        norm=norm,
        scaled=scaled or "",
    )
    run_case(case, Target(device, "numpy", "paged_cache", True)).require()


def by_table(**given: Any) -> Any:
    """The problem of a block table of two pages an entry."""
    sizes = {"batch": B, "S": SIZE, "kv_heads": G, "head_dim": D}
    pages = {"pages": PAGES, "page_size": SIZE, "block_table": 0, "table_width": 2}
    return PagedCache(**sizes, **pages, **given).problem()


@pytest.mark.parametrize(
    ("backend", "arch", "why"),
    [
        ("cuda", "sm_80", "sm_80 has no instructions that convert it"),
        ("cuda", "sm_90a", "sm_90a converts float8_e4m3fn"),
        ("rocm", "gfx1100", "gfx1100 has no instructions that convert it"),
    ],
)
@pytest.mark.parametrize("direction", ["append", "copy"])
def test_pages_that_an_arch_does_not_convert(
    backend: str, arch: str, why: str, direction: str
) -> None:
    toolchain = plugins().backend(backend).toolchain
    assert toolchain is not None
    row, stored = toolchain.arch_row(arch), DType.float8_e4m3fnuz
    copies = {"sources": 0} if direction == "copy" else {}
    dtype = stored if copies else DType.float16
    made = by_table(direction=direction, dtype=dtype, dtype_pages=stored, **copies)
    assert CACHE.refuse(made, row) == f"pages are float8_e4m3fnuz: {why}"
    assert CACHE.tiles(made.spec, row) == ()


@pytest.mark.parametrize(
    ("backend", "arch", "early"),
    [("cuda", "sm_90a", True), ("cuda", "sm_80", False), ("rocm", "gfx942", False)],
)
def test_a_launch_starts_early_where_an_arch_has_that(backend: str, arch: str, early: bool) -> None:
    toolchain = plugins().backend(backend).toolchain
    assert toolchain is not None
    row = toolchain.arch_row(arch)
    device = Device(backend, 0, arch, limits=DeviceLimits(compute_units=100))
    made = by_table(dtype="float16")
    config = CACHE.config(made, CACHE.tile(made, row, device), row, device)
    assert config.programmatic is early and config.refuse(row) is None


def test_strides_and_scales_without_their_operands() -> None:
    given: dict[str, Any] = {"k": normal(B, S, G, D), "k_pages": pages(), "block_table": TABLE}
    for more, words in (
        ({"stride_k_scales_page": 3}, "stride_k_scales_page = 3: describes k_scales"),
        ({"stride_v_pages_page": 3}, "stride_v_pages_page = 3: describes v_pages"),
        ({"direction": np.array(["append"] * 2)}, "must be one of append, gather, copy"),
    ):
        with pytest.raises(InvalidValue, match=re.escape(words)):
            PagedCache.from_arrays(v=None, v_pages=None, **given, **more)
    repeated = np.lib.stride_tricks.as_strided(pages(), strides=(0, *pages().strides[1:]))
    with pytest.raises(InvalidValue, match=r"^v_pages = page stride 0: .* larger\.$"):
        kernelseam.append_paged(
            given["k"], given["k"], pages(), repeated, block_table=given["block_table"]
        )
