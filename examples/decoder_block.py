"""A decoder block of Llama-3-8B's shape: forward, backward, and decoding from a paged cache.

The projections (the first turns q and k, and writes k and v into pages), the attention and their
gradients are kernelseam's or torch's; RMS norms and SwiGLU are torch's in both. Beside ours run
torch's scaled_dot_product_attention by each backend that torch has here, and FlashAttention-3 where
flash_attn_interface can be imported. A decoded row is held against the forward over all rows.

Needs torch. On a GPU in bfloat16 with the model's extents; steps of decoding are replayed from CUDA
graphs. Else a small block in float32 on the CPU. Prints Markdown, of which `python -m
benchmarks.gallery` makes a picture.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

try:
    import kernelseam
    import torch
    import torch.nn.functional as F
    from kernelseam import Attention, plan
    from kernelseam.interop import torch as seam
    from torch import Tensor
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam torch") from None

Run = Callable[[], object]
on_gpu = torch.cuda.is_available() and any(d.backend != "numpy" for d in kernelseam.devices())
DEVICE, DTYPE = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)


class Extents(NamedTuple):
    """Of the block, of what is trained on (``batch`` × ``rows`` tokens), and of what is decoded:
    ``entries`` of ``prompt`` tokens, ``steps`` more each."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    batch: int
    rows: int
    entries: int
    prompt: int
    steps: int
    page: int


LLAMA_3_8B = Extents(32, 8, 128, 4096, 14336, 2, 8192, 16, 3584, 512, 16)
SMALL = Extents(4, 2, 16, 64, 160, 2, 48, 3, 40, 24, 8)
SIZE = LLAMA_3_8B if on_gpu else SMALL
TIMES = 16
"""A part of a step is launched from one graph, whose replay is timed."""
PARTS = ("norm, q, k, v", "attention", "output", "norm, MLP")
OFF = 2e-2 if on_gpu else 1e-4
"""How far a decoded row, or a gradient beside torch's, may be off, of its norm."""


# ---- what all share


class Weights(NamedTuple):
    """As torch.nn.Linear has them; gate and up in one."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor


def weights() -> Weights:
    z, columns = SIZE, SIZE.heads * SIZE.head_dim

    def linear(rows: int, columns: int) -> Tensor:
        return normal(rows, columns) * columns**-0.5

    return Weights(
        torch.ones(z.hidden, device=DEVICE, dtype=DTYPE),
        linear((z.heads + 2 * z.kv_heads) * z.head_dim, z.hidden),
        linear(z.hidden, columns),
        torch.ones(z.hidden, device=DEVICE, dtype=DTYPE),
        linear(2 * z.mlp, z.hidden),
        linear(z.hidden, z.mlp),
    )


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def angles() -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, D/2]."""
    half = torch.arange(SIZE.head_dim // 2, dtype=torch.float64)
    most = max(SIZE.rows, SIZE.prompt + SIZE.steps)
    turns = torch.arange(most)[:, None] * 500000 ** (-2 * half / SIZE.head_dim)
    return turns.cos().float().to(DEVICE), turns.sin().float().to(DEVICE)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (SIZE.hidden,), weight, 1e-5)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, S, heads, D]: column i pairs with column i + D/2."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


if not on_gpu:
    torch.set_num_threads(1)  # more cost a block as small as this more than they bring
else:  # one kernel each, forward and backward, for all contestants; torch's norm is one
    swiglu, turned = (torch.compile(f, dynamic=False) for f in (swiglu, turned))


