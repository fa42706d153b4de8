"""The reference model of the speed and memory comparisons: a Llama of 8 blocks, 256 wide, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ReferenceConfig:
    """Sizes; batch and sequence are those of the comparisons."""

    num_blocks: int = 8
    dim: int = 256
    num_heads: int = 4
    ffn_dim: int = 704
    vocab_size: int = 8192
    seq_len: int = 256
    batch_size: int = 8


class _Block(nn.Module):
    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        dim, ffn_dim = config.dim, config.ffn_dim
        self.num_heads = config.num_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, ffn_dim, bias=False), nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        query, key, value = (self._heads(layer(normed)) for layer in (self.query, self.key, self.value))
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    turned = torch.cat([-heads[..., half:], heads[..., :half]], -1)
    return heads * cos + turned * sin


class ReferenceModel(nn.Module):
    """Token ids (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_blocks))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        head_dim = config.dim // config.num_heads
        angles = torch.outer(torch.arange(config.seq_len), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden, self.cos, self.sin)
        return self.head(self.norm(hidden))
