"""Any class of Transformers by its name, with a small configuration of random weights, and inputs
for it. Nothing is written for one class but what ``_OWN`` holds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers as hf
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Tensor = Any
MAPPINGS = (
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE",
    "IMAGE_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "AUDIO_CLASSIFICATION",
    "CTC",
)
MOST = 10**8
"""Parameters of a model that is made."""
ROWS = 12
_LAYERS = (
    r"(n|num|encoder|decoder|speech_encoder|t2u_encoder|t2u_decoder)(_hidden)?_layers?|"
    r"num_(en|de)coder_layers|num_blocks|depth|.*_num_hidden_layers|num_hidden_groups"
)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1}
_SIZES = (
    (r".*vocab_size(_per_layer_input)?", 128),
    (r"(.*_)?hidden_size(_global)?|d_model|n_embd|emb(ed|edding|_dim|ed_dim|edding_size)?", 64),
    (r"dim|hidden_dim|embed_dim|word_embed_proj_dim|output_hidden_size|lru_width|d_embed", 64),
    (r".*(num_attention_heads|attention_heads)|num_heads|n_heads?|index_n_heads", 4),
    (r".*num_key_value_heads|num_kv_heads|kv_n_heads", 2),
    (r".*head_dim|d_kv|query_pre_attn_scalar", 16),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size)|d_ff|d_inner|dff|n_inner|dim_ff", 64),
    (r"classifier_proj_size|hidden_size_per_layer_input", 64),
    (r"(q|kv|o|qk)_lora_rank", 32),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 8),
    (r"num_experts_per_tok|moe_topk|moe_top_k|moe_k|index_block_size|index_topk_blocks", 2),
    (r"n_group|topk_group|n_groups|first_k_dense_replace|num_dense_layers", 1),
    (r"sliding_window(_size)?|index_topk|attention_chunk_size|local_attention", 5),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions", 512),
    (r"rotary_dim", 8),
    (r"image_size", 64),
    (r"n_shared_experts", 1),
    (r"num_mtp_layers|num_nextn_predict_layers|num_kv_shared_layers", 0),
)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_KINDS = ("sliding_attention", "full_attention")
_OWN: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 99}},
    "CohereCompassTextConfig": {"rope_parameters": dict.fromkeys(_KINDS, _ROPE)},
    "DoryConfig": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "EsmcConfig": {"num_key_value_heads": 4},
    "EfficientNetConfig": {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640},
    "EsmConfig": {"vocab_size": 128, "mask_token_id": 3},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "Glm5NextTextConfig": {
        "index_topk": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashConfig": {"qk_head_dim": 32},
    "Mamba2Config": {"num_heads": 8},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 99},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 99},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "ReformerConfig": {"is_decoder": True, "axial_pos_embds": False},
    "Wav2Vec2BertConfig": {"vocab_size": 128},
    "Wav2Vec2ConformerConfig": {"vocab_size": 128},
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"]},
}
"""What some classes need beside: kinds of layers, and numbers that depend on others."""


def classes() -> Iterator[tuple[str, str]]:
    """(name of a class, type of its configuration), each class once."""
    known = set()
    for mapping in MAPPINGS:
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for kind, named in names.items():
            for name in named if isinstance(named, tuple | list) else (named,):
                if name not in known:
                    known.add(name)
                    yield name, kind


def small(config: Any, layers: int, widths: bool = True) -> Any:
    """A configuration of a class in few elements: of what its parameters say by their names, those
    that are larger are replaced. Without ``widths`` only layers, tokens and windows."""
    given: dict[str, Any] = {}
    latent = "kv_lora_rank" in inspect.signature(config.__init__).parameters
    for name, parameter in inspect.signature(config.__init__).parameters.items():
        default = parameter.default
        number = isinstance(default, int) and not isinstance(default, bool) and default > 0
        missing = default is None and "int" in str(parameter.annotation)
        if re.fullmatch(r"(pad|bos|eos|sep|decoder_start)_token_id", name):
            given[name] = _TOKENS.get(name, 2)
        elif re.fullmatch(r"forced_(bos|eos)_token_id", name):
            given[name] = None
        elif isinstance(default, float) and re.search(r"drop|dropout", name):
            given[name] = 0.0
        elif number and default > 100 and re.search(r"_token_(id|index)$|_index$", name):
            given[name] = 100 + len(given) % 20
        elif number and re.fullmatch(_LAYERS, name):
            given[name] = min(layers, default)
        else:
            size = next((s for p, s in _SIZES if re.fullmatch(p, name)), None)
            if size is None or not (
                number or (missing and re.search("head_dim|expert|key_value_heads", name))
            ):
                continue
            if latent and "key_value_heads" in name:
                size = 4
            if widths or size in (5, 128):
                given[name] = min(size, default) if number else size
    whole = config()
    for name in getattr(config, "sub_configs", {}):
        part = getattr(whole, name, None)
        if hasattr(part, "to_dict"):
            given[name] = small(type(part), layers, widths).to_dict()
    given |= _OWN.get(config.__name__, {})
    found = config(**given)
    known = getattr(config, "ignore_keys_at_rope_validation", ())
    rope = getattr(found, "rope_parameters", None) or {}
    if "mrope_section" in known and "rope_type" in rope:  # parts of a head for time, height, width
        width = getattr(found, "head_dim", None) or found.hidden_size // found.num_attention_heads
        third, rest = divmod(int(width * rope.get("partial_rotary_factor", 1)) // 2, 3)
        rope["mrope_section"] = [third + rest, third, third]
    return found


def made(name: str, kind: str) -> Any:
    """A model for evaluation, with eager attention, that has run. Raises ValueError, with the
    reasons, where no configuration is found."""
    model_class = getattr(hf, name)
    config_class = model_class.config_class or CONFIG_MAPPING[kind]
    reasons = []
    for layers, widths in ((2, True), (8, True), (2, False)):
        try:
            config = small(config_class, layers, widths)
            with torch.device("meta"):
                count = sum(p.numel() for p in model_class(config).parameters())
            if count > MOST:
                raise ValueError(f"{count:.0e} parameters")
            torch.manual_seed(7)
            model = model_class(config).float().eval()
            for label, parameter in model.named_parameters():
                if parameter.ndim == 2:  # attention that is not uniform
                    torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
                elif "sink" in label:
                    torch.nn.init.normal_(parameter)
            model.set_attn_implementation("eager")
            result(model, inputs(model, "none"))
            return model
        except Exception as error:  # whatever a class has against it
            lines = " ".join(str(error).split())
            reasons.append(f"{type(error).__name__}: {lines[:160]}")
    raise ValueError(" | ".join(reasons))


def inputs(model: Any, side: str) -> dict[str, Tensor]:
    """Of two entries, the second padded at a side ("none": neither, without a mask), if the class
    has masks: tokens, an image, a sound or its features."""
    config, main = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(3)
    vocabulary = min(getattr(config.get_text_config(), "vocab_size", None) or 100, 99)
    given: dict[str, Tensor] = {}
    rows = 0
    if main == "input_ids":
        rows, lost = ROWS, 4
        given[main] = torch.randint(3, vocabulary, (2, rows), generator=generator)
    elif main == "pixel_values":
        parts: list[Any] = [config]
        parts += [getattr(config, n, None) for n in ("vision_config", "backbone_config")]
        size = next((x.image_size for x in parts if getattr(x, "image_size", None)), 64)
        sides = size if isinstance(size, list | tuple) else (size, size)
        frames = (config.num_frames,) if getattr(config, "num_frames", None) else ()
        channels = getattr(config, "num_channels", None) or 3
        given[main] = torch.randn(2, *frames, channels, *sides, generator=generator)
    elif (
        main == "input_values" and hasattr(config, "max_length") and hasattr(config, "num_mel_bins")
    ):
        given[main] = torch.randn(2, config.max_length, config.num_mel_bins, generator=generator)
    elif main == "input_values":
        rows, lost = 4000, 1400
        given[main] = torch.randn(2, rows, generator=generator)
    elif main == "input_features":
        part = (
            getattr(config, "encoder_config", None)
            or getattr(config, "audio_config", None)
            or config
        )
        names = (
            "num_mel_bins",
            "feature_projection_input_dim",
            "input_feat_per_channel",
            "input_dim",
        )
        bins = next((getattr(part, n) for n in names if getattr(part, n, None)), 80)
        whisper = "hisper" in type(part).__name__
        rows, lost = (2 * part.max_source_positions, 999) if whisper else (100, 34)
        shape = (2, bins, rows) if whisper else (2, rows, bins)
        given[main] = torch.randn(shape, generator=generator)
    else:
        raise ValueError(f"its inputs are {main}")
    if rows and side != "none":
        place, counts = torch.arange(rows), torch.tensor([[rows], [rows - lost]])
        mask = place >= rows - counts if side == "left" and main == "input_ids" else place < counts
        given["attention_mask"] = mask.long()
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = torch.randint(3, vocabulary, (2, 7), generator=generator)
    return given


def result(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Logits, last hidden states, or whichever tensor of floats comes first; of tokens, those of no
    padding."""
    torch.manual_seed(11)  # some draw what they hide
    with torch.no_grad():
        found = model(**given)
    named = [found.get(n) for n in ("logits", "last_hidden_state", "prediction_logits")]
    tensors = [x for x in (*named, *found.values()) if isinstance(x, torch.Tensor)]
    first = next(x for x in tensors if x.is_floating_point())
    mask, ids = given.get("attention_mask"), given.get("input_ids")
    return (
        first if mask is None or ids is None or first.shape[:2] != ids.shape else first[mask.bool()]
    )
