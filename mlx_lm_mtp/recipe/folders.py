"""The two folders in the layout that Hugging Face ships, float32.

float32 because a greedy text must be equal token for token however many tokens a
forward reads, and bfloat16 logits tie too often for that.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .gemma4 import Drafter, Target

PATTERN = ["sliding_attention"] * 4 + ["full_attention"]
ROPE = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
    "enable_moe_block": False,
    "global_head_dim": 64,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": None,
    "num_attention_heads": 4,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPE,
    "sliding_window": 64,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_cache": True,
    "vocab_size": 2048,
}
# The template of the tokenizer: Gemma's turns.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
SPECIAL = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


def target_config() -> dict[str, Any]:
    """The target: 40 layers, of which the last 20 share K/V."""
    text = COMMON | {
        "final_logit_softcapping": 30.0,
        "hidden_size": 96,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 64,
        "layer_types": PATTERN * 8,
        "num_hidden_layers": 40,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": 2048,
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "audio_config": None,
        "vision_config": None,
        "boi_token_id": 6,
        "eoi_token_id": 7,
        "image_token_id": 8,
        "video_token_id": 9,
        "boa_token_id": 10,
        "eoa_token_index": 11,
        "audio_token_id": 12,
        "dtype": "float32",
        "eos_token_id": [1, 5],
        "initializer_range": 0.02,
        "text_config": text,
        "tie_word_embeddings": True,
        "vocab_size": 2048,
    }


def assistant_config() -> dict[str, Any]:
    """The drafter: four layers, 64 centroids of which 8 are looked into."""
    text = COMMON | {
        "final_logit_softcapping": None,
        "hidden_size": 80,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 192,
        "layer_types": PATTERN[1:],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target_config()["text_config"]["hidden_size"],
        "centroid_intermediate_top_k": 8,
        "dtype": "float32",
        "num_centroids": 64,
        "text_config": text,
        "tie_word_embeddings": True,
        "use_ordered_embeddings": True,
    }


def _dump(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value, indent=1) + "\n")


def _save(
    weights: dict[str, torch.Tensor], config: dict[str, Any], data: Path, folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _dump(folder, "config.json", config)
    _dump(
        folder,
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",
            **SPECIAL,
            "chat_template": TEMPLATE,
        },
    )
    _dump(folder, "special_tokens_map.json", SPECIAL)
    shutil.copy(data / "tokenizer.json", folder)
    weights = {k: v.detach().cpu().contiguous() for k, v in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_target(model: Target, config: dict[str, Any], data: Path, out: Path) -> None:
    """Write ``out/target``."""
    weights = {f"model.language_model.{k}": v for k, v in model.state_dict().items()}
    _save(weights, config, data, out / "target")
    generation = {
        "bos_token_id": 2,
        "do_sample": True,
        "eos_token_id": [1, 5],
        "pad_token_id": 0,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }
    _dump(out / "target", "generation_config.json", generation)


def load_target(out: Path, device: torch.device) -> Target:
    """The target that ``save_target`` wrote."""
    from safetensors.torch import load_file

    weights = load_file(out / "target" / "model.safetensors")
    model = Target(target_config()["text_config"])
    prefix = "model.language_model."
    model.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items()})
    return model.to(device)


def save_drafter(
    drafter: Drafter, config: dict[str, Any], data: Path, out: Path
) -> None:
    """Write ``out/assistant``."""
    _save(drafter.state_dict(), config, data, out / "assistant")
    generation = {
        "bos_token_id": 2,
        "eos_token_id": [1, 5],
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "pad_token_id": 0,
    }
    _dump(out / "assistant", "generation_config.json", generation)
