"""Projections whose k and v are appended to pages: ragged rows, slots, ends of caches, 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam as ks
import ml_dtypes
import numpy as np
import pytest
from kernelseam import QkvProjection
from kernelseam.descriptors.gemm.problem import HeadsSpec
from kernelseam.errors import InvalidValue
from refusals import Refused, refusals

RNG = np.random.default_rng(3)
H, G, D, HIDDEN, PAGES, SIZE = 4, 2, 8, 24, 12, 4
WIDTH = (H + 2 * G) * D
E4M3, F16 = ml_dtypes.float8_e4m3fn, np.float16
CU, LENGTHS = np.array([0, 3, 3, 9], np.int32), np.array([2, 5, 16], np.int32)
"""The first of three sequences has fewer keys than tokens; two rows belong to none."""


def normal(*shape: int, dtype: Any = F16) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


def drawn(dtype: Any, *, packed: bool, slots: bool, counted: bool, scaled: str) -> dict[str, Any]:
    """Operands of ``fused_qkv_projection`` beside input and weight; pages are written."""
    lead = (11,) if packed else (3, 4)
    places: dict[str, Any] = {"block_table": RNG.permutation(PAGES).reshape(3, 4).astype(np.int32)}
    if slots:
        drawn = RNG.permutation(PAGES * SIZE)[: int(np.prod(lead))].reshape(lead)
        drawn.reshape(-1)[2] = -1
        places = {"slot_mapping": drawn}
    elif packed:
        places["cu_seqlens_q"] = CU
    if counted:
        places["kv_lengths"] = LENGTHS
    for name in ("k", "v"):
        places[f"{name}_pages"] = np.zeros((PAGES, SIZE, G, D), dtype)
        if scaled == "tokens":
            places[f"{name}_scales"] = np.zeros((PAGES, SIZE, G), np.float32)
        elif scaled:
            places[f"{name}_scales"] = np.full(G if scaled == "heads" else 1, 0.03, np.float32)
    return places


def rotary() -> Any:
    angle = np.arange(48)[:, None] / 20 ** (np.arange(D // 2) / (D // 2))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


ASKED = {
    "ragged": (F16, {"packed": True, "slots": False, "counted": False, "scaled": ""}),
    "ragged e4m3": (E4M3, {"packed": True, "slots": False, "counted": True, "scaled": "tokens"}),
    "cached": (F16, {"packed": False, "slots": False, "counted": True, "scaled": ""}),
    "slots": (F16, {"packed": True, "slots": True, "counted": False, "scaled": ""}),
    "slots e4m3": (E4M3, {"packed": False, "slots": True, "counted": False, "scaled": "heads"}),
    "e4m3": (E4M3, {"packed": False, "slots": False, "counted": False, "scaled": "tensor"}),
    "e4m3 unscaled": (E4M3, {"packed": False, "slots": False, "counted": False, "scaled": ""}),
}


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_it_is_the_projection_and_then_the_append(name: str, rotated: bool) -> None:
    """Bit for bit, also with rotation: by the product, where it knows the positions, else by the
    append."""
    dtype, asked = ASKED[name]
    places = drawn(dtype, **asked)
    x = normal(11, HIDDEN) if asked["packed"] else normal(3, 4, HIDDEN)
    weight, bias = normal(WIDTH, HIDDEN), normal(WIDTH)
    tables: dict[str, Any] = {"rotary": rotary()} if rotated else {}
    apart = {n: y.copy() for n, y in places.items()}
    with ks.trace() as launches:
        q = ks.fused_qkv_projection(x, weight, bias, H, G, D, layout="bshd", **tables, **places)
    assert [r.kernel for r in launches] == ["numpy_gemm", "numpy_paged_cache"]
    late = rotated and bool({"kv_lengths", "cu_seqlens_q"} & places.keys())
    early = {} if late else tables
    of_q, k, v = ks.fused_qkv_projection(x, weight, bias, H, G, D, layout="bshd", **early)
    more = {"q": of_q, "out": of_q, **tables} if late else {}
    ks.append_paged(k, v, **apart, **more)
    np.testing.assert_array_equal(q, of_q)
    assert q.dtype == F16
    for n in ("k_pages", "v_pages", "k_scales", "v_scales"):
        if n in places:
            got, want = (y[n].astype(np.float32) for y in (places, apart))
            np.testing.assert_array_equal(got, want)
            assert got.any()


def test_positions_say_where_ragged_rows_go() -> None:
    x, weight = normal(9, HIDDEN), normal(WIDTH, HIDDEN)
    positions = np.array([5, 0, 9, *RNG.permutation(16)[:6]], np.int32)
    table = RNG.permutation(PAGES).reshape(3, 4).astype(np.int32)
    pages = [np.zeros((PAGES, SIZE, G, D), F16) for _ in "kv"]
    given: dict[str, Any] = {"rotary": rotary(), "positions": positions, "layout": "bshd"}
    q = ks.fused_qkv_projection(
        x,
        weight,
        None,
        H,
        G,
        D,
        k_pages=pages[0],
        v_pages=pages[1],
        block_table=table,
        cu_seqlens_q=CU,
        **given,
    )
    rows = ks.fused_qkv_projection(x, weight, None, H, G, D, **given)
    np.testing.assert_array_equal(q, rows[0])
    entry = np.repeat([0, 1, 2], np.diff(CU))
    for page, want in zip(pages, rows[1:], strict=True):
        np.testing.assert_array_equal(page[table[entry, positions // SIZE], positions % SIZE], want)


def call(**more: Any) -> Callable[[], object]:
    given = drawn(F16, packed=True, slots=False, counted=False, scaled="")
    given = {n: x for n, x in {**given, **more}.items() if x is not None}
    x = given.pop("input", normal(11, HIDDEN))
    return lambda: ks.fused_qkv_projection(x, normal(WIDTH, HIDDEN), None, H, G, D, **given)


def test_what_does_not_fit_is_refused(refused: Refused) -> None:
    unpaged = {"k_pages": None, "v_pages": None, "block_table": None}
    refused(
        "cu_seqlens_q = given: k and v are not written to pages. Give positions instead, by which "
        "packed rows are rotated.",
        call(**unpaged),
    )
    refused(
        "kv_lengths = given: k and v are not written to pages. Give block_table or slot_mapping, "
        "or leave it out.",
        call(**unpaged, cu_seqlens_q=None, kv_lengths=LENGTHS),
    )
    refused(
        "block_table = None: is used with k_pages and v_pages. Give all three, or none.",
        call(block_table=None),
    )
    refused(
        "v_pages = None: is used with k_pages and slot_mapping. Give all three, or none.",
        call(block_table=None, v_pages=None, slot_mapping=np.zeros(11, np.int32)),
    )
    slots = np.zeros(11, np.int32)
    refused(
        "slot_mapping = given: one of the two says the places. Give slot_mapping or block_table.",
        call(slot_mapping=slots),
    )
    refused(
        "cu_seqlens_q = given: slot_mapping says the places. Leave it out.",
        call(block_table=None, slot_mapping=slots),
    )
    refused(
        "kv_lengths = given: positions say it. Give one of the two.",
        call(kv_lengths=LENGTHS, positions=np.zeros(11, np.int32)),
    )
    refused(
        "first_position = 3: an append by a block table counts from 0, kv_lengths or positions. "
        "Give positions or kv_lengths.",
        call(first_position=3),
    )
    refused(
        "kv_lengths = an array of shape [2]: must be [sequences=3]. Check the order of the axes of "
        "all arrays.",
        call(kv_lengths=LENGTHS[:2]),
    )
    refused(
        "v_scales = None: belongs to k_scales. Give both, or leave k_scales out.",
        call(k_scales=np.ones(G, np.float32)),
    )
    scales = {n: np.ones(G, np.float32) for n in ("k_scales", "v_scales")}
    refused(
        "scales = heads: are for rows of float16 in pages of 8 bits, these are of float16. Leave "
        "them out.",
        call(**scales),
    )
    refused(
        "kv_lengths[2] = 17: must be from 0 to 16, which the table has room for. Correct it, or "
        "give a wider table.",
        call(kv_lengths=np.array([3, 0, 17], np.int32)),
    )
    refused(
        "cu_seqlens_q[3] = 12: must not exceed the 11 rows. Correct the last offset.",
        call(cu_seqlens_q=np.array([0, 3, 3, 12], np.int32)),
    )
    refused(
        "v_pages = an array of float16: must be float32 as k_pages is. Convert the array, or "
        "correct the dtype.",
        call(k_pages=np.zeros((PAGES, SIZE, G, D), np.float32)),
    )


APPEND: dict[str, Any] = {"block_table": 0, "pages": 7, "page_size": 4, "table_width": 3}


def described(**more: Any) -> QkvProjection:
    given = {"batch": 2, "S": 5, "hidden": 24, "num_heads": 4, "head_dim": 8, "kv_heads": 2}
    return QkvProjection(**{**given, "dtype": "float16", **more})


def test_the_descriptor_over_addresses() -> None:
    d = described(**APPEND, dtype_pages="float8_e4m3fn", k_scales=0, v_scales=0, scales="tokens")
    p: Any = d.problem()
    assert p.spec.heads == HeadsSpec() and p.heads.k_strides == p.heads.v_strides == (80, 8, 16)
    assert p.append.k_strides == p.append.v_strides == (80, 8, 16) and not p.append.num_heads
    assert p.append.k_pages_strides == (64, 8, 16) and p.between == {"k": 0, "v": 512}
    found = {r.name: (str(r.dtype), r.shape, r.written) for r in p.operands}
    assert found["q"] == ("float16", (2, 4, 5, 8), True)
    assert found["k"] == found["v"] == ("float8_e4m3fn", (7, 2, 4, 8), True)
    assert found["k_scales"] == found["v_scales"] == ("float32", (7, 2, 4), True)
    assert str(p.spec).endswith("then paged_cache append float16→float8_e4m3fn scaled=tokens")
    rotated = {"cos": 0, "sin": 0, "rotary_dim": 8, "max_position": 12}
    counted: Any = described(**APPEND, **rotated, kv_lengths=0).problem()
    assert counted.append.spec.rotary == "halves" and not counted.spec.heads.rotary
    assert counted.append.num_heads == 4 and counted.max_position == 0
    given: Any = described(**APPEND, **rotated, positions=0, dtype_pages="float8_e4m3fn").problem()
    assert not given.append.spec.rotary and given.spec.heads == HeadsSpec("halves", True)
    assert given.append.spec.position == "given"
    plain: Any = described(**APPEND).problem()
    assert plain.append is None and plain.spec.heads == HeadsSpec(paged=True)


@pytest.mark.parametrize(
    ("given", "message"),
    refusals("projection_appended", "appended", globals()),
)
def test_fields_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        described(**given)
    assert str(caught.value) == message


def test_torch_sees_one_operator() -> None:
    torch = pytest.importorskip("torch")
    from kernelseam.interop import torch as on_torch

    given = drawn(E4M3, packed=True, slots=False, counted=True, scaled="tokens")
    pages = {n: given.pop(n) for n in ("k_pages", "v_pages")}
    tensors = {n: torch.from_numpy(x) for n, x in given.items()}
    tensors |= {n: torch.zeros(x.shape, dtype=torch.float8_e4m3fn) for n, x in pages.items()}
    x, weight = (torch.randn(n, HIDDEN).half() for n in (11, WIDTH))
    again = {n: t.clone() for n, t in tensors.items()}
    q = on_torch.fused_qkv_projection(x, weight, None, H, G, D, **tensors)
    order = ("k_pages", "v_pages", "block_table", *[None] * 5, "slot_mapping", "kv_lengths")
    order += ("cu_seqlens_q", "k_scales", "v_scales")
    operands = [x, weight, *[again.get(n) if n else None for n in order]]
    options = {"num_heads": H, "num_kv_heads": G, "head_dim": D}
    made = torch.ops.kernelseam.fused_qkv_projection_paged(*operands, **options)
    assert torch.equal(made, q)
    for n in ("k_pages", "v_pages", "k_scales", "v_scales"):
        assert torch.equal(again[n].float(), tensors[n].float()) and tensors[n].float().any()
    torch.library.opcheck(
        torch.ops.kernelseam.fused_qkv_projection_paged.default,
        tuple(operands),
        options,
        test_utils="test_faketensor",
    )
    with pytest.raises(InvalidValue, match=r"k_pages = given: gradients to weight do not flow"):
        on_torch.fused_qkv_projection(x, weight.requires_grad_(), None, H, G, D, **tensors)
    with torch.device("meta"):
        rows = torch.empty(11, HIDDEN), torch.empty(WIDTH, HIDDEN), None, H, G, D
        offsets = torch.empty(4, dtype=torch.int32)
    for home in (on_torch, ks):
        with pytest.raises(InvalidValue, match=r"cu_seqlens_q = given: k and v are not written"):
            home.fused_qkv_projection(*rows, cu_seqlens_q=offsets)
