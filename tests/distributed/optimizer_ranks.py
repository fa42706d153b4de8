"""What each rank of test_optimizers.py runs: steps of one optimizer variant, saved, and gone on with elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from zero_ranks import CPU, LLAMA, NUM_ROWS, OPTIMIZER, SEQ_LEN, new_model, workload_of

from trainfit.hardware.ranks import local_part
from trainfit.profile import Mesh, OptimizerVariant, Precision, Zero
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.techniques.stored_adamw import flat_states
from trainfit.techniques.stored_moments import moments
from trainfit.train.checkpoint import RunState, checkpoint_path
from trainfit.train.packing import Position
from trainfit.train.saving import Checkpoints
from trainfit.workload import MicroBatch, Workload, workload_from_config

NUM_STEPS = 5


@dataclass(frozen=True)
class Case:
    """On two ranks. shape: of the mesh."""

    variant: OptimizerVariant
    stage: int
    precision: Precision = "bf16"
    accumulation: int = 1
    tensor: int = 1
    loss_chunks: int = 1
    inner: int = 48  # width of each mlp; see UNEVEN

    def __str__(self) -> str:
        words = [self.variant.kind, self.variant.weights, self.variant.states, self.variant.update]
        words += [f"stage{self.stage}", f"k{self.accumulation}", f"tensor{self.tensor}"]
        words += [f"chunks{self.loss_chunks}"] * (self.loss_chunks > 1) + [f"inner{self.inner}"] * (self.inner != 48)
        return "-".join(words)

    def strategy(self, size: int) -> Strategy:
        data = size // self.tensor
        mesh = Mesh(1, data if not self.stage else 1, data if self.stage else 1, self.tensor)
        # One process runs what the ranks have side by side as micro batches, one after the other, if it may have any.
        micro_batches = self.accumulation * 2 // data if self.variant.update == "step" else 1
        return Strategy(
            NUM_ROWS // data // micro_batches,
            micro_batches,
            precision=self.precision,
            tiers=parse_tiers("full", 2),
            loss_chunks=self.loss_chunks,
            optimizer=self.variant,
            mesh=mesh,
            zero=Zero(self.stage),
        )


def batches(step: TrainStep, number: int) -> list[MicroBatch]:
    """This rank's of NUM_ROWS rows."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(97, (NUM_ROWS, SEQ_LEN + 1), generator=generator)
    mine = tokens.chunk(step.ranks.mesh.data)[step.ranks.data_index]
    whole = MicroBatch.of(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
    return list(whole.split(step.strategy.micro_batch_size))


def workload_for(case: Case) -> Workload:
    if case.inner == 48:
        return workload_of("llama")
    workload = workload_from_config({**LLAMA, "intermediate_size": case.inner}, seq_len=SEQ_LEN, name="llama")
    mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    plan = {f"model.layers.*.mlp.{name}": how for name, how in mlp.items()}
    return workload.copy(optimizer=OPTIMIZER, tensor_plan=plan)


def new_step(case: Case) -> TrainStep:
    workload = workload_for(case)
    size = dist.get_world_size() if dist.is_initialized() else 1
    strategy = case.strategy(size) if size > 1 else _alone(case)
    torch.manual_seed(5)  # rounding by chance draws from the seed of the process
    step = build_step(workload, strategy, CPU, max_grad_norm=None, model=new_model(workload))
    torch.manual_seed(100 + step.ranks.rank)  # as a run does for dropout; copies of the model must not round by it
    return step


def _alone(case: Case) -> Strategy:
    return replace(case, stage=0, tensor=1).strategy(1)


def run(case: Case, folder: Path | None = None) -> dict[str, Any]:
    """NUM_STEPS steps, a save, and two steps more; on ranks these again, from what was saved."""
    step = new_step(case)
    gradients = gradients_of(step)
    losses = [float(step(batches(step, number)).loss) for number in range(NUM_STEPS)]
    left = {"losses": losses, "tensors": whole_tensors(step), "dtypes": gradient_dtypes(step)}
    left |= {"gradients": gradients, "local_shapes": local_shapes(step), "moments": whole_moments(step)}
    if folder is not None:
        with Checkpoints(folder, step.ranks, keep=1) as checkpoints:
            state = RunState(NUM_STEPS, Position(0, 0), 0, {}, "", "")
            checkpoints.save(state, step.model, step.optimizer, (torch.get_rng_state(),))
    left |= two_steps_more(step)
    if folder is not None and dist.is_initialized():
        left["resumed"] = resume(case, checkpoint_path(folder, NUM_STEPS))
    return left


def two_steps_more(step: TrainStep) -> dict[str, Any]:
    losses = [float(step(batches(step, number)).loss) for number in (NUM_STEPS, NUM_STEPS + 1)]
    return {"next": losses, "last": whole_tensors(step)}


def resume(case: Case, checkpoint: Path) -> dict[str, Any]:
    step = new_step(case)
    with Checkpoints(checkpoint.parent, step.ranks, keep=1) as checkpoints:
        checkpoints.load(checkpoint, step.model, step.optimizer)
    return {"tensors": whole_tensors(step)} | two_steps_more(step)


def run_all(cases: list[tuple[Case, Path | None]]) -> list[dict[str, Any]]:
    return [run(case, folder) for case, folder in cases]


def gradient_dtypes(step: TrainStep) -> set[str]:
    """Of a window that is accumulated and dropped."""
    if step.strategy.optimizer.update == "backward":
        return set()
    step.accumulate(batches(step, 99))
    found = {str(p.grad.dtype) for group in step.optimizer.param_groups for p in group["params"] if p.grad is not None}
    step.optimizer.zero_grad()
    return found


def gradients_of(step: TrainStep) -> dict[str, Tensor]:
    """Whole ones of a window that is accumulated and dropped."""
    if step.strategy.optimizer.update == "backward":
        return {}
    step.accumulate(batches(step, 99))
    found = {name: _whole(p.grad) for name, p in step.model.named_parameters() if p.grad is not None}
    step.optimizer.zero_grad()
    return found


def local_shapes(step: TrainStep) -> dict[str, dict[str, tuple[int, ...]]]:
    """Of this rank's part of each parameter ("") and of its states, by the parameter's name."""
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    return {
        names[id(parameter)]: {key: tuple(local_part(value.detach()).shape) for key, value in state.items()}
        | {"": tuple(local_part(parameter.detach()).shape)}
        for parameter, state in step.optimizer.state.items()
    }


def whole_moments(step: TrainStep) -> dict[str, Tensor]:
    """Moments as the fp32 values that their codes and scales stand for; each rank reads its own."""
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    found: dict[str, Tensor] = {}
    for parameter, state in step.optimizer.state.items():
        shape = local_part(parameter.detach()).shape
        flat = flat_states(state)
        for moment in moments(step.strategy.optimizer.states if parameter.dim() > 1 else "fp32"):
            value = moment.read(flat).clone().view(shape)
            if isinstance(parameter, DTensor):
                value = DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            found[f"{moment.name}.{names[id(parameter)]}"] = _whole(value)
    return found


def whole_tensors(step: TrainStep) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(step.model.named_parameters())
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    for parameter, state in step.optimizer.state.items():
        tensors |= {f"{key}.{names[id(parameter)]}": value for key, value in state.items()}
    return {name: _whole(value) for name, value in tensors.items()}


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    # gloo takes neither 8-bit floats nor 16-bit integers; fp32 holds both.
    if tensor.dtype in (torch.float8_e4m3fn, torch.int16):
        return tensor.detach().float().full_tensor().to(tensor.dtype)
    return tensor.detach().full_tensor().clone()