class Block:
    """The four parts of a block, whose first two a contestant has of its own; x is [B, S, hidden],
    heads stand after rows."""

    name = ""

    def __init__(self, w: Weights, rotary: tuple[Tensor, Tensor]) -> None:
        self.w, self.rotary = w, rotary

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Turned q and k, and v, of as many positions as there are rows."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        return F.linear(y.flatten(-2), self.w.out) + x

    def mlp(self, x: Tensor) -> Tensor:
        normed = norm(x, self.w.norm_mlp)
        return F.linear(swiglu(F.linear(normed, self.w.gate_up)), self.w.down) + x

    def __call__(self, x: Tensor) -> Tensor:
        return self.mlp(self.output(self.attend(*self.qkv(x)), x))

    # A step of decoding: one row x [B, 1, hidden] of each entry behind the ``cached`` rows, in a
    # cache that ``fill`` makes of the rows of a prompt.

    def fill(self, x: Tensor) -> None:
        raise NotImplementedError

    def step_qkv(self, x: Tensor, cached: int) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def step_attend(self, cached: int, *of: Tensor) -> Tensor:
        raise NotImplementedError

    def rewind(self, cached: int) -> None:
        """So many rows are cached."""
        raise NotImplementedError

    one_graph = True
    """Whether one graph serves all steps, whose number is in device memory alone."""
    decodes = True


# ---- kernelseam


