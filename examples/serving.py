"""A small serving engine: continuous batching over a paged cache, of a random Llama.

Each step computes the rows of all running requests in one batch: chunks of prompts beside single
tokens and drafts. One plan serves every batch up to a bound, on a GPU captured once: offsets,
lengths and tables lie in memory that a step rewrites, and nothing but the new tokens is read
back. Pages of equal beginnings are shared (prefix cache), drafts are verified by the
step that would have computed one token (prompt lookup decoding), and the cache may be in e4m3 with
a scale for each token and head. Its tokens are compared with those of Transformers' eager
attention.

    python examples/serving.py                       # on the host, by NumPy
    python examples/serving.py --cache e4m3          # the model in bfloat16
    python examples/serving.py --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

try:
    import kernelseam
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as e:
    raise SystemExit(f"{e.name} is missing: pip install kernelseam torch transformers") from None

PAGE_SIZE = 4
Tensor = torch.Tensor


def random_llama(**options: Any) -> LlamaForCausalLM:
    """Two layers with random weights, large enough that tokens differ; or as ``options`` say."""
    torch.manual_seed(0)
    small = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.12,
        "attn_implementation": "eager",
    }
    return LlamaForCausalLM(LlamaConfig(**small | options)).eval()


class Pages:
    """Which pages are free, how often each is used, and which full pages begin which prompts."""

    def __init__(self, count: int) -> None:
        self.free = deque(range(count))
        self.users = [0] * count
        self.known: dict[tuple[int, ...], int] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}

    def take(self) -> int:
        """A page for new tokens: what it held before is forgotten."""
        page = self.free.popleft()
        self.known.pop(self.tokens.pop(page, ()), None)
        self.users[page] = 1
        return page

    def share(self, tokens: Sequence[int]) -> list[int]:
        """Pages that hold the keys of the first tokens, as many as are known; the last token
        is left to be computed."""
        pages: list[int] = []
        while (n := (len(pages) + 1) * PAGE_SIZE) < len(tokens):
            page = self.known.get(tuple(tokens[:n]))
            if page is None:
                break
            if not self.users[page]:
                self.free.remove(page)
            self.users[page] += 1
            pages.append(page)
        return pages

    def remember(self, page: int, tokens: tuple[int, ...]) -> None:
        """``page`` is full: it ends this beginning."""
        if tokens not in self.known:
            self.known[tokens], self.tokens[page] = page, tokens

    def release(self, pages: Sequence[int]) -> None:
        """Free those that nobody else uses; what they hold stays known until they are taken."""
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)


@dataclass
class Request:
    """A prompt, and what has become of it."""

    tokens: list[int]
    wanted: int
    """Tokens in the end."""
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens whose keys are in the cache."""

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.wanted

    def draft(self, most: int) -> list[int]:
        """What followed the last two tokens where they stood before (prompt lookup)."""
        x = self.tokens
        for i in range(len(x) - 3, -1, -1):
            if x[i : i + 2] == x[-2:]:
                return x[i + 2 : i + 2 + min(most, self.wanted - len(x) - 1)]
        return []


class Batch:
    """Packed rows of a step, of which those beyond the last sequence are of nobody: up to ``rows``
    rows of up to ``requests`` requests, in one piece of memory that every step rewrites."""

    def __init__(self, rows: int, requests: int, width: int, device: Any) -> None:
        self.rows, self.requests, self.width = rows, requests, width
        on_host = torch.zeros(rows + 2 * requests + 1 + requests * width, dtype=torch.int32)
        self.on_host = on_host.pin_memory() if device.type == "cuda" else on_host
        self._all = self.on_host.to(device, copy=True)
        self.tokens, self.cu_seqlens, self.kv_lengths, self.block_table = self.split(self._all)

    def split(self, numbers: Tensor) -> list[Tensor]:
        """Tokens, offsets, lengths and tables."""
        n = self.requests
        *others, tables = numbers.split([self.rows, n + 1, n, n * self.width])
        return [*others, tables.unflatten(0, (n, self.width))]

    def set(self, parts: list[tuple[Request, list[int]]]) -> None:
        """To these requests' rows; ``kv_lengths`` are with the new tokens."""
        empty = self.requests - len(parts)
        tokens = [t for _, rows in parts for t in rows]
        ends = list(accumulate((len(rows) for _, rows in parts), initial=0))
        lengths = [r.cached + len(rows) for r, rows in parts]
        tables = [p for r, _ in parts for p in r.pages + [-1] * (self.width - len(r.pages))]
        numbers = [
            *(tokens + [0] * (self.rows - len(tokens))),
            *(ends + ends[-1:] * empty),
            *(lengths + [0] * empty),
            *(tables + [-1] * self.width * empty),
        ]
        self.on_host.copy_(torch.tensor(numbers, dtype=torch.int32))
        self._all.copy_(self.on_host, non_blocking=True)


