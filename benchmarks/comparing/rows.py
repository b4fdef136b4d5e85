"""Rows and what they share: a session, contestants over the row's memory, the verdict on each one's
result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import kernelseam as ks
import ml_dtypes
import numpy as np
import torch
from kernelseam.contract import ArrayInfo, Device
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.dispatch import find_device
from kernelseam.dtypes import DType
from kernelseam.errors import KernelSeamError
from kernelseam.oracle import check
from kernelseam.oracle.formulas import AttentionResult
from kernelseam.planning import Plan
from kernelseam.plugins import plugins
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.comparing.machine import sampling
from benchmarks.comparing.results import BACK_TO_BACK, FLUSHED, OURS, PEER, Record, Timed
from benchmarks.comparing.timing import Clock, Run, Settings, Turn, measure

BASE = 1 << 40
"""Placeholder address of arrays that are only planned for."""
PEERS_DIFFER = {"float16": 1e-2, "bfloat16": 2e-2, "float32": 1e-4, "float64": 1e-10}
"""Relative error, ‖result − float64‖ / ‖float64‖, above which a peer's result is wrong."""

Array = np.ndarray[Any, Any]
Make = Callable[[Sequence[int], str], Any]
"""An array of a shape and a dtype."""


@dataclass
class Session:
    """What a run's rows share. ``implementations``: those of ours that are timed beside dispatch's
    own choice, where they support a row's problem. Without ``peers`` nobody else's is called, nor
    ours of another problem beside it."""

    device: str
    clock: Clock
    settings: Settings = field(default_factory=Settings)
    implementations: Sequence[str] = ()
    peers: bool = True
    planned_for: Device | None = None
    """A device that need not be here, where nothing is run."""

    def random(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """N(0, 1)."""
        drawn = "bfloat16" if dtype.startswith("float8") else dtype  # torch draws none of 8 bits
        values = torch.randn(*shape, device=self.device, dtype=getattr(torch, drawn))
        return values.to(getattr(torch, dtype))

    def poisoned(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Filled with NaN, so that missing writes show."""
        return torch.full(
            tuple(shape), float("nan"), device=self.device, dtype=getattr(torch, dtype)
        )

    def stream(self) -> int:
        """torch's current stream; during capture the graph's."""
        return 0 if self.device == "cpu" else int(torch.cuda.current_stream().cuda_stream)

    def flash(self) -> AbstractContextManager[None]:
        """Within it torch's attention is its flash attention where that takes a call: what torch
        takes by itself may be cuDNN's, which plans each new length for 50 to 150 ms."""
        ways = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        chosen: AbstractContextManager[None] = sdpa_kernel(ways)
        return chosen

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def target(self) -> Device:
        """kernelseam's name for the device. torch calls AMD's GPUs ``cuda``, too."""
        if self.planned_for is not None:
            return self.planned_for
        vendor = "rocm:0" if torch.version.hip else "cuda:0"
        return find_device("numpy" if self.device == "cpu" else vendor)

    def prepared(self, dtype: str, make_judge: Callable[[], Callable[[Any], Judged]]) -> Prepared:
        """A row's contestants, none yet. The judge is made for the first result that it is asked
        about: its reference in float64 takes longer than many a row."""
        judge = cache(make_judge)
        return Prepared(judge=lambda result: judge()(result), dtype=dtype, peers=self.peers)

    def e4m3(self) -> str:
        """The dtype of 8 bits that the device multiplies, or where it multiplies none, the usual
        one."""
        target = self.target()
        toolchain = plugins().backend(target.backend).toolchain
        own = toolchain.arch_row(target.arch).fp8_dtypes if toolchain else ()
        return str(next(iter(sorted(own, key=str)), DType.float8_e4m3fn))

    def phantom(self, shape: Sequence[int], dtype: str) -> ArrayInfo:
        """An array's description without memory, to plan for."""
        strides = [1] * len(shape)
        for i in reversed(range(len(shape) - 1)):
            strides[i] = strides[i + 1] * max(shape[i + 1], 1)
        return ArrayInfo(
            BASE, tuple(shape), tuple(strides), DType(dtype), self.target(), "torch", None
        )


@dataclass
class Contestant:
    """``result``: what it computed, None of a copy; ``repeats``: whether it gives the same bits
    every time."""

    name: str
    role: str
    run: Run
    result: Callable[[], Any] | None = None
    implementation: str = ""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    repeats: bool = True


@dataclass(frozen=True)
class Judged:
    """‖result − float64‖ / ‖float64‖, and the largest error over its tolerance with what it is
    of."""

    error: float
    worst: float
    message: str


@dataclass(frozen=True)
class Part:
    """One head of an attention's result that is held against float64: where it lies in the result,
    how many keys it has, which of its rows are looked at (None: all), and what is expected."""

    place: Any
    keys: int
    want: AttentionResult
    rows: Any = None


def judged(result: torch.Tensor, parts: Iterable[Part], head_dim: int, dtype: str) -> Judged:
    """The relative error over all parts, and the worst element's error over its tolerance."""
    actual, expected, worst, message = [], [], 0.0, ""
    for part in parts:
        out = host(result[part.place])[None, None]
        verdict = check.attention_verdict(
            part.want, part.keys, head_dim, DType.of(dtype), out, None, out.shape[:3], part.rows
        )
        actual.append((out[0, 0] if part.rows is None else out[0, 0][part.rows]).reshape(-1))
        expected.append(part.want.out.reshape(-1))
        if verdict.worst >= worst:
            worst, message = verdict.worst, verdict.message
    error = relative(np.concatenate(actual).astype(np.float64), np.concatenate(expected))
    return Judged(error, worst, message)


@dataclass
class Prepared:
    """A row's contestants over allocated memory. Without ``peers``, nobody else's."""

    contestants: list[Contestant] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    judge: Callable[[Any], Judged] = lambda result: Judged(0.0, 0.0, "")
    dtype: str = "float32"
    keep: object = None
    """Owners of memory that the plans know by address only."""
    peers: bool = True

    def ours(
        self,
        session: Session,
        descriptor: Callable[[Any], Descriptor],
        result: Callable[[], Any],
        shown: Callable[[Any], Any] = lambda out: out,
    ) -> None:
        """Add ours as dispatched, and each named implementation that supports the problem, each
        with its own output. ``shown`` converts an output to what the judge takes."""
        first = self.add(session, descriptor, result, shown, OURS, OURS)
        implementations = {first.implementation}
        for name in session.implementations:
            called = f"{OURS} by {name}"
            try:
                contestant = self.add(session, descriptor, result, shown, called, OURS, name)
            except KernelSeamError as e:
                self.refused[called] = str(e)
                continue
            if contestant.implementation in implementations:  # it is dispatch's own choice
                self.contestants.remove(contestant)
            implementations.add(contestant.implementation)

    def add(
        self,
        session: Session,
        descriptor: Callable[[Any], Descriptor],
        result: Callable[[], Any],
        shown: Callable[[Any], Any],
        name: str,
        role: str,
        implementation: str | None = None,
    ) -> Contestant:
        """Add one plan as a contestant. Raises the errors of planning and binding."""
        out = result()
        plan = ks.plan(descriptor(out), device=session.target(), implementation=implementation)
        called = plan.implementation + (f":{plan.choice.variant}" if plan.choice.variant else "")
        contestant = Contestant(name, role, launched(plan, session), lambda: shown(out), called)
        self.contestants.append(contestant)
        return contestant

    def peer(
        self,
        name: str,
        run: Run,
        result: Callable[[Any], Any] = lambda x: x,
        role: str = PEER,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Another's: tried at once, and refused with its reason where it raises. ``result``: what
        it returned, as the row's results lie."""
        if not self.peers:
            return

        def selected() -> None:
            with around():
                run()

        if (why := refusal(selected)) is not None:
            self.refused[name] = why
            return
        self.contestants.append(Contestant(name, role, run, lambda: result(run()), around=around))


def refusal(run: Run) -> str | None:
    """Why another's call raises, in a line; None where it does not."""
    try:
        run()
    except Exception as e:  # a library raises what it likes
        return f"{type(e).__name__}: {e}".strip().splitlines()[0][:200]
    return None


def launched(plan: Plan, session: Session) -> Run:
    """A plan's call on torch's current stream, which lists of addresses cannot tell."""
    call = plan.bind()
    return call if session.device == "cpu" else lambda: call(session.stream())


class Row(Protocol):
    """One problem."""

    @property
    def suite(self) -> str: ...

    @property
    def name(self) -> str: ...

    def planned(self, session: Session) -> Iterable[Descriptor]:
        """What of ours is planned, over memory that is not there: compiled before anything is
        timed."""

    def measure(self, session: Session) -> Record:
        """Raises what a contestant of ours raises."""


@dataclass(frozen=True)
class NamedRow:
    """Another suite's row, under a title: a definition's, or a seed's."""

    title: str
    row: Row
    suite: str

    @property
    def name(self) -> str:
        return f"{self.title}: {self.row.name}"

    def planned(self, session: Session) -> Iterable[Descriptor]:
        return self.row.planned(session)

    def measure(self, session: Session) -> Record:
        return replace(self.row.measure(session), suite=self.suite, name=self.name)


class Wrong(Exception):
    """A contestant's result is wrong."""


def compared(record: Record, prepared: Prepared, session: Session) -> Record:
    """Check every contestant's result, then time them in turns. Raises Wrong."""
    record.refused.update(prepared.refused)
    timed = {c.name: Timed(c.name, c.role, c.implementation) for c in prepared.contestants}
    ours = _first_result(prepared, session)
    for c in prepared.contestants:
        if c.result is None:
            continue
        with c.around():
            c.run()
            session.synchronize()
            judged = prepared.judge(result := c.result())
            session.synchronize()
        timed[c.name].error = judged.error
        if c.implementation and c.role != PEER:
            timed[c.name].worst = judged.worst
            right = judged.worst <= 1 and bool(torch.isfinite(result).all())
        else:
            right = max(judged.error, apart(ours, result)) <= PEERS_DIFFER[prepared.dtype]
        if not right:  # nor where it is NaN
            raise Wrong(f"{_called(c)}: relative error {judged.error:.2e}. {judged.message}")
    kept = {
        c.name: c.result().clone()
        for c in prepared.contestants
        if c.role == OURS and c.repeats and c.result is not None
    }
    turns = {c.name: Turn(c.run, c.around) for c in prepared.contestants}
    with sampling(session.device) as clocks:
        samples, record.captured = measure(turns, session.clock, session.settings)
    record.clocks = clocks
    for c in prepared.contestants:
        if c.name in kept and c.result is not None and not torch.equal(c.result(), kept[c.name]):
            raise Wrong(f"{_called(c)}: other bits after it was timed than before")
        timed[c.name].us = {
            BACK_TO_BACK: [round(s * 1e6, 3) for s in samples[c.name].back_to_back],
            FLUSHED: [round(s * 1e6, 3) for s in samples[c.name].flushed],
        }
    record.timed = list(timed.values())
    return record


def _called(c: Contestant) -> str:
    return f"{c.name} [{c.implementation}]" if c.implementation else c.name


def _first_result(prepared: Prepared, session: Session) -> torch.Tensor:
    first = next(c for c in prepared.contestants if c.role == OURS)
    first.run()
    session.synchronize()
    assert first.result is not None
    result: torch.Tensor = first.result()
    return result


def apart(x: torch.Tensor, y: torch.Tensor) -> float:
    """‖x − y‖ / ‖y‖ over all of it, an entry of the first axis at a time."""
    off = whole = 0.0
    for a, b in zip(*(_pieces(t) for t in (x, y)), strict=True):
        off += (
            float(
                torch.linalg.vector_norm((a.float() - b.float()).reshape(-1), dtype=torch.float32)
            )
            ** 2
        )
        whole += float(torch.linalg.vector_norm(b.float().reshape(-1), dtype=torch.float32)) ** 2
    return (off / whole) ** 0.5 if whole else float(off > 0)


def _pieces(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of about 64 million elements."""
    size = max((64 << 20) // max(t[0].numel(), 1), 1)
    return (t[i : i + size] for i in range(0, len(t), size))


def host(tensor: torch.Tensor) -> Array:
    """A tensor's elements as NumPy has them."""
    copied = tensor.detach().contiguous().cpu()
    narrow = copied.dtype is torch.bfloat16
    array: Array = copied.view(torch.int16).numpy() if narrow else copied.numpy()
    return array.view(ml_dtypes.bfloat16) if narrow else array


def relative(actual: Array, expected: Array) -> float:
    """‖got − want‖ / ‖want‖."""
    norm = float(np.linalg.norm(expected))
    return float(np.linalg.norm(actual.astype(np.float64) - expected)) / norm if norm else 0.0
