"""TRL's YAML for `trl sft --config`: SFTConfig and ModelConfig of TRL 1.9, TrainingArguments of transformers 5.24."""

from __future__ import annotations

from typing import Any

from trainfit.export.accelerate import fsdp_notes, grad_scaler, recompute_all
from trainfit.export.base import Draft, Export, Job
from trainfit.export.text import as_yaml, comments

SYSTEM = "TRL"
_CHUNK_TOKENS = 256  # _CHUNKED_LM_HEAD_CHUNK_SIZE of trl/trainer/sft_trainer.py


def trl(job: Job) -> Export:
    """A sft_config.yaml without model, data and learning rate."""
    draft = Draft(job)
    settings = {
        **_batch(job, draft),
        **_precision(job, draft),
        **_loss(job, draft),
        **_optimizer(job, draft),
        **_frozen(job, draft),
        **_sharding(job, draft),
        **_activation(job, draft),
    }
    if job.environment:  # TrlParser sets them before it parses the rest
        draft.express("allocator")
        settings = {"env": job.environment, **settings}
    notes = draft.notes(SYSTEM)
    lead = ["Use: trl sft --config FILE, with model_name_or_path, dataset_name, learning_rate and output_dir added."]
    return Export("trl", "sft_config.yaml", comments(job.title, lead, notes) + as_yaml(settings), notes)


def _batch(job: Job, draft: Draft) -> dict[str, Any]:
    """Packed, since a plan counts on full sequences."""
    return {
        **draft.batch("per_device_train_batch_size", "gradient_accumulation_steps"),
        "max_length": job.seq_len,
        "packing": True,
        "packing_strategy": "wrapped",
        "max_grad_norm": job.max_grad_norm or 0.0,
    }


def _precision(job: Job, draft: Draft) -> dict[str, Any]:
    strategy = job.strategy
    draft.express("precision")
    draft.note_if(
        strategy.optimizer.weights != "fp32",
        f"optimizer.weights {strategy.optimizer.weights}: fp32 weights that are cast are nearest, dtype: bfloat16 "
        "would round weights and moments to the nearest bfloat16",
        "optimizer.weights",
    )
    grad_scaler(draft)
    return {"dtype": "float32", "bf16": strategy.precision == "bf16", "fp16": strategy.precision == "fp16"}


def _loss(job: Job, draft: Draft) -> dict[str, Any]:
    chunks = job.strategy.loss_chunks
    draft.note_if(
        chunks > 1,
        f"loss_chunks {chunks}: chunked_nll takes pieces of {_CHUNK_TOKENS} tokens; the plan's have "
        f"{-(-job.strategy.micro_batch_size * job.seq_len // chunks)}",
        "loss_chunks",
    )
    return {"loss_type": "chunked_nll" if chunks > 1 else "nll"}


def _optimizer(job: Job, draft: Draft) -> dict[str, Any]:
    """Names of transformers' OptimizerNames."""
    variant = job.strategy.optimizer
    if variant.kind == "adafactor":
        draft.note("optimizer.kind adafactor: transformers' own, not torch's", "optimizer.kind")
        return {"optim": "adafactor"}
    small = variant.states in ("int8", "fp8")
    if variant.place == "host":
        draft.note(
            "optimizer.place host: bitsandbytes' paged AdamW moves states to the host only when the device is full",
            "optimizer.place",
        )
        _states(draft, variant.states, small)
        return {"optim": "paged_adamw_8bit" if small else "paged_adamw_32bit"}
    _states(draft, variant.states, small)
    if small:
        return {"optim": "adamw_bnb_8bit"}
    draft.express("optimizer.kernel")
    fused = "adamw_torch_npu_fused" if job.kind == "npu" else "adamw_torch_fused"
    return {"optim": fused if variant.kernel == "fused" else "adamw_torch"}


def _states(draft: Draft, states: str, small: bool) -> None:
    exact = states in ("fp32", "int8")
    draft.express("optimizer.states")
    nearest = "bitsandbytes' int8 is as small" if small else "moments are fp32, which takes more memory"
    draft.note_if(not exact, f"optimizer.states {states}: {nearest}")


def _frozen(job: Job, draft: Draft) -> dict[str, Any]:
    """Quantised by bitsandbytes, which takes all linear layers; for LoRA."""
    frozen = job.strategy.frozen_weights
    if frozen not in ("int8", "nf4"):
        return {}
    draft.note(f"frozen_weights {frozen}: bitsandbytes', of all linear layers but the head", "frozen_weights")
    return {"load_in_8bit": True} if frozen == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def _sharding(job: Job, draft: Draft) -> dict[str, Any]:
    """FSDP2 where ranks share one copy; what else a mesh has is the launcher's."""
    strategy = job.strategy
    mesh = strategy.mesh
    draft.express("mesh.shard")
    for name in ("replicate", "tensor"):
        size = getattr(mesh, name)
        beside = name == "tensor" or mesh.shard > 1
        draft.express(f"mesh.{name}")
        draft.note_if(
            size > 1 and beside,
            f"mesh.{name} {size}: accelerate launch --config_file FILE, with the file of --export accelerate",
        )
    draft.note_if(mesh.pipeline > 1, f"mesh.pipeline {mesh.pipeline}: {SYSTEM} has no stages", "mesh.pipeline")
    draft.note_if(
        mesh.size > 1, f"processes: accelerate launch --num_processes {mesh.size // mesh.pipeline} of your machines"
    )
    if mesh.shard == 1:
        return {}
    draft.express("zero.stage")
    fsdp_notes(job, draft)
    each = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return {"fsdp": True, **({"accelerator_config": each} if job.micro_batches_reduce else {})}


def _activation(job: Job, draft: Draft) -> dict[str, Any]:
    """every_n_layers is transformers 5.24's. Sharded blocks are recomputed by FSDP's own wrapper."""
    tiers, sharded = job.tiers, job.strategy.mesh.shard > 1
    config: dict[str, Any] = {"version": 2, "reshard_after_forward": job.strategy.zero.stage == 3}
    by_model = tiers.every is not None and tiers.every > 1
    if sharded and not by_model:
        config["activation_checkpointing"] = recompute_all(job, draft)
    shared = {"fsdp_config": config} if sharded else {}
    if tiers.keeps_all or (sharded and not by_model):
        return {**shared, "gradient_checkpointing": False}
    arguments: dict[str, Any] = {"use_reentrant": False}
    step = tiers.every or tiers.step
    if step > 1:
        arguments["every_n_layers"] = step
    draft.express("tiers")
    draft.note_if(
        tiers.every is None,
        f"tiers {tiers.text}: {'all blocks' if step == 1 else f'every {step} blocks'} in full are nearest in no more "
        "memory",
    )
    return {**shared, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": arguments}
