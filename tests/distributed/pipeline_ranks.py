"""What the ranks of the pipeline tests run, and plain training by hand to hold it against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainfit.hardware import accelerator
from trainfit.profile import Mesh, Pipeline, Precision, Zero
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.step.train_step import StepResult
from trainfit.techniques.optimizer import make_optimizer
from trainfit.workload import (
    IGNORED_LABEL,
    AdamWSettings,
    MicroBatch,
    Workload,
    workload_from_config,
    workload_from_module,
)

CPU = accelerator("cpu")
STEPS, ROWS, SEQ_LEN, VOCAB, BLOCKS = 20, 8, 12, 97, 5
MAX_NORM = 0.5
TINY = {
    "vocab_size": VOCAB,
    "num_hidden_layers": BLOCKS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": SEQ_LEN,
}
_EXPERTS = TINY | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "two heads": TINY | {"model_type": "llama", "num_key_value_heads": 2},
    "gemma2": TINY | {"head_dim": 8, "sliding_window": 6},
    "qwen3_moe": _EXPERTS,
    "experts": {"model_type": "qwen3_moe", **_EXPERTS, "num_key_value_heads": 2},
    "gpt2": {
        "vocab_size": VOCAB,
        "n_layer": BLOCKS,
        "n_embd": 16,
        "n_head": 2,
        "n_positions": SEQ_LEN,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


class TupleBlock(nn.Module):
    """Returns a tuple, as blocks of some models do, and wants its hidden states by name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        nn.init.eye_(self.down.weight)

    def forward(self, *, hidden_states: Tensor, shift: Tensor) -> tuple[Tensor, None]:
        # Under autocast this is in low precision, other than what the embedding gives.
        return self.down(hidden_states + F.gelu(self.up(self.norm(hidden_states) + shift))), None


class OwnModel(nn.Module):
    """No transformers model: a position table of its own, a scaled embedding, a norm in front of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.positions = nn.Parameter(torch.randn(SEQ_LEN, 16) / 10)
        self.entry = nn.LayerNorm(16)
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.entry(self.embed(tokens) * 4.0 + self.positions[: tokens.shape[1]])
        shift = torch.linspace(0, 0.1, 16)
        for block in self.blocks:
            hidden = block(hidden_states=hidden, shift=shift)[0]
        return self.head(self.norm(hidden))


def make_workload(family: str) -> Workload:
    if family in FAMILIES:
        workload = workload_from_config({"model_type": family, **FAMILIES[family]}, seq_len=SEQ_LEN, name=family)
    else:
        workload = workload_from_module({"own": OwnModel}[family], seq_len=SEQ_LEN, vocab_size=VOCAB)
    # Gradients that cancel, as of gpt2's key bias, are rounding errors; a small eps would make steps of them.
    return workload.copy(optimizer=AdamWSettings(eps=1e-6))


def make(workload: Workload, frozen: tuple[str, ...]) -> nn.Module:
    torch.manual_seed(0)
    model = workload.make_model().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def batch_of(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Token ids and labels (ROWS, SEQ_LEN), with from one valid label to all in a row."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (rows, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    valid = torch.randint(1, SEQ_LEN + 1, (rows, 1), generator=generator)
    labels[torch.arange(SEQ_LEN) >= valid] = IGNORED_LABEL
    return tokens[:, :-1].contiguous(), labels


@dataclass(frozen=True)
class Case:
    """One way to train, and the model it trains."""

    family: str = "llama"
    mesh: Mesh = Mesh(pipeline=2)
    zero: Zero = Zero()
    pipeline: Pipeline = Pipeline()
    accumulation: int = 2
    tiers: str = "keep"
    chunks: int = 1
    frozen: tuple[str, ...] = ()
    precision: Precision = "fp32"
    steps: int = STEPS


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluated: tuple[float, int] = (0.0, 0)
    own: tuple[str, ...] = ()
    elements: int = 0


def train_plainly(case: Case) -> Trained:
    """One process, one big batch, nothing of ours but the optimizer's groups."""
    workload = make_workload(case.family)
    model, found = make(workload, case.frozen), Trained()
    optimizer = make_optimizer(model.named_parameters(), workload.optimizer)
    for step in range(case.steps):
        with CPU.autocast(case.precision):
            loss, _ = _plain_loss(model, *batch_of(step), reduction="mean")
        loss.backward()
        found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
    model.eval()
    with torch.no_grad(), CPU.autocast(case.precision):
        loss, tokens = _plain_loss(model, *batch_of(99, 3), reduction="sum")
    found.evaluated = loss.item(), tokens
    found.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def _plain_loss(model: nn.Module, tokens: Tensor, labels: Tensor, *, reduction: str) -> tuple[Tensor, int]:
    output = model(tokens)
    logits = output if isinstance(output, Tensor) else output.logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=reduction)
    return loss, int((labels >= 0).sum())


