"""Built-in models, as data: what their public config.json files say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA_2 = {
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA_3_1 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
_QWEN_2_5 = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
_QWEN_3 = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "head_dim": 128,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}


def _sizes(layers: int, dim: int, heads: int, kv_heads: int, ffn: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
    }


BUILTIN: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _LLAMA_2 | _sizes(32, 4096, 32, 32, 11008),
    "llama-2-13b": _LLAMA_2 | _sizes(40, 5120, 40, 40, 13824),
    "llama-2-70b": _LLAMA_2 | _sizes(80, 8192, 64, 8, 28672),
    "llama-3.1-8b": _LLAMA_3_1 | _sizes(32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _LLAMA_3_1 | _sizes(80, 8192, 64, 8, 28672),
    "qwen2.5-7b": _QWEN_2_5 | _sizes(28, 3584, 28, 4, 18944),
    "qwen2.5-32b": _QWEN_2_5 | {"rms_norm_eps": 1e-5} | _sizes(64, 5120, 40, 8, 27648),
    "qwen3-8b": {"model_type": "qwen3"} | _QWEN_3 | _sizes(36, 4096, 32, 8, 12288),
    "qwen3-32b": {"model_type": "qwen3"} | _QWEN_3 | _sizes(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    | _QWEN_3
    | _sizes(48, 2048, 32, 4, 6144),
    "mistral-7b": {
        "model_type": "mistral",
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    }
    | _sizes(32, 4096, 32, 8, 14336),
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    | _sizes(32, 4096, 32, 8, 14336),
    "gemma-2-9b": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "head_dim": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    }
    | _sizes(42, 3584, 16, 8, 14336),
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
    },
    # Shape of the 13B model of arXiv:2005.14165 with the dimension rounded to 40 heads of 128.
    "gpt-13b": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 2048,
        "n_layer": 40,
        "n_embd": 5120,
        "n_head": 40,
    },
}


def builtin_names() -> tuple[str, ...]:
    return tuple(BUILTIN)