class Model:
    """The layers over a paged cache."""

    def __init__(self, llama: LlamaForCausalLM, pages: int, device: str, dtype: Any, e4m3: bool):
        c = llama.config
        self.dim, self.eps, self.layers = c.head_dim, c.rms_norm_eps, c.num_hidden_layers
        self.w = {n: x.detach().to(device, dtype) for n, x in llama.state_dict().items()}
        positions = torch.arange(c.max_position_embeddings)
        base = llama.model.rotary_emb.inv_freq.float().cpu()
        angles = (positions[:, None] * base).to(device)
        self.rotary = angles.cos().contiguous(), angles.sin().contiguous()
        stored = torch.float8_e4m3fn if e4m3 else dtype
        shape = (self.layers, 2, pages, PAGE_SIZE, c.num_key_value_heads)
        self.cache = torch.zeros(*shape, self.dim, device=device, dtype=stored)
        self.scales = torch.zeros(*shape, device=device) if e4m3 else None

    def attention(self, layer: int, x: Tensor, b: Batch) -> Tensor:
        at = f"model.layers.{layer}.self_attn."
        q, k, v = (
            F.linear(x, self.w[f"{at}{n}_proj.weight"]).unflatten(1, (-1, self.dim)) for n in "qkv"
        )
        return F.linear(self.attend(layer, q, k, v, b).flatten(1), self.w[f"{at}o_proj.weight"])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, b: Batch) -> Tensor:
        """Append the rows' keys and values, then attend to all of each request's."""
        k_pages, v_pages = self.cache[layer]
        scales: dict[str, Any] = {}
        if self.scales is not None:
            scales = dict(zip(("k_scales", "v_scales"), self.scales[layer], strict=True))
        q = kernelseam.append_paged(
            k,
            v,
            k_pages,
            v_pages,
            q=q,
            rotary=self.rotary,
            block_table=b.block_table,
            kv_lengths=b.kv_lengths,
            cu_seqlens_q=b.cu_seqlens,
            **scales,
        )
        return kernelseam.attention_paged(
            q,
            k_pages,
            v_pages,
            b.block_table,
            b.kv_lengths,
            cu_seqlens_q=b.cu_seqlens,
            max_seqlen_q=b.rows,
            **scales,
            **({"scale_block": 1} if scales else {}),
        )

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[1:], self.w[f"model.{name}.weight"], self.eps)

    def __call__(self, b: Batch) -> Tensor:
        """The likeliest token behind each row."""
        x = F.embedding(b.tokens, self.w["model.embed_tokens.weight"])
        for i in range(self.layers):
            x = x + self.attention(i, self.norm(x, f"layers.{i}.input_layernorm"), b)
            h = self.norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up, down = (
                self.w[f"model.layers.{i}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
            )
            x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
        return F.linear(self.norm(x, "norm"), self.w["lm_head.weight"]).argmax(1)


class Step:
    """The model on a batch, on a GPU captured once for all batches."""

    def __init__(self, model: Model, batch: Batch, captured: bool = True) -> None:
        self.model, self.batch = model, batch
        self.graph: Any = None
        if captured and batch.tokens.device.type == "cuda":
            self.model(batch)  # compiles, and allocates what stays
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.found = self.model(batch)

    def __call__(self) -> Tensor:
        """The likeliest token behind each row of the batch."""
        if self.graph is None:
            return self.model(self.batch)
        self.graph.replay()
        return self.found


class Engine:
    """Takes requests; each step computes at most ``budget`` rows."""

    def __init__(self, step: Step, pages: int, drafts: int) -> None:
        self.compute, self.batch, self.pages = step, step.batch, Pages(pages)
        self.budget, self.drafts = step.batch.rows, drafts
        self.waiting, self.running = deque[Request](), list[Request]()
        self.steps = self.rows = self.shared = self.drafted = self.accepted = 0

    def step(self) -> None:
        """Choose rows, compute them, take the tokens that they give."""
        parts = list[tuple[Request, list[int]]]()
        left = self.budget
        for r in self.running:  # decoding first, then chunks of prompts
            rows = r.tokens[r.cached :]
            if len(rows) == 1 and self.drafts:
                rows += r.draft(min(self.drafts, left - 1))
            self._add(parts, r, rows[:left])
            left = self.budget - sum(len(rows) for _, rows in parts)
        while self.waiting and left > 0 and len(self.running) < self.batch.requests:
            r = self.waiting[0]
            if -(-r.wanted // PAGE_SIZE) > len(self.pages.free):
                break
            self.running.append(self.waiting.popleft())
            r.pages = self.pages.share(r.tokens)
            r.cached = len(r.pages) * PAGE_SIZE
            self.shared += r.cached
            # room to the end, so that no running request has to wait for pages
            missing = -(-r.wanted // PAGE_SIZE) - len(r.pages)
            r.pages += [self.pages.take() for _ in range(missing)]
            self._add(parts, r, r.tokens[r.cached :][:left])
            left = self.budget - sum(len(rows) for _, rows in parts)
        self.batch.set(parts)
        found = self.compute().tolist()
        self.steps, self.rows = self.steps + 1, self.rows + self.budget - left
        for r, rows in parts:
            self._take(r, rows, found[: len(rows)])
            del found[: len(rows)]
        for r in [r for r in self.running if r.done]:
            self.running.remove(r)
            self.pages.release(r.pages)

    def run(self, requests: Sequence[Request]) -> float:
        """Seconds until all are done."""
        self.waiting.extend(requests)
        start = time.perf_counter()
        with torch.no_grad():
            while self.waiting or self.running:
                self.step()
        return time.perf_counter() - start

    @staticmethod
    def _add(parts: list[tuple[Request, list[int]]], r: Request, rows: list[int]) -> None:
        if rows:
            parts.append((r, rows))

    def _take(self, r: Request, rows: list[int], found: list[int]) -> None:
        """The request's new tokens: those drafts that the model would have chosen, and one more."""
        before, known = r.cached, len(r.tokens) - r.cached
        drafted = rows[known:]
        self.drafted += len(drafted)
        r.cached += min(known, len(rows))
        if r.cached == len(r.tokens):  # the prompt is through
            for token, draft in zip(found[known - 1 :], [*drafted, None], strict=True):
                r.tokens.append(token)
                if token != draft or r.done:
                    break
                r.cached += 1
                self.accepted += 1
        for page in range(before // PAGE_SIZE, r.cached // PAGE_SIZE):
            self.pages.remember(r.pages[page], tuple(r.tokens[: (page + 1) * PAGE_SIZE]))


def eager(llama: LlamaForCausalLM, tokens: Sequence[int], wanted: int) -> list[int]:
    """What Transformers' eager attention chooses, without a cache."""
    x = list(tokens)
    while len(x) < wanted:
        with torch.no_grad():
            x.append(int(llama(torch.tensor([x]), use_cache=False).logits[0, -1].argmax()))
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="[float32; bfloat16 with --cache e4m3]")
    parser.add_argument("--cache", choices=("same", "e4m3"), default="same")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--budget", type=int, default=24, help="rows of a step")
    given = parser.parse_args()
    e4m3 = given.cache == "e4m3"
    dtype = getattr(torch, given.dtype or ("bfloat16" if e4m3 else "float32"))

    llama = random_llama()
    made = torch.Generator().manual_seed(1)
    system = torch.randint(0, 96, (13,), generator=made).tolist()
    prompts = [
        system + torch.randint(0, 96, (3 + 5 * (i % 4),), generator=made).tolist()
        for i in range(given.requests)
    ]
    wanted = [len(p) + 12 + i % 5 for i, p in enumerate(prompts)]
    width = max(-(-n // PAGE_SIZE) for n in wanted)
    model = Model(llama, 6 * width, given.device, dtype, e4m3)
    with torch.no_grad():
        step = Step(model, Batch(given.budget, given.requests, width, model.cache.device))
    for _ in range(1 if given.device == "cpu" else 2):  # on a device the second run is timed
        requests = [Request([*p], n) for p, n in zip(prompts, wanted, strict=True)]
        engine = Engine(step, 6 * width, drafts=3)
        seconds = engine.run(requests)
    made_tokens = sum(len(r.tokens) - len(p) for r, p in zip(requests, prompts, strict=True))
    print(
        f"{made_tokens} tokens of {len(requests)} requests in {engine.steps} steps of "
        f"{engine.rows / engine.steps:.0f} rows, {made_tokens / seconds:.0f} tokens a second; "
        f"{engine.shared} prompt tokens from shared pages, "
        f"{engine.accepted} of {engine.drafted} drafted tokens accepted"
    )
    right = [r.tokens == eager(llama, p, r.wanted) for r, p in zip(requests, prompts, strict=True)]
    print(f"{sum(right)} of {len(right)} requests have the tokens of Transformers' eager attention")
    if dtype is torch.float32:
        assert all(right)


if __name__ == "__main__":
    main()