def new_step(case: Case) -> TrainStep:
    workload = make_workload(case.family)
    strategy = Strategy(
        ROWS // case.mesh.data // case.accumulation,
        case.accumulation,
        tiers=parse_tiers(case.tiers, BLOCKS),
        loss_chunks=case.chunks,
        mesh=case.mesh,
        zero=case.zero,
        precision=case.precision,
        pipeline=case.pipeline,
    )
    return build_step(workload, strategy, CPU, max_grad_norm=MAX_NORM, model=make(workload, case.frozen))


def train_one(case: Case) -> Trained:
    step = new_step(case)
    parameters = dict(step.model.named_parameters())
    found = Trained(own=tuple(parameters), elements=sum(p.numel() for p in parameters.values()))
    index, data = step.ranks.data_index, case.mesh.data
    for number in range(case.steps):
        tokens, labels = (tensor[index::data].contiguous() for tensor in batch_of(number))
        result = step(list(MicroBatch.of(tokens, labels).split(step.strategy.micro_batch_size)))
        assert result.gradient_norm is not None
        found.losses.append(result.loss.item())
        found.norms.append(result.gradient_norm.item())
    loss, tokens_seen = step.evaluate(MicroBatch.of(*batch_of(99, 3)))
    found.evaluated = loss.item(), tokens_seen
    for name, parameter in step.model.named_parameters():
        whole = parameter.detach()
        found.weights[name] = whole.full_tensor() if isinstance(whole, DTensor) else whole.clone()
    return found


def uneven(number: int) -> list[MicroBatch]:
    """Windows that do not fill the pipeline: one micro batch, two of other shapes, three."""
    tokens, labels = batch_of(number)
    cuts = [(8, SEQ_LEN)], [(5, 7), (3, SEQ_LEN)], [(2, 5), (2, 7), (3, SEQ_LEN)]
    window, first = [], 0
    for rows, length in cuts[number]:
        part = slice(first, first + rows)
        window.append(MicroBatch.of(tokens[part, :length], labels[part, :length]))
        first += rows
    return window


def uneven_plainly(case: Case) -> list[tuple[float, float]]:
    workload, strategy = make_workload(case.family), Strategy(ROWS, tiers=("keep",) * BLOCKS)
    steps = [build_step(workload, strategy, CPU, max_grad_norm=MAX_NORM, model=make(workload, ())) for _ in range(3)]
    return [_numbers(step(uneven(number))) for number, step in enumerate(steps)]


def _numbers(result: StepResult) -> tuple[float, float]:
    assert result.gradient_norm is not None
    return result.loss.item(), result.gradient_norm.item()


def step_unevenly(cases: list[Case]) -> list[list[tuple[float, float]]]:
    """Loss and gradient norm of one step for each uneven window, for each case."""
    return [[_numbers(new_step(case)(uneven(number))) for number in range(3)] for case in cases]


def run_cases(cases: list[Case], unevenly: list[Case]) -> tuple[list[Trained], list[list[tuple[float, float]]]]:
    """All that one start of ranks is asked."""
    return [train_one(case) for case in cases], step_unevenly(unevenly)
