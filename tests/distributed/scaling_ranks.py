"""What test_rank_loss_scaling.py runs on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from trainfit.hardware import accelerator
from trainfit.hardware.ranks import local_part
from trainfit.profile import LossScale, Mesh, Zero
from trainfit.step import Strategy, TrainStep, build_step, find_overflow
from trainfit.workload import MicroBatch, Workload, workload_from_config

ROWS, SEQ_LEN, STEPS = 12, 8, 4


@dataclass(frozen=True)
class Case:
    """One run. vocab_size 2 leaves the third of three ranks without a row of embedding and head."""

    name: str
    mesh: Mesh = Mesh()
    stage: int = 0
    per_block: bool = False
    accumulation: int = 2
    reduce_dtype: str = "fp32"
    vocab_size: int = 97
    loss_chunks: int = 1

    def __str__(self) -> str:
        return self.name

    def strategy(self) -> Strategy:
        return Strategy(
            ROWS // self.mesh.data // self.accumulation,
            self.accumulation,
            "fp16",
            loss_chunks=self.loss_chunks,
            loss_scale=LossScale(per_block=self.per_block),
            mesh=self.mesh,
            zero=Zero(self.stage, reduce_dtype=self.reduce_dtype),  # type: ignore[arg-type]
        )


def workload_of(case: Case) -> Workload:
    config = {
        "model_type": "llama",
        "vocab_size": case.vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": SEQ_LEN,
    }
    return workload_from_config(config, seq_len=SEQ_LEN, name="llama")


def build(case: Case) -> TrainStep:
    workload = workload_of(case)
    torch.manual_seed(0)
    return build_step(workload, case.strategy(), accelerator("cpu"), model=workload.make_model())


def window(case: Case, step: TrainStep, number: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(case.vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    mine = ids.chunk(case.mesh.data)[step.ranks.data_index]
    return list(MicroBatch.of(mine[:, :-1], mine[:, 1:]).split(case.strategy().micro_batch_size))


def scales_of(step: TrainStep) -> dict[str, Any]:
    assert step.scaling is not None
    return step.scaling.state()


def train(case: Case) -> dict[str, Any]:
    """STEPS steps; in the second, rank 0 finds an inf in its part of one gradient."""
    step = build(case)
    scaling = step.scaling
    assert scaling is not None
    unscale = scaling.unscale
    number = -1

    def with_inf(optimizer: Optimizer) -> None:
        if number == 1 and step.ranks.rank == 0:
            gradient = next(p.grad for name, p in step.model.named_parameters() if "up_proj" in name)
            local_part(gradient).view(-1)[0] = torch.inf
        unscale(optimizer)

    scaling.unscale = with_inf  # type: ignore[method-assign]
    rows = len(local_part(step.optimizer.param_groups[0]["params"][0].detach()))
    results, moved, states = [], [], []
    for number in range(STEPS):
        before = _weights(step)
        results.append(step(window(case, step, number)))
        moved.append(any(not torch.equal(*pair) for pair in zip(before, _weights(step))))
        states.append(scales_of(step))
    return {
        "losses": [float(result.loss) for result in results],
        "norms": [float(result.gradient_norm) for result in results if result.gradient_norm is not None],
        "skipped": [result.skipped for result in results],
        "moved": moved,
        "states": states,
        "rows": rows,
        "overflow": find_overflow(step, window(case, step, 9)),
    }


def _weights(step: TrainStep) -> list[Tensor]:
    return [local_part(parameter.detach()).clone() for parameter in step.model.parameters()]


def run_all(cases: list[Case]) -> dict[str, dict[str, Any]]:
    """By name. Every rank of a mesh of another size than the launch's would be refused, so all are of its size."""
    assert all(case.mesh.size == dist.get_world_size() for case in cases)
    return {case.name: train(case) for case in cases}
