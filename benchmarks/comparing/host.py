"""The host's time of one call beside torch's: problems so small that the device is never what is
waited for.

Ways take turns: each is called two hundred times at a go, which the device's queue has room for,
without a wait in between, and waited for before the next go. Of a round the least time of its goes
counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import kernelseam as ks
import torch
import torch.nn.functional as functional
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.planning import Call

from benchmarks.comparing import idle_device
from benchmarks.comparing.host_new import NewRow, new_rows
from benchmarks.comparing.results import HOST, OURS, PEER, Record, Timed
from benchmarks.comparing.rows import Session, refusal
from benchmarks.comparing.timing import Run

CALLS, GOES, ROUNDS = 200, 60, 5
"""Of a go, of a round, of a row."""
CALL_MICROSECONDS = 4.0


@dataclass(frozen=True)
class HostRow:
    """``make(session)``: ours and torch's, None where torch has no such call. ``limit``: µs that
    ours may take."""

    name: str
    make: Callable[[Session], tuple[Run, Run | None]]
    limit: float | None = None
    suite: str = "host"

    def planned(self, session: Session) -> Iterable[Descriptor]:
        return ()

    def measure(self, session: Session) -> Record:
        ours, peer = self.make(session)
        if idle_device.active():
            peer = None
        runs = {OURS: ours} | ({"torch": peer} if peer is not None else {})
        record = Record(
            self.suite, self.name, limits={} if self.limit is None else {HOST: self.limit}
        )
        if peer is not None:
            with session.flash():
                why = refusal(peer)
            if why is not None:
                record.refused["torch"] = why
                del runs["torch"]
        times = least(runs, session)
        record.timed = [
            Timed(n, OURS if n == OURS else PEER, us={HOST: us}) for n, us in times.items()
        ]
        return record


def least(runs: dict[str, Run], session: Session) -> dict[str, list[float]]:
    """µs a call in each round, by name."""
    with session.flash():
        for run in runs.values():
            for _ in range(CALLS):
                run()
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            best = dict.fromkeys(runs, float("inf"))
            for _ in range(GOES):
                for name, run in runs.items():
                    session.synchronize()
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        run()
                    best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
            for name, us in best.items():
                seconds[name].append(round(us, 3))
        session.synchronize()
    return seconds


def _attention(session: Session) -> list[torch.Tensor]:
    """q, k, v and a result."""
    return [session.random((1, 4, 128, 64), "float16") for _ in range(4)]


def _product(session: Session) -> list[torch.Tensor]:
    """A, B and C."""
    return [
        session.random(shape, "float16") for shape in ((4, 128, 64), (4, 64, 128), (4, 128, 128))
    ]


def _call(session: Session) -> Call:
    return ks.plan(ks.Attention.from_arrays(*_attention(session))).bind()


def _call_of_attention(session: Session) -> tuple[Run, Run | None]:
    call, stream = _call(session), session.stream()
    return lambda: call(stream), None


def _call_on_current_stream(session: Session) -> tuple[Run, Run | None]:
    return _call(session), None


def _launch(session: Session) -> tuple[Run, Run | None]:
    call, stream = _call(session), session.stream()
    launch = call.launcher()
    return lambda call=call: launch(stream), None  # the call keeps the arrays


def _call_of_product(session: Session) -> tuple[Run, Run | None]:
    a, b, c = _product(session)
    gemm = ks.BatchedGemmStrided(A=a, B=b, C=c, M=128, N=128, K=64, batch=4)
    call, stream = ks.plan(gemm).bind(), session.stream()
    return lambda: call(stream), None


def _attentions(session: Session) -> tuple[Run, Run | None]:
    q, k, v, _ = _attention(session)
    return lambda: ks.attention(q, k, v), lambda: functional.scaled_dot_product_attention(q, k, v)


def _attention_into(session: Session) -> tuple[Run, Run | None]:
    q, k, v, out = _attention(session)
    return lambda: ks.attention(q, k, v, out=out), lambda: functional.scaled_dot_product_attention(
        q, k, v
    )


def _products(session: Session) -> tuple[Run, Run | None]:
    a, b, _ = _product(session)
    return lambda: ks.bmm(a, b), lambda: torch.bmm(a, b)


def _product_into(session: Session) -> tuple[Run, Run | None]:
    a, b, c = _product(session)
    return lambda: ks.bmm(a, b, out=c), lambda: torch.bmm(a, b, out=c)


def host_rows() -> list[HostRow | NewRow]:
    return [
        HostRow("call(stream), attention", _call_of_attention, CALL_MICROSECONDS),
        HostRow("call(stream), product", _call_of_product, CALL_MICROSECONDS),
        HostRow("call(), torch's current stream", _call_on_current_stream),
        HostRow("its launch alone", _launch),
        HostRow("attention(q, k, v)", _attentions),
        HostRow("attention(q, k, v, out=out)", _attention_into),
        HostRow("bmm(a, b)", _products),
        HostRow("bmm(a, b, out=out)", _product_into),
        *new_rows(),
    ]
