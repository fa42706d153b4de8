"""Tensor parallelism, alone and with ZeRO, replicas and tiers, against one process: losses, norms and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain import CPU, make_model, small_workload
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainfit.hardware.ranks import fake_process_group, ranks_of
from trainfit.profile import Mesh, TensorParallel, Zero
from trainfit.rehearsal.rehearse import fake_tensors, full_micro_batch
from trainfit.step import Strategy, TrainStep, build_step
from trainfit.techniques.optimizer import make_optimizer
from trainfit.workload import IGNORED_LABEL, MicroBatch, Workload, workload_from_module

NUM_STEPS = 20
ROWS = 8
SEQ_LEN = 16
# 42 features over 2 tensor ranks are 21, which 2 shards do not share evenly.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True, "intermediate_size": 42, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


class Perceptrons(nn.Module):
    """A user's own model, with a norm that can work on a part of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 32)
        self.blocks = nn.ModuleList([self._block() for _ in range(2)])
        self.head = nn.Linear(32, 97)

    def _block(self) -> nn.Module:
        return nn.ModuleDict(
            {"norm": nn.LayerNorm(32), "gate": nn.Linear(32, 40), "up": nn.Linear(32, 40), "down": nn.Linear(40, 32)}
        )

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            normed = block["norm"](hidden)
            hidden = hidden + block["down"](block["gate"](normed).sigmoid() * block["up"](normed))
        return self.head(hidden)


Training = tuple[Tensor, Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    model: str
    mesh: Mesh
    stage: int = 0
    accumulation: int = 1
    tier: str = "keep"
    loss_chunks: int = 1
    sequence: bool = False
    frozen: bool = False
    blockwise: bool = False

    @property
    def strategy(self) -> Strategy:
        return Strategy(
            ROWS // self.mesh.data // self.accumulation,
            self.accumulation,
            mesh=self.mesh,
            zero=Zero(self.stage),
            tiers=() if self.model == "own" else (self.tier,) * 2,
            loss_chunks=self.loss_chunks,
            tensor=TensorParallel(self.sequence),
            attention="blockwise" if self.blockwise else "model",
        )


TENSOR, SHARDED, COPIES = Mesh(tensor=2), Mesh(shard=2, tensor=2), Mesh(replicate=2, tensor=2)
TWO_RANKS = [
    Case("llama", TENSOR),
    Case("llama", TENSOR, accumulation=4, tier="full", loss_chunks=2, sequence=True),
    Case("qwen2", TENSOR, tier="full", sequence=True),
    Case("qwen3", TENSOR, accumulation=4, tier="discard", loss_chunks=2),
    Case("qwen3", TENSOR, tier="pointwise", sequence=True),
    Case("mistral", TENSOR, accumulation=4, tier="full", frozen=True),
    Case("mistral", TENSOR, tier="attention", sequence=True),
    Case("gemma2", TENSOR, tier="pointwise", loss_chunks=2),
    Case("gemma2", TENSOR, accumulation=4, sequence=True),
    Case("gemma2", TENSOR, tier="attention", loss_chunks=2, sequence=True, blockwise=True),
    Case("phi3", TENSOR, tier="full"),
    Case("qwen3_moe", TENSOR, accumulation=4, tier="pointwise", loss_chunks=2),
    Case("own", TENSOR, accumulation=2, loss_chunks=2),
]
FOUR_RANKS = [
    Case("llama", SHARDED, stage=1, accumulation=4, tier="pointwise", loss_chunks=2),
    Case("llama", SHARDED, stage=2, accumulation=4, tier="discard"),
    Case("llama", SHARDED, stage=3, tier="full", loss_chunks=2, sequence=True),
    Case("llama", COPIES, accumulation=4, tier="pointwise", frozen=True),
    Case("qwen3", SHARDED, stage=3, accumulation=4, tier="pointwise", frozen=True),
    Case("gemma2", SHARDED, stage=2, loss_chunks=2),
    Case("gemma2", SHARDED, stage=3, tier="full", blockwise=True),
    Case("qwen3_moe", SHARDED, stage=3, accumulation=4, tier="full", loss_chunks=2),
]


def workload_of(model: str) -> Workload:
    if model == "own":
        own = workload_from_module(Perceptrons, seq_len=SEQ_LEN, vocab_size=97)
        plan = {"blocks.*.norm": "sequence", "blocks.*.gate": "colwise", "blocks.*.up": "colwise"}
        return own.copy(tensor_plan={**plan, "blocks.*.down": "rowwise"})
    return small_workload(seq_len=SEQ_LEN, **MODELS[model])


def windows() -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each step; rows have from 1 to 16 labels, so ranks have unequal numbers."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(97, (NUM_STEPS, ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, :, 1:].clone()
    labels[:, 0, 3:] = IGNORED_LABEL
    labels[:, 5, 1:] = IGNORED_LABEL
    return list(zip(tokens[:, :, :-1], labels))


def new_step(case: Case, strategy: Strategy) -> TrainStep:
    workload = workload_of(case.model)
    model = make_model(workload)
    freeze(case, model)
    return build_step(workload, strategy, CPU, model=model)


def freeze(case: Case, model: nn.Module) -> None:
    if case.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in ("embed_tokens", "0.self_attn.k_proj")))


