"""Calls that every rank makes alike: with ``check=True`` one small exchange finds where they
differ, and what one rank refuses, every rank raises."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.transfers import all_gather
from kernelseam.errors import InvalidValue, format_value

Tensor = Any
T = TypeVar("T")
_BYTES = 4096
"""Of a rank's description in the first exchange: its length in so many digits, then JSON."""
_DIGITS = 12
_SHOWN = 60
"""Characters of each of the values that differ."""


def agree(axis: Axis, check: bool, make: Callable[[], tuple[T, Mapping[str, object]]]) -> T:
    """What ``make`` returns beside a description of the call. With ``check``, every rank raises
    InvalidValue for what any of them refuses or fails at, and where descriptions differ, naming
    field and ranks."""
    if not check:
        return make()[0]
    result: T | None = None
    error: Exception | None = None
    said: Mapping[str, object] = {}
    try:
        result, said = make()
    except InvalidValue as refused:
        error = refused
        words = [refused.field, format_value(refused.value), refused.rule, refused.remedy]
        said = {"refused": words}
    except Exception as failed:  # the other ranks must not wait for this one
        error = failed
        said = {"refused": ["call", type(failed).__name__, str(failed), "Change the call"]}
    everywhere = _exchanged(axis, said)
    for rank, other in enumerate(everywhere):
        if "refused" in other:
            field, value, rule, remedy = other["refused"]
            raise InvalidValue(
                field, value, f"rank {rank} of {axis.size} refuses it: {rule}", remedy
            ) from error
    for name in {n: None for other in everywhere for n in other}:
        values = [other.get(name) for other in everywhere]
        if any(v != values[0] for v in values):
            ranks: dict[str, list[int]] = {}
            for rank, v in enumerate(values):
                ranks.setdefault(str(v), []).append(rank)
            raise InvalidValue(
                name,
                "; ".join(f"{_short(v)} on {_named(at)}" for v, at in ranks.items()),
                "must be the same on every rank",
                "Pass the same everywhere",
            )
    assert result is not None
    return result


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _named(ranks: Sequence[int]) -> str:
    """Ascending ranks in words, three and more neighbours as one span."""
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    words = [f"{a} to {b}" if b > a + 1 else ", ".join(map(str, range(a, b + 1))) for a, b in spans]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"


def _exchanged(axis: Axis, said: Mapping[str, object]) -> list[dict[str, Any]]:
    """Every rank's description: by one exchange, and by a second where one of them is longer."""
    text = json.dumps(said, default=format_value).encode()
    device = torch.device("cpu")
    if "gloo" not in str(dist.get_backend_config(axis.group)):
        device = torch.accelerator.current_accelerator(check_available=True) or device
    step = f"exchange of options on rank {axis.index} of {axis.size}"

    def gathered(sent: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(sent.ljust(size)), dtype=torch.uint8)
        return [row.tobytes() for row in all_gather(axis, mine.to(device), step).cpu().numpy()]

    first = gathered((f"{len(text):{_DIGITS}}".encode() + text)[:_BYTES], _BYTES)
    longest = max(int(row[:_DIGITS]) for row in first)
    whole = [row[_DIGITS:] for row in first]
    if longest > _BYTES - _DIGITS:
        whole = gathered(text, longest)
    return [json.loads(row) for row in whole]
