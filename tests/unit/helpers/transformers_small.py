"""Any class of Transformers by its name, with a small configuration of random weights, and inputs
for it. Nothing is written for one class but what ``_OWN`` and ``_INPUTS`` hold."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
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
_MROPE = _ROPE | {"mrope_section": [4, 2, 2]}
_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_OWN: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "BltConfig": {"encoder_hash_byte_group_vocab": 50, "num_hidden_layers": 2},
    "Blip2Config": {"image_token_index": 99, "num_query_tokens": 4},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 99}},
    "CohereCompassTextConfig": {"rope_parameters": dict.fromkeys(_KINDS, _ROPE)},
    "ConditionalDetrConfig": {"backbone_config": _BACKBONE},
    "Cosmos3EdgeTextConfig": {"rope_parameters": _MROPE},
    "DabDetrConfig": {"backbone_config": _BACKBONE},
    "DbrxConfig": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DeformableDetrConfig": {
        "backbone_config": _BACKBONE | {"out_features": ["stage2", "stage3", "stage4"]}
    },
    "DetrConfig": {"backbone_config": _BACKBONE},
    "DiffusionGemmaTextConfig": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "DoryConfig": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "EsmcConfig": {"num_key_value_heads": 4},
    "EfficientNetConfig": {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640},
    "Emu3Config": {"vocabulary_map": {"<image>": 99}},
    "Emu3VQVAEConfig": {"base_channels": 32, "codebook_size": 64},
    "EsmConfig": {"vocab_size": 128, "mask_token_id": 3},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "Glm5NextTextConfig": {
        "index_topk": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "GraniteSpeech5EncoderConfig": {"num_key_value_heads": 4},
    "HYV4VLTextConfig": {"rope_parameters": _MROPE},
    "InstructBlipConfig": {"image_token_index": 99, "num_query_tokens": 4},
    "InstructBlipVideoConfig": {"video_token_index": 99, "num_query_tokens": 4},
    "JanusVQVAEConfig": {
        "base_channels": 32,
        "latent_channels": 32,
        "projection_dim": 64,
        "image_token_embed_dim": 64,
        "num_embeddings": 64,
    },
    "JanusVisionConfig": {"projection_dim": 64},
    "KyutaiSpeechToTextConfig": {"num_codebooks": 2, "audio_pad_token_id": 98},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Llama4VisionConfig": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "LongcatFlashConfig": {"qk_head_dim": 32},
    "Mamba2Config": {"num_heads": 8},
    "MimiConfig": {"upsample_groups": 64},
    "MllamaVisionConfig": {"intermediate_layers_indices": [0, 1]},
    "Molmo2Config": {"adapter_config": {"vision_feature_layer": [1, 0], "intermediate_size": 64}},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 32, 32]},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "PerceiverConfig": {
        "d_latents": 64,
        "num_latents": 8,
        "num_cross_attention_heads": 1,
        "num_self_attends_per_block": 1,
    },
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
    "ReformerForMaskedLM": {"is_decoder": False},
    "ShieldGemma2Config": {"yes_token_index": 5, "no_token_index": 6},
    "Step3p7TextConfig": {"sliding_window": 5},
    "TableTransformerConfig": {"backbone_config": _BACKBONE},
    "UnlimitedOcrTextConfig": {"num_key_value_heads": 4},
    "VibeVoiceAcousticTokenizerConfig": {"num_filters": 4},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"num_filters": 4},
    "Wav2Vec2BertConfig": {"vocab_size": 128},
    "Wav2Vec2ConformerConfig": {"vocab_size": 128},
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"]},
    "xLSTMConfig": {"qk_dim_factor": 1.0},
}
"""What some classes need beside: kinds of layers, and numbers that depend on others; by the name of
a configuration's class, or of a model's."""


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(5))


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def _after_an_image(count: int) -> Tensor:
    return torch.cat([torch.full((2, count), 99), _tokens(2, ROWS)], 1)


def _pictures(model: Any, *counts: int) -> Tensor:
    config = getattr(model.config, "vision_config", model.config)
    return _numbers(2, *counts, 3, config.image_size, config.image_size)


_INPUTS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "BlipForConditionalGeneration": lambda m: {"input_ids": _tokens(2, ROWS)},
    "Blip2ForConditionalGeneration": lambda m: {"input_ids": _after_an_image(4)},
    "DiaForConditionalGeneration": lambda m: {
        "decoder_input_ids": _tokens(2, 7, m.config.decoder_config.num_channels)
    },
    "GraniteSpeech5ForCTC": lambda m: {"input_features": _numbers(2, 100, 320)},
    "IdeficsForVisionText2Text": lambda m: {
        "pixel_values": _pictures(m, 1),
        "image_attention_mask": torch.ones(2, ROWS, 1, dtype=torch.long),
    },
    "InstructBlipForConditionalGeneration": lambda m: {
        "input_ids": _after_an_image(4),
        "qformer_input_ids": _tokens(2, 6),
    },
    "InstructBlipVideoForConditionalGeneration": lambda m: {
        "pixel_values": _pictures(m, 2),
        "input_ids": _after_an_image(8),
        "qformer_input_ids": _tokens(2, 6),
    },
    "Kosmos2ForConditionalGeneration": lambda m: {
        "input_ids": _after_an_image(m.config.latent_query_num),
        "image_embeds_position_mask": (_after_an_image(m.config.latent_query_num) == 99).long(),
    },
    "KyutaiSpeechToTextForConditionalGeneration": lambda m: {
        "input_ids": _tokens(2, ROWS, m.config.num_codebooks + 1)
    },
    "Llama4VisionModel": lambda m: {"pixel_values": _pictures(m)},
    "MllamaVisionModel": lambda m: {
        "pixel_values": _pictures(m, 1, 4),
        "aspect_ratio_ids": torch.tensor([[1], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]], [[1, 1, 0, 0]]]),
    },
    "OmniASRForCTC": lambda m: {"input_values": _numbers(2, 1, 4000)},
    "PerceiverForMaskedLM": lambda m: {"inputs": _tokens(2, ROWS)},
    "PerceiverForImageClassificationLearned": lambda m: {"inputs": _pictures(m)},
    "PerceiverForImageClassificationConvProcessing": lambda m: {"inputs": _numbers(2, 3, 224, 224)},
    "PerceiverForImageClassificationFourier": lambda m: {"inputs": _numbers(2, 3, 224, 224)},
    "Pix2StructForConditionalGeneration": lambda m: {
        "flattened_patches": torch.cat([torch.ones(2, 12, 2), _numbers(2, 12, 768)], 2),
        "decoder_input_ids": _tokens(2, 7),
    },
    "Siglip2ForImageClassification": lambda m: {
        "pixel_values": _numbers(2, 16, 768),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
    },
    "UdopForConditionalGeneration": lambda m: {"bbox": _numbers(2, ROWS, 4).sigmoid()},
    "VideoPrismVisionModel": lambda m: {"pixel_values_videos": _pictures(m, m.config.num_frames)},
    "VoxtralRealtimeForConditionalGeneration": lambda m: {
        "input_features": _numbers(2, m.config.audio_config.num_mel_bins, 96)
    },
}
"""By the name of a model's class: inputs of other kinds or shapes, or that it needs beside. Where
they are its main ones it gets no masks."""


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


def small(config: Any, layers: int, widths: bool = True, model: str = "") -> Any:
    """A configuration of a class, for a model's, in few elements: of what its parameters say by
    their names, those that are larger are replaced. Without ``widths`` only layers, tokens and
    windows."""
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
    given |= _OWN.get(config.__name__, {}) | _OWN.get(model, {})
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
            config = small(config_class, layers, widths, name)
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
    own = _INPUTS.get(type(model).__name__, lambda _: {})(model)
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
    elif main not in own:
        raise ValueError(f"its inputs are {main}")
    if rows and main not in own and side != "none":
        place, counts = torch.arange(rows), torch.tensor([[rows], [rows - lost]])
        mask = place >= rows - counts if side == "left" and main == "input_ids" else place < counts
        given["attention_mask"] = mask.long()
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = torch.randint(3, vocabulary, (2, 7), generator=generator)
    given |= own
    taken = inspect.signature(model.forward).parameters if own else given
    return {name: x for name, x in given.items() if name in taken}


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
