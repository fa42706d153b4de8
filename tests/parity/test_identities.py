"""Bytes that theory knows beforehand, from rehearsals: ZeRO's gathered blocks, AdamW's step, attention's matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfit.hardware import accelerator, find_device, this_machine
from trainfit.profile import Mesh, Zero
from trainfit.rehearsal import measure, rehearse
from trainfit.rehearsal.rehearse import fake_tensors
from trainfit.rehearsal.tracker import StorageTracker
from trainfit.step import Strategy, parse_tiers
from trainfit.workload import workload_from_config, workload_from_module

Dropout = Callable[[Tensor], Tensor]
CPU = this_machine("cpu")
LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize("blocks", [2, 4])
def test_weights_kept_after_forward_are_all_blocks_but_the_one_on_its_way(blocks):
    """FSDP2's reshard "never", ZeRO 2 here, less its default, ZeRO 3: for Llama-3-8B 31 x 218.1 M x 2 bytes.

    At the gradient of the logits the default has the last block under way for backward, and no other.
    """
    config = {**LLAMA_3_8B, "num_hidden_layers": blocks}
    workload = workload_from_config(config, seq_len=8192, name="Llama-3-8B, cut short")
    tiers = parse_tiers("full", blocks)
    never, default = (
        rehearse(
            workload,
            Strategy(1, precision="bf16", tiers=tiers, cast="block", mesh=Mesh(shard=8), zero=Zero(stage)),
            find_device("h100", 8),
        )
        for stage in (2, 3)
    )
    with torch.device("meta"):
        layers = workload.make_model().get_submodule("model.layers")
    block = sum(parameter.numel() for parameter in layers.get_submodule("0").parameters())
    assert block == 218_112_000
    assert never.peak_bytes - default.peak_bytes == (blocks - 1) * block * 2
    assert (never.peak_phase, default.peak_phase) == ("loss", "loss")


class Halves(nn.Module):
    """A model that is bfloat16 through and through, large enough for its tokens to weigh nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 512, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16) for _ in range(8))
        self.head = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden).float()


@pytest.mark.parametrize("foreach", [True, False])
def test_pure_bf16_adamw_peaks_at_ten_bytes_a_parameter_with_foreach(foreach):
    """Weight 2, gradient 2, moments 2 + 2, and foreach's roots of all second moments at once 2."""
    adamw = partial(torch.optim.AdamW, lr=1e-3, foreach=foreach)
    workload = workload_from_module(Halves, seq_len=4, vocab_size=512)
    workload = workload.copy(make_optimizer=lambda named: adamw([parameter for _, parameter in named]))
    count = sum(parameter.numel() for parameter in Halves().parameters())
    predicted = rehearse(workload, Strategy(1), CPU, max_grad_norm=None)
    measured = measure(workload, Strategy(1), accelerator("cpu"), steps=0, max_grad_norm=None)
    assert measured.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.01)
    assert predicted.peak_phase == "optimizer"
    if foreach:
        assert predicted.peak_bytes == pytest.approx(10 * count, rel=0.001)
    else:  # a parameter at a time, of which there are ten
        assert 8 * count < predicted.peak_bytes < 9 * count


class Attention(nn.Module):
    """Attention written out in half precision, with dropout, or by one kernel, whose dropout would keep a seed."""

    def __init__(self, heads: int, dim: int, dropout: Dropout | None) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(dim, dim, bias=False, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, dim = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = (each.transpose(1, 2) for each in split.unbind(2))
        if self.dropout is None:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            query, key, value = (each.contiguous() for each in (query, key, value))
            scores = query @ key.transpose(2, 3) / (dim // self.heads) ** 0.5
            mixed = self.dropout(F.softmax(scores, dim=-1)) @ value
        result: Tensor = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return result


def saved_bytes(batch: int, length: int, heads: int, dropout: Dropout | None) -> int:
    """What one layer's forward leaves, its output included."""
    with fake_tensors():
        layer = Attention(heads, 64 * heads, dropout)
        hidden = torch.empty(batch, length, 64 * heads, dtype=torch.bfloat16, requires_grad=True)
        tracker = StorageTracker()
        tracker.register([*layer.parameters(), hidden], "parameters")
        with tracker:
            before = tracker.live_bytes()
            output = layer(hidden)
            left = tracker.live_bytes() - before
        assert output.shape == hidden.shape
        return left


def device_dropout(scores: Tensor) -> Tensor:
    """What F.dropout runs on CUDA: the mask is of booleans."""
    return torch.native_dropout(scores, 0.1, True)[0]


def cpu_dropout(scores: Tensor) -> Tensor:
    """On a CPU the mask has the dtype of what it masks."""
    return F.dropout(scores, 0.1)


@pytest.mark.parametrize(("batch", "length", "heads"), [(1, 512, 4), (3, 256, 2), (2, 1024, 8)])
@pytest.mark.parametrize(("dropout", "bytes_each"), [(device_dropout, 5), (cpu_dropout, 6)])
def test_unfused_attention_saves_five_bytes_a_score_more(batch, length, heads, dropout, bytes_each):
    """Softmax 2, dropout's mask 1, dropped softmax 2 (arXiv:2205.05198). A kernel keeps 4 bytes a row instead."""
    rows = batch * heads * length
    more = saved_bytes(batch, length, heads, dropout) - saved_bytes(batch, length, heads, None)
    assert more == bytes_each * rows * length - 4 * rows
