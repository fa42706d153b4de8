"""Plain PyTorch training, written by hand: what every planned step is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_models import TINY_CONFIGS
from trainfit.hardware import accelerator
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.workload import IGNORED_LABEL, MicroBatch, Workload, workload_from_config

CPU = accelerator("cpu")
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def tiny_workload(family: str, seq_len: int = 24, **changes: Any) -> Workload:
    return workload_from_config({**TINY_CONFIGS[family], **changes}, seq_len=seq_len, name=family)


def small_workload(model_type: str, seq_len: int = 24, **changes: Any) -> Workload:
    """Two blocks of 32, vocabulary 97, of any family that takes llama's names."""
    return workload_from_config({"model_type": model_type, **SMALL, **changes}, seq_len=seq_len, name=model_type)


def make_model(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.make_model()


def random_batch(workload: Workload, rows: int = 2, seed: int = 3) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(workload.vocab_size, (rows, workload.seq_len + 1), generator=generator)
    return MicroBatch.of(tokens[:, :-1], tokens[:, 1:])


def sequences(lengths: Sequence[int], vocab_size: int, seed: int = 5) -> list[Tensor]:
    """Token sequences that predict as many tokens as lengths says."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length + 1,), generator=generator) for length in lengths]


def build(workload: Workload, activation: str = "keep", *, model: nn.Module | None = None, **knobs: Any) -> TrainStep:
    """A step around the model that make_model() makes."""
    table = knobs.get("tier_table")
    tiers = table[-1].tiers if table else parse_tiers(activation, len(workload.anatomy().blocks))
    max_grad_norm = knobs.pop("max_grad_norm", None)
    strategy = Strategy(knobs.pop("micro_batch_size", 2), tiers=tiers, **knobs)
    return build_step(workload, strategy, CPU, max_grad_norm=max_grad_norm, model=model or make_model(workload))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def planned_gradients(step: TrainStep, batches: Sequence[MicroBatch], seed: int = 1) -> dict[str, Tensor]:
    step.model.zero_grad()
    torch.manual_seed(seed)
    step.accumulate(batches)
    return gradients(step.model)


def plain_gradients(model: nn.Module, batch: MicroBatch, seed: int = 1) -> dict[str, Tensor]:
    """One forward, the mean token loss, one backward."""
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(batch.inputs)
    logits = getattr(output, "logits", output)
    F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL).backward()
    return gradients(model)


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over all parameters: largest difference, relative to the largest entry of that parameter's gradient.

    Gradients that cancel to nearly nothing (a key's bias) are held against a hundredth of the model's largest entry.
    """
    assert found.keys() == expected.keys()
    largest = {name: gradient.abs().max() for name, gradient in expected.items()}
    floor = max(largest.values()) / 100
    return max(((found[name] - expected[name]).abs().max() / max(largest[name], floor)).item() for name in expected)


def assert_equal_to_the_bit(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differing, f"{len(differing)} of {len(expected)} gradients differ, first {differing[0]}"
