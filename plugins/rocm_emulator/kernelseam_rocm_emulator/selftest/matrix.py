"""Self-tests of the matrix instructions, by the lane maps of AMD's ISA documents: D = A·Bᵀ + C with
numbers of every class, in A's last row inf and NaN, in its first rows subnormals of its dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelseam_rocm_emulator.patches.elements import BITS, TYPES
from kernelseam_rocm_emulator.selftest.instruction import RDNA4
from kernelseam_rocm_emulator.selftest.kernels import KernelTest, Launcher

_PRELUDE = r"""
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <int N> struct bits_of;
template <> struct bits_of<4> { using type = unsigned; };
template <> struct bits_of<2> { using type = unsigned short; };
template <> struct bits_of<1> { using type = unsigned char; };
"""


@dataclass(frozen=True)
class Product:
    """One instruction. A lane holds ``each`` consecutive elements of a row of A and of B."""

    builtin: str
    arch: str
    kind: str
    """Of the elements: F16, BF16, XF32, FP8 (or FP8FNUZ) or IU8."""
    element: str
    """The builtin's own type of an element, or of the words that hold several."""
    side: int
    depth: int
    out: str
    each: int
    call: str
    """The builtin's arguments over x, y and c."""

    @property
    def lanes(self) -> int:
        return 64 if self.arch.startswith("gfx9") else 32


def products(arch: str) -> Iterator[Product]:
    if arch.startswith("gfx9"):
        shapes = [(16, 16), (32, 8)] + ([(16, 32), (32, 16)] if arch == "gfx950" else [])
        for side, depth in shapes:
            new = depth * side == 512
            for kind, element in (("F16", "_Float16"), ("BF16", "__bf16" if new else "short")):
                ending = (
                    ("_" if new else "")
                    + kind.lower()
                    + ("_1k" if kind == "BF16" and not new else "")
                )
                yield Product(
                    f"mfma_f32_{side}x{side}x{depth}{ending}",
                    arch,
                    kind,
                    element,
                    side,
                    depth,
                    "float",
                    depth * side // 64,
                    "x, y, c, 0, 0, 0",
                )
        if arch != "gfx90a":
            kind = "FP8FNUZ" if arch == "gfx942" else "FP8"
            for side, depth in ((16, 32), (32, 16)):
                name, call = f"mfma_f32_{side}x{side}x{depth}_fp8_fp8", "{x}, {y}, c, 0, 0, 0"
                yield Product(name, arch, kind, "int", side, depth, "float", 8, _longs(call))
        if arch == "gfx942":
            name, call = "mfma_f32_16x16x8_xf32", "x, y, c, 0, 0, 0"
            yield Product(name, arch, "XF32", "float", 16, 8, "float", 2, call)
        return
    tail = "_w32_gfx12" if arch in RDNA4 else "_w32"
    each = 8 if arch in RDNA4 else 16
    bf16 = "short"
    for kind, element in (("F16", "_Float16"), ("BF16", bf16)):
        yield Product(
            f"wmma_f32_16x16x16_{kind.lower()}{tail}",
            arch,
            kind,
            element,
            16,
            16,
            "float",
            each,
            "x, y, c",
        )
    if arch in RDNA4:
        name = "wmma_f32_16x16x16_fp8_fp8" + tail
        yield Product(name, arch, "FP8", "int", 16, 16, "float", 8, "x, y, c")
    call = "true, x, false, y, c, false"
    yield Product(f"wmma_i32_16x16x16_iu8{tail}", arch, "IU8", "int", 16, 16, "int", each, call)


def _longs(call: str) -> str:
    """Operands of 8 bytes as MFMA takes them."""
    return call.format(**{n: f"__builtin_bit_cast(long, {n})" for n in "xy"})


def tests(arch: str) -> Iterator[KernelTest]:
    for p in products(arch):
        yield KernelTest(p.builtin, _source(p), _check(p))
        if p.lanes == 32 and p.kind == "F16" and arch not in RDNA4:
            yield KernelTest(
                f"{p.builtin} without its copy of A", _source(p, copied=False), _must_refuse(p)
            )


