"""What each rank of test_zero.py runs, and the plain training that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tiny_models import TINY_CONFIGS
from trainfit.errors import DataError
from trainfit.hardware import accelerator
from trainfit.profile import Mesh, Offload, Zero
from trainfit.step import Strategy, TrainStep, build_step, parse_tiers
from trainfit.step.gradient_norm import clip_gradients
from trainfit.techniques import offload
from trainfit.workload import (
    IGNORED_LABEL,
    LoRASettings,
    MicroBatch,
    Workload,
    with_adapter,
    workload_from_config,
    workload_from_module,
)
from trainfit.workload.workload import AdamWSettings

CPU = accelerator("cpu")
offload.SMALLEST = 64  # else nothing of so small a model would leave
NUM_STEPS, NUM_ROWS, SEQ_LEN, MAX_NORM = 20, 16, 12, 0.5
# Where a gradient is rounding noise around zero (a key's bias), Adam's update would be noise of full size.
OPTIMIZER = AdamWSettings(learning_rate=1e-3, eps=1e-5)
_SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
LLAMA: dict[str, Any] = {"model_type": "llama", **_SMALL}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    # Fewer rows than ranks have, and not a multiple: SH-01.
    "tied-5": {"model_type": "llama", **_SMALL, "vocab_size": 5, "tie_word_embeddings": True},
    "gpt2": {**TINY_CONFIGS["gpt2"], "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_positions": 64}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3_moe": {**TINY_CONFIGS["qwen3_moe"], **_SMALL, "head_dim": 8, "moe_intermediate_size": 16},
}


@dataclass(frozen=True)
class Case:
    """One run: model by name, and the strategy's knobs. copies: of mesh.replicate; the rest of the ranks share."""

    model: str
    stage: int
    accumulation: int = 1
    tier: str = "keep"
    copies: int = 1
    loss_chunks: int = 1
    precision: str = "fp32"
    zero: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [self.model, f"stage{self.stage}", f"k{self.accumulation}", self.tier]
        parts += [f"copies{self.copies}"] * (self.copies > 1) + [f"chunks{self.loss_chunks}"] * (self.loss_chunks > 1)
        parts += [self.precision] * (self.precision != "fp32")
        return "-".join(parts + [f"{key}={value}" for key, value in self.zero])

    def strategy(self, size: int) -> Strategy:
        mesh = Mesh(replicate=size) if self.stage == 0 else Mesh(replicate=self.copies, shard=size // self.copies)
        return Strategy(
            NUM_ROWS // size // self.accumulation,
            self.accumulation,
            precision=self.precision,  # type: ignore[arg-type]
            tiers=parse_tiers(self.tier, 2),
            loss_chunks=self.loss_chunks,
            mesh=mesh,
            zero=Zero(self.stage, **dict(self.zero)),
            offload=Offload("disk") if "offload" in self.tier else Offload(),
        )


def workload_of(name: str) -> Workload:
    if name == "frozen":
        return workload_from_module(_frozen_llama, seq_len=SEQ_LEN, vocab_size=97).copy(optimizer=OPTIMIZER)
    if name == "lora":
        base = workload_from_config(_CONFIGS["llama"], seq_len=SEQ_LEN, name=name)
        return with_adapter(base, LoRASettings(rank=4)).copy(optimizer=OPTIMIZER)
    return workload_from_config(_CONFIGS[name], seq_len=SEQ_LEN, name=name).copy(optimizer=OPTIMIZER)


def _frozen_llama() -> nn.Module:
    """Trainable layers after, before and beside frozen ones: one block as with adapters, one whole; CK-14."""
    model = workload_from_config(_CONFIGS["llama"], seq_len=SEQ_LEN, name="llama").make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "layers.1.mlp" in name or "lm_head" in name)
    return model


