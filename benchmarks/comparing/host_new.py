"""The host's time of calls on extents that were never seen, of a spec that was, beside torch's; and
of calls on a thousand known ones in turns.

Each call is timed by itself, and the median counts: the first call of a problem class chooses, and
is one of many. Ways take turns, fifty problems each.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import kernelseam as ks
import kernelseam.interop.torch as ks_torch
import torch
import torch.nn.functional as functional
from kernelseam.descriptors.common.protocol import Descriptor
from kernelseam.interop.transformers_attention import attention_forward

from benchmarks.comparing import idle_device
from benchmarks.comparing.results import HOST, OURS, PEER, Record, Timed
from benchmarks.comparing.rows import Session, refusal
from benchmarks.comparing.timing import Run

NEW, KNOWN, ROUNDS, TURN = 100, 1000, 3, 50
"""Problems that are new, problems that come in turns, how often each of those comes, and how many
the device's queue has room for."""
_LAYERS = 16
"""Of a model, whose caches have the same extents."""
Make = Callable[[int], tuple[Run, Run | None]]
"""Ours and torch's for the problem of a number."""


@dataclass(frozen=True)
class NewRow:
    """``make(session)``: the calls of each problem by a number, over memory that exists. ``limit``:
    µs that ours may take of new extents, ``known`` of known ones."""

    name: str
    make: Callable[[Session], Make]
    limit: float
    known: float | None = None
    suite: str = "host"

    def planned(self, session: Session) -> Iterable[Descriptor]:
        return ()

    def measure(self, session: Session) -> Record:
        count = NEW if self.known is None else KNOWN
        record = Record(self.suite, self.name, limits={HOST: self.known or self.limit})
        make, times = self.make(session), dict[str, list[float]]()
        with session.flash():
            peer = make(1)[1]
            if peer is not None and (why := refusal(peer)) is not None:
                record.refused["torch"] = why
                make = _alone(make)
            for n in (1, 2, 3, *range(10, 40, 7)):  # a spec is known by two of its problems
                for run in make(n):
                    if run is not None:
                        run()
        first = 100
        for i in range(ROUNDS):
            start = first if self.known else first + i * count
            pairs = [make(n) for n in range(start, start + count)]
            if self.known and not i:
                for _ in range(2):
                    medians(pairs, session)
            for name, us in medians(pairs, session).items():
                times.setdefault(name, []).append(round(us, 3))
        record.timed = [
            Timed(n, OURS if n == OURS else PEER, us={HOST: us}) for n, us in times.items()
        ]
        return record


def _alone(make: Make) -> Make:
    """Ours of each problem, without torch's."""
    return lambda n: (make(n)[0], None)


def medians(pairs: Sequence[tuple[Run, Run | None]], session: Session) -> dict[str, float]:
    """µs of a call."""
    times: dict[str, list[float]] = {OURS: [], "torch": []}
    for first in range(0, len(pairs), TURN):
        for which, name in enumerate((OURS, *(() if idle_device.active() else ("torch",)))):
            session.synchronize()
            with session.flash():
                for pair in pairs[first : first + TURN]:
                    if (run := pair[which]) is not None:
                        start = time.perf_counter()
                        run()
                        times[name].append((time.perf_counter() - start) * 1e6)
    session.synchronize()
    return {name: statistics.median(us) for name, us in times.items() if us}


def _decode(session: Session) -> Make:
    """A dense cache that grows by a key a step."""
    q = session.random((4, 32, 1, 128), "bfloat16")
    k, v = (session.random((4, 8, 2600, 128), "bfloat16") for _ in range(2))

    def make(n: int) -> tuple[Run, Run | None]:
        x, y = k[:, :, : 1000 + n], v[:, :, : 1000 + n]
        return lambda: ks.attention(q, x, y), lambda: functional.scaled_dot_product_attention(
            q, x, y, enable_gqa=True
        )

    return make


