"""Workloads and worker functions of the tests that compare a rehearsed rank with a measured one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from trainfit.hardware import accelerator
from trainfit.profile import Profile
from trainfit.rehearsal.measure import measure_rank
from trainfit.step import Strategy, parse_tiers
from trainfit.techniques import offload
from trainfit.workload import Workload, workload_from_config

NUM_BLOCKS = 3
offload.SMALLEST = 256  # else little of so small a model would leave
# Rows that neither 2 nor 4 ranks divide, so that shards are padded.
SIZES = {
    "vocab_size": 301,
    "hidden_size": 64,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 150,
    "max_position_embeddings": 64,
}


def workload_of(family: str = "llama", **changes: Any) -> Workload:
    return workload_from_config({"model_type": family, **SIZES, **changes}, seq_len=32, name=family)


def frozen_workload() -> Workload:
    """The embedding and the first block do not train."""
    plain = workload_of()
    return Workload("frozen", partial(_frozen_model, plain), plain.vocab_size, plain.max_seq_len, plain.seq_len)


def _frozen_model(plain: Workload) -> nn.Module:
    model = plain.make_model()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def strategy_of(activation: str = "keep", *, rows: int = 2, **knobs: Any) -> Strategy:
    return Strategy(rows, tiers=parse_tiers(activation, NUM_BLOCKS), **knobs)


def measure_steps(workload: Workload, strategies: Sequence[Strategy]) -> list[Profile]:
    """On each rank: the second step of every strategy."""
    device = accelerator("cpu")
    return [measure_rank(device, workload, strategy, steps=0) for strategy in strategies]
