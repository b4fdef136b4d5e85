"""Self-tests of vector arithmetic: packed float16, mixed precision, integers, and exchange between
lanes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from kernelseam_rocm_emulator.selftest.instruction import (
    ALL,
    CDNA,
    RDNA,
    RDNA3,
    RDNA4,
    InstructionTest,
    U,
    Words,
    as_bytes,
    floats,
    fma,
    half,
    high,
    into,
    low,
    pair,
    wide,
    words,
)

OLD = (*RDNA3, *CDNA)  # gfx12 has other names for these


def tests() -> Iterator[InstructionTest]:
    yield from _packed()
    yield from _mixed()
    yield from _floats()
    yield from _integers()
    yield from _lanes()
    yield from _narrowed()
    yield from _rounded()


def _packed() -> Iterator[InstructionTest]:
    for op, f in (("add", np.add), ("mul", np.multiply)):

        def straight(a: Words, b: Words, c: Words, d: Words, f: Any = f) -> Words:
            return pair(f(low(a), low(b)), f(high(a), high(b)))

        def crossed(a: Words, b: Words, c: Words, d: Words, f: Any = f) -> Words:
            return pair(f(high(a), low(b)), f(low(a), high(b)))

        yield InstructionTest(f"v_pk_{op}_f16", ALL, f"v_pk_{op}_f16 %0, %1, %2", straight)
        yield InstructionTest(
            f"v_pk_{op}_f16 op_sel",
            ALL,
            f"v_pk_{op}_f16 %0, %1, %2 op_sel:[1,0] op_sel_hi:[0,1]",
            crossed,
        )
    yield InstructionTest(
        "v_pk_fma_f16 neg_lo",
        ALL,
        "v_pk_fma_f16 %0, %1, %2, %3 neg_lo:[1,0,0]",
        lambda a, b, c, d: pair(fma(-low(a), low(b), low(c)), fma(high(a), high(b), high(c))),
        compare="h",
    )
    yield InstructionTest(
        "v_pk_add_f16 with a constant",
        ALL,
        "v_pk_add_f16 %0, %1, 1.0 op_sel_hi:[1,0]",
        lambda a, b, c, d: pair(low(a) + np.float16(1), high(a) + np.float16(1)),
    )
    for name, archs in (("v_pk_max_f16", OLD), ("v_pk_max_num_f16", RDNA4)):
        yield InstructionTest(
            name,
            archs,
            f"{name} %0, %1, %2",
            lambda a, b, c, d: pair(np.maximum(low(a), low(b)), np.maximum(high(a), high(b))),
        )
    yield InstructionTest(
        "v_cvt_f16_f32 to the upper half",
        ("gfx1100",),  # hiprtc names no halves of registers for gfx1151
        "v_cvt_f16_f32 %0.h, %1",
        lambda a, b, c, d: into(d, half(floats(a)), True),
        "gggg",
    )
    yield InstructionTest(
        "v_add_f16 of halves",
        ("gfx1100",),  # hiprtc names no halves of registers for gfx1151
        "v_add_f16 %0.h, %1.h, %2.l",
        lambda a, b, c, d: into(d, half(high(a) + low(b)), True),
    )
    yield from _high_registers()
    yield InstructionTest(
        "v_fma_f16 op_sel",
        RDNA,
        "v_fma_f16 %0, %1, %2, %3 op_sel:[1,0,0,1]",
        lambda a, b, c, d: into(d, half(fma(high(a), low(b), low(c))), True),
        compare="h",
    )


def _high_registers() -> Iterator[InstructionTest]:
    """Registers from 128 on in 16-bit instructions, which are whole ones on CDNA."""
    yield InstructionTest(
        "v_cvt_f16_f32 into v128",
        CDNA,
        "v_cvt_f16_f32_e32 v128, %1\nv_mov_b32 %0, v128",
        lambda a, b, c, d: half(floats(a)),
        "gggg",
    )
    yield InstructionTest(
        "v_cvt_f32_f16 from v128",
        CDNA,
        "v_mov_b32 v128, %1\nv_cvt_f32_f16_e32 %0, v128",
        lambda a, b, c, d: words(low(a)),
        "hhhh",
    )
    yield InstructionTest(
        "v_add_f16 of v128 and v129",
        CDNA,
        "v_mov_b32 v128, %1\nv_mov_b32 v129, %2\nv_add_f16_e32 v128, v128, v129\nv_mov_b32 %0, "
        "v128",
        lambda a, b, c, d: half(low(a) + low(b)),
    )
    yield InstructionTest(
        "v_cmp_lt_f16 of v128 and v129",
        CDNA,
        "v_mov_b32 v128, %1\nv_mov_b32 v129, %2\nv_cmp_lt_f16_e32 vcc, v128, v129\ns_nop 1\n"
        "v_cndmask_b32_e32 %0, %1, %2, vcc",
        lambda a, b, c, d: np.where(low(a) < low(b), b, a),
    )


def _mixed() -> Iterator[InstructionTest]:
    yield InstructionTest(
        "v_fma_mix_f32",
        RDNA,
        "v_fma_mix_f32 %0, %1, %2, %3 op_sel:[1,0,0] op_sel_hi:[1,1,0]",
        lambda a, b, c, d: words(fma(high(a), low(b), floats(c))),
        "hhff",
        "f",
        1e-6,
    )
    for name, upper in (("v_fma_mixlo_f16", False), ("v_fma_mixhi_f16", True)):
        yield InstructionTest(
            name,
            RDNA,
            f"{name} %0, %1, %2, %3 op_sel_hi:[1,1,1]",
            lambda a, b, c, d, upper=upper: into(d, half(fma(low(a), low(b), low(c))), upper),  # type: ignore[misc]
            compare="h",
        )
    yield InstructionTest(
        "v_dot2_f32_f16",
        ALL,
        "v_dot2_f32_f16 %0, %1, %2, %3",
        lambda a, b, c, d: words(fma(low(a), low(b), fma(high(a), high(b), floats(c)))),
        "hhff",
        "f",
    )
    yield InstructionTest(
        "v_dot2acc_f32_f16",
        RDNA3,
        "v_dot2acc_f32_f16 %0, %1, %2",
        lambda a, b, c, d: words(fma(low(a), low(b), fma(high(a), high(b), floats(d)))),
        "hhff",
        "f",
    )
    yield InstructionTest(
        "v_cvt_pk_rtz_f16_f32",
        RDNA,
        "v_cvt_pk_rtz_f16_f32 %0, %1, %2",
        lambda a, b, c, d: pair(floats(a), floats(b)),
        "gggg",
    )
    yield InstructionTest(
        "v_cvt_pk_bf16_f32", ("gfx950",), "v_cvt_pk_bf16_f32 %0, %1, %2", _bfloat16, "ffff"
    )


def _bfloat16(a: Words, b: Words, c: Words, d: Words) -> Words:
    def rounded(x: Words) -> Words:
        return (x + U(0x7FFF) + (x >> U(16) & U(1))) >> U(16)

    return rounded(a) | rounded(b) << U(16)


def _narrowed() -> Iterator[InstructionTest]:
    """e4m3 of every byte, of both formats: 0x80 is −0 in one and NaN in the other."""

    def expected(dtype: Any, first: int, two: bool) -> Any:
        def converted(a: Words, b: Words, c: Words, d: Words) -> Words:
            numbers = as_bytes(a, dtype)[:, first : first + 1 + two].astype(np.float32)
            return words(numbers[:, 0] + 2 * numbers[:, 1] if two else numbers[:, 0])

        return converted

    sdwa = tuple(f"sdwa %R, %1 src0_sel:{n}" for n in ("BYTE_1", "BYTE_3", "WORD_1"))
    e64 = ("e64 %R, %1 byte_sel:1", "e64 %R, %1 byte_sel:2", "e64 %R, %1 op_sel:[1,0]")
    for archs, dtype, forms in (
        (("gfx942",), ml_dtypes.float8_e4m3fnuz, sdwa),
        (("gfx950",), ml_dtypes.float8_e4m3fn, sdwa),
        (RDNA4, ml_dtypes.float8_e4m3fn, e64),
    ):
        one = "v_cvt_f32_fp8_"
        both = "v_cvt_pk_f32_fp8_"
        for form, first in (
            ("e32 %R, %1", 0),
            (forms[0], 1),
            (forms[1], 3 if forms is sdwa else 2),
        ):
            text = one + form.replace("%R", "%0")
            yield InstructionTest(text, archs, text, expected(dtype, first, False), "wwww", "e")
        for form, first in (("e32 %R, %1", 0), (forms[2], 2)):
            text = both + form.replace("%R", "v[60:61]")
            text += "\ns_nop 1\nv_fma_f32 %0, v61, 2.0, v60"
            yield InstructionTest(text, archs, text, expected(dtype, first, True), "wwww", "e")


def _rounded() -> Iterator[InstructionTest]:
    """Two numbers to e4m3 of both formats, small ones and NaN among them, in either half."""
    for archs, dtype in (
        (("gfx942",), ml_dtypes.float8_e4m3fnuz),
        (("gfx950", *RDNA4), ml_dtypes.float8_e4m3fn),
    ):
        for upper in (False, True):

            def expected(
                a: Words, b: Words, c: Words, d: Words, dtype: Any = dtype, upper: bool = upper
            ) -> Words:
                numbers = [(floats(x) * np.float32(1 / 64)).astype(dtype) for x in (a, b)]
                first, second = (x.view(np.uint8).astype(np.uint32) for x in numbers)
                return into(d, first | second << U(8), upper)

            text = "v_mul_f32 v60, 0x3c800000, %1\nv_mul_f32 v61, 0x3c800000, %2\n"
            text += "v_cvt_pk_fp8_f32 %0, v60, v61" + " op_sel:[0,0,1]" * upper
            name = "v_cvt_pk_fp8_f32" + " to the upper half" * upper
            yield InstructionTest(name, archs, text, expected, "ffff")


def _floats() -> Iterator[InstructionTest]:
    yield InstructionTest(
        "1/(2π) as a constant",
        ALL,
        "v_mul_f32 %0, 0.15915494, %1",
        lambda a, b, c, d: words(floats(a) * np.float32(1 / (2 * np.pi))),
        "ffff",
        "f",
        1e-6,
    )
    for name, archs in (("v_max3_f32", OLD), ("v_max3_num_f32", RDNA4)):
        yield InstructionTest(
            name,
            archs,
            f"{name} %0, %1, %2, %3",
            lambda a, b, c, d: words(np.maximum(np.maximum(floats(a), floats(b)), floats(c))),
            "ffff",
        )
    yield InstructionTest(
        "v_med3_f32",
        OLD,
        "v_med3_f32 %0, %1, %2, %3",
        lambda a, b, c, d: words(np.median([floats(a), floats(b), floats(c)], 0)),
        "ffff",
    )
    yield InstructionTest(
        "v_ldexp_f32", ALL, "v_ldexp_f32 %0, %1, 3", lambda a, b, c, d: words(floats(a) * 8), "ffff"
    )
    yield InstructionTest(
        "v_maximum_f32",
        RDNA4,
        "v_maximum_f32 %0, %1, %2",
        lambda a, b, c, d: words(np.maximum(floats(a), floats(b))),
        "ffff",
    )
    moves = "\n".join(f"v_mov_b32 v{60 + i}, %{1 + i % 3}" for i in range(4))
    yield InstructionTest(
        "v_pk_fma_f32 op_sel",
        CDNA,
        f"{moves}\nv_pk_fma_f32 v[64:65], v[60:61], v[62:63], v[60:61] op_sel:[1,0,0] "
        "op_sel_hi:[0,1,1]\ns_nop 1\n"
        "v_mov_b32 %0, v65",
        lambda a, b, c, d: words(fma(floats(a), floats(a), floats(b))),
        "ffff",
        "f",
    )


def _integers() -> Iterator[InstructionTest]:
    def permuted(a: Words, b: Words, c: Words, d: Words) -> Any:
        both, select = wide(a) << np.uint64(32) | wide(b), wide(c)
        shifts = [(select >> np.uint64(8 * i) & np.uint64(7)) * np.uint64(8) for i in range(4)]
        parts = [both >> s & np.uint64(255) for s in shifts]
        return sum(p << np.uint64(8 * i) for i, p in enumerate(parts)).astype(U)  # type: ignore[union-attr]

    def products(a: Words, b: Words, c: Words, d: Words) -> Words:
        sums = (as_bytes(a, np.int8).astype(np.int64) * as_bytes(b, np.int8)).sum(1)
        total: Words = ((sums + c) & 0xFFFFFFFF).astype(U)
        return total

    def signed(x: Words) -> Any:
        return (x << U(8)).view(np.int32).astype(np.int64) >> 8

    cut = U(0xFFFFFF)
    yield InstructionTest("v_perm_b32", ALL, "v_perm_b32 %0, %1, %2, %3", permuted, "iisi")
    yield InstructionTest(
        "v_alignbit_b32",
        ALL,
        "v_alignbit_b32 %0, %1, %2, 8",
        lambda a, b, c, d: ((wide(a) << np.uint64(32) | wide(b)) >> np.uint64(8)).astype(U),
        "iiii",
    )
    yield InstructionTest(
        "v_dot4_i32_iu8", RDNA, "v_dot4_i32_iu8 %0, %1, %2, %3 neg_lo:[1,1,0]", products, "iiii"
    )
    yield InstructionTest("v_dot4_i32_i8", CDNA, "v_dot4_i32_i8 %0, %1, %2, %3", products, "iiii")
    yield InstructionTest(
        "v_mul_u32_u24",
        ALL,
        "v_mul_u32_u24 %0, %1, %2",
        lambda a, b, c, d: (a & cut) * (b & cut),
        "iiii",
    )
    yield InstructionTest(
        "v_mul_i32_i24",
        ALL,
        "v_mul_i32_i24 %0, %1, %2",
        lambda a, b, c, d: (signed(a) * signed(b) & 0xFFFFFFFF).astype(U),
        "iiii",
    )
    yield InstructionTest(
        "v_mad_u32_u24",
        ALL,
        "v_mad_u32_u24 %0, %1, %2, %3",
        lambda a, b, c, d: (a & cut) * (b & cut) + c,
        "iiii",
    )
    yield InstructionTest(
        "v_bfi_b32", ALL, "v_bfi_b32 %0, %1, %2, %3", lambda a, b, c, d: a & b | ~a & c, "iiii"
    )


def _lanes() -> Iterator[InstructionTest]:
    def moved(name: str, archs: tuple[str, ...], control: str, expected: Any) -> InstructionTest:
        text = f"v_mov_b32_dpp %0, %1 {control} row_mask:0xf bank_mask:0xf"
        return InstructionTest(f"DPP {name}", archs, text, expected, "iiii")

    def swapped(width: int) -> InstructionTest:
        name = f"v_permlane{width}_swap_b32"
        lane = np.arange(64)
        return InstructionTest(
            name,
            ("gfx950",),
            f"v_mov_b32 %0, %1\nv_mov_b32 v60, %2\ns_nop 4\n{name} %0, v60",
            lambda a, b, c, d: np.where(lane // width % 2 == 0, a, b[lane - width]),
            "iiii",
        )

    def lane(x: Words) -> Any:
        return np.arange(len(x))

    yield moved("row_ror", ALL, "row_ror:4", lambda a, b, c, d: a[lane(a) & ~15 | lane(a) - 4 & 15])
    yield moved(
        "row_shr",
        ALL,
        "row_shr:1",
        lambda a, b, c, d: np.where(lane(a) % 16 >= 1, np.roll(a, 1), d),
    )
    yield moved("quad_perm", ALL, "quad_perm:[1,0,3,2]", lambda a, b, c, d: a[lane(a) ^ 1])
    yield moved("row_xmask", RDNA, "row_xmask:2", lambda a, b, c, d: a[lane(a) ^ 2])
    yield moved("row_share", RDNA, "row_share:3", lambda a, b, c, d: a[lane(a) & ~15 | 3])
    yield moved("row_newbcast", CDNA, "row_newbcast:3", lambda a, b, c, d: a[lane(a) & ~15 | 3])
    for name, other in (("v_permlane16_b32", 0), ("v_permlanex16_b32", 16)):
        for what, last in (("", "s21"), (" by a literal", "0x89abcdef")):
            yield InstructionTest(
                name + what,
                RDNA,
                f"s_mov_b32 s20, 0x76543210\ns_mov_b32 s21, 0x89abcdef\n{name} %0, %1, s20, {last}",
                lambda a, b, c, d, other=other: (  # type: ignore[misc]
                    a[lane(a) ^ lane(a) // 8 % 2 * 7 ^ other]
                ),
                "iiii",
            )
    yield swapped(16)
    yield swapped(32)
    for m in (1, 16):
        mask = "".join("i" if 16 >> i == m else "p" for i in range(5))
        yield InstructionTest(
            f"ds_swizzle_b32 xor {m}",
            ALL,
            f'ds_swizzle_b32 %0, %1 offset:swizzle(BITMASK_PERM,"{mask}")\nWAIT',
            lambda a, b, c, d, m=m: a[lane(a) ^ m],  # type: ignore[misc]
            "iiii",
        )
