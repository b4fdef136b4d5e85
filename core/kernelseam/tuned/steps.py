"""The steps by which extents that vary are put into classes (``classes.py``): of each extent that
which stands for its class. Traces record calls of these alone."""

from __future__ import annotations

import math

from kernelseam.symbolic import recorded

FEW = 64
"""Rows below which a class has one number of them."""
_TILE_ROWS = 64, 128, 256
"""Rows of tiles that heads of a group may share."""


@recorded
def about(n: int) -> int:
    """The nearest power of √2 on a logarithmic scale; 0 for 0."""
    return round(2 ** (round(2 * math.log2(n)) / 2)) if n > 0 else 0


@recorded
def near(n: int) -> int:
    """The nearest number of four leading bits, eight steps an octave; exact below 16."""
    step = 1 << max(n.bit_length() - 4, 0)
    return (n + step // 2) // step * step


@recorded
def few(n: int) -> int:
    """The largest extent of a class in steps of half an octave: 1, 2, 3, 4, 6, 8, 12, …"""
    octave = 1 << max(n - 1, 0).bit_length()
    return n if n < 4 else 3 * octave // 4 if 4 * n <= 3 * octave else octave


@recorded
def rows(n: int) -> int:
    """The largest extent of a class: exact below 64, then in 64s, then by five leading bits of
    their number."""
    if n < FEW:
        return n
    units = -(-n // FEW)
    cut = max(units.bit_length() - 5, 0)
    return (-(-units >> cut) << cut) * FEW


@recorded
def entries(n: int) -> int:
    """The largest batch of a class of few queries, whose tiles or parts of keys fill a device or
    not: exact up to 16, then by four leading bits."""
    cut = max(n.bit_length() - 4, 0)
    return -(-n >> cut) << cut


@recorded
def shared(n: int, most: int, group: int) -> int:
    """The largest number of queries, up to ``most``, of a class in which ``group`` heads have as
    many tiles of 64, 128 and 256 rows, where they share them by whole queries; tiles by five
    leading bits."""
    for tile_rows in _TILE_ROWS if group > 1 else ():
        tiles = -(-n // (tile_rows // group)) if tile_rows >= group else 0
        cut = max(tiles.bit_length() - 5, 0)
        most = min(most, (-(-tiles >> cut) << cut) * (tile_rows // group)) if tiles else most
    return most


@recorded
def columns(n: int) -> int:
    """As ``rows`` by six bits, and divided by the same powers of two below 64: on them depend the
    lines of a cache and the chunks of a transfer."""
    if n < FEW:
        return n
    low, units = n & -n, -(-n // FEW)
    cut = max(units.bit_length() - 6, 0)
    return (-(-units >> cut) << cut) * FEW - (low if low < FEW else 0)


@recorded
def total(n: int, entries: int, represented: int, most: int) -> int:
    """Of ``represented`` packed sequences, up to ``most`` rows in all: as many a sequence as ``n``
    of ``entries`` are, by four leading bits; 0 for 0."""
    return max(min(near(n * represented // max(entries, 1)), most), 1) if n else 0
