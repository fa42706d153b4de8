"""Tiny transformers configs, one of each family, for tests and benchmarks on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMMON = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 352,
    "max_position_embeddings": 512,
}
TINY_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **_COMMON},
    "qwen2": {"model_type": "qwen2", **_COMMON},
    "qwen3": {"model_type": "qwen3", **_COMMON, "head_dim": 32},
    "mistral": {"model_type": "mistral", **_COMMON},
    "gemma2": {"model_type": "gemma2", **_COMMON, "head_dim": 32, "sliding_window": 64},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 1000,
        "n_embd": 128,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "phi3": {"model_type": "phi3", **_COMMON, "pad_token_id": 0},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_COMMON,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}