def _source(p: Product, copied: bool = True) -> str:
    """The kernel: rows of A and B by lane, C read and D written by the accumulators' map."""
    width = BITS[p.kind] // 8
    packed = p.each // 4 if width == 1 else p.each
    group = f"l / {p.side}" if p.lanes == 64 or p.each == 8 else "0"
    count = p.side * p.side // p.lanes
    rows = {
        ("gfx9", 16): "4 * (l / 16) + i",
        ("gfx9", 32): "8 * (i / 4) + 4 * (l / 32) + i % 4",
        ("gfx11", 16): "2 * i + l / 16",
        ("gfx12", 16): "8 * (l / 16) + i",
    }[p.arch[: 4 if p.lanes == 64 else 5], p.side]
    first = "x = __builtin_bit_cast(vec<{t}, {n}>, *(const raw*)(a + at));"
    if not copied:
        first = "if (l < 16) " + first
    return f"""extern "C" __global__ void NAME(
    const bits_of<{width}>::type* a, const bits_of<{width}>::type* b, const {p.out}* addend, {p.out}* out) {{
  using raw = vec<unsigned, {p.each * width // 4}>;
  int l = threadIdx.x, at = (l % {p.side}) * {p.depth} + ({group}) * {p.each};
  vec<{p.element}, {packed}> x = {{}}, y;
  {first.format(t=p.element, n=packed)}
  y = __builtin_bit_cast(vec<{p.element}, {packed}>, *(const raw*)(b + at));
  vec<{p.out}, {count}> c;
  for (int i = 0; i < {count}; i++) c[i] = addend[({rows}) * {p.side} + l % {p.side}];
  c = __builtin_amdgcn_{p.builtin}({p.call});
  for (int i = 0; i < {count}; i++) out[({rows}) * {p.side} + l % {p.side}] = c[i];
}}
"""  # noqa: E501


def prelude() -> str:
    """What stands before the kernels."""
    return _PRELUDE


def _operands(
    p: Product, rng: np.random.Generator
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    shape = (p.side, p.depth)
    if p.kind == "IU8":
        a, b = (
            rng.integers(-128, 128, shape).astype(np.int8),
            rng.integers(0, 256, shape).astype(np.uint8),
        )
        return a, b, rng.integers(-1000, 1000, (p.side, p.side)).astype(np.int32)
    a, b = (rng.standard_normal(shape).astype(TYPES[p.kind]) for _ in "ab")
    if p.kind == "XF32":  # what it has, and what is cut off
        x, y = ((z.view(np.uint32) | np.uint32(0x1FFF)).view(np.float32) for z in (a, b))
        x[-1, :3] = np.inf, -np.inf, np.nan
        return x, y, rng.standard_normal((p.side, p.side)).astype(np.float32)
    if BITS[p.kind] == 8:  # 7 subnormals, and no inf
        a[0] = rng.integers(1, 8, p.depth).astype(np.uint8).view(TYPES[p.kind])
        a[-1, 2] = np.nan
        return a, b, rng.standard_normal((p.side, p.side)).astype(np.float32)
    a[0] = rng.integers(1, 100, p.depth).astype(np.uint16).view(TYPES[p.kind])  # subnormal
    a[-1, :3] = np.inf, -np.inf, np.nan
    a[-2, 1] = np.inf
    return a, b, rng.standard_normal((p.side, p.side)).astype(np.float32)


def _run(
    p: Product, launch: Launcher, rng: np.random.Generator
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    a, b, c = _operands(p, rng)
    out = np.zeros_like(c)
    launch((1, 1, 1), (p.lanes, 1, 1), a, b, c, out)
    exact = np.int64 if p.kind == "IU8" else np.float64
    if p.kind == "XF32":
        a, b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
    with np.errstate(invalid="ignore"):
        return out, a.astype(exact) @ b.astype(exact).T + c


def _check(p: Product) -> Any:
    def check(launch: Launcher, rng: np.random.Generator) -> str:
        actual, expected = _run(p, launch, rng)
        right = (
            actual == expected
            if p.kind == "IU8"
            else np.isclose(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        )
        # the row of subnormals is small: C hides it, so that it is compared on its own
        if p.kind != "IU8":
            right[0] = actual[0] == expected[0].astype(np.float32)
        if right.all():
            return ""
        row, column = (int(i) for i in np.argwhere(~right)[0])
        values = f"is {actual[row, column]} and must be {expected[row, column]}"
        return f"{int((~right).sum())} elements differ, [{row}, {column}] {values}"

    return check


def _must_refuse(p: Product) -> Any:
    def check(launch: Launcher, rng: np.random.Generator) -> str:
        try:
            _run(p, launch, rng)
        except RuntimeError as e:
            return "" if "not a copy" in str(e) else str(e)
        return "lanes 16 to 31 differ from lanes 0 to 15, without an error"

    return check
