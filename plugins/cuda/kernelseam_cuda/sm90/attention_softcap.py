"""The softcap of small scores by a polynomial: the coefficients of SmallCap in
cuda_kernels/sm90/attention/softmax.h, and where they serve."""

from __future__ import annotations

from itertools import accumulate, repeat
from operator import mul

from kernelseam.kernels.signature import Structure

_TANH_LONG = (0.999999927, -0.3333231, 0.133101737, -0.0521014809, 0.0154754275)
_TANH_SHORT = (0.999999922, -0.33329463, 0.130458951)
"""tanh(x)/x by powers of x²: relative errors 7.3e-8 and 7.8e-8 up to ``_TANH_LIMIT`` and
``_TANH_LEAST``."""
_TANH_LIMIT, _TANH_LEAST = 0.6, 0.19
_SMALL_CAP = ("least", "d0", "d1", "d2", "limit", *(f"c{i}" for i in range(len(_TANH_LONG))))
_LEAST_COEFFICIENT, _LARGEST_COEFFICIENT = 1e-36, 1e30
"""Of tanh with the scale in it: what float32 holds, and its sums with a fourth power."""

SMALL_CAP = Structure(tuple((f"small_cap_{n}", "f32") for n in _SMALL_CAP), _SMALL_CAP)


def small_cap(cap: float, cap_inverse: float) -> dict[str, int | float]:
    """The coefficients of ``cap``·tanh(``cap_inverse``·x), and below which x they serve: 0 where
    float32 does not hold them."""

    def scaled(polynomial: tuple[float, ...]) -> list[float]:
        powers = accumulate(
            repeat(cap_inverse**2, len(polynomial) - 1), mul, initial=cap * cap_inverse
        )
        return [x * power for x, power in zip(polynomial, powers, strict=True)]

    short, long = scaled(_TANH_SHORT), scaled(_TANH_LONG)
    held = all(_LEAST_COEFFICIENT < abs(x) < _LARGEST_COEFFICIENT for x in (*short, *long))
    values = [0.0] * len(_SMALL_CAP)
    if held:
        values = [_TANH_LEAST / cap_inverse, *short, _TANH_LIMIT / cap_inverse, *long]
    return dict(zip((f"small_cap_{n}" for n in _SMALL_CAP), values, strict=True))
