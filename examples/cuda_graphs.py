"""Decoding from one CUDA graph: a step projects, writes to the cache, attends and counts lengths,
all of it in device memory, so that each replay is the next token.

Every step is held against causal attention over all rows, without a cache. Needs torch; where there
is no GPU the same steps run on the CPU, without a graph.
"""

from __future__ import annotations

from collections.abc import Callable

try:
    import kernelseam
    import torch
    from kernelseam import Attention, plan
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam torch") from None

H, H_KV, D, HIDDEN, PAGE = 8, 2, 64, 256, 16
PROMPTS, STEPS = (1, 15, 16, 30), 40
on_gpu = torch.cuda.is_available() and any(d.backend != "numpy" for d in kernelseam.devices())
DEVICE, DTYPE, OFF = ("cuda", torch.float16, 5e-3) if on_gpu else ("cpu", torch.float32, 1e-5)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step's replay; the step itself where there are no graphs. It has run once before."""
    if not on_gpu:
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda: graph.replay()


def main() -> None:
    torch.manual_seed(0)
    entries, most = len(PROMPTS), max(PROMPTS) + STEPS
    width = -(-most // PAGE)
    weight = torch.randn((H + 2 * H_KV) * D, HIDDEN).to(DEVICE, DTYPE) / HIDDEN**0.5
    hidden = torch.randn(entries, most, HIDDEN).to(DEVICE, DTYPE)
    angles = torch.arange(most)[:, None] / 10000 ** (torch.arange(D // 2) / (D // 2))
    rotary = angles.cos().to(DEVICE), angles.sin().to(DEVICE)

    # What a step reads and writes: memory that stays, contents that change.
    k_pages, v_pages = torch.zeros(2, entries * width, PAGE, H_KV, D, device=DEVICE, dtype=DTYPE)
    block_table = torch.randperm(entries * width).view(entries, width).to(DEVICE, torch.int32)
    lengths = torch.zeros(entries, device=DEVICE, dtype=torch.int32)
    q = torch.empty(entries, 1, H, D, device=DEVICE, dtype=DTYPE)
    out = torch.empty_like(q)
    entry = torch.arange(entries, device=DEVICE)
    attend = plan(
        Attention.from_arrays(
            q,
            k_pages,
            v_pages,
            out,
            layout="bshd",
            block_table=block_table,
            kv_lengths=lengths,
            max_seqlen_k=most,
        )
    ).bind()

    def step() -> None:
        kernelseam.fused_qkv_projection(
            hidden[entry, lengths][:, None],
            weight,
            None,
            H,
            H_KV,
            D,
            rotary=rotary,
            positions=lengths[:, None],
            k_pages=k_pages,
            v_pages=v_pages,
            block_table=block_table,
            layout="bshd",
            out=q,
        )
        lengths.add_(1)
        attend()

    # The first run loads what cuBLAS or torch load by themselves; what it wrote is written again.
    step()
    replay = captured(step)
    lengths.zero_()
    exact = kernelseam.attention(
        *kernelseam.fused_qkv_projection(hidden, weight, None, H, H_KV, D, rotary=rotary),
        causal=True,
    )
    prompts = torch.tensor(PROMPTS, device=DEVICE)
    worst = 0.0
    for done in range(1, max(PROMPTS) + STEPS + 1):
        replay()
        if done <= max(PROMPTS):  # prompts token by token: entries with shorter ones wait
            lengths.copy_(torch.minimum(lengths, prompts))
        else:
            worst = max(worst, (out[:, 0] - exact[entry, :, lengths - 1]).abs().max().item())
    print(
        f"on {DEVICE}: {STEPS} steps {'from one graph' if on_gpu else 'without a graph'}, "
        f"{', '.join(map(str, lengths.tolist()))} keys, off by {worst:.1e}"
    )
    assert worst < OFF


if __name__ == "__main__":
    main()
