"""The released spelling of configs, which every known reader of these files accepts."""

from dataclasses import asdict
from typing import Any

from dgemma.config.shape import ARCHITECTURES, FULL, SLIDING, GenerationConfig, ModelConfig


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """A config as `config.json` spells it."""
    top: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "dtype": config.dtype,
        "model_type": config.family,
        "text_config": _text_to_json(config),
        "tie_word_embeddings": True,
        **config.media_ids,
    }
    if config.vision is not None:
        top["vision_config"] = dict(config.vision)
    if config.family == "diffusion_gemma":
        top["canvas_length"] = config.canvas_length
        if config.long_reply is not None:
            top["long_reply"] = asdict(config.long_reply)
    return top


def _text_to_json(config: ModelConfig) -> dict[str, Any]:
    text: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "dtype": config.dtype,
        "eos_token_id": 1,
        "final_logit_softcapping": config.final_logit_softcapping,
        "global_head_dim": config.global_head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "layer_types": list(config.layer_types),
        "model_type": f"{config.family}_text",
        "num_hidden_layers": config.num_hidden_layers,
        "num_global_key_value_heads": config.num_global_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rope_parameters": {
            FULL: {
                "partial_rotary_factor": config.full_rotary_fraction,
                "rope_theta": config.full_rope_theta,
                "rope_type": "proportional",
            },
            SLIDING: {"rope_theta": config.sliding_rope_theta, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
    }
    same = """head_dim hidden_size intermediate_size max_position_embeddings moe_intermediate_size
        num_attention_heads num_experts num_key_value_heads rms_norm_eps sliding_window
        top_k_experts vocab_size"""
    text |= {key: getattr(config, key) for key in same.split()}
    if config.family == "gemma4":
        text |= {"attention_k_eq_v": True, "enable_moe_block": True}
        text |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    return text


def generation_config_to_json(config: GenerationConfig) -> dict[str, Any]:
    """The generation defaults as `generation_config.json` spells them."""
    raw = {name: getattr(config, name) for name in GenerationConfig.__slots__}
    raw["eos_token_id"] = list(raw.pop("stop_ids"))
    bound = raw.pop("entropy_bound")
    raw["sampler_config"] = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": bound}
    return raw
