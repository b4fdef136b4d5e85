"""The host's time of one call beside torch's: problems so small that the device is never what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional

import kernelseam as ks
from benchmarks.comparing.results import HOST, OURS, PEER, Record, Timed
from benchmarks.comparing.rows import Session
from benchmarks.comparing.timing import Run
from kernelseam.planning import Descriptor

CALLS = 300
"""In a burst: fewer than a device's queue holds, so that none waits."""
ROUNDS = 15
CALL_MICROSECONDS = 4.0


@dataclass(frozen=True)
class HostRow:
    """``make(session)``: ours and torch's, None where torch has no such call. ``limit``: µs that ours may take."""

    name: str
    make: Callable[[Session], tuple[Run, Run | None]]
    limit: float | None = None
    suite: str = "host"

    def planned(self, session: Session) -> Iterable[Descriptor]:
        return ()

    def measure(self, session: Session) -> Record:
        ours, peer = self.make(session)
        runs = {OURS: ours} | ({"torch": peer} if peer is not None else {})
        record = Record(self.suite, self.name, limits={} if self.limit is None else {HOST: self.limit})
        timed = {n: Timed(n, OURS if n == OURS else PEER) for n in runs}
        for turn in range(ROUNDS + 1):
            for name, run in sorted(runs.items(), key=lambda x: (x[0] == OURS) == bool(turn % 2)):
                us = microseconds(run, session)
                if turn:  # the first warms up
                    timed[name].us.setdefault(HOST, []).append(round(us, 3))
        record.timed = list(timed.values())
        return record


def microseconds(run: Run, session: Session, calls: int = CALLS) -> float:
    """Of one call, without waiting for the device."""
    for _ in range(20):
        run()
    session.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - start
    session.synchronize()
    return elapsed / calls * 1e6


def _attention(session: Session) -> tuple[Any, Any]:
    q = session.random((1, 4, 64, 64), "float16")
    return q, torch.empty_like(q)


def _product(session: Session) -> tuple[Any, Any, Any]:
    a, b = session.random((8, 8, 16), "float16"), session.random((8, 16, 8), "float16")
    return a, b, torch.empty(8, 8, 8, device=session.device, dtype=torch.float16)


def _stream(session: Session) -> int:
    return 0 if session.device == "cpu" else int(torch.cuda.current_stream().cuda_stream)


def _call_of_attention(session: Session) -> tuple[Run, Run | None]:
    q, out = _attention(session)
    call, stream = ks.plan(ks.Attention.from_arrays(q, q, q, out)).bind(), _stream(session)
    return lambda: call(stream), None


def _call_of_product(session: Session) -> tuple[Run, Run | None]:
    a, b, c = _product(session)
    gemm = ks.BatchedGemmStrided(A=a, B=b, C=c, M=8, N=8, K=16, batch=8)
    call, stream = ks.plan(gemm).bind(), _stream(session)
    return lambda: call(stream), None


def _attentions(session: Session) -> tuple[Run, Run | None]:
    q, _ = _attention(session)
    return lambda: ks.attention(q, q, q), lambda: functional.scaled_dot_product_attention(q, q, q)


def _attention_into(session: Session) -> tuple[Run, Run | None]:
    q, out = _attention(session)
    return lambda: ks.attention(q, q, q, out=out), lambda: functional.scaled_dot_product_attention(q, q, q)


def _products(session: Session) -> tuple[Run, Run | None]:
    a, b, _ = _product(session)
    return lambda: ks.bmm(a, b), lambda: torch.bmm(a, b)


def _product_into(session: Session) -> tuple[Run, Run | None]:
    a, b, c = _product(session)
    return lambda: ks.bmm(a, b, out=c), lambda: torch.bmm(a, b, out=c)


def host_rows() -> list[HostRow]:
    return [
        HostRow("call(stream), attention", _call_of_attention, CALL_MICROSECONDS),
        HostRow("call(stream), product", _call_of_product, CALL_MICROSECONDS),
        HostRow("attention(q, k, v)", _attentions), HostRow("attention(q, k, v, out=out)", _attention_into),
        HostRow("bmm(a, b)", _products), HostRow("bmm(a, b, out=out)", _product_into),
    ]
