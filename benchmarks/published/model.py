"""A decoder as several frameworks write it: which operators, in which dtypes, is what decides what is saved."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from published.kernels import (
    FlashAttention,
    FusedActivation,
    FusedGate,
    FusedNorm,
    FusedRotary,
    GatherTokens,
    QuantisedLinear,
    ScatterTokens,
    dropout,
)
from published.records import Lora, Run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.bfloat16}  # fp16: as many bytes


@dataclass(frozen=True)
class Dialect:
    """How a framework writes a block.

    norm, rotary: "fused" kernels, "fp32" with upcasts, or "half". gate: "fused" or "eager". attention: "flash-attn"
    takes few key heads, "sdpa" repeated ones, "unfused" makes scores, "mha" is nn.MultiheadAttention.
    """

    norm: str
    rotary: str
    gate: str
    attention: str


def dialect_of(run: Run) -> Dialect:
    """From the framework, its kernels and whether the compiler fuses pointwise operators."""
    attention = run.attention
    if attention == "flash":
        attention = "flash-attn" if run.framework in ("transformers", "megatron") else "sdpa"  # type: ignore[assignment]
    if run.compiled or run.framework == "megatron":
        return Dialect("fused", "fused", "fused", attention)
    if run.triton:
        return Dialect("fused", "fused", "eager", attention)
    rotary = "fp32" if run.framework in ("torchtitan", "torchtune") else "half"
    return Dialect("fp32", rotary, "eager", attention)


class Norm(nn.Module):
    def __init__(self, dim: int, dialect: Dialect) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.fused = dialect.norm == "fused"

    def forward(self, hidden: Tensor) -> Tensor:
        if self.fused:
            output: Tensor = FusedNorm.apply(hidden, self.weight)  # type: ignore[no-untyped-call]
            return output
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(hidden.dtype)


class Linear(nn.Module):
    """y = x W^T + b; W in the dtype of the run, or packed."""

    def __init__(self, columns: int, rows: int, bias: bool = False, quant: str = "", keeps_input: bool = False) -> None:
        super().__init__()
        self.rows, self.quant, self.keeps_input = rows, quant, keeps_input
        if quant:
            self.packed = nn.Buffer(torch.empty(packed_bytes(columns, rows), dtype=torch.uint8))
            self.scales = nn.Buffer(torch.empty(scale_bytes(columns, rows, quant), dtype=torch.uint8))
        else:
            self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.quant:
            output: Tensor = QuantisedLinear.apply(hidden, self.packed, self.rows, self.keeps_input)  # type: ignore[no-untyped-call]
            return output
        return F.linear(hidden, self.weight, self.bias)


def packed_bytes(columns: int, rows: int) -> int:
    """Codes of 4 bits."""
    return columns * rows // 2


def scale_bytes(columns: int, rows: int, quant: str) -> int:
    """nf4: an fp32 for 64 weights; double quantised a byte for 64 and an fp32 for 256 of those. gptq: for 128 rows an
    fp16 scale and a code of 4 bits as zero point, and an int32 for each column."""
    blocks = columns * rows // 64
    if quant == "gptq":
        return columns // 128 * rows * 5 // 2 + 4 * columns
    return 4 * blocks if quant == "nf4" else blocks + blocks // 64


class LoraLinear(nn.Module):
    """PEFT's forward: the input in the adapter's dtype (unless the base is packed and autocast will cast it), dropout,
    two small matmuls, scaling, sum."""

    def __init__(self, base: Linear, columns: int, lora: Lora, autocast: bool) -> None:
        super().__init__()
        self.base = base
        self.down = Linear(columns, lora.rank)
        self.up = Linear(lora.rank, base.rows)
        self.dropout, self.casts = lora.dropout, not (lora.quant and autocast)

    def forward(self, hidden: Tensor) -> Tensor:
        result = self.base(hidden)
        dtype = result.dtype
        inner = hidden.to(self.down.weight.dtype) if self.casts else hidden
        return (result + self.up(self.down(dropout(inner, self.dropout))) * 0.5).to(dtype)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, run: Run, dialect: Dialect) -> None:
        super().__init__()
        dims, split = run.dims, run.tensor
        self.dialect, self.dropout = dialect, run.dropout
        self.heads, self.kv_heads, self.head_dim = dims.heads // split, max(1, dims.kv_heads // split), dims.head_dim
        self.rotates = not dims.learned_positions and run.framework != "deepspeed"
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.joined = run.framework in ("litgpt", "megatron")
        if self.joined:
            self.qkv = _linear(run, "qkv", dims.hidden, wide + 2 * narrow)
        else:
            self.q = _linear(run, "q", dims.hidden, wide)
            self.k = _linear(run, "k", dims.hidden, narrow)
            self.v = _linear(run, "v", dims.hidden, narrow)
        self.o = _linear(run, "o", wide, dims.hidden)
        self.q_norm = Norm(self.head_dim, dialect) if dims.qk_norm else None
        self.k_norm = Norm(self.head_dim, dialect) if dims.qk_norm else None

    def forward(self, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        batch, tokens, _ = hidden.shape
        if self.joined:
            every = self.qkv(hidden).view(batch, tokens, -1, self.head_dim)
            query, key, value = every.split([self.heads, self.kv_heads, self.kv_heads], 2)
        else:
            query, key, value = (
                each(hidden).view(batch, tokens, -1, self.head_dim) for each in (self.q, self.k, self.v)
            )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotates:
            query, key = (_rotate(each, tables, self.dialect.rotary).to(value.dtype) for each in (query, key))
        return self.o(self._attend(query, key, value).reshape(batch, tokens, -1))  # type: ignore[no-any-return]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kind = self.dialect.attention
        if kind == "flash-attn":
            output: Tensor = FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
            return output
        repeats = self.heads // self.kv_heads
        if repeats > 1:
            key, value = (_repeat(each, repeats) for each in (key, value))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if kind == "sdpa":
            return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        return self._unfused(query, key, value).transpose(1, 2)

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Scores in the compute dtype, a fused scale-mask-softmax, dropout of the probabilities."""
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_dim)
        return dropout(torch.softmax(scores, -1), self.dropout) @ value