class Ours(Block):
    """One launch for q, k and v, turned; one for the attention; one for output and residual."""

    name = "kernelseam"

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        heads = (SIZE.heads, SIZE.kv_heads, SIZE.head_dim)
        return seam.fused_qkv_projection(
            norm(x, self.w.norm), self.w.qkv, None, *heads, rotary=self.rotary, layout="bshd"
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return seam.attention(q, k, v, causal=True, layout="bshd", deterministic=False)

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        return seam.fused_output_projection_residual(y, self.w.out, residual=x, layout="bshd")

    def fill(self, x: Tensor) -> None:
        self.pages = [torch.zeros_like(p) for p in empty_pages()]
        self.table = block_table()
        self.lengths = torch.full((SIZE.entries,), SIZE.prompt, dtype=torch.int32, device=DEVICE)
        rows = torch.arange(SIZE.prompt, dtype=torch.int32, device=DEVICE)
        self.project(x, rows.expand(SIZE.entries, -1).contiguous())
        # A plan for what is launched again and again: its call only launches.
        self.q = normal(SIZE.entries, 1, SIZE.heads, SIZE.head_dim)
        self.y = torch.empty_like(self.q)
        k_pages, v_pages = self.pages
        self.call = plan(
            Attention.from_arrays(
                self.q,
                k_pages,
                v_pages,
                self.y,
                layout="bshd",
                block_table=self.table,
                kv_lengths=self.lengths,
                max_seqlen_k=SIZE.prompt + SIZE.steps,
            )
        ).bind()

    def project(self, x: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
        """q; k and v go to their pages."""
        return kernelseam.fused_qkv_projection(
            norm(x, self.w.norm),
            self.w.qkv,
            None,
            SIZE.heads,
            SIZE.kv_heads,
            SIZE.head_dim,
            rotary=self.rotary,
            positions=positions,
            k_pages=self.pages[0],
            v_pages=self.pages[1],
            block_table=self.table,
            layout="bshd",
            out=out,
        )

    def step_qkv(self, x: Tensor, cached: int) -> tuple[Tensor, ...]:
        self.project(x, self.lengths[:, None], self.q)
        return ()

    def step_attend(self, cached: int, *of: Tensor) -> Tensor:
        self.lengths.add_(1)
        self.call()
        return self.y

    def rewind(self, cached: int) -> None:
        self.lengths.fill_(cached)


def empty_pages() -> tuple[Tensor, Tensor]:
    pages = SIZE.entries * -(-(SIZE.prompt + SIZE.steps) // SIZE.page)
    shape = (pages, SIZE.page, SIZE.kv_heads, SIZE.head_dim)
    return normal(*shape), normal(*shape)


def block_table() -> Tensor:
    """Every entry's pages, in any order."""
    made = torch.Generator().manual_seed(0)
    width = -(-(SIZE.prompt + SIZE.steps) // SIZE.page)
    order = torch.randperm(SIZE.entries * width, generator=made).to(torch.int32)
    return order.reshape(SIZE.entries, width).to(DEVICE)


# ---- torch


class Sdpa(Block):
    """torch's products and attention, by one backend of its own; a cache [B, H_kv, S, D]."""

    one_graph = False  # the keys that a step sees are a slice of the cache

    def __init__(self, w: Weights, rotary: tuple[Tensor, Tensor], backend: Any = None) -> None:
        super().__init__(w, rotary)
        self.backend = backend
        self.name = "torch" if backend is None else f"torch, {NAMES[backend]}"
        # cuDNN would plan every length anew
        self.decodes = backend is not SDPBackend.CUDNN_ATTENTION

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        z = SIZE
        heads = F.linear(norm(x, self.w.norm), self.w.qkv).unflatten(-1, (-1, z.head_dim))
        return tuple(heads.split([z.heads, z.kv_heads, z.kv_heads], dim=-2))

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.split(x)
        cos, sin = (t[: x.shape[1]] for t in self.rotary)
        return turned(q, cos, sin), turned(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.sdpa(q, k, v, q.shape[2] == k.shape[2] > 1).transpose(1, 2)

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    def fill(self, x: Tensor) -> None:
        shape = (SIZE.entries, SIZE.kv_heads, SIZE.prompt + SIZE.steps, SIZE.head_dim)
        self.cache = [normal(*shape) for _ in "kv"]
        for cached, rows in zip(self.cache, self.qkv(x)[1:], strict=True):
            cached[:, :, : SIZE.prompt] = rows.transpose(1, 2)

    def step_qkv(self, x: Tensor, cached: int) -> tuple[Tensor, ...]:
        q, k, v = self.split(x)
        cos, sin = (t[cached : cached + 1] for t in self.rotary)
        self.cache[0][:, :, cached] = turned(k, cos, sin)[:, 0]
        self.cache[1][:, :, cached] = v[:, 0]
        return (turned(q, cos, sin),)

    def step_attend(self, cached: int, *of: Tensor) -> Tensor:
        k, v = (x[:, :, : cached + 1] for x in self.cache)
        return self.sdpa(of[0].transpose(1, 2), k, v, False).transpose(1, 2)

    def rewind(self, cached: int) -> None:
        pass


NAMES = {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.CUDNN_ATTENTION: "cuDNN"}


class Flash3(Sdpa):
    """FlashAttention-3, which turns q and k of a step and puts k and v into pages itself."""

    one_graph = True

    def __init__(self, w: Weights, rotary: tuple[Tensor, Tensor]) -> None:
        super().__init__(w, rotary)
        self.name = "FlashAttention-3"
        self.interface: Any = __import__("flash_attn_interface")
        self.turns = [t.to(DTYPE) for t in rotary]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = self.interface.flash_attn_func(q, k, v, causal=True)
        return made[0] if isinstance(made, tuple) else made

    def fill(self, x: Tensor) -> None:
        self.pages = [torch.zeros_like(p) for p in empty_pages()]
        self.table = block_table()
        self.lengths = torch.full((SIZE.entries,), SIZE.prompt, dtype=torch.int32, device=DEVICE)
        row = torch.arange(SIZE.prompt, device=DEVICE)
        places = self.table[:, row // SIZE.page].long() * SIZE.page + row % SIZE.page
        for pages, rows in zip(self.pages, self.qkv(x)[1:], strict=True):
            pages.flatten(0, 1)[places] = rows

    def step_qkv(self, x: Tensor, cached: int) -> tuple[Tensor, ...]:
        return self.split(x)

    def step_attend(self, cached: int, *of: Tensor) -> Tensor:
        q, k, v = of
        made = self.interface.flash_attn_with_kvcache(
            q,
            *self.pages,
            k=k,
            v=v,
            rotary_cos=self.turns[0],
            rotary_sin=self.turns[1],
            cache_seqlens=self.lengths,
            page_table=self.table,
            causal=True,
            rotary_interleaved=False,
        )
        self.lengths.add_(1)
        return made[0] if isinstance(made, tuple) else made

    def rewind(self, cached: int) -> None:
        self.lengths.fill_(cached)


def contestants(w: Weights, rotary: tuple[Tensor, Tensor]) -> list[Any]:
    """Ours, then what else is here."""
    if not on_gpu:
        return [Ours(w, rotary), Sdpa(w, rotary)]
    found: list[Any] = [Ours(w, rotary), *(Sdpa(w, rotary, backend) for backend in NAMES)]
    try:
        found.append(Flash3(w, rotary))
    except (ImportError, OSError) as e:
        print(f"FlashAttention-3 is not here: {e}", file=sys.stderr)
    return found


# ---- time


def milliseconds(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Medians of so many rounds, in which all take turns, after one that is not timed."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            spent = _device_time(run) if on_gpu else _host_time(run)
            if turn:
                times[name].append(spent)
    return {name: sorted(x)[repeats // 2] for name, x in times.items()}


def _device_time(run: Run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _host_time(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def captured(run: Run, pool: Any = None) -> Run:
    """Its replay from a CUDA graph; on the CPU itself."""
    if not on_gpu:
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return lambda: graph.replay()


def table(title: str, names: list[str], rows: dict[str, list[float]], tokens: int) -> None:
    """A column a contestant; the last row is of the whole."""
    print(f"\n| {title}, ms | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|")
    for part, row in rows.items():
        print(f"| {part} | {' | '.join(f'{x:.3f}' for x in row)} |")
    print(f"| tokens/s | {' | '.join(f'{tokens / x * 1e3:.0f}' for x in rows['whole'])} |")


# ---- training


def forward_and_backward(block: Block, x: Tensor, dy: Tensor) -> dict[str, Run]:
    """Each part's forward, and its forward and backward; the whole. Gradients are by x and by the
    weights."""
    w, passes = block.w, dict[str, Run]()
    inputs: tuple[Tensor, ...] = (x,)
    for name, part, own in (
        (PARTS[0], block.qkv, (w.norm, w.qkv)),
        (PARTS[1], block.attend, ()),
        (PARTS[2], lambda y: block.output(y, x), (w.out,)),
        (PARTS[3], block.mlp, (w.norm_mlp, w.gate_up, w.down)),
    ):
        leaves = [t.detach().requires_grad_() for t in inputs]
        made = several(part(*leaves))
        down = [torch.randn_like(t) for t in made]

        def forward(part: Any = part, leaves: Any = leaves) -> Any:
            return several(part(*leaves))

        def both(
            forward: Any = forward, leaves: Any = leaves, down: Any = down, own: Any = own
        ) -> Any:
            return torch.autograd.grad(forward(), [*leaves, *own], down)

        passes |= {f"{name}, forward": forward, f"{name}, both": both}
        inputs = tuple(t.detach() for t in made)
    return {**passes, "whole": lambda: torch.autograd.grad(block(x), [x, *w], dy)}


def several(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def training(blocks: list[Any], repeats: int) -> None:
    z = SIZE
    x = normal(z.batch, z.rows, z.hidden).requires_grad_()
    dy = normal(z.batch, z.rows, z.hidden)
    exact: Any = None
    passes = []
    for block in blocks:
        print(f"training by {block.name} …", file=sys.stderr)
        passes.append(forward_and_backward(block, x, dy))
        found: Any = passes[-1]["whole"]()
        exact = exact or found
        worst = max(off(a, b) for a, b in zip(found, exact, strict=True))
        assert worst < OFF, f"{block.name}: gradients are {worst:.1e} off {blocks[0].name}'s"
    rows: dict[str, list[float]] = {}
    for name in passes[0]:
        runs = {block.name: made[name] for block, made in zip(blocks, passes, strict=True)}
        rows[name] = [*milliseconds(runs, repeats).values()]
    for part in PARTS:
        forward = rows[f"{part}, forward"]
        rows[f"{part}, both"] = [b - f for b, f in zip(rows[f"{part}, both"], forward, strict=True)]
    named = {name.replace(", both", ", backward"): row for name, row in rows.items()}
    names = [block.name for block in blocks]
    table(f"training, {z.batch} × {z.rows} tokens", names, named, z.batch * z.rows)


# ---- decoding


class Decoding:
    """``steps`` rows behind the prompts of hidden [B, prompt + steps, hidden]."""

    def __init__(self, block: Any, hidden: Tensor) -> None:
        self.block = block
        block.fill(hidden[:, : SIZE.prompt].contiguous())
        self.rows = hidden[:, SIZE.prompt :].transpose(0, 1)[:, :, None].contiguous()
        self.outs = torch.empty_like(self.rows)
        self.at = torch.zeros(1, dtype=torch.long, device=DEVICE)
        self.step(SIZE.prompt)  # plans and compiles
        # A step whose keys are a slice has a graph of each length, captured before it counts.
        lengths = range(SIZE.prompt, SIZE.prompt + SIZE.steps)
        if on_gpu and block.one_graph:
            lengths = lengths[:1]
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        graphs = [captured(lambda cached=cached: self.step(cached), pool) for cached in lengths]  # type: ignore[misc]
        self.replays = graphs * (SIZE.steps // len(graphs))

    def step(self, cached: int) -> None:
        x = self.rows.index_select(0, self.at)[0]
        y = self.block.step_attend(cached, *self.block.step_qkv(x, cached))
        self.outs.index_copy_(0, self.at, self.block.mlp(self.block.output(y, x))[None])
        self.at.add_(1)

    def whole(self) -> None:
        self.at.zero_()
        self.block.rewind(SIZE.prompt)
        for replay in self.replays:
            replay()

    def parts(self) -> dict[str, Run]:
        """So many times each part of the last step, and what lies between."""
        block, x, last = self.block, self.rows[-1].clone(), SIZE.prompt + SIZE.steps - 1
        block.rewind(last)
        q = block.step_qkv(x, last)
        y = block.step_attend(last, *q).clone()
        h = block.output(y, x)

        def often(run: Run) -> Run:
            def runs() -> None:
                for _ in range(TIMES):
                    block.rewind(last)
                    run()

            return captured(runs)

        return {
            PARTS[0]: often(lambda: block.step_qkv(x, last)),
            PARTS[1]: often(lambda: block.step_attend(last, *q)),
            PARTS[2]: often(lambda: block.output(y, x)),
            PARTS[3]: often(lambda: block.mlp(h)),
            "rewind": often(lambda: block.rewind(last)) if block.one_graph else lambda: None,
        }


def decoding(blocks: list[Any], repeats: int) -> float:
    """How far decoded rows are off the forward's, at most."""
    z, made, worst = SIZE, [], 0.0
    hidden = normal(z.entries, z.prompt + z.steps, z.hidden)
    exact = torch.cat([blocks[0](h[None])[:, z.prompt :] for h in hidden])
    blocks = [b for b in blocks if b.decodes]
    for block in blocks:
        print(f"decoding by {block.name} …", file=sys.stderr)
        made.append(Decoding(block, hidden))
        made[-1].whole()
        rows = made[-1].outs[:, :, 0].transpose(0, 1)
        worst = max(worst, off(rows, exact))
        assert worst < OFF, f"{block.name}: decoded rows are {worst:.1e} off the forward's"
    runs: dict[str, dict[str, Run]] = {}
    for block, of in zip(blocks, made, strict=True):
        for name, run in {**of.parts(), "whole": of.whole}.items():
            runs.setdefault(name, {})[block.name] = run
    spent = {name: [*milliseconds(each, repeats).values()] for name, each in runs.items()}
    between = [x / 2 for x in spent.pop("rewind")]  # which it did twice
    found = {
        part: [(x - b) / TIMES for x, b in zip(spent[part], between, strict=True)] for part in PARTS
    }
    found["whole"] = [x / z.steps for x in spent["whole"]]
    title = f"a step of decoding, {z.entries} entries, {z.prompt} + {z.steps} keys"
    table(title, [b.name for b in blocks], found, z.entries)
    return worst


# ---- in one call


def off(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).double().norm() / exact.double().norm())


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
    blocks = contestants(w, rotary)
    training(blocks, repeats)
    with torch.no_grad():
        worst = decoding(blocks, repeats)
    print(
        f"\nDecoded rows are those of the forward over all {z.prompt + z.steps}: {worst:.0e} off."
    )


if __name__ == "__main__":
    main()
