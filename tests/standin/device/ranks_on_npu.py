"""What the ranks of test_ranks.py run, each in a process of its own, and the plain training they are compared with.

npu_standin comes first: a spawned rank imports this module before it asks for its device.
"""

from __future__ import annotations

import npu_standin  # noqa: F401  isort: skip

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainfit.hardware import Accelerator
from trainfit.profile import Mesh, Profile, Zero
from trainfit.rehearsal.measure import measure_rank
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.train import storage
from trainfit.train.checkpoint import RunState, list_checkpoints
from trainfit.train.packing import Position
from trainfit.train.saving import Checkpoints
from trainfit.workload import IGNORED_LABEL, AdamWSettings, MicroBatch, Workload, workload_from_config

NUM_RANKS, NUM_BLOCKS, NUM_STEPS, NUM_ROWS, SEQ_LEN, MAX_NORM = 2, 2, 5, 8, 16, 0.5
WAIT_SECONDS = 20.0
_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_layer": NUM_BLOCKS,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 64,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
# The stand-in lacks kernels that any NPU has, and runs what they are composed of; these two it does not need.
_OWN_KERNELS = {"attn_implementation": "eager", "hidden_act": "gelu"}


@dataclass(frozen=True)
class Case:
    """One way to train on two ranks, in two micro batches."""

    mesh: Mesh
    stage: int = 0
    tier: str = "keep"
    family: str = "llama"

    def __str__(self) -> str:
        kind = "pipeline" if self.mesh.pipeline > 1 else f"stage{self.stage}"
        return f"{kind}-{self.tier}-{self.family}"

    @property
    def strategy(self) -> Strategy:
        tiers = parse_tiers(self.tier, NUM_BLOCKS)
        return Strategy(NUM_ROWS // self.mesh.data // 2, 2, tiers=tiers, mesh=self.mesh, zero=Zero(self.stage))


def stage_of_zero(stage: int, tier: str = "keep") -> Case:
    return Case(Mesh(shard=NUM_RANKS) if stage else Mesh(replicate=NUM_RANKS), stage, tier)


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    devices: frozenset[str] = frozenset()


def workload_of(family: str = "llama", **changes: Any) -> Workload:
    config = {"llama": _LLAMA, "gpt2": _GPT2}[family]
    workload = workload_from_config({**config, **changes}, seq_len=SEQ_LEN, name=family)
    # A small eps would make steps of full size of what is rounding noise in a tied embedding's gradients.
    return workload.copy(optimizer=AdamWSettings(learning_rate=3e-3, eps=1e-4))


def measured_workload() -> Workload:
    return workload_of(**_OWN_KERNELS, hidden_size=64, vocab_size=301, intermediate_size=150)


def new_model(family: str = "llama") -> nn.Module:
    torch.manual_seed(0)
    return workload_of(family).make_model()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Ids and labels of all ranks, (NUM_ROWS, SEQ_LEN). Rows have from one to all of their labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(_LLAMA["vocab_size"], (NUM_ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    valid = torch.randint(1, SEQ_LEN + 1, (NUM_ROWS, 1), generator=generator)
    labels[torch.arange(SEQ_LEN) >= valid] = IGNORED_LABEL
    return tokens[:, :-1].contiguous(), labels


def train_plainly(family: str) -> Trained:
    """One process on the cpu, one big batch, nothing of ours."""
    settings, model = workload_of(family).optimizer, new_model(family).train()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)
    losses, norms = [], []
    for number in range(NUM_STEPS):
        ids, labels = batch_of(number)
        logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, norms, {name: p.detach() for name, p in model.named_parameters()})


# ---- on each rank ---------------------------------------------------------------------------------------------------


def run_all(npu: Accelerator, trained: Sequence[Case], measured: Sequence[Case], folder: Path) -> dict[str, Any]:
    """Everything in one start of processes."""
    return {
        "backends": dist.get_backend_config(),
        "device": str(npu.device),
        "trained": [(train(npu, case), held_bytes(npu)) for case in trained],
        "measured": [measure(npu, case) for case in measured],
        "saved": save_and_load(npu, folder),
        "made": made(npu),
    }


def new_step(npu: Accelerator, case: Case, *, seed: int = 0) -> TrainStep:
    torch.manual_seed(seed)  # weights are drawn on the host, so they are those of new_model()
    return build_step(workload_of(case.family), case.strategy, npu, max_grad_norm=MAX_NORM)


def window(step: TrainStep, number: int) -> list[MicroBatch]:
    """This rank's micro batches, on the host."""
    index, data = step.ranks.data_index, step.ranks.mesh.data
    ids, labels = (tensor.chunk(data)[index] for tensor in batch_of(number))
    return list(MicroBatch.of(ids, labels).split(step.strategy.micro_batch_size))


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def train(npu: Accelerator, case: Case) -> Trained:
    step = new_step(npu, case)
    results = [step(window(step, number)) for number in range(NUM_STEPS)]
    norms = [result.gradient_norm.item() for result in results if result.gradient_norm is not None]
    states = [value for state in step.optimizer.state.values() for name, value in state.items() if name != "step"]
    devices = frozenset(str(tensor.device) for tensor in (*step.model.parameters(), *states))
    weights = {name: whole(parameter) for name, parameter in step.model.named_parameters()}
    return Trained([result.loss.item() for result in results], norms, weights, devices)


def held_bytes(npu: Accelerator) -> int:
    """What the device holds once everything that can go is gone."""
    gc.collect()
    return npu.memory.current_bytes()


def measure(npu: Accelerator, case: Case) -> Profile:
    return measure_rank(npu, measured_workload(), case.strategy, steps=0)


def made(npu: Accelerator) -> dict[str, int]:
    """Bytes of the device while a step at stage 3 makes its model: live before, at the peak, of what training keeps."""
    before = held_bytes(npu)
    npu.memory.reset_peak()
    torch.manual_seed(0)
    step = build_step(measured_workload(), stage_of_zero(3).strategy, npu)
    states = [value for state in step.optimizer.state.values() for value in state.values()]
    shards = [*step.model.parameters(), *step.model.buffers(), *states]
    kept = sum((each.to_local() if isinstance(each, DTensor) else each).untyped_storage().nbytes() for each in shards)
    whole_bytes = sum(parameter.numel() * 4 for parameter in step.model.parameters())
    return {"before": before, "peak": npu.memory.peak_bytes(), "kept": kept, "whole": whole_bytes}


def save_and_load(npu: Accelerator, folder: Path) -> dict[str, Any]:
    """Stage 3: two steps, a save, and the next step before anything is written; then that step from what was saved."""
    step = new_step(npu, stage_of_zero(3))
    for number in range(2):
        step(window(step, number))
    saved, rng = tensors_of(step), npu.rng.get_state()
    state = RunState(2, Position(0, 2 * NUM_ROWS), 0, {"seed": 0}, "recipe", "plan")
    checkpoints = Checkpoints(folder, step.ranks, keep=1, asynchronous=not npu.shares_host_memory)
    with writes_held_back() as writes, checkpoints:
        checkpoints.save(state, step.model, step.optimizer, rng)
        expected = step(window(step, 2)).loss.item()
        early = len(list_checkpoints(folder))
        writes.may_begin.set()
    again = new_step(npu, stage_of_zero(3), seed=1)
    elsewhere = again(window(again, 3)).loss.item()
    restored = Checkpoints(folder, again.ranks, keep=1).load(folder / "step-00000002", again.model, again.optimizer)
    restored.set_rng(npu)
    return {
        "early": early,
        "written_from": writes.devices,
        "tensors": (saved, tensors_of(again)),
        "rng": (rng, npu.rng.get_state()),
        "expected": expected,
        "elsewhere": elsewhere,
        "resumed": again(window(again, 2)).loss.item(),
    }


def tensors_of(step: TrainStep) -> dict[str, Tensor]:
    """Copies of parameters and moments, whole, by name."""
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    tensors = {name: whole(parameter).clone() for name, parameter in step.model.named_parameters()}
    for parameter, state in step.optimizer.state.items():
        tensors |= {f"{key}.{names[id(parameter)]}": whole(value).clone() for key, value in state.items()}
    return tensors


@dataclass
class Writes:
    """may_begin: set it to let them. devices: where the tensors lay that were written."""

    may_begin: threading.Event = field(default_factory=threading.Event)
    devices: set[str] = field(default_factory=set)


@contextmanager
def writes_held_back() -> Iterator[Writes]:
    """Fails a save that writes before its caller goes on."""
    writes, bytes_of = Writes(), storage._bytes_of

    def watched(entry: storage.Entry) -> memoryview:
        assert writes.may_begin.wait(WAIT_SECONDS), "save() waits for its writes"
        writes.devices.add(entry.read().device.type)
        return bytes_of(entry)

    storage._bytes_of = watched
    try:
        yield writes
    finally:
        storage._bytes_of = bytes_of
