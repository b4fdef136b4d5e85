"""Tokens a second of the example's serving loop beside the same loop by FlashInfer.

    python -m benchmarks.serving_loop [--device cuda] [--small]

Model, requests, schedule and pages are those of examples/serving.py. Ours is captured in a CUDA
graph once, as the example is, or not. FlashInfer rotates, appends and attends by functions of its
own; its wrapper is planned on the host in every step. Not captured, it computes as many rows as a
step has; captured, as many as steps may have, as ours does.

Loops take turns, after one run each that is not timed. Errors are those of the first layer's
attention, of every tenth step of that run, beside the same in float64 over the loop's own pages.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.comparing import flashinfer_peer

PAGE = 16
ROUNDS = 3
EVERY = 10
Tensor = Any
Loops = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class Load:
    """Requests of a shared beginning, a prompt and new tokens, and the model that takes them."""

    name: str
    requests: int
    budget: int
    """Rows of a step."""
    shared: int
    prompts: tuple[int, int]
    """The shortest and the longest."""
    new: int
    model: Mapping[str, int | float] = field(default_factory=dict)
    drafts: int = 3

    @property
    def width(self) -> int:
        """Pages of the longest request."""
        return -(-(self.shared + self.prompts[1] + self.new) // PAGE)

    @property
    def pages(self) -> int:
        return self.requests * self.width

    def made(self) -> list[tuple[list[int], int]]:
        """Prompts, and tokens in the end; the same in every run."""
        at = torch.Generator().manual_seed(1)

        def tokens(count: int) -> list[int]:
            drawn: list[int] = torch.randint(0, 96, (count,), generator=at).tolist()
            return drawn

        beginning, (low, high) = tokens(self.shared), self.prompts
        own = [low + (high - low) * i // max(self.requests - 1, 1) for i in range(self.requests)]
        return [(beginning + tokens(n), self.shared + n + self.new) for n in own]


SMALL = Load("the example's model, D128", 6, 24, 16, (3, 18), 14, {"head_dim": 128})
LARGE = Load(
    "eight layers of an 8B model",
    *(64, 256, 128, (64, 448), 48),
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
    },
    drafts=0,
)


class FlashInferStep:
    """What the example's ``Step`` is, by FlashInfer's functions."""

    def __init__(self, model: Any, batch: Any, backend: str, captured: bool = False) -> None:
        self.model, self.batch, self.module = model, batch, flashinfer_peer.flashinfer()
        self._cos_sin, self._captured = torch.cat(model.rotary, 1), captured
        self._heads = model.w["model.layers.0.self_attn.q_proj.weight"].shape[0] // model.dim
        sizes = {
            "qo_indptr_buf": batch.requests + 1,
            "paged_kv_indptr_buf": batch.requests + 1,
            "paged_kv_indices_buf": batch.requests * batch.width + 1,
            "paged_kv_last_page_len_buf": batch.requests,
        }
        self._buffers = {n: self._zeros(size) for n, size in sizes.items()} if captured else {}
        self._wrapper = self.module.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=batch.tokens.device),
            "NHD",
            backend=backend,
            use_cuda_graph=captured,
            **self._buffers,
        )
        model.attend = self.attend
        self._graph: Any = None
        if captured:
            self._capture()

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.batch.tokens.device)

    def _capture(self) -> None:
        rows, requests = self.batch.rows, self.batch.requests
        self._entries, self._positions, self._places = (self._zeros(rows) for _ in range(3))
        # the first plan says how many rows there may be
        offsets = torch.tensor([0] + [rows] * requests, dtype=torch.int32)
        lengths = torch.tensor([rows] + [0] * (requests - 1), dtype=torch.int32)
        self._plan(offsets, lengths, self.batch.split(self.batch.on_host)[3])
        self.model(self.batch)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._found = self.model(self.batch)

    def _plan(self, offsets: Tensor, lengths: Tensor, tables: Tensor) -> None:
        """Of sequences on the host."""
        counts = (lengths + PAGE - 1) // PAGE
        indices = tables[torch.arange(tables.shape[1]) < counts[:, None]]
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
        indptr[1:] = counts.cumsum(0)
        last = torch.where(lengths > 0, (lengths - 1) % PAGE + 1, 0).int()
        if self._captured:  # behind them the page of rows that are of nobody
            indices = torch.cat((indices, indices.new_tensor([self.model.cache.shape[2] - 1])))
        numbers = indices, indptr, last, offsets, lengths
        on_device = torch.cat(numbers).pin_memory().to(self._cos_sin.device, non_blocking=True)
        *pages, begins, ends = on_device.split([len(x) for x in numbers])
        k = self.model.cache[0, 0]
        self._wrapper.plan(
            *(offsets, indptr, pages[0], last),
            *(self._heads, k.shape[2], self.model.dim, PAGE),
            causal=True,
            q_data_type=k.dtype,
            kv_data_type=k.dtype,
            max_token_per_sequence=int((offsets[1:] - offsets[:-1]).max()),
        )
        places = self.module.get_batch_indices_positions
        if not self._captured:
            self._pages = pages
            self._entries, self._positions = places(begins, ends, int(offsets[-1]))
            self._places = self._positions
            return
        names = "indices", "indptr", "last_page_len"
        self._pages = [self._buffers[f"paged_kv_{n}_buf"] for n in names]
        self._positions.zero_()
        places(begins, ends, self.batch.rows, self._entries, self._positions)
        spare = int(indptr[-1]) * PAGE
        self._places.copy_(torch.where(self._entries < 0, spare, self._positions))
        self._entries.clamp_(min=0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, b: Any) -> Tensor:
        """As the example's, rotated in place."""
        pages = tuple(self.model.cache[layer])
        self.module.apply_rope_with_cos_sin_cache_inplace(
            self._positions, q.flatten(1), k.flatten(1), self.model.dim, self._cos_sin
        )
        self.module.append_paged_kv_cache(
            k, v, self._entries, self._places, pages, *self._pages, "NHD"
        )
        return self._wrapper.run(q, pages)

    def __call__(self) -> Tensor:
        _, offsets, lengths, tables = self.batch.split(self.batch.on_host)
        count = len(lengths) if self._captured else int((lengths > 0).sum())
        self._plan(offsets[: count + 1], lengths[:count], tables[:count])
        if self._graph is None:
            return self.model(SimpleNamespace(tokens=self.batch.tokens[: int(offsets[-1])]))
        self._graph.replay()
        return self._found


