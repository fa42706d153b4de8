"""transformers' Llama of the same sizes with the same weights, and its activation checkpointing."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from contest.setting import Case, Step, WithLoss, loop
from reference_model import ReferenceModel

_NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "out",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


def llama(case: Case, *, checkpointed: bool, **settings: Any) -> Step:
    """settings: arguments of activation_checkpointing_enable."""
    model = _same_weights(case)
    if checkpointed:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False}, **settings)
    model.train()
    return loop(case, WithLoss(_Logits(model)), model.parameters())


class _Logits(torch.nn.Module):
    """Ids to logits, so that all have the same loss."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(input_ids=ids, use_cache=False).logits
        return logits


def _same_weights(case: Case) -> LlamaForCausalLM:
    sizes, source = case.config, case.new_model()
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn_dim,
        num_hidden_layers=sizes.num_blocks,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_heads,
        max_position_embeddings=sizes.seq_len,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(case.device)
    model.load_state_dict(_state_of(source))
    return model


def _state_of(source: ReferenceModel) -> dict[str, torch.Tensor]:
    state = {
        "model.embed_tokens.weight": source.embedding.weight,
        "model.norm.weight": source.norm.weight,
        "lm_head.weight": source.head.weight,
    }
    for index, block in enumerate(source.blocks):
        for theirs, ours in _NAMES.items():
            state[f"model.layers.{index}.{theirs}.weight"] = getattr(block, ours).weight
    return state
