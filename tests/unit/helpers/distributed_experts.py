"""What each rank of a test does with products whose experts lie on ranks, and the same on one
process, by torch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

EXPERTS, K, HIDDEN, N = 12, 5, 4, 3


def counts_of(rank: int) -> Any:
    """Rows of each expert: rank 1 has none, expert 3 has none, rank 2's last four have all."""
    rng = np.random.default_rng(rank)
    counts = rng.integers(0, 6, EXPERTS)
    counts[3] = 0
    if rank == 1:
        counts[:] = 0
    if rank == 2:
        counts[:8] = 0
    return counts


def operands(rank: int, size: int) -> dict[str, Any]:
    """A rank's rows, two of them behind the last expert's, the gradient of its result, and all
    experts' weights."""
    rng, counts = np.random.default_rng(100 + rank), counts_of(rank)
    rows = int(counts.sum()) + 2 * (rank != 1)
    of_all = np.random.default_rng(7)
    return {
        "a": rng.standard_normal((rows, K)),
        "dy": rng.standard_normal((rows, N)),
        "offs": counts.cumsum().astype(np.int32),
        "up": of_all.standard_normal((EXPERTS, K, 2 * HIDDEN)),
        "down": of_all.standard_normal((EXPERTS, HIDDEN, N)),
        "one": of_all.standard_normal((EXPERTS, K, N)),
    }


def swiglu(x: Any) -> Any:
    import torch

    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def kept(rank: int, capacity: int | None) -> Any:
    """(rows that are multiplied, the expert of each)."""
    counts = counts_of(rank)
    first = counts.cumsum() - counts
    pairs = [
        (first[e] + i, e) for e in range(EXPERTS) for i in range(min(counts[e], capacity or 99))
    ]
    return np.array(pairs, np.int64).reshape(-1, 2).T