def exact(q: Tensor, model: Any, layer: int, batch: Any) -> Tensor:
    """Attention of rows that are not rotated yet, over the pages of a layer, in float64."""
    _, offsets, lengths, tables = batch.split(batch.on_host)
    cos, sin = (x.double() for x in model.rotary)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    k, v = model.cache[layer]
    ends = offsets.tolist()
    for i, length in enumerate(lengths.tolist()):
        begin, end = ends[i], ends[i + 1]
        if begin == end:
            continue
        own = tables[i, : -(-length // PAGE)].long().to(q.device)
        keys, values = (x[own].flatten(0, 1)[:length].double().transpose(0, 1) for x in (k, v))
        at = torch.arange(length - (end - begin), length, device=q.device)
        x, y = q[begin:end].double().chunk(2, -1)
        c, s = cos[at, None], sin[at, None]
        rows = torch.cat((x * c - y * s, y * c + x * s), -1).transpose(0, 1)
        rows = rows.unflatten(0, (len(keys), -1))
        scores = rows @ keys[:, None].transpose(-1, -2) * q.shape[-1] ** -0.5
        scores.masked_fill_(torch.arange(length, device=q.device) > at[:, None], -torch.inf)
        found = (scores.softmax(-1) @ values[:, None]).flatten(0, 1)
        out[begin:end] = found.transpose(0, 1)
    return out


def watched(step: Any, run: Callable[[], None]) -> float:
    """The largest relative error of the first layer's attention while ``run`` runs."""
    model, attend, worst, calls = step.model, step.model.attend, 0.0, 0

    def also(layer: int, q: Tensor, k: Tensor, v: Tensor, b: Any) -> Tensor:
        nonlocal worst, calls
        calls += layer == 0
        given = q.clone() if layer == 0 and calls % EVERY == 1 else None
        out = attend(layer, q, k, v, b)
        if given is not None:
            rows = int(step.batch.split(step.batch.on_host)[1][-1])
            want = exact(given[:rows], model, layer, step.batch)
            error = float((out[:rows].double() - want).norm() / want.norm())
            worst = max(worst, error)
        return out

    model.attend = also
    run()
    model.attend = attend
    return worst


def loops(load: Load, example: Any, device: str, dtype: Any) -> Loops:
    """What makes each loop's step."""
    with torch.device(device):
        llama = example.random_llama(**load.model)
    for weight in llama.parameters():  # all loops' models have these
        weight.data = weight.data.to(dtype)

    def parts() -> tuple[Any, Any]:
        model = example.Model(llama, load.pages + 1, device, dtype, False)
        batch = example.Batch(load.budget, load.requests, load.width, model.cache.device)
        return model, batch

    return {
        "ours, captured": lambda: example.Step(*parts()),
        "ours": lambda: example.Step(*parts(), captured=False),
        "FlashInfer, FA3": lambda: FlashInferStep(*parts(), "fa3"),
        "FlashInfer, FA2": lambda: FlashInferStep(*parts(), "fa2"),
        "FlashInfer, FA2, captured": lambda: FlashInferStep(*parts(), "fa2", True),
        "FlashInfer, FA3, captured": lambda: FlashInferStep(*parts(), "fa3", True),
    }


def measured(load: Load, example: Any, device: str, dtype: Any) -> Iterator[str]:
    """A line for each loop."""
    steps = dict[str, Any]()
    errors, tokens, times = dict[str, str](), dict[str, list[list[int]]](), dict[str, list[float]]()
    counts = dict[str, str]()

    def run(name: str) -> None:
        requests = [example.Request([*p], n) for p, n in load.made()]
        engine = example.Engine(steps[name], load.pages, load.drafts)
        times.setdefault(name, []).append(engine.run(requests))
        tokens[name] = [r.tokens for r in requests]
        counts[name] = f"{engine.steps} × {engine.rows / engine.steps:.0f}"

    for name, made in loops(load, example, device, dtype).items():
        try:
            with torch.no_grad():
                steps[name] = made()
            seen = watched(steps[name], partial(run, name))
            errors[name] = f"{seen:.1e}" if seen else "–"
        except Exception as e:  # it compiles at first use, which may fail in many ways
            steps.pop(name, None)
            yield f"| {load.name} | {name} | {type(e).__name__}: {str(e).splitlines()[0][:150]} |"
    for _ in range(ROUNDS):
        for name in steps:
            run(name)
    made_tokens = load.requests * load.new
    rates = {n: made_tokens / statistics.median(times[n][1:]) for n in steps}
    first = next(iter(rates))
    for name, rate in rates.items():
        same = sum(x == y for x, y in zip(tokens[name], tokens[first], strict=True))
        yield (
            f"| {load.name} | {name} | {rate:.0f} | {rates[first] / rate:.2f} "
            f"| {counts[name]} | {same} of {load.requests} | {errors[name]} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="the example's load alone")
    given = parser.parse_args(arguments)
    example: Any = import_module("examples.serving")
    example.PAGE_SIZE = PAGE
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    print("| load | loop | tokens a second | ours, captured / it | steps × rows | same | error |")
    print("|---|---|---|---|---|---|---|")
    for load in (SMALL,) if given.small else (SMALL, LARGE):
        for line in measured(load, example, given.device, dtype):
            print(line, flush=True)


if __name__ == "__main__":
    main()
