"""Argument buffers, held against the layouts of the platform's C compiler as ctypes knows them."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelseam.contract import KernelFacts
from kernelseam.errors import DeviceError
from kernelseam.kernels.entry import entry
from kernelseam.kernels.signature import Signature, Structure

C_TYPES: dict[str, Any] = {
    "pointer": ctypes.c_uint64,
    "i64": ctypes.c_int64,
    "i32": ctypes.c_int32,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
kinds = st.recursive(
    st.sampled_from(sorted(C_TYPES)),
    lambda inner: st.lists(inner, min_size=1, max_size=4).map(tuple),
    max_leaves=12,
)


def members(kinds: tuple[Any, ...], prefix: str = "x") -> tuple[Any, ...]:
    """Each kind with a name of its own; tuples become structures."""
    return tuple(
        (f"{prefix}{i}", Structure(members(k, f"{prefix}{i}_")) if isinstance(k, tuple) else k)
        for i, k in enumerate(kinds)
    )


def c_type(kind: Any) -> Any:
    if not isinstance(kind, tuple):
        return C_TYPES[kind]
    fields = [(f"m{i}", c_type(k)) for i, k in enumerate(kind)]
    return type("S", (ctypes.Structure,), {"_fields_": fields})


def leaves(kinds: tuple[Any, ...]) -> list[str]:
    return [leaf for k in kinds for leaf in (leaves(k) if isinstance(k, tuple) else [k])]


def fill(into: Any, kinds: tuple[Any, ...], values: Any) -> None:
    for i, k in enumerate(kinds):
        if isinstance(k, tuple):
            fill(getattr(into, f"m{i}"), k, values)
        else:
            setattr(into, f"m{i}", next(values))


@given(st.lists(kinds, min_size=1, max_size=6).map(tuple))
def test_the_layout_is_c_s(kinds: tuple[Any, ...]) -> None:
    signature, whole = Signature(members(kinds)), c_type(kinds)
    places = tuple(
        (getattr(whole, f"m{i}").offset, getattr(whole, f"m{i}").size) for i in range(len(kinds))
    )
    assert signature.layout == places
    values = [n + 1 for n, _ in enumerate(leaves(kinds))]
    filled = whole()
    fill(filled, kinds, iter(values))
    names = [name for name, _, _ in signature.scalars]
    packed = signature.pack(dict(zip(names, values, strict=True)))
    end = places[-1][0] + places[-1][1]
    assert packed == bytes(filled)[:end]  # without what pads the whole


RANGES: dict[str, Any] = {
    "pointer": st.integers(0, 2**64 - 1),
    "i64": st.integers(-(2**63), 2**63 - 1),
    "i32": st.integers(-(2**31), 2**31 - 1),
    "f32": st.floats(width=32, allow_nan=False),
    "f64": st.floats(allow_nan=False),
}


@given(st.lists(kinds, min_size=1, max_size=6).map(tuple), st.data())
def test_every_value_that_a_type_has_arrives(kinds: tuple[Any, ...], data: st.DataObject) -> None:
    """Strides of 2³² and more, addresses in the upper half: what C reads from the buffer is what
    was given."""
    signature, whole = Signature(members(kinds)), c_type(kinds)()
    values = [data.draw(RANGES[kind]) for kind in leaves(kinds)]
    names = [name for name, _, _ in signature.scalars]
    fill(whole, kinds, iter(values))
    packed = signature.pack(dict(zip(names, values, strict=True)))
    assert packed == bytes(whole)[: len(packed)]


@pytest.mark.parametrize("stride", [2**31 - 1, 2**31, 2**32, 2**32 + 8, 2**40 + 1, -(2**32)])
def test_a_stride_has_64_bits(stride: int) -> None:
    signature = Signature(
        (("rows", "i32"), ("batch", "i64"), ("view", Structure((("head", "i64"), ("row", "i32")))))
    )
    packed = signature.pack({"rows": 7, "batch": stride, "head": stride + 1, "row": 3})
    assert struct.unpack_from("<i4xqqi", packed) == (7, stride, stride + 1, 3)


def test_what_no_64_bits_hold_is_named() -> None:
    signature = Signature((("batch", "i64"), ("at", "pointer")))
    with pytest.raises(DeviceError, match=r"^argument batch = 9223372036854775808 is not a i64"):
        signature.pack({"batch": 2**63, "at": 0})
    with pytest.raises(DeviceError, match=r"^argument at = -1 is not a pointer"):
        signature.pack({"batch": 0, "at": -1})


def test_a_name_may_come_twice() -> None:
    signature = Signature((("a", "i32"), ("s", Structure((("a", "i32"), ("b", "i32"))))))
    assert signature.pack({"a": 7, "b": 8}) == bytes([7, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0])


def test_what_does_not_fit_is_named() -> None:
    signature = Signature((("s", Structure((("rows", "i32"), ("at", "pointer")))),))
    with pytest.raises(DeviceError, match=r"^argument rows = 2147483648 is not a i32"):
        signature.pack({"rows": 2**31, "at": 0})


def test_another_layout_is_refused() -> None:
    signature = Signature((("a", "pointer"), ("s", Structure((("b", "i64"), ("c", "i32"))))))
    signature.placed(KernelFacts("k", 1, 0, 0, 0, 0, ((0, 8), (8, 16))))
    with pytest.raises(
        DeviceError, match=r"kernel k takes parameters at \(\(0, 8\), \(8, 12\)\), the host packs"
    ):
        signature.placed(KernelFacts("k", 1, 0, 0, 0, 0, ((0, 8), (8, 12))))


MAPS = Signature(
    (("n", "i32"), ("a", "tensor_map"), ("rows", Structure((("at", "pointer"), ("m", "i32")))))
)


@pytest.mark.parametrize("at", [48, 64])
def test_a_tensor_map_is_packed_where_the_binary_has_it(at: int) -> None:
    """A compiler whose memory of parameters begins at 16 bytes past a multiple of 64 has the map at
    48."""
    facts = KernelFacts("k", 1, 0, 0, 0, 0, ((0, 4), (at, 128), (at + 128, 16)))
    placed = MAPS.placed(facts)
    assert (MAPS.layout, placed.layout) == (((0, 4), (64, 128), (192, 16)), facts.parameters)
    packed = placed.pack({"n": 7, "a": bytes(range(128)), "at": 0x1122, "m": 9})
    assert len(packed) == at + 144
    assert packed[:8] == bytes([7, 0, 0, 0, 0, 0, 0, 0]) and packed[at : at + 128] == bytes(
        range(128)
    )
    assert packed[at + 128 :] == (0x1122).to_bytes(8, "little") + (9).to_bytes(8, "little")


@pytest.mark.parametrize(
    "parameters",
    [
        ((0, 4), (48, 128)),  # one is missing
        ((0, 4), (48, 16), (64, 128)),  # another order
        ((0, 4), (48, 120), (176, 16)),  # another size
        ((0, 4), (48, 128), (168, 16)),  # one over the other
        ((48, 4), (0, 128), (176, 16)),  # out of order
    ],
)
def test_number_order_and_sizes_are_held_against_the_binary_all_the_same(
    parameters: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(DeviceError, match=r"the host packs \(\(0, 4\), \(64, 128\), \(192, 16\)\)"):
        MAPS.placed(KernelFacts("k", 1, 0, 0, 0, 0, parameters))


def test_without_opaque_arguments_the_offsets_are_c_s() -> None:
    with pytest.raises(DeviceError, match="its device source and its kernel definition disagree"):
        Signature((("a", "i32"), ("b", "i32"))).placed(
            KernelFacts("k", 1, 0, 0, 0, 0, ((0, 4), (8, 4)))
        )


@pytest.mark.parametrize("given", [bytes(127), bytes(129), 5])
def test_a_tensor_map_is_whole(given: Any) -> None:
    with pytest.raises(DeviceError, match=r"^argument a = .* is not a tensor_map of 128 bytes"):
        MAPS.pack({"n": 7, "a": given, "at": 0, "m": 0})


@given(st.lists(kinds, min_size=1, max_size=6).map(tuple))
def test_a_flat_signature_takes_members_by_themselves(kinds: tuple[Any, ...]) -> None:
    flat, leaf = Signature(members(kinds), flat=True), tuple(leaves(kinds))
    assert flat.layout == Signature(members(leaf)).layout
    names = [name for name, _, _ in flat.scalars]
    values = dict(zip(names, range(1, len(names) + 1), strict=True))
    by_place = Signature(tuple(zip(names, leaf, strict=True)))
    assert flat.pack(values) == by_place.pack(values)
    facts = KernelFacts("k", 1, 0, 0, 0, 0, flat.layout)
    assert flat.placed(facts).scalars == flat.scalars


@pytest.mark.parametrize(("in_place", "where"), [(False, ""), (True, "KS_ARGUMENT ")])
def test_an_entry_may_take_structures_whole(in_place: bool, where: str) -> None:
    """Each member is asserted to be where it is packed; what is not given is passed as {}."""
    pages = Structure((("table", "pointer"), ("rows", "i32")))
    parameters = (("map", "tensor_map"), ("n", "i32"), ("pages", pages))
    optional = ("heads", "pages", "scales")
    created = entry("k", "k.h", Signature(parameters, None, False, True, in_place, optional))
    assert created.endswith(
        'static_assert(sizeof(Argument3) == 16, "size of pages");\n'
        "static_assert(KS_OFFSET(Argument3, table) == 0 && "
        'sizeof(((Argument3*)0)->table) == 8, "table of pages");\n'
        "static_assert(KS_OFFSET(Argument3, rows) == 8 && "
        'sizeof(((Argument3*)0)->rows) == 4, "rows of pages");\n'
        "typedef ParametersOf<Left3::others> Left4; typedef Left4::first Argument4;\n"
        "KS_KERNEL(BODY_THREADS, BODY_BLOCKS)\n"
        f"k(KS_ARGUMENT Argument0 map, Argument1 n, {where}Argument3 pages) {{\n"
        "  k_body(map, n, Argument2{}, pages, Argument4{});\n"
        "}\n"
    )


def test_an_entry_hands_members_to_a_body() -> None:
    inner = Structure((("size", "i32"), ("shift", "i32")), ("d", "shift"))
    pages = Structure((("table", "pointer"), ("page", inner)), ("base", "size"))
    created = entry("k", "k.h", Signature((("pages", pages), ("n", "i32")), flat=True))
    _, _, code = created.partition(
        "R(const A&, More...)> { typedef A first; typedef R others(More...); };\n"
    )
    assert created.startswith('#include "k.h"\ntemplate')
    assert code == (
        "typedef ParametersOf<decltype(k_body)> Left0; typedef Left0::first Argument0;\n"
        'static_assert(sizeof(Argument0) == 16, "size of pages");\n'
        "typedef ParametersOf<Left0::others> Left1; typedef Left1::first Argument1;\n"
        "KS_KERNEL(BODY_THREADS, BODY_BLOCKS)\n"
        "k(decltype(((Argument0*)0)->base) pages_base, decltype(((Argument0*)0)->size.d) "
        "pages_size_d, decltype(((Argument0*)0)->size.shift) pages_size_shift, Argument1 n) {\n"
        "  Argument0 pages;\n"
        "  pages.base = pages_base;\n"
        "  pages.size.d = pages_size_d;\n"
        "  pages.size.shift = pages_size_shift;\n"
        "  k_body(pages, n);\n"
        "}\n"
    )
