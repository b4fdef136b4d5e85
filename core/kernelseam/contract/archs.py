"""Archs: the row of each in its vendor's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelseam.dtypes import DType


@dataclass(frozen=True)
class LibraryRate:
    """How a vendor's library multiplies matrices of one dtype."""

    block: int
    """Rows and columns of a result that one of its blocks makes."""
    rate: float
    """The part of the device's peak that its blocks reach."""
    block_seconds: float
    """What starting and ending a block takes of a compute unit: every matrix, however small, has
    blocks of its own."""
    tf32: float = 1.0
    """How many times as fast it multiplies in TF32, where it does."""


@dataclass(frozen=True)
class Coefficients:
    """What is left of a device's peaks, by arch: a row of its vendor's table."""

    source: str
    """What the figures were measured on, or "estimated"."""
    bandwidth: float = 1.0
    """The part of the peak bandwidth that a copy reaches, read and written."""
    multiply: Mapping[DType, float] = field(default_factory=dict, hash=False)
    """The part of the peak rate that the instruction of the shared kernels' products issues at: a
    tile's rate is a part of this. 1 where a dtype is missing."""
    call_seconds: float = 0.0
    """What a call of a vendor's library takes beyond a launch."""
    libraries: Mapping[str, Mapping[DType, LibraryRate]] = field(default_factory=dict, hash=False)
    """By implementation and dtype."""


@dataclass(frozen=True)
class ArchRow:
    """One arch's row in its vendor's table: what shared kernels and their definitions need to know.

    ``tiles`` maps an operation ("gemm", "attention") to its rows of tile shapes; each operation's
    kernel definition documents the columns it reads.
    """

    arch: str
    warp_size: int
    shared_bytes_per_block: int
    registers_per_lane: int
    platform: str
    """Include name of the platform header."""
    defines: tuple[tuple[str, str], ...]
    matrix_dtypes: frozenset[DType]
    tiles: Mapping[str, tuple[Any, ...]] = field(hash=False)
    options: tuple[str, ...] = ()
    cluster_blocks: int = 1
    """The most blocks of a cluster; 1 where there are no clusters."""
    programmatic_launch: bool = False
    """Whether it has programmatic dependent launch."""
    costs: Coefficients | None = field(default=None, compare=False)
    """None: nobody knows more than the peaks, and the roofline stands for a prediction."""
