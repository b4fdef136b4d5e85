"""Training an attention layer through kernelseam's gradients: it learns to say again what stood
three tokens before.

Needs torch. On a GPU where torch sees one and its plugin is installed, else on the CPU.
"""

from __future__ import annotations

try:
    import kernelseam
    import torch
    from kernelseam.interop.torch import attention
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam torch") from None

TOKENS, LENGTH, BACK, WIDTH, HEADS, KV_HEADS, BATCH, STEPS = 12, 24, 3, 48, 4, 2, 16, 40
on_gpu = torch.cuda.is_available() and any(d.backend != "numpy" for d in kernelseam.devices())
DEVICE = "cuda" if on_gpu else "cpu"


class Recall(torch.nn.Module):
    """Token and place → one causal attention layer with grouped heads and sinks → the token."""

    def __init__(self) -> None:
        super().__init__()
        dim = WIDTH // HEADS
        self.token, self.place = (
            torch.nn.Embedding(TOKENS, WIDTH),
            torch.nn.Embedding(LENGTH, WIDTH),
        )
        self.q = torch.nn.Linear(WIDTH, HEADS * dim)
        self.k, self.v = (torch.nn.Linear(WIDTH, KV_HEADS * dim) for _ in range(2))
        self.sinks = torch.nn.Parameter(torch.zeros(HEADS))
        self.out = torch.nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)) for f in (self.q, self.k, self.v))
        return self.out(attention(q, k, v, causal=True, sinks=self.sinks, layout="bshd").flatten(2))


def main() -> None:
    torch.manual_seed(0)
    model = Recall().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(0, TOKENS, (BATCH, LENGTH), device=DEVICE)
        logits = model(tokens)[:, BACK:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-BACK].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:2}: loss {losses[-1]:.3f}", flush=True)
    right = (logits.argmax(-1) == tokens[:, :-BACK]).float().mean().item()
    print(f"on {DEVICE}: loss {losses[0]:.3f} → {losses[-1]:.3f}, {right:.0%} of the tokens right")
    assert losses[-1] < losses[0] / 4 and right > 0.9
    grown = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not grown, f"no gradient reached {grown}"


if __name__ == "__main__":
    main()
