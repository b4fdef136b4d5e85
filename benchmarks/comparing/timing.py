"""Times taken in turns, on a card that is warm, back to back and with an emptied L2 cache.

One contestant after another misled by up to 13 %: the clock follows power and heat. So each round
asks all of them, in an order that moves on from round to round. Before the first the card is kept
busy until it is at its power limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

Run = Callable[[], object]


@dataclass(frozen=True)
class Settings:
    """How long is measured."""

    rounds: int = 7
    warm_seconds: float = 0.3
    burst_seconds: float = 0.008
    most_flushed: int = 8
    """Launches of one contestant in a round, each after a flush."""
    short_seconds: float = 100e-6
    """Launches with shorter device times are replayed from a graph, if the host takes longer to
    launch them."""
    captured_launches: int = 20


@dataclass(frozen=True)
class Turn:
    """What is timed. ``around``: entered for a burst, so that what only selects a backend is not
    timed."""

    run: Run
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class Samples:
    """Seconds of one launch."""

    back_to_back: list[float] = field(default_factory=list)
    flushed: list[float] = field(default_factory=list)


class Clock(Protocol):
    """A device's."""

    def burst(self, run: Run, count: int) -> float:
        """Seconds on the device of ``count`` launches, one after the other."""

    def flushed(self, run: Run, count: int) -> list[float]:
        """Seconds on the device of each of ``count`` launches, the L2 cache emptied before each."""

    def captured(self, run: Run, count: int) -> Run | None:
        """``count`` launches as one replay of a graph; None where they cannot be captured."""


def measure(
    turns: Mapping[str, Turn], clock: Clock, settings: Settings
) -> tuple[dict[str, Samples], bool]:
    """Times of each by name, and whether bursts were replays of graphs."""
    once = {name: _once(turn, clock) for name, turn in turns.items()}
    _warm(turns, once, clock, settings)
    once = {name: _once(turn, clock) for name, turn in turns.items()}
    graphs: dict[str, Run] = {}
    if once and min(once.values()) < settings.short_seconds:
        graphs = _graphs(turns, clock, settings.captured_launches)
    samples = {name: Samples() for name in turns}
    names = list(turns)
    for turn_number in range(settings.rounds):
        at = turn_number % max(len(names), 1)
        for name in names[at:] + names[:at]:
            turn, repeats = turns[name], max(int(settings.burst_seconds / once[name]), 1)
            with turn.around():
                if graphs:
                    replays = max(repeats // settings.captured_launches, 1)
                    seconds = clock.burst(graphs[name], replays) / (
                        replays * settings.captured_launches
                    )
                else:
                    seconds = clock.burst(turn.run, repeats) / repeats
                samples[name].back_to_back.append(seconds)
        for name in names[at:] + names[:at]:
            count = min(max(int(settings.burst_seconds / once[name]), 1), settings.most_flushed)
            with turns[name].around():
                samples[name].flushed += clock.flushed(turns[name].run, count)
    return samples, bool(graphs)


def _once(turn: Turn, clock: Clock) -> float:
    with turn.around():
        clock.burst(turn.run, 1)
        return max(clock.burst(turn.run, 2) / 2, 1e-7)


def _warm(
    turns: Mapping[str, Turn], once: Mapping[str, float], clock: Clock, settings: Settings
) -> None:
    spent = 0.0
    while turns and spent < settings.warm_seconds:
        for name, turn in turns.items():
            with turn.around():
                spent += max(
                    clock.burst(turn.run, max(int(settings.burst_seconds / once[name]), 1)), 1e-6
                )


def _graphs(turns: Mapping[str, Turn], clock: Clock, count: int) -> dict[str, Run]:
    """Graphs of all contestants or of none, so that their times are comparable."""
    graphs: dict[str, Run] = {}
    for name, turn in turns.items():
        with turn.around():
            graph = clock.captured(turn.run, count)
        if graph is None:
            return {}
        graphs[name] = graph
    return graphs
