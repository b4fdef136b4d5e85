"""A mixture of experts: a router and SwiGLU experts by two grouped products. The first gathers the
tokens of each expert and gates what it makes of them, the second scatters its results, times the
router's weights. It learns a
different permutation for each class of token, then decodes, beside the same layer by torch.

Needs torch. On a GPU where torch sees one and its plugin is installed, else on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

try:
    import kernelseam
    import torch
    import torch.nn.functional as F
    from kernelseam.interop.torch import grouped_mm
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam torch") from None

EXPERTS, CHOSEN, WIDTH, HIDDEN, CLASSES, BATCH, STEPS = 8, 2, 32, 48, 6, 128, 80
on_gpu = torch.cuda.is_available() and any(d.backend != "numpy" for d in kernelseam.devices())
DEVICE, DTYPE = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
Product = Callable[..., torch.Tensor]


def by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    a_indices: torch.Tensor | None = None,
    out_indices: torch.Tensor | None = None,
    out_factors: torch.Tensor | None = None,
    epilogue: str | None = None,
) -> torch.Tensor:
    """As torch's operations say it: the host reads where each expert's rows end, and multiplies."""
    x = x if a_indices is None else x[a_indices]
    starts = [0, *ends.tolist()]
    parts = zip(starts, starts[1:], weights, strict=False)
    y = torch.cat([x[i:j] @ w for i, j, w in parts])
    if epilogue == "swiglu":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    if out_factors is not None:
        y = (y * out_factors[:, None]).to(y.dtype)
    return y if out_indices is None else torch.empty_like(y).index_copy(0, out_indices.long(), y)


class Experts(torch.nn.Module):
    """Tokens [T, WIDTH] → the weighted sum of what the chosen experts make of each."""

    def __init__(self) -> None:
        super().__init__()

        def weights(*shape: int) -> torch.nn.Parameter:
            drawn = torch.randn(*shape, device=DEVICE, dtype=DTYPE)
            return torch.nn.Parameter(drawn * shape[-2] ** -0.5)

        self.router = weights(WIDTH, EXPERTS)
        self.gate_up = weights(EXPERTS, WIDTH, 2 * HIDDEN)
        self.down = weights(EXPERTS, HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor, product: Product = grouped_mm) -> torch.Tensor:
        chance, experts = (x @ self.router).float().softmax(-1).topk(CHOSEN)
        chance = chance / chance.sum(-1, keepdim=True)
        # Sorted by expert in numbers alone: which token a row is of, and where each expert's rows
        # end. All on the device; the host need not know.
        ordered, order = experts.flatten().sort()
        numbers = torch.arange(EXPERTS, device=x.device)
        ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
        taken = (order // CHOSEN).int()
        hidden = product(x, self.gate_up, ends, a_indices=taken, epilogue="swiglu")
        y = product(
            hidden,
            self.down,
            ends,
            out_indices=order.int(),
            out_factors=chance.flatten()[order],
        )
        return y.view(len(x), CHOSEN, -1).sum(1)


def drawn(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose first CLASSES numbers tell how the others are to be permuted."""
    x = torch.randn(BATCH, WIDTH, generator=generator)
    kind = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    x[:, :CLASSES] = 3 * F.one_hot(kind, CLASSES)
    places = torch.stack([torch.arange(WIDTH).roll(3 * c) for c in range(CLASSES)])
    wanted = x.gather(1, places[kind])
    return x.to(DEVICE, DTYPE), wanted.to(DEVICE, DTYPE)


def seconds(run: Callable[[], object], times: int = 5) -> float:
    """Of one run, after a first."""
    run()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def off(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    layer = Experts()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        x, wanted = drawn(generator)
        loss = F.mse_loss(layer(x).float(), wanted.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"on {DEVICE}: loss {losses[0]:.2f} → {losses[-1]:.2f} in {STEPS} steps")
    assert losses[-1] < losses[0] / 3

    x, _ = drawn(generator)
    results = []
    for product in (grouped_mm, by_expert):
        layer.zero_grad()
        y = layer(x, product)
        y.float().square().sum().backward()
        results.append([y.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)])
    assert all(len(r) == 4 for r in results), "every weight has a gradient"
    apart = [off(mine, theirs) for mine, theirs in zip(*results, strict=True)]
    print(
        f"beside torch, an expert at a time: result off by {apart[0]:.0e}, gradients by at most "
        f"{max(apart[1:]):.0e}"
    )

    with torch.no_grad():
        alone = torch.cat([layer(x[i : i + 1]) for i in range(16)])
    print(f"decoded one token at a time: off by {off(alone, results[0][0][:16]):.0e}")

    def step_of(product: Product) -> Callable[[], object]:
        return lambda: layer(x, product).float().square().sum().backward()

    def token_of(product: Product) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return layer(x[:1], product)

        return run

    for what, run in (("a training step", step_of), ("a token", token_of)):
        mine, theirs = seconds(run(grouped_mm)), seconds(run(by_expert))
        print(f"{what}: {mine * 1e3:.2f} ms, by torch {theirs * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