def _layers(session: Session) -> Make:
    """A layer of a model as Transformers calls it, one query: sixteen in a row have caches of the
    same extents, each memory of its own."""
    heads, most = (4, 8), 640
    q = session.random((4, 32, 1, 64), "bfloat16")
    caches = session.random((_LAYERS, 2, math.prod(heads) * most * 64), "bfloat16")
    layer = SimpleNamespace(is_causal=True, num_key_value_groups=4, training=False)
    peer: Any = None
    if importlib.util.find_spec("transformers") is not None:
        peer = importlib.import_module("transformers.integrations.sdpa_attention")

    def make(n: int) -> tuple[Run, Run | None]:
        shape = (*heads, 512 + n // _LAYERS, 64)
        k, v = (x[: math.prod(shape)].view(shape) for x in caches[n % _LAYERS])

        def theirs() -> object:
            return peer.sdpa_attention_forward(layer, q, k, v, None, scaling=0.125)

        return lambda: attention_forward(layer, q, k, v, None, scaling=0.125), peer and theirs

    return make


def _causal(session: Session) -> Make:
    q = session.random((1, 32, 1500, 64), "bfloat16")
    k, v = (session.random((1, 8, 1500, 64), "bfloat16") for _ in range(2))

    def make(n: int) -> tuple[Run, Run | None]:
        x, y, z = (t[:, :, : 100 + n] for t in (q, k, v))
        return lambda: ks.attention(
            x, y, z, causal=True
        ), lambda: functional.scaled_dot_product_attention(x, y, z, is_causal=True, enable_gqa=True)

    return make


def _varlen(session: Session) -> Make:
    """Two sequences; their total and the longest vary."""
    x = session.random((3000, 16, 64), "bfloat16")
    offsets = torch.arange(3, dtype=torch.int32, device=session.device)

    def make(n: int) -> tuple[Run, Run | None]:
        length = 64 + n
        y, cu = x[: 2 * length], offsets * length
        return lambda: ks.attention_varlen(y, y, y, cu, cu, length, length), None

    return make


def _paged(session: Session) -> Make:
    """One query each; the batch and the table's width vary."""
    pages = session.random((512, 16, 8, 128), "bfloat16")
    q = session.random((128, 1, 32, 128), "bfloat16")
    table = torch.zeros(128, 64, dtype=torch.int32, device=session.device)
    lengths = torch.full((128,), 16, dtype=torch.int32, device=session.device)

    def make(n: int) -> tuple[Run, Run | None]:
        b = 1 + n % 100
        x, y, z = q[:b], table[:b, : 1 + n // 100], lengths[:b]
        return lambda: ks.attention_paged(x, pages, pages, y, z), None

    return make


def _matmul2d(session: Session) -> Make:
    a, w = session.random((1500, 1024), "bfloat16"), session.random((1024, 1024), "bfloat16")

    def make(n: int) -> tuple[Run, Run | None]:
        x = a[: 100 + n]
        return lambda: ks.matmul2d(x, w, implementation=_named(session)), lambda: torch.mm(x, w)

    return make


def _bmm(session: Session) -> Make:
    a, b = session.random((8, 1500, 256), "bfloat16"), session.random((8, 256, 512), "bfloat16")

    def make(n: int) -> tuple[Run, Run | None]:
        x = a[:, : 100 + n]
        return lambda: ks.bmm(x, b, implementation=_named(session)), lambda: torch.bmm(x, b)

    return make


def _grouped(session: Session) -> Make:
    """Sixteen experts; the tokens vary."""
    a, w = session.random((1500, 256), "bfloat16"), session.random((16, 256, 512), "bfloat16")
    offs = torch.zeros(16, dtype=torch.int32, device=session.device)

    def make(n: int) -> tuple[Run, Run | None]:
        x = a[: 100 + n]
        return lambda: ks.grouped_mm(
            x, w, offs, implementation=_named(session)
        ), lambda: torch._grouped_mm(x, w, offs=offs)

    return make


def _gathered(session: Session) -> Make:
    """The same, of tokens that are gathered and scattered."""
    a, w = session.random((1500, 256), "bfloat16"), session.random((16, 256, 512), "bfloat16")
    offs = torch.zeros(16, dtype=torch.int32, device=session.device)
    indices = torch.arange(1500, dtype=torch.int32, device=session.device)

    def make(n: int) -> tuple[Run, Run | None]:
        x = indices[: 100 + n]
        named = _named(session)
        return lambda: ks.grouped_mm(
            a, w, offs, a_indices=x, out_indices=x, implementation=named
        ), None

    return make


def _qkv(session: Session) -> Make:
    x, w = session.random((1, 1500, 512), "bfloat16"), session.random((1024, 512), "bfloat16")

    def make(n: int) -> tuple[Run, Run | None]:
        y = x[:, : 100 + n]
        return lambda: ks.fused_qkv_projection(
            y, w, num_heads=8, num_kv_heads=4
        ), lambda: functional.linear(y, w)

    return make


def _gradients(session: Session) -> Make:
    tensors = [session.random((1, 8, 1500, 64), "bfloat16") for _ in range(4)]

    def make(n: int) -> tuple[Run, Run | None]:
        cut = [t[:, :, : 100 + n] for t in tensors]
        return _both(ks_torch.attention, cut, causal=True), _both(
            functional.scaled_dot_product_attention, cut, is_causal=True
        )

    return make


def _packed_gradients(session: Session) -> Make:
    """Two sequences; their total and the longest vary."""
    tensors = [session.random((3000, 16, 64), "bfloat16") for _ in range(4)]
    offsets = torch.arange(3, dtype=torch.int32, device=session.device)

    def make(n: int) -> tuple[Run, Run | None]:
        length = 64 + n
        cu, cut = offsets * length, [t[: 2 * length] for t in tensors]
        more = (cu, cu, length, length)
        return _both(ks_torch.attention_varlen, cut, *more, causal=True), None

    return make


def _both(
    attention: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    *more: Any,
    **options: Any,
) -> Run:
    """Forward and backward of q, k, v and a gradient."""
    *leaves, gradient = (t.detach() for t in tensors)
    for t in leaves:
        t.requires_grad_()

    def both() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(attention(*leaves, *more, **options), leaves, gradient)

    return both


def _named(session: Session) -> str | None:
    """The kernel of ours whose calls are measured on a GPU: a library's has its own host time."""
    if idle_device.active():
        return "sm90"
    if session.device == "cpu":
        return None
    return "sm90" if session.target().arch.startswith("sm_90") else "shared"


_ROWS: tuple[tuple[str, Callable[[Session], Make], float], ...] = (
    ("attention, a cache that grows", _decode, 70.0),
    ("attention, causal, lengths", _causal, 70.0),
    ("attention_varlen, totals and longest", _varlen, 70.0),
    ("attention_paged, batch and width", _paged, 70.0),
    ("matmul2d, rows", _matmul2d, 70.0),
    ("bmm, rows", _bmm, 70.0),
    ("grouped_mm, tokens", _grouped, 70.0),
    ("grouped_mm, tokens that are gathered and scattered", _gathered, 80.0),
    ("fused_qkv_projection, tokens", _qkv, 90.0),
    ("attention and its gradients, lengths", _gradients, 200.0),
    ("attention_varlen and its gradients, totals", _packed_gradients, 200.0),
)
_KNOWN = 25.0


def new_rows() -> list[NewRow]:
    rows = [NewRow(f"new extents: {name}", make, limit) for name, make, limit in _ROWS]
    rows.append(NewRow("sixteen in a row: a layer of a model, one query", _layers, 30.0))
    return rows + [
        NewRow(f"known among {KNOWN}: {name}", make, limit, _KNOWN)
        for name, make, limit in _ROWS[:8]
    ]
