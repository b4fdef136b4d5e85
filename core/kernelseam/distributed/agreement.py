"""Calls that every rank makes alike: with ``check=True`` one small exchange finds where they
differ, and what one rank refuses, every rank raises."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from kernelseam.distributed.ranks import Axis
from kernelseam.distributed.transfers import all_gather
from kernelseam.errors import InvalidValue, KernelSeamError

Tensor = Any
T = TypeVar("T")
_BYTES = 4096
"""A rank's description, as JSON."""


def agree(axis: Axis, check: bool, make: Callable[[], tuple[T, Mapping[str, object]]]) -> T:
    """What ``make`` returns beside a description of the call. With ``check``, every rank raises
    what any of them refuses, and InvalidValue where descriptions differ, naming field and ranks."""
    if not check:
        return make()[0]
    result: T | None = None
    error: KernelSeamError | None = None
    said: Mapping[str, object] = {}
    try:
        result, said = make()
    except KernelSeamError as refused:
        error = refused
        words = (
            [refused.field, str(refused.value), refused.rule, refused.remedy]
            if isinstance(refused, InvalidValue)
            else ["call", type(refused).__name__, str(refused)[:400], "Change the call"]
        )
        said = {"refused": words}
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
            kinds: dict[str, list[int]] = {}
            for rank, v in enumerate(values):
                kinds.setdefault(str(v), []).append(rank)
            differing = "; ".join(
                f"{v} on rank{'s' * (len(at) > 1)} {', '.join(map(str, at))}"
                for v, at in kinds.items()
            )
            raise InvalidValue(
                name, differing, "must be the same on every rank", "Pass the same everywhere"
            )
    assert result is not None
    return result


def _exchanged(axis: Axis, said: Mapping[str, object]) -> list[dict[str, Any]]:
    text = json.dumps(said, default=str).encode()
    if len(text) > _BYTES:
        text = json.dumps({"call": f"{text[: _BYTES // 2].decode(errors='replace')}…"}).encode()
    device = torch.device("cpu")
    if "gloo" not in str(dist.get_backend_config(axis.group)):
        device = torch.accelerator.current_accelerator(check_available=True) or device
    mine = torch.zeros(_BYTES, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    step = f"exchange of options on rank {axis.index} of {axis.size}"
    everyone = all_gather(axis, mine.to(device), step).cpu().numpy()
    return [json.loads(row.tobytes().rstrip(b"\0")) for row in everyone]