def new_model(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.make_model()


def batch_of(step: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids and labels of all ranks, (NUM_ROWS, SEQ_LEN). Rows have from none to all of their labels."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(vocab_size, (NUM_ROWS, SEQ_LEN + 1), generator=generator)
    labels = ids[:, 1:].clone()
    lengths = torch.randint(SEQ_LEN + 1, (NUM_ROWS,), generator=generator)
    labels[torch.arange(SEQ_LEN) >= lengths[:, None]] = IGNORED_LABEL
    labels[0] = IGNORED_LABEL  # with accumulation 4, a micro batch of rank 0 without any
    return ids[:, :-1].contiguous(), labels


def window(case: Case, step: int, vocab_size: int) -> list[MicroBatch]:
    """This rank's micro batches."""
    ids, labels = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in batch_of(step, vocab_size))
    return list(MicroBatch.of(ids, labels).split(case.strategy(dist.get_world_size()).micro_batch_size))


def plain_gradients(name: str) -> dict[str, Tensor]:
    """Of the first window's mean token loss, in one process."""
    workload = workload_of(name)
    model = new_model(workload).train()
    plain_loss(model, 1, workload.vocab_size).backward()
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


def plain_loss(model: nn.Module, step: int, vocab_size: int) -> Tensor:
    ids, labels = batch_of(step, vocab_size)
    logits = model(ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)


def plain(name: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and weights of NUM_STEPS steps of one process, written by hand."""
    workload = workload_of(name)
    model = new_model(workload).train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=OPTIMIZER.learning_rate,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = plain_loss(model, step, workload.vocab_size)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trainable, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {key: parameter.detach() for key, parameter in model.named_parameters()}


def build(case: Case) -> TrainStep:
    workload = workload_of(case.model)
    strategy = case.strategy(dist.get_world_size())
    return build_step(workload, strategy, CPU, max_grad_norm=MAX_NORM, model=new_model(workload))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(case: Case) -> dict[str, Any]:
    """NUM_STEPS steps, and what they left."""
    step = build(case)
    vocab_size = workload_of(case.model).vocab_size
    results = [step(window(case, index, vocab_size)) for index in range(NUM_STEPS)]
    parameters = dict(step.model.named_parameters())
    trained = {id(parameter) for parameter in parameters.values() if parameter.requires_grad}
    updated = {id(parameter) for group in step.optimizer.param_groups for parameter in group["params"]}
    weights = {name: whole(parameter.detach()) for name, parameter in parameters.items()}
    return {
        "losses": [float(result.loss) for result in results],
        "norms": [float(result.gradient_norm) for result in results if result.gradient_norm is not None],
        "weights": weights if dist.get_rank() == 0 else None,
        "is_same": trained == updated,
    }


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients_between(case: Case) -> tuple[list[tuple[int, int]], int, int]:
    """Elements of gradients that this rank holds before each micro batch and after the last: (whole, sharded).

    Then those of all trained parameters, and of this rank's share of them.
    """
    step = build(case)
    updated = [parameter for group in step.optimizer.param_groups for parameter in group["params"]]
    found: list[tuple[int, int]] = []

    def look() -> None:
        held = {id(p): p for p in [*step.model.parameters(), *updated] if p.grad is not None}.values()
        sharded = sum(local(p.grad).numel() for p in held if isinstance(p.grad, DTensor))
        found.append((sum(p.grad.numel() for p in held if not isinstance(p.grad, DTensor)), sharded))

    before: Callable[..., None] = step._sync.before_micro_batch

    def watched(*, is_last: bool) -> None:
        look()
        before(is_last=is_last)

    step._sync.before_micro_batch = watched  # type: ignore[method-assign]
    step.accumulate(window(case, 1, 97))
    look()
    return found, sum(p.numel() for p in updated), sum(local(p.detach()).numel() for p in updated)


def accumulated(case: Case) -> dict[str, Tensor]:
    """Gradients of one window, whole."""
    step = build(case)
    step.accumulate(window(case, 1, 97))
    return {name: whole(p.grad).clone() for name, p in step.model.named_parameters() if p.grad is not None}


class StepFailedError(Exception):
    """Of a step, on all ranks alike."""


def after_failures(case: Case) -> tuple[str, list[dict[str, Tensor]]]:
    """What a first window without labels is told, and whole gradients of one and the same window: of a new step, and
    after windows that failed in the second micro batch's forward and in the first one's backward."""
    step = build(case)
    block = step.model.get_submodule("model.layers.0")
    empty = [MicroBatch.of(batch.inputs, torch.full_like(batch.labels, IGNORED_LABEL)) for batch in window(case, 1, 97)]
    try:
        told = str(step(empty))
    except DataError as error:
        told = str(error)
    found = [accumulated(case)]
    for fail in (_fail_in_forward, _fail_in_backward):
        handle = fail(block)
        try:
            step(window(case, 2, 97))
            raise AssertionError("it did not fail")
        except StepFailedError:
            handle.remove()
        step.accumulate(window(case, 1, 97))
        found.append({name: whole(p.grad).clone() for name, p in step.model.named_parameters() if p.grad is not None})
        step.optimizer.zero_grad(set_to_none=True)
    return told, found


def _fail_in_forward(block: nn.Module) -> Any:
    calls: list[int] = []

    def look(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise StepFailedError

    return block.register_forward_pre_hook(look)


def _fail_in_backward(block: nn.Module) -> Any:
    def fail(_: Tensor) -> None:
        raise StepFailedError

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    return block.register_forward_hook(look)


def inf_on_one_rank(case: Case) -> tuple[int, float]:
    """Rows of the embedding that this rank has, and the gradient norm, where one gradient of rank 0 is inf."""
    step = build(case)
    step.accumulate(window(case, 1, workload_of(case.model).vocab_size))
    gradient = local(step.model.get_input_embeddings().weight.grad)
    if dist.get_rank() == 0:
        gradient[0, 0] = torch.inf
    return len(gradient), float(clip_gradients(step._parameters, MAX_NORM, step.ranks))


def dtypes(case: Case) -> dict[str, set[torch.dtype]]:
    """Of what the optimizer works on."""
    step = build(case)
    step.accumulate(window(case, 1, 97))
    updated = [parameter for group in step.optimizer.param_groups for parameter in group["params"]]
    states = [value for state in step.optimizer.state.values() for value in state.values()]
    return {
        "parameters": {parameter.dtype for parameter in updated},
        "gradients": {parameter.grad.dtype for parameter in updated},
        "states": {state.dtype for state in states},
    }


def run_all(work: list[tuple[str, Case]]) -> dict[tuple[str, Case], Any]:
    """Functions of this module by name, each on its case: one start of processes for all."""
    return {(name, case): globals()[name](case) for name, case in work}
