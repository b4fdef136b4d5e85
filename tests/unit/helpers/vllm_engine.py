"""A process of its own: vLLM's engine with our attention, and the same model by Transformers' eager
attention. Prints the tokens that each chose greedily, as JSON.

    python vllm_engine.py MODEL FOLDER

The model is made in FOLDER from a small config and random weights. Prompts are longer and shorter
than a step of the engine, so that chunks of prompts run beside decoding; two begin alike, so that
the engine's cache of prefixes is used.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import kernelseam.interop.vllm as interop  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

Tokens = list[list[int]]
NEW = 24
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}


def made(name: str) -> Any:
    """Weights are large, so that a token depends on what attention sees. Gemma's embeddings, which
    are its last layer too, stay small: it would repeat the last token."""
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(**SMALL)
    else:
        config = transformers.Gemma2Config(
            **SMALL, sliding_window=32, attn_logit_softcapping=4.0, query_pre_attn_scalar=32
        )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, x in model.named_parameters():
            if key.endswith("post_attention_layernorm.weight") and name == "gemma2":
                x.fill_(8)
            elif x.dim() > 1 and not (key.endswith("embed_tokens.weight") and name == "gemma2"):
                x.mul_(4)
    return model.float().eval()


def prompts() -> Tokens:
    draw = torch.Generator().manual_seed(3)
    found = [torch.randint(3, 256, (n,), generator=draw).tolist() for n in (5, 70, 1, 33, 120)]
    return [*found, found[4][:100] + found[0]]


def by_transformers(model: Any) -> Tokens:
    chosen = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW,
            eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
        chosen.append(made[0, len(prompt) :].tolist())
    return chosen


def by_engine(folder: str) -> tuple[Tokens, int]:
    """The tokens, and how often our attention was called."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    interop.register()  # as the entry point does where kernelseam is installed
    if current_platform.is_cpu():
        _host_takes_ours()
    from kernelseam.interop.vllm_attention import KernelseamImpl

    calls, forward = [0], KernelseamImpl.forward

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        return forward(self, *arguments, **options)

    KernelseamImpl.forward = counted  # type: ignore[method-assign]
    engine = LLM(
        model=folder,
        attention_backend=interop.NAME,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        compilation_config={"custom_ops": ["none"]},
    )
    asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    found = engine.generate([{"prompt_token_ids": x} for x in prompts()], asked, use_tqdm=False)
    return [list(x.outputs[0].token_ids) for x in found], calls[0]


def _host_takes_ours() -> None:
    """vLLM's platform for hosts takes its own backend whichever is asked for."""
    from vllm.platforms.cpu import CpuPlatform

    own = CpuPlatform.get_attn_backend_cls.__func__

    def chosen(cls: Any, selected: Any, *rest: Any, **options: Any) -> str:
        if selected is not None and selected.name == interop.NAME:
            path: str = selected.get_path()
            return path
        return str(own(cls, selected, *rest, **options))

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)


def main(name: str, folder: str) -> None:
    model = made(name)
    model.save_pretrained(folder)
    expected = by_transformers(model)
    found, calls = by_engine(folder)
    print(json.dumps({"expected": expected, "found": found, "calls": calls}))


if __name__ == "__main__":
    main(*sys.argv[1:])
