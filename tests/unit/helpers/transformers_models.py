"""Small models of Transformers with random weights, made on the spot, and inputs for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf

Tensor = Any
ROWS = 12
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "max_position_embeddings": 64,
}
_DECODER = {
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LAYERS = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Model:
    """``make()`` gives the model; ``decoder`` says whether it generates."""

    name: str
    make: Callable[[], Any]
    decoder: bool = True


def _llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER))


def _mistral() -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(**_DECODER, sliding_window=5))


def _gemma2() -> Any:
    config = hf.Gemma2Config(
        **_DECODER,
        sliding_window=5,
        layer_types=_LAYERS,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
    )
    return hf.Gemma2ForCausalLM(config)


def _gemma3() -> Any:
    config = hf.Gemma3TextConfig(
        **_DECODER, sliding_window=5, layer_types=_LAYERS, query_pre_attn_scalar=16
    )
    return hf.Gemma3ForCausalLM(config)


def _gpt_oss() -> Any:
    config = hf.GptOssConfig(
        **_DECODER,
        sliding_window=5,
        layer_types=_LAYERS,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = hf.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def _bert() -> Any:
    sizes = {n: x for n, x in _SIZES.items() if n != "attention_dropout"}
    config = hf.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return hf.BertForMaskedLM(config)


def _modernbert() -> Any:
    config = hf.ModernBertConfig(
        **_SIZES, local_attention=6, layer_types=_LAYERS, pad_token_id=0, reference_compile=False
    )
    return hf.ModernBertForMaskedLM(config)


def _t5() -> Any:
    config = hf.T5Config(
        vocab_size=97,
        d_model=128,
        d_kv=32,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    return hf.T5ForConditionalGeneration(config)


MODELS = {
    m.name: m
    for m in (
        Model("llama", _llama),
        Model("mistral", _mistral),
        Model("gemma2", _gemma2),
        Model("gemma3", _gemma3),
        Model("gpt_oss", _gpt_oss),
        Model("bert", _bert, decoder=False),
        Model("modernbert", _modernbert, decoder=False),
        Model("t5", _t5),
    )
}


def made(name: str, implementation: str) -> Any:
    """A model with weights that depend on its name alone, for evaluation. Skips the test where an
    older Transformers does not let an attention be chosen for it."""
    torch.manual_seed(7)
    model = MODELS[name].make()
    if not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"{name} has an attention of its own in Transformers {hf.__version__}")
    for parameter in model.parameters():  # larger than their own: attention that is not uniform
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    for module in model.modules() if name == "t5" else ():
        if hasattr(module, "key_value_proj_dim"):
            with torch.no_grad():
                module.q.weight *= 32**-0.5  # its scores are not scaled
    for part in model.modules():  # 5.17 does not reach T5's stacks from the whole
        if isinstance(part, hf.PreTrainedModel):
            part.set_attn_implementation(implementation)
    return model.eval()


def padded(side: str, rows: int = ROWS) -> dict[str, Tensor]:
    """Three entries with 0, 4 and rows − 1 of padding, on the left or on the right, or ("none")
    without, in which case there is no mask."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 97, (3, rows), generator=generator)
    if side == "none":
        return {"input_ids": ids}
    place = torch.arange(rows)
    counts = torch.tensor([[rows], [rows - 4], [1]])
    mask = place >= rows - counts if side == "left" else place < counts
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def inputs(name: str, side: str) -> dict[str, Tensor]:
    """Of a forward: T5 has tokens of its decoder besides."""
    given = padded(side)
    if name == "t5":
        generator = torch.Generator().manual_seed(5)
        given["decoder_input_ids"] = torch.randint(2, 97, (3, 7), generator=generator)
    return given


def compared(name: str, given: dict[str, Tensor]) -> Tensor:
    """Which rows of the logits are compared: those of no padding."""
    if name == "t5":
        return torch.ones_like(given["decoder_input_ids"], dtype=torch.bool)
    mask = given.get("attention_mask")
    if mask is None or mask.dim() != 2:
        return torch.ones_like(given["input_ids"], dtype=torch.bool)
    return mask.bool()