def train(case: Case, strategy: Strategy) -> Training:
    """Losses and gradient norms of all steps, and the weights after them."""
    step = new_step(case, strategy)
    rank, number = step.ranks.data_index, strategy.mesh.data
    results = []
    for tokens, labels in windows():
        mine = MicroBatch.of(tokens[rank::number].contiguous(), labels[rank::number].contiguous())
        results.append(step(list(mine.split(strategy.micro_batch_size))))
    weights = {name: whole(parameter) for name, parameter in step.model.named_parameters()}
    return (
        torch.stack([each.loss for each in results]),
        torch.stack([each.gradient_norm for each in results if each.gradient_norm is not None]),
        weights,
    )


def train_plainly(case: Case) -> Training:
    """The same by hand, in one process on whole batches."""
    workload = workload_of(case.model)
    model = make_model(workload).train()
    freeze(case, model)
    optimizer = make_optimizer(model.named_parameters(), workload.optimizer)
    losses, norms = [], []
    for tokens, labels in windows():
        output = model(tokens)
        logits = output if isinstance(output, Tensor) else output.logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms), {name: p.detach() for name, p in model.named_parameters()}


def whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def train_all(cases: list[Case]) -> list[Training]:
    return [train(case, case.strategy) for case in cases]


def local_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Of what this rank keeps of each parameter."""
    parameters = new_step(case, case.strategy).model.named_parameters()
    return {name: tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape) for name, p in parameters}


def train_and_look(cases: list[Case], looked_at: Case) -> tuple[list[Training], dict[str, tuple[int, ...]]]:
    return train_all(cases), local_shapes(looked_at)


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative to all of the tensor: AdamW makes the rounding of a gradient that is nearly zero as large as any."""
    return ((found - expected).norm() / expected.norm()).item()


def assert_equals_one_process(cases: list[Case], results: list[list[Training]]) -> None:
    expected = {}
    for index, case in enumerate(cases):
        if (key := (case.model, case.frozen)) not in expected:
            expected[key] = train_plainly(case)
        losses, norms, weights = expected[key]
        for rank, result in enumerate(results):
            found_losses, found_norms, found_weights = result[index]
            assert difference(found_losses, losses) < 1e-5, (case, rank)
            assert difference(found_norms, norms) < 1e-5, (case, rank)
            assert found_weights.keys() == weights.keys()
            for name, weight in weights.items():
                # A key's bias has no gradient but rounding.
                if name.endswith("k_proj.bias"):
                    continue
                assert difference(found_weights[name], weight) < 1e-5, (case, rank, name)
                assert torch.equal(found_weights[name], results[0][index][2][name]), (case, rank, name)


def test_two_tensor_ranks_equal_one_process() -> None:
    assert_equals_one_process(TWO_RANKS, run_ranks(train_all, 2, TWO_RANKS))


def test_tensor_ranks_with_zero_and_replicas_equal_one_process() -> None:
    results = run_ranks(train_and_look, 4, FOUR_RANKS, Case("qwen3_moe", SHARDED, stage=3))
    assert_equals_one_process(FOUR_RANKS, [trained for trained, _ in results])
    for _, shapes in results:
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (32 // 4, 32)
        assert shapes["model.layers.0.self_attn.o_proj.weight"] == (32 // 2, 32 // 2)
        assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (4 // 4, 32, 32)
        assert shapes["model.layers.0.input_layernorm.weight"] == (32 // 2,)


@pytest.mark.parametrize("is_middle", [False, True])
@pytest.mark.parametrize(
    ("mesh", "stage", "sequence"),
    [(Mesh(tensor=4), 0, False), (Mesh(tensor=4, shard=2), 3, False), (Mesh(tensor=4, shard=2), 2, True)],
)
def test_a_step_can_be_rehearsed(mesh: Mesh, stage: int, sequence: bool, is_middle: bool) -> None:
    workload = small_workload("llama", SEQ_LEN, num_key_value_heads=4)
    with fake_process_group(mesh.size, mesh.size // 2 if is_middle else 0):
        ranks = ranks_of(mesh, CPU)
        with fake_tensors():
            strategy = Strategy(
                2,
                2,
                mesh=mesh,
                zero=Zero(stage),
                tiers=("full", "pointwise"),
                loss_chunks=2,
                tensor=TensorParallel(sequence),
            )
            step = build_step(workload, strategy, CPU, ranks=ranks)
            batch = full_micro_batch(workload, strategy)
            step([batch, batch])
            q_proj = step.model.get_parameter("model.layers.0.self_attn.q_proj.weight")
            assert isinstance(q_proj, DTensor)
            assert q_proj.to_local().shape == (32 // 4 // mesh.shard, 32)
