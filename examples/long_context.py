"""A transformer layer over a sequence that several devices hold, forward and backward.

    torchrun --nproc-per-node 2 examples/long_context.py

Every rank has its rows of the tokens; norms, projections and the feed-forward network need no
others, attention does: kernelseam.distributed passes K and V between ranks. Weights are the same on
every rank, and their gradients are summed over ranks. Needs torch. On GPUs where torch sees one for
each rank, with 262,144 tokens; else on the host, with 512.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

try:
    import kernelseam
    import torch
    import torch.distributed as dist
    from kernelseam import distributed
    from kernelseam.interop.torch import attention
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam torch") from None


class Layer(torch.nn.Module):
    """Attention and a gated feed-forward network, each with a norm and a residual."""

    def __init__(self, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        width = heads * dim
        self.heads, self.kv_heads = heads, kv_heads
        self.norm, self.norm_ffn = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, attend: object) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        q, k, v = qkv.transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), 1)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm_ffn(x)).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


def parsed(on_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=262144 if on_gpu else 512)
    parser.add_argument("--heads", type=int, default=16 if on_gpu else 4)
    parser.add_argument("--kv-heads", type=int, default=16 if on_gpu else 2)
    parser.add_argument("--dim", type=int, default=128 if on_gpu else 16)
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--window", type=int, help="keys before a token that it sees")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    local, size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > local
    on_gpu = on_gpu and any(d.backend != "numpy" for d in kernelseam.devices())
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if on_gpu else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    options = parsed(on_gpu)
    dtype = getattr(torch, options.dtype)
    group = dist.group.WORLD
    torch.manual_seed(0)
    layer = Layer(options.heads, options.kv_heads, options.dim).to(device, dtype)
    # Rows of the whole in the order by which causal work is even; no rank makes them all.
    rows = distributed.shard(torch.arange(options.tokens), dim=0, group=group, causal=True)
    angles = rows[:, None] * torch.arange(1, options.heads * options.dim + 1)
    x = torch.sin(angles.float() * 0.37)[None].to(device, dtype)
    window = None if options.window is None else (options.window, 0)
    masks = {"causal": True, "window": window}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return distributed.attention(q, k, v, group=group, method=options.method, **masks)

    def step() -> tuple[torch.Tensor, float]:
        layer.zero_grad()
        out = layer(x, attend)
        out.float().square().mean().backward()
        for p in layer.parameters():
            dist.all_reduce(p.grad)
        if on_gpu:
            torch.cuda.synchronize()
        return out.detach(), time.perf_counter()

    step()
    with distributed.measured() as transfers:
        start = time.perf_counter()
        for _ in range(options.steps):
            out, end = step()
    seconds = (end - start) / options.steps
    memory = (
        torch.cuda.max_memory_allocated()
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    figures = torch.tensor(
        [transfers.waited / options.steps / seconds, memory, transfers.sent / options.steps]
    ).to(device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    waiting, memory, sent = figures.tolist()
    off = None
    if options.tokens <= 4096:  # the whole on each rank
        grads = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        whole = distributed.unshard(x, dim=1, group=group, causal=True)
        alone = layer(whole, lambda q, k, v: attention(q, k, v, **masks))
        (alone.float().square().mean() * size).backward()
        mine = distributed.shard(alone.detach(), dim=1, group=group, causal=True)
        of = [(mine, out), *((p.grad, g) for p, g in zip(layer.parameters(), grads, strict=True))]
        off = max(float((a - b).abs().max() / a.abs().max()) for a, b in of)
    if dist.get_rank() == 0:
        print(
            f"{size} rank{'s' * (size > 1)} on {device.type} ({dist.get_backend()}): "
            f"{options.tokens} tokens, {len(rows)} a rank, {options.heads} heads on "
            f"{options.kv_heads}, dim {options.dim}, "
            f"{options.dtype}, method {options.method}"
        )
        print(
            f"forward and backward: {seconds * 1e3:.1f} ms, {options.tokens / seconds:.0f} tokens/s"
        )
        print(
            f"at most, of all ranks: {waiting:.1%} of it waiting for transfers, "
            f"{sent / 1e6:.1f} MB sent a step, {memory / 1e6:.0f} MB of memory"
        )
        if off is not None:
            print(f"off from one process: {off:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
