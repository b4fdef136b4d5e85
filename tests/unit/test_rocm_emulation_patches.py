"""Patches: instructions encoded here, on a wave of this process, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("kernelseam_rocm_emulator", reason="kernelseam-rocm-emulator is not installed")
from kernelseam_rocm_emulator import patches  # noqa: E402
from kernelseam_rocm_emulator.selftest import tests as selftests  # noqa: E402
from kernelseam_rocm_emulator.wave import EXEC, M0, Wave  # noqa: E402

RNG = np.random.default_rng(7)


class Host(Wave):
    """A wave in memory of this process, with LDS of 4 KiB, random registers, and every lane
    active."""

    def __init__(self, lanes: int) -> None:
        self.keep = [np.zeros(n, np.uint32) for n in (260, 256 * lanes, 256 * lanes, 1024)]
        scalars, vectors, accumulators, shared = (x.ctypes.data for x in self.keep)
        super().__init__(lanes, scalars, vectors, accumulators, shared, 0)
        self.vectors[...] = RNG.integers(0, 1 << 32, self.vectors.shape, np.uint32)
        self.scalars[EXEC : EXEC + 2] = 0xFFFFFFFF


def step(name: str, family: str, *fields: tuple[int, int]) -> Callable[[Wave], object]:
    """The patch's step of an instruction whose fields are (lowest bit, value)."""
    word = sum(value << at for at, value in fields)
    patch = patches.find(word, name, family, 8)
    assert patch is not None
    return patch.step


def test_what_the_emulator_does_right_is_left_to_it() -> None:
    assert patches.find(0, "V_ADD_F32_E32", "cdna", 4) is None
    assert patches.find(0, "", "rdna4", 4) is None
    assert patches.find(0, "V_MFMA_F32_16X16X4_F32", "cdna", 8) is None


def vop3p(d: int, a: int, b: int, c: int) -> tuple[tuple[int, int], ...]:
    return (0, d), (32, 256 + a), (41, 256 + b), (50, c)


