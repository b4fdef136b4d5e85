"""Whole programs, by the clock: Transformers' ``generate`` with a cache that grows, and training on
packed batches whose totals differ. Ours and torch's flash attention take turns.
"""

from __future__ import annotations

import gc
import importlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import kernelseam.interop.torch as ks_torch
import kernelseam.interop.transformers as ks_transformers
import torch
import torch.nn.functional as functional
from kernelseam.descriptors.common.protocol import Descriptor
from torch import Tensor

from benchmarks.comparing.results import ELAPSED, OURS, PEER, Record, Timed
from benchmarks.comparing.rows import Session, refusal
from benchmarks.comparing.timing import Run

ROUNDS, PROMPTS, PROMPT, NEW_TOKENS = 3, 4, 512, 64
BATCHES, LAYERS, HEADS, HEAD_DIM = 200, 4, 16, 64
"""Of training: batches of 4 to 12 sequences of 64 to 512 rows."""


@dataclass(frozen=True)
class ModelRow:
    """``make(session)``: ours and torch's."""

    name: str
    make: Callable[[Session], tuple[Run, Run]]
    suite: str = "models"

    def planned(self, session: Session) -> Iterable[Descriptor]:
        return ()

    def measure(self, session: Session) -> Record:
        runs = dict(zip((OURS, "torch"), self.make(session), strict=True))
        record = Record(self.suite, self.name)
        with session.flash():
            runs[OURS]()
            if (why := refusal(runs["torch"])) is not None:
                record.refused["torch"] = why
                del runs["torch"]
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(ROUNDS):
                for name, run in runs.items():
                    session.synchronize()
                    start = time.perf_counter()
                    run()
                    session.synchronize()
                    times[name].append(round((time.perf_counter() - start) * 1e6))
        record.timed = [
            Timed(n, OURS if n == OURS else PEER, us={ELAPSED: us}) for n, us in times.items()
        ]
        runs.clear()
        gc.collect()
        return record


def _generate(
    layers: int, head_dim: int, hidden: int, inner: int
) -> Callable[[Session], tuple[Run, Run]]:
    """Llama's layers with 8 heads of keys, random weights in bf16; greedy, eager."""

    def make(session: Session) -> tuple[Run, Run]:
        transformers: Any = importlib.import_module("transformers")
        ks_transformers.register()
        config = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=head_dim,
        )
        with torch.device(session.device):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        prompts = torch.randint(1, 32000, (PROMPTS, PROMPT), device=session.device)

        def by(name: str) -> Run:
            def run() -> object:
                model.set_attn_implementation(name)
                return model.generate(prompts, max_new_tokens=NEW_TOKENS, do_sample=False)

            return run

        return by("kernelseam"), by("sdpa")

    return make


def _ours(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    result: Tensor = ks_torch.attention_varlen(
        q, k, v, offsets, offsets, longest, longest, causal=True
    )
    return result


def _nested(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    jagged = torch.nested.nested_tensor_from_jagged
    q, k, v = (
        jagged(x, offsets, min_seqlen=1, max_seqlen=longest).transpose(1, 2) for x in (q, k, v)
    )
    result = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    rows: Tensor = result.transpose(1, 2).values()
    return rows


def _training(session: Session) -> tuple[Run, Run]:
    """Layers of attention with projections, forward and backward, in bf16."""
    width, draw = HEADS * HEAD_DIM, random.Random(0)
    batches: list[tuple[int, Tensor, int]] = []
    for _ in range(BATCHES):
        lengths = [draw.randint(64, 512) for _ in range(draw.randint(4, 12))]
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(session.device, torch.int32)
        batches.append((sum(lengths), offsets, max(lengths)))
    rows = session.random((12 * 512, width), "bfloat16")
    weights = [
        (session.random((width, width), "bfloat16") * width**-0.5).requires_grad_()
        for _ in range(4 * LAYERS)
    ]

    def by(attention: Callable[..., Tensor]) -> Run:
        def run() -> None:
            with torch.enable_grad():
                for total, offsets, longest in batches:
                    x = rows[:total]
                    for i in range(0, len(weights), 4):
                        *inputs, out = weights[i : i + 4]
                        heads = [
                            functional.linear(x, w).view(total, HEADS, HEAD_DIM) for w in inputs
                        ]
                        mixed = attention(*heads, offsets, longest)
                        x = x + functional.linear(mixed.reshape(total, width), out)
                    torch.autograd.grad(x.float().square().mean(), weights)

        return run

    return by(_ours), by(_nested)


def model_rows() -> list[ModelRow]:
    return [
        ModelRow("generate 64 of 4 × 512, 16 layers D64", _generate(16, 64, 2048, 8192)),
        ModelRow("generate 64 of 4 × 512, 4 layers D128", _generate(4, 128, 4096, 14336)),
        ModelRow("training on 200 packed batches", _training),
    ]
