"""What one row gave, as JSON keeps it, and the ratios that count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OURS, PEER, WITHOUT, COPY = "ours", "peer", "without", "copy"
"""Roles: ours; another's; without the row's option; a copy of the bytes that the row must move.
Only a peer counts."""
BACK_TO_BACK, FLUSHED, HOST, ELAPSED = "back to back", "flushed", "host", "elapsed"
COLD, WALL, DISK = "cold, CPU", "cold, wall", "disk"
"""Ways of timing: launches one after the other; each after the L2 cache was emptied; the host's
time of a call; a program's by the clock; a binary from the compiler, by the process's CPU time and
by the clock, and from the cache on disk."""


@dataclass
class Timed:
    """One contestant of a row."""

    name: str
    role: str
    implementation: str = ""
    us: dict[str, list[float]] = field(default_factory=dict)
    """µs by way, one number a round (flushed: one a launch)."""
    error: float | None = None
    """‖result − float64‖ / ‖float64‖ over the part of the result that was looked at."""
    worst: float | None = None
    """Of ours: the largest error over the tolerance of docs/accuracy.md; at most 1."""
    predicted_us: float | None = None
    """Of ours, where choices are measured: µs by the cost model."""

    def median(self, way: str) -> float | None:
        """µs."""
        return statistics.median(self.us[way]) if self.us.get(way) else None

    def spread(self, way: str) -> float | None:
        """Half of the distance between the quartiles, over the median."""
        samples = self.us.get(way) or []
        if len(samples) < 4:
            return None
        low, middle, high = statistics.quantiles(samples, n=4)
        return (high - low) / 2 / middle


@dataclass
class Record:
    """A row's result. ``least``: what its ratio must not be below; ``limits``: µs that ours may
    take, by way."""

    suite: str
    name: str
    operations: float = 0.0
    bytes: float = 0.0
    least: float = 1.0
    limits: dict[str, float] = field(default_factory=dict)
    timed: list[Timed] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Contestant → why it has no times."""
    captured: bool = False
    """Whether bursts were replays of a graph, since launching takes the host longer than the
    device."""
    clocks: dict[str, float] = field(default_factory=dict)
    """What the card said of itself during the row."""
    seconds: float = 0.0
    unsupported: str = ""
    """Why nothing of ours takes the row on this device."""
    failure: str = ""
    """Why the row says nothing: a wrong result, an exception."""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Record:
        return cls(**{**fields, "timed": [Timed(**t) for t in fields["timed"]]})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, role: str) -> list[Timed]:
        return [t for t in self.timed if t.role == role]

    def ratios(self, ours: Timed, other: Timed) -> dict[str, float]:
        """The other's time over ours, by way."""
        return {
            way: theirs / mine
            for way in ours.us
            if (mine := ours.median(way)) and (theirs := other.median(way)) is not None
        }

    def counted(self, ours: Timed) -> float | None:
        """The best peer's time over ours, in the way in which that is less; None without a peer."""
        ratios = [r for peer in self.of(PEER) for r in self.ratios(ours, peer).values()]
        return min(ratios, default=None)

    def beyond(self, ours: Timed) -> list[str]:
        """What of it misses the row's targets, in words."""
        ratio = self.counted(ours)
        missed = []
        if ratio is not None and ratio < self.least:
            missed.append(f"{ratio:.3f} of the best peer, wanted {self.least:g}")
        for way, limit in self.limits.items():
            if (median := ours.median(way)) is not None and median > limit:
                missed.append(f"{way} {median:.3g} µs, at most {limit:g}")
        return missed


def mean(ratios: Iterable[float]) -> float | None:
    """The geometric mean."""
    values = list(ratios)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def means(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """By suite, by contestant of ours: the geometric mean of the ratios that count."""
    by_name: dict[str, dict[str, list[float]]] = {}
    for record in records:
        for ours in record.of(OURS):
            if not record.failure and (ratio := record.counted(ours)) is not None:
                by_name.setdefault(record.suite, {}).setdefault(ours.name, []).append(ratio)
    return {
        suite: {name: mean(r) or 0.0 for name, r in by.items()} for suite, by in by_name.items()
    }