@pytest.mark.parametrize(("kind", "name"), [("f2", "F16"), ("bfloat16", "BF16")])
@pytest.mark.parametrize(("side", "depth"), [(16, 16), (16, 32), (32, 8), (32, 16)])
def test_mfma(kind: str, name: str, side: int, depth: int) -> None:
    import ml_dtypes

    dtype: Any = np.float16 if kind == "f2" else ml_dtypes.bfloat16
    wave, groups = Host(64), 64 // side
    each = depth // groups
    a, b = (RNG.standard_normal((side, depth)).astype(dtype) for _ in "ab")
    a[3, :2] = np.nan, np.inf
    a[5, :2] = np.inf, 1e-7
    for register, x in ((10, a), (20, b)):
        held = x.reshape(side, groups, each).transpose(1, 0, 2).reshape(64, each)
        wave.vectors[register : register + each // 2] = np.ascontiguousarray(held).view(np.uint32).T
    c = RNG.standard_normal((side * side // 64, 64)).astype(np.float32)
    wave.vectors[40 : 40 + len(c)] = c.view(np.uint32)
    step(f"V_MFMA_F32_{side}X{side}X{depth}_{name}", "cdna", *vop3p(60, 10, 20, 256 + 40))(wave)
    actual = wave.vectors[60 : 60 + len(c)].view(np.float32)
    product = a.astype(np.float64) @ b.astype(np.float64).T
    for i in range(len(c)):
        for lane in range(64):
            row = 4 * groups * (i // 4) + 4 * (lane // side) + i % 4
            expected = product[row, lane % side] + c[i, lane]
            np.testing.assert_allclose(actual[i, lane], expected, rtol=1e-6, equal_nan=True)


def test_mfma_of_xf32_leaves_13_bits_aside() -> None:
    wave = Host(64)
    x, y = (RNG.standard_normal((16, 8)).astype(np.float32) for _ in "xy")
    for first, z in ((10, x), (20, y)):  # lane 16·g + i holds values 2·g and 2·g + 1 of row i
        wave.vectors[first : first + 2] = (
            z.reshape(16, 4, 2).transpose(2, 1, 0).reshape(2, 64).view(np.uint32)
        )
    wave.vectors[30:34] = 0
    step("V_MFMA_F32_16X16X8_XF32", "cdna", *vop3p(40, 10, 20, 256 + 30))(wave)
    x, y = ((z.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for z in (x, y))
    found = wave.vectors[40:44].view(np.float32).reshape(4, 4, 16).transpose(1, 0, 2)
    expected = x.astype(np.float64) @ y.T.astype(np.float64)
    np.testing.assert_allclose(found.reshape(16, 16), expected, rtol=1e-6, atol=1e-6)


def test_mfma_with_a_constant_addend_and_accumulators() -> None:
    wave = Host(64)
    wave.accumulators[10:12] = 0x3C003C00  # ones
    wave.vectors[20:22] = 0x40004000  # twos
    wave.scalars[242] = np.float32(1).view(np.uint32)
    fields = (*vop3p(60, 10, 20, 242), (59, 1), (15, 1))
    step("V_MFMA_F32_16X16X16_F16", "cdna", *fields)(wave)
    assert (wave.accumulators[60:64].view(np.float32) == 33).all()


@pytest.mark.parametrize("family", ["rdna3", "rdna4"])
def test_wmma(family: str) -> None:
    wave, spread = Host(32), family == "rdna4"
    a, b = (RNG.standard_normal((16, 16)).astype(np.float16) for _ in "ab")
    for register, x in ((10, a), (20, b)):
        lanes = np.concatenate([x[:, :8], x[:, 8:]]) if spread else np.concatenate([x, x])
        words = np.ascontiguousarray(lanes).view(np.uint32).T
        wave.vectors[register : register + len(words)] = words
    wave.scalars[128] = 0
    run = step("V_WMMA_F32_16X16X16_F16", family, *vop3p(60, 10, 20, 128))
    run(wave)
    actual, product = (
        wave.vectors[60:68].view(np.float32),
        a.astype(np.float64) @ b.astype(np.float64).T,
    )
    for r in range(8):
        for lane in range(32):
            row = 8 * (lane // 16) + r if spread else 2 * r + lane // 16
            assert actual[r, lane] == np.float32(product[row, lane % 16])
    if not spread:
        wave.vectors[12, 17] ^= 1
        message = r"lanes 16 to 31 of operand A \(v10\) are not a copy of lanes 0 to 15"
        with pytest.raises(RuntimeError, match=message):
            run(wave)


@pytest.mark.parametrize("crosswise", [False, True])
def test_permlane_by_a_literal(crosswise: bool) -> None:
    wave = Host(32)
    wave.scalars[30] = 0x76543210
    before = wave.vectors.copy()
    fields = (0, 5), (32, 256 + 6), (41, 30), (50, 255), (64, 0x89ABCDEF)
    step("V_PERMLANEX16_B32" if crosswise else "V_PERMLANE16_B32", "rdna3", *fields)(wave)
    for lane in range(32):
        within = lane % 16 if lane % 16 < 8 else 23 - lane % 16
        assert wave.vectors[5, lane] == before[6, (lane & 16 ^ 16 * crosswise) + within]


def test_swizzle_leaves_inactive_lanes() -> None:
    wave = Host(32)
    wave.scalars[EXEC] = 0x0000FFF7
    before = wave.vectors.copy()
    step("DS_SWIZZLE_B32", "rdna4", (0, 1 << 10 | 31), (32, 4), (56, 9))(wave)
    for lane in range(16):
        expected = before[9, 3] if lane == 3 else 0 if lane ^ 1 == 3 else before[4, lane ^ 1]
        assert wave.vectors[9, lane] == expected
    assert (wave.vectors[9, 16:] == before[9, 16:]).all()


def test_loads_of_16_bits_keep_the_other_16() -> None:
    wave = Host(64)
    wave.keep[3][:64] = RNG.integers(0, 1 << 32, 64, np.uint32)
    wave.vectors[7] = 4 * np.arange(64)
    before = wave.vectors[9].copy()
    step("DS_READ_U16_D16_HI", "cdna", (0, 2), (32, 7), (56, 9))(wave)
    assert (wave.vectors[9] == (before & 0xFFFF | wave.keep[3][:64] & 0xFFFF0000)).all()


def test_accumulators_are_stored() -> None:
    wave = Host(64)
    wave.vectors[7] = np.arange(64) * 16
    step("DS_WRITE_B96", "cdna", (0, 4), (25, 1), (32, 7), (40, 20))(wave)
    rows = wave.keep[3].reshape(-1, 4)[:64]
    assert (rows[:, 1:] == wave.accumulators[20:23].T).all() and not rows[:, 0].any()
    assert patches.find(7 << 32 | 20 << 40, "DS_WRITE_B96", "cdna", 8) is None


def test_loads_straight_to_lds() -> None:
    wave, source = Host(64), RNG.integers(0, 1 << 32, 64, np.uint32)
    places = source.ctypes.data + 4 * (np.arange(64, dtype=np.uint64) ^ 3)
    wave.vectors[4], wave.vectors[5] = places & 0xFFFFFFFF, places >> 32
    wave.scalars[M0] = 128
    step("GLOBAL_LOAD_LDS_DWORD", "cdna", (32, 4), (48, 0x7F))(wave)
    assert (wave.keep[3][32:96] == source[np.arange(64) ^ 3]).all()


@pytest.mark.parametrize(
    ("family", "base", "name"),
    [("cdna", 0x7F, "DWORDX2"), ("rdna3", 0x7C, "B64"), ("rdna4", 0x7C, "B64")],
)
def test_words_at_odd_addresses(family: str, base: int, name: str) -> None:
    wave, memory = Host(64 if family == "cdna" else 32), RNG.integers(0, 256, 2048).astype(np.uint8)
    places = memory.ctypes.data + 2 + 8 * np.arange(wave.lanes, dtype=np.uint64)
    wave.vectors[4], wave.vectors[5] = places & 0xFFFFFFFF, places >> 32
    fields = (
        ((0, base), (32, 9), (64, 4), (72, 16))
        if family == "rdna4"
        else ((0, 16), (32, 4), (48, base), (56, 9))
    )
    load = step(f"GLOBAL_LOAD_{name}", family, *fields)
    assert load(wave) is True
    expected = memory[18 : 18 + 8 * wave.lanes].reshape(-1, 8).copy().view(np.uint32)
    assert (expected == wave.vectors[9:11].T).all()
    wave.vectors[4] = places.astype(np.uint32) & ~np.uint32(3)
    assert load(wave) is False  # aligned: the emulator's


def test_stores_at_odd_addresses_leave_their_neighbours() -> None:
    wave, memory = Host(32), np.zeros(16, np.uint8)
    wave.scalars[EXEC] = 1
    wave.scalars[20], wave.scalars[21] = memory.ctypes.data & 0xFFFFFFFF, memory.ctypes.data >> 32
    wave.vectors[4] = 8
    wave.vectors[9] = 0x04030201
    offset = -2 & 0x1FFF
    assert step("GLOBAL_STORE_B32", "rdna3", (0, offset), (32, 4), (40, 9), (48, 20))(wave) is True
    assert memory.tolist() == [0] * 6 + [1, 2, 3, 4] + [0] * 6


@pytest.mark.parametrize("base", [20, 127])
def test_floats_are_added_out_of_accumulators(base: int) -> None:
    wave, memory = Host(64), np.arange(20, dtype=np.float32)
    start, lanes = memory.ctypes.data + 8, np.arange(64, dtype=np.uint64)
    wave.scalars[20], wave.scalars[21] = start & 0xFFFFFFFF, start >> 32
    places = lanes % 16 * 4 + np.uint64(0 if base == 20 else start)
    wave.vectors[4], wave.vectors[5] = places & 0xFFFFFFFF, places >> 32
    x = RNG.integers(-9, 9, 64).astype(np.float32)
    wave.accumulators[9], wave.vectors[9] = x.view(np.uint32), 0x7FC00000
    fields = ((0, -4 & 0x1FFF), (32, 4), (40, 9), (48, base))
    assert step("GLOBAL_ATOMIC_ADD_F32", "cdna", *fields, (55, 1))(wave) is None
    assert (memory[1:17] == np.arange(1, 17) + x.reshape(4, 16).sum(0)).all()
    assert memory[[0, 17, 18, 19]].tolist() == [0, 17, 18, 19]


@pytest.mark.parametrize("base", [20, 124])
@pytest.mark.parametrize(
    ("family", "name", "fields"),
    [
        ("cdna", "GLOBAL_ATOMIC_ADD", ((0, -4 & 0x1FFF), (16, 1), (32, 4), (40, 9), (56, 12))),
        (
            "rdna4",
            "GLOBAL_ATOMIC_ADD_U32",
            ((32, 12), (52, 1), (55, 9), (64, 4), (72, -4 & 0xFFFFFF)),
        ),
    ],
)
def test_integers_that_are_added_return_what_was_there(
    family: str, name: str, fields: tuple[tuple[int, int], ...], base: int
) -> None:
    wave = Host(64 if family == "cdna" else 32)
    memory = np.array([7, 0xFFFFFFFF, 100, 8], np.uint32)
    start, lanes = memory.ctypes.data + 8, np.arange(wave.lanes, dtype=np.uint64)
    wave.scalars[20], wave.scalars[21] = start & 0xFFFFFFFF, start >> 32
    places = lanes % 2 * 4 + np.uint64(0 if base == 20 else start)
    wave.vectors[4], wave.vectors[5] = places & 0xFFFFFFFF, places >> 32
    wave.vectors[9], wave.vectors[12] = lanes, 555
    wave.scalars[EXEC], wave.scalars[EXEC + 1] = 0b1110, 0
    at = (48 if family == "cdna" else 0, base)
    assert step(name, family, *fields, at)(wave) is None
    assert memory.tolist() == [7, 1, 104, 8], "beyond the largest it begins at 0 again"
    assert wave.vectors[12, :5].tolist() == [555, 100, 0xFFFFFFFF, 101, 555]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("GLOBAL_ATOMIC_ADD", ((48, 20),)),
        ("GLOBAL_ATOMIC_ADD", ((48, 20), (55, 1), (16, 1))),
        ("GLOBAL_ATOMIC_ADD_F32", ((48, 20),)),
        ("GLOBAL_ATOMIC_ADD_F32", ((48, 20), (55, 1), (16, 1))),
    ],
)
def test_other_atomics_are_the_emulators(name: str, fields: tuple[tuple[int, int], ...]) -> None:
    word = sum(value << at for at, value in fields)
    assert patches.find(word, name, "cdna", 8) is None
    assert patches.find(word, name, "rdna3", 8) is None


@pytest.mark.parametrize(
    ("arch", "dtype"), [("gfx942", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")]
)
def test_e4m3_on_cdna(arch: str, dtype: str) -> None:
    """Of every byte, with SDWA's choice of byte and word, into active lanes alone."""
    import ml_dtypes

    wave = Host(64)
    wave.vectors[9] = np.arange(256, dtype=np.uint8).view(np.uint32)
    wave.scalars[EXEC] = 0xFFFF
    before = wave.vectors.copy()
    numbers = wave.vectors[9].view(getattr(ml_dtypes, dtype)).astype(np.float32).reshape(64, 4)
    for name, second, columns in (
        ("V_CVT_F32_FP8_E32", 0x00060609, (0,)),
        ("V_CVT_F32_FP8_E32", 0x00030609, (3,)),
        ("V_CVT_PK_F32_FP8_E32", 0x00050609, (2, 3)),
    ):
        word = 249 | 20 << 17 | second << 32
        patch = patches.find(word, name, "cdna", 8, arch)
        assert patch is not None
        patch.step(wave)
        for i, column in enumerate(columns):
            actual = wave.vectors[20 + i].view(np.float32)
            half = (np.arange(64) < 16) | (np.arange(64) >= 32)
            assert np.array_equal(actual[half], numbers[half, column], equal_nan=True)
            assert (wave.vectors[20 + i, ~half] == before[20 + i, ~half]).all()


@pytest.mark.parametrize(
    ("arch", "dtype"), [("gfx942", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")]
)
def test_products_of_e4m3_on_cdna(arch: str, dtype: str) -> None:
    """16×16×32: a lane has 8 values of k, from 8 · (lane / 16) on, of row lane % 16."""
    import ml_dtypes

    wave, rng = Host(64), np.random.default_rng(4)
    factors = rng.standard_normal((2, 16, 32)).astype(getattr(ml_dtypes, dtype))
    for at, x in zip((4, 8), factors, strict=True):
        lanes = x.reshape(16, 4, 8).transpose(1, 0, 2).reshape(64, 8)
        wave.vectors[at : at + 2] = np.ascontiguousarray(lanes).view(np.uint32).T
    word = 20 | (256 + 4) << 32 | (256 + 8) << 41 | 128 << 50
    patch = patches.find(word, "V_MFMA_F32_16X16X32_FP8_FP8", "cdna", 8, arch)
    assert patch is not None
    wave.scalars[128] = 0
    patch.step(wave)
    a, b = factors.astype(np.float64)
    out = np.ascontiguousarray(wave.vectors[20:24].T).view(np.float32).reshape(4, 16, 4)
    actual = out.transpose(0, 2, 1).reshape(16, 16)
    np.testing.assert_allclose(actual, a @ b.T, rtol=1e-6, atol=1e-6)


def test_e4m3_on_rdna() -> None:
    """RDNA 4 counts the bytes of one number with the bits of op_sel in reverse."""
    import ml_dtypes

    wave = Host(32)
    numbers = wave.vectors[9].view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(32, 4)
    for name, bits, columns in (
        ("V_CVT_F32_FP8_E64", ((12, 1),), (1,)),
        ("V_CVT_F32_FP8_E64", ((11, 1),), (2,)),
        ("V_CVT_PK_F32_FP8_E64", ((11, 1),), (2, 3)),
    ):
        step(name, "rdna4", (0, 20), (32, 256 + 9), *bits)(wave)
        for i, column in enumerate(columns):
            actual = wave.vectors[20 + i].view(np.float32)
            assert np.array_equal(actual, numbers[:, column], equal_nan=True)


@pytest.mark.parametrize(
    "word",
    [249 | 0x00062609 << 32, 249 | 0x00160609 << 32, 250],
    ids=["clamped", "negated", "DPP"],
)
def test_e4m3_with_modifiers_is_the_emulators_to_refuse(word: int) -> None:
    assert patches.find(word, "V_CVT_F32_FP8_E32", "cdna", 8, "gfx942") is None


def test_calls() -> None:
    wave = Host(64)
    wave.pc = 0x1000
    wave.set_pair(10, 0x7F0000002000)
    step("S_SWAPPC_B64", "cdna", (0, 10), (16, 30))(wave)
    assert wave.pc == 0x7F0000002000 and wave.pair(30) == 0x1004
    step("S_SETPC_B64", "cdna", (0, 30))(wave)
    assert wave.pc == 0x1004
    step("S_GETPC_B64", "cdna", (16, 40))(wave)
    assert wave.pc == 0x1008 and wave.pair(40) == 0x1008


def test_buffers_end_at_their_records() -> None:
    wave, memory = Host(32), RNG.integers(0, 1 << 32, 32, np.uint32)
    wave.scalars[20], wave.scalars[21] = memory.ctypes.data & 0xFFFFFFFF, memory.ctypes.data >> 32
    wave.scalars[22] = 40
    wave.vectors[4] = 4 * np.arange(32)
    fields = (26, 0b111000), (18, 20), (32, 4), (40, 9), (48, 5), (54, 1), (56, 124)
    step("", "rdna3", *fields)(wave)
    assert wave.vectors[9].tolist() == memory[:10].tolist() + [0] * 22


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1200", "gfx1201"])
def test_the_selftest_has_a_kernel_for_each_test(arch: str) -> None:
    from kernelseam_rocm_emulator import selftest

    actual = list(selftests(arch))
    text = selftest.source(arch)
    assert len({name for name, _ in actual}) == len(actual) > 45
    assert all(f"void {name}(" in text for name, _ in actual) and "NAME" not in text
