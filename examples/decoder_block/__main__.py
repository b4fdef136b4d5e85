"""A decoder block of Llama-3-8B's shape: forward, backward, and decoding from a paged cache.

The projections (the first turns q and k, and writes k and v into pages), the attention, the MLP
with SwiGLU and their gradients are kernelseam's or torch's; RMS norms are torch's in both. Beside
ours run torch's scaled_dot_product_attention by each backend that torch has here, and
FlashAttention-3 where flash_attn_interface can be imported. A decoded row is held against the
forward over all rows.

Needs torch. On a GPU in bfloat16 with the model's extents; steps of decoding are replayed from CUDA
graphs. Else a small block in float32 on the CPU. Prints Markdown, of which `python -m
benchmarks.gallery` makes a picture.
"""

from __future__ import annotations

import argparse

try:
    import kernelseam  # noqa: F401
    import torch
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam torch") from None

from block import DTYPE, SIZE, Weights, angles, on_gpu, weights
from decoding import decoding
from implementations import available
from training import training


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9 if on_gpu else 3)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    z, rotary = SIZE, angles()
    w = Weights(*(t.requires_grad_() for t in weights()))
    name = torch.cuda.get_device_name() if on_gpu else "the CPU"
    print(
        f"On {name}: {z.heads} heads on {z.kv_heads}, dim {z.head_dim}, hidden {z.hidden}, "
        f"MLP {z.mlp}, {str(DTYPE).removeprefix('torch.')}, torch {torch.__version__}."
    )
    blocks = available(w, rotary)
    training(blocks, repeats)
    with torch.no_grad():
        worst = decoding(blocks, repeats)
    print(
        f"\nDecoded rows are those of the forward over all {z.prompt + z.steps}: {worst:.0e} off."
    )


if __name__ == "__main__":
    main()