def _repeat(tensor: Tensor, repeats: int) -> Tensor:
    batch, tokens, heads, dim = tensor.shape
    return tensor[:, :, :, None, :].expand(batch, tokens, heads, repeats, dim).reshape(batch, tokens, -1, dim)


def _rotate(tensor: Tensor, tables: tuple[Tensor, Tensor], kind: str) -> Tensor:
    if kind == "fused":
        tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
        output: Tensor = FusedRotary.apply(tensor)  # type: ignore[no-untyped-call]
        return output
    cos, sin = (table[:, None, :].to(torch.float32 if kind == "fp32" else tensor.dtype) for table in tables)
    tensor = tensor.float() if kind == "fp32" else tensor
    if kind == "fp32":
        pairs = torch.view_as_complex(tensor.unflatten(-1, (-1, 2)).contiguous())
        half = cos.shape[-1] // 2
        return torch.view_as_real(pairs * torch.complex(cos[..., :half], sin[..., :half])).flatten(-2)
    first, second = tensor.chunk(2, -1)
    return tensor * cos + torch.cat((-second, first), -1) * sin


class Mlp(nn.Module):
    def __init__(self, run: Run, dialect: Dialect) -> None:
        super().__init__()
        dims = run.dims
        width = dims.ffn // run.tensor
        self.fused = dialect.gate == "fused"
        self.gate = _linear(run, "gate", dims.hidden, width) if dims.gated else None
        self.up = _linear(run, "up", dims.hidden, width)
        self.down = _linear(run, "down", width, dims.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        up = self.up(hidden)
        if self.gate is None:
            return self.down(FusedActivation.apply(up) if self.fused else F.gelu(up))  # type: ignore[no-any-return, no-untyped-call]
        gate = self.gate(hidden)
        if self.fused:
            return self.down(FusedGate.apply(gate, up))  # type: ignore[no-any-return, no-untyped-call]
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """transformers' loop: each expert takes the tokens that chose it; here all get equal parts."""

    def __init__(self, run: Run, dialect: Dialect) -> None:
        super().__init__()
        dims = run.dims
        self.active = dims.active_experts
        self.router = Linear(dims.hidden, dims.experts)
        self.experts = nn.ModuleList(Mlp(run, dialect) for _ in range(dims.experts))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        share = flat.shape[0] * self.active // len(self.experts)
        probabilities = torch.softmax(self.router(flat).float(), -1)
        final = torch.zeros_like(flat)
        for expert, module in enumerate(self.experts):
            rows = torch.zeros(share, dtype=torch.long)
            part = module(flat[rows].unsqueeze(0)).squeeze(0) * probabilities[rows, expert, None].to(flat.dtype)
            final = final.index_add(0, rows, part.to(flat.dtype))
        return final.view_as(hidden)


class Block(nn.Module):
    def __init__(self, run: Run, dialect: Dialect) -> None:
        super().__init__()
        dims = run.dims
        self.norm1, self.norm2 = Norm(dims.hidden, dialect), Norm(dims.hidden, dialect)
        self.attention = Attention(run, dialect)
        self.mlp: nn.Module = Experts(run, dialect) if dims.experts > 1 else Mlp(run, dialect)
        self.dropout = run.dropout
        self.ranks = run.tensor if run.sequence_parallel else 1

    def forward(self, hidden: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        inner = scatter_tokens(self.attention(gather_tokens(self.norm1(hidden), self.ranks), tables), self.ranks)
        hidden = hidden + dropout(inner, self.dropout)
        del inner
        inner = scatter_tokens(self.mlp(gather_tokens(self.norm2(hidden), self.ranks)), self.ranks)
        return hidden + dropout(inner, self.dropout)


def gather_tokens(hidden: Tensor, ranks: int) -> Tensor:
    return GatherTokens.apply(hidden, ranks) if ranks > 1 else hidden  # type: ignore[no-untyped-call]


def scatter_tokens(hidden: Tensor, ranks: int) -> Tensor:
    return ScatterTokens.apply(hidden, ranks) if ranks > 1 else hidden  # type: ignore[no-untyped-call]


class Decoder(nn.Module):
    """Embedding, blocks, norm, head. first: whether the last pipeline stage is also the first one."""

    def __init__(self, run: Run, *, first: bool) -> None:
        super().__init__()
        dims, dialect = run.dims, dialect_of(run)
        self.dims = dims
        vocab = dims.vocab // run.tensor
        self.embedding = nn.Embedding(vocab, dims.hidden) if first else None
        self.positions = nn.Embedding(dims.learned_positions, dims.hidden) if first and dims.learned_positions else None
        self.blocks = nn.ModuleList(Block(run, dialect) for _ in range(dims.layers // run.pipeline))
        self.norm = Norm(dims.hidden, dialect)
        self.head = Linear(dims.hidden, vocab)
        if dims.tied and self.embedding is not None:
            self.head.weight = self.embedding.weight  # type: ignore[assignment]

    def tables(self, tokens: int) -> tuple[Tensor, Tensor]:
        angles = torch.zeros(tokens, self.dims.head_dim)
        return angles.cos(), angles.sin()


def _linear(run: Run, name: str, columns: int, rows: int) -> nn.Module:
    lora = run.lora
    # bitsandbytes kept the input for backward until 0.42, of the time when litgpt measured.
    keeps_input = run.framework == "litgpt"
    base = Linear(columns, rows, run.dims.bias, lora.quant if lora else "", keeps_input)
    adapted = lora and (name in lora.targets or (name == "qkv" and lora.targets & {"q", "k", "v"}))
    return LoraLinear(base, columns, lora, run.autocast) if lora and adapted else base


def adapters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of LoRA, in order."""
    return [p for m in model.modules() if isinstance(m, LoraLinear) for p in (m.down.weight, m.up.weight)]


def set_dtypes(model: nn.Module, run: Run, dtype: torch.dtype, adapter_dtype: torch.dtype) -> None:
    """Parameters in the dtypes that the run keeps them in; with adapters everything else is frozen."""
    train = {id(p) for p in adapters(model)}
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                is_adapter = id(parameter) in train
                replaced[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, dtype=adapter_dtype if is_adapter else dtype),
                    requires_grad=is_adapter or run.lora is None,
                )
            module._parameters[name] = replaced[id(parameter)]