def _leaves(found: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    return [found[n].requires_grad_() for n in names]


def layer(
    group: Any, form: str, chunks: int, capacity: int | None, dtype: str = "float64", **options: Any
) -> dict[str, Any]:
    """The errors of this rank's result and gradients. ``form``: "one" product, a "layer", or one
    that a function comes before ("led")."""
    import torch
    import torch.distributed as dist
    from gloo_ranks import device_of
    from kernelseam import distributed

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    kind, device = getattr(torch, dtype), device_of(group)
    each = EXPERTS // size
    mine = slice(rank * each, (rank + 1) * each)
    names = ("one",) if form == "one" else ("up", "down")

    def tensors(of: int) -> dict[str, Any]:
        made = {n: torch.from_numpy(x).to(device) for n, x in operands(of, size).items()}
        return {n: x.to(kind) if x.is_floating_point() else x for n, x in made.items()}

    own = tensors(rank)
    weights = [own[n][mine].clone().requires_grad_() for n in names]
    a = own["a"].clone().requires_grad_()
    steps = {
        "one": weights[0],
        "layer": [weights[0], swiglu, weights[-1]],
        "led": [torch.tanh, weights[0], swiglu, weights[-1]],
    }
    y = distributed.grouped_mm(
        a, steps[form], own["offs"], group=group, chunks=chunks, capacity=capacity, **options
    )
    y.backward(own["dy"])

    wide = {n: x.double() for n, x in own.items() if x.is_floating_point()}
    leaves, wanted = _leaves(wide, names), []
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for of in range(size):
        there = tensors(of)
        x = there["a"].double().requires_grad_()
        rows, experts = torch.from_numpy(kept(of, capacity)).to(device)
        z = x[rows].tanh() if form == "led" else x[rows]
        for i, w in enumerate(leaves):
            z = torch.einsum("tk,tkn->tn", swiglu(z) if i else z, w[experts])
        result = x.new_zeros(len(x), N).index_copy(0, rows, z)
        loss += (result * there["dy"].double()).sum()
        wanted.append((x, result))
    loss.backward()
    x, result = wanted[rank]
    pairs = {"y": (y, result), "da": (a.grad, x.grad)}
    pairs |= {
        f"d_{n}": (w.grad, v.grad[mine]) for n, w, v in zip(names, weights, leaves, strict=True)
    }
    return {
        n: float((p.double() - q).abs().max() / q.abs().max().clamp(min=1)) if q.numel() else 0.0
        for n, (p, q) in pairs.items()
    }


TOKENS = 7
"""Of each rank; rank 1 has none."""


def token_operands(rank: int, size: int) -> tuple[Any, ...]:
    """A rank's tokens, the gradient of its result, of which token each row is and times what, and
    where experts' rows end."""
    rng, rows = np.random.default_rng(200 + rank), len(operands(rank, size)["a"])
    tokens = TOKENS if rows else 0
    x, dy = (rng.standard_normal((tokens, n)) for n in (K, N))
    indices = rng.integers(0, max(tokens - 1, 1), rows).astype(np.int32)
    return x, dy, indices, rng.random(rows, np.float32), operands(rank, size)["offs"]


@contextmanager
def sent(everywhere: bool, apart: bool) -> Iterator[None]:
    """Whether all tokens go to each rank, and own ones' rows are multiplied apart."""
    from kernelseam.distributed import tokens

    with (
        mock.patch.object(tokens, "_SEND_ALL", 0.0 if everywhere else 2.0),
        mock.patch.object(tokens, "_OWN_APART", 0 if apart else 1 << 30),
    ):
        yield


def of_tokens(
    group: Any,
    form: str,
    factors: bool,
    way: tuple[bool, bool],
    dtype: str = "float64",
    **options: Any,
) -> dict[str, Any]:
    """The errors of this rank's result and gradients, of rows that are tokens, each in several
    rows and some in none, and two rows behind the last expert's. ``way``: as of ``sent``."""
    import torch
    import torch.distributed as dist
    from gloo_ranks import device_of
    from kernelseam import distributed

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    kind, device = getattr(torch, dtype), device_of(group)
    mine = slice(rank * (EXPERTS // size), (rank + 1) * (EXPERTS // size))
    names = ("one",) if form == "one" else ("up", "down")
    all_weights = {n: torch.from_numpy(operands(0, 1)[n]).to(device, kind) for n in names}
    leaves = [x.double().requires_grad_() for x in all_weights.values()]

    def tensors(of: int) -> tuple[Any, ...]:
        made = [torch.from_numpy(x).to(device) for x in token_operands(of, size)]
        return *(x.to(kind) for x in made[:2]), *made[2:]

    x, dy, indices, weights, offs = tensors(rank)
    own = [all_weights[n][mine].detach().clone().requires_grad_() for n in names]
    leaf, f = x.clone().requires_grad_(), weights.clone().requires_grad_()
    steps = {
        "one": own[0],
        "layer": [own[0], swiglu, own[-1]],
        "led": [torch.tanh, own[0], swiglu, own[-1]],
    }
    with sent(*way):
        y = distributed.grouped_mm(
            leaf,
            steps[form],
            offs,
            group=group,
            a_indices=indices,
            out_factors=f if factors else None,
            **options,
        )
    y.backward(dy)

    wanted, loss = [], torch.zeros((), dtype=torch.float64, device=device)
    for of in range(size):
        x, dy, indices, weights, _ = tensors(of)
        x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
        rows, experts = torch.from_numpy(kept(of, None)).to(device)
        z = x[indices[rows].long()]
        z = z.tanh() if form == "led" else z
        for i, w in enumerate(leaves):
            z = torch.einsum("tk,tkn->tn", swiglu(z) if i else z, w[experts])
        z = z * weights[rows, None] if factors else z
        result = x.new_zeros(len(x), N).index_add(0, indices[rows], z)
        loss += (result * dy.double()).sum()
        wanted.append((x, weights, result))
    loss.backward()
    x, weights, result = wanted[rank]
    pairs = {"y": (y.detach(), result.detach()), "da": (leaf.grad, x.grad)}
    if factors:
        pairs["d_factors"] = f.grad, weights.grad
    pairs |= {f"d_{n}": (w.grad, v.grad[mine]) for n, w, v in zip(names, own, leaves, strict=True)}
    return {
        n: float((p.double() - q).abs().max() / q.abs().max().clamp(min=1)) if q.numel() else 0.0
        for n, (p, q) in pairs.items()
    }


@contextmanager
def _recorded(names: list[str]) -> Iterator[None]:
    """Write down what routes begin and wait for, and products."""
    from kernelseam.distributed import experts, routes
    from kernelseam.interop.torch import grouped_mm

    def name_of(route: Any) -> str:
        chunk: str = route._step.split("chunk ")[1].split()[0]
        return ("back " if "results" in route._step else "") + chunk

    right_start, right_wait = routes.Route.start, routes.Route.wait
    right_product = grouped_mm

    def start(self: Any, *given: Any) -> Any:
        names.append(f"begin {name_of(self)}")
        return right_start(self, *given)

    def wait(self: Any) -> None:
        names.append(f"end {name_of(self)}")
        right_wait(self)

    def multiplied(x: Any, *given: Any, **options: Any) -> Any:
        names.append("product")
        x.requires_grad and x.register_hook(lambda _: names.append("product"))
        return right_product(x, *given, **options)

    with (
        mock.patch.object(routes.Route, "start", start),
        mock.patch.object(routes.Route, "wait", wait),
        mock.patch.object(experts, "product", multiplied),
    ):
        yield


def order_of_steps(group: Any, chunks: int) -> tuple[list[str], list[str]]:
    import torch
    import torch.distributed as dist
    from kernelseam import distributed

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = {n: torch.from_numpy(x) for n, x in operands(0, size).items()}
    each = EXPERTS // size
    weight = own["one"][rank * each : (rank + 1) * each].clone().requires_grad_()
    a, names = own["a"].requires_grad_(), list[str]()
    with _recorded(names):
        y = distributed.grouped_mm(a, weight, own["offs"], group=group, chunks=chunks)
        forward = names.copy()
        names.clear()
        y.sum().backward()
    return forward, names


def bytes_sent(group: Any) -> tuple[int, int]:
    import torch
    import torch.distributed as dist
    from kernelseam import distributed

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = {n: torch.from_numpy(x) for n, x in operands(rank, size).items()}
    each = EXPERTS // size
    mine = slice(rank * each, (rank + 1) * each)
    with distributed.measured() as m:
        distributed.grouped_mm(own["a"], own["one"][mine], own["offs"], group=group)
    here = counts_of(rank)[mine].sum()
    out = counts_of(rank).sum() - here
    back = sum(counts_of(r)[mine].sum() for r in range(size)) - here
    return m.sent, int(4 * (EXPERTS + 1) * (size - 1) + 8 * (out * K + back * N))


def bytes_of_tokens(group: Any, everywhere: bool, apart: bool) -> tuple[int, int]:
    import torch
    import torch.distributed as dist
    from kernelseam import distributed

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    each = EXPERTS // size
    mine = slice(rank * each, (rank + 1) * each)
    x, _, indices, weights, offs = map(torch.from_numpy, token_operands(rank, size))
    one = torch.from_numpy(operands(0, 1)["one"][mine])
    with distributed.measured() as m, sent(everywhere, apart):
        distributed.grouped_mm(x, one, offs, group=group, a_indices=indices, out_factors=weights)

    def counts(of: int, to: int) -> tuple[int, int]:
        """(rows, tokens) that go from one rank to another."""
        rows, experts = kept(of, None)
        of_tokens, _, indices = token_operands(of, size)[:3]
        there = indices[rows[experts // each == to]]
        return len(there), len(of_tokens) if everywhere else len(np.unique(there))

    others = [r for r in range(size) if r != rank]
    rows = sum(counts(rank, r)[0] for r in others)
    forth, back = (sum(counts(*p)[1] for p in pairs) for pairs in
                   ([(rank, r) for r in others], [(r, rank) for r in others]))  # fmt: skip
    told = EXPERTS + 2 + (0 if everywhere else size)
    return m.sent, 4 * told * (size - 1) + 8 * (rows + forth * K + back * N)


def faulty(group: Any, fault: str) -> dict[str, float]:
    """The layer with a fault planted into this process."""
    from kernelseam.distributed import experts, routes, token_exchange, tokens
    from kernelseam.distributed.sums import write_sum

    if fault == "a token of the row before":
        places = vars(tokens.Destinations)["places"].fget
        moved = property(lambda self: places(self).roll(1))
        with mock.patch.object(tokens.Destinations, "places", moved):
            return of_tokens(group, "layer", True, (False, False))
    if fault == "own sums left out":
        combined = token_exchange.TokenExchange.combined
        with mock.patch.object(
            token_exchange.TokenExchange, "combined", lambda self, own: combined(self, own * 0)
        ):
            return of_tokens(group, "layer", True, (True, True))
    if fault == "another rank's sums left out":
        with mock.patch(
            "kernelseam.distributed.token_exchange.write_sum",
            lambda out, terms: write_sum(out, terms[:1]),
        ):
            return of_tokens(group, "layer", True, (True, False))
    if fault == "tokens of another rank":
        ordered = tokens.ExpertLayer._ordered
        with mock.patch.object(
            tokens.ExpertLayer,
            "_ordered",
            lambda *given: (ordered(*given)[0], ordered(*given)[1].flip(0)),
        ):
            return of_tokens(group, "layer", True, (True, False))
    if fault == "experts of other rows":
        right = experts._ShardedProduct._multiplied
        with mock.patch.object(
            experts._ShardedProduct,
            "_multiplied",
            lambda call, x, steps, keys, count: right(call, x, steps, keys.flip(0), count),
        ):
            return layer(group, "layer", 2, None)
    if fault == "results of the row before":
        through = experts._ShardedProduct._through
        with mock.patch.object(
            experts._ShardedProduct,
            "_through",
            lambda *given: [y.roll(1, 0) for y in through(*given)],
        ):
            return layer(group, "layer", 1, None)
    assert fault == "gradients not sent back"
    with mock.patch.object(
        routes.Route,
        "send_back",
        lambda self, gradient: setattr(
            self, "back", self.start(gradient.mul(0).split(self.received), self.sent, "x")
        ),
    ):
        return layer(group, "layer", 2, None)


def odd_offsets(group: Any) -> Any:
    import torch
    import torch.distributed as dist
    from kernelseam import distributed

    ends = [0, 2, 1] if dist.get_rank(group) == 1 else [0, 2, 4]
    offs = torch.tensor(ends, dtype=torch.int32)
    return distributed.grouped_mm(torch.ones(4, 2), torch.ones(1, 2, 2), offs, group=group)


def learnt(group: Any) -> float:
    """The error of the gradients of what norms before, between and behind weights learn, with free
    slots, whose memory is NaN until it is written."""
    import torch
    import torch.distributed as dist
    from kernelseam import distributed

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = {n: torch.from_numpy(x) for n, x in operands(rank, size).items()}
    mine = slice(rank * (EXPERTS // size), (rank + 1) * (EXPERTS // size))
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for capacity in (None, 6):
            factors = [torch.linspace(1, 2, n, dtype=torch.float64) for n in (K, HIDDEN, N)]
            learns = [x.requires_grad_() for x in factors]
            first, inner, last = (
                lambda x, g=g: torch.nn.functional.rms_norm(x, g.shape, g, 0.0) for g in learns
            )
            b = [first, own["up"][mine], lambda x, f=inner: f(swiglu(x)), own["down"][mine], last]
            y = distributed.grouped_mm(own["a"], b, own["offs"], group=group, capacity=capacity)
            y.backward(own["dy"])
            found.append(torch.cat([g.grad for g in learns]))
        return float((found[0] - found[1]).abs().nan_to_num(torch.inf).max())
    finally:
        torch.use_deterministic_algorithms(False)
