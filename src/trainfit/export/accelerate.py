"""Accelerate's YAML for `accelerate launch --config_file`: ClusterConfig of accelerate 1.15, with FSDP2's plugin."""

from __future__ import annotations

from typing import Any

from trainfit.export.base import Draft, Export, Job
from trainfit.export.text import as_yaml, comments

SYSTEM = "Accelerate"
_SEVERAL = {"cuda": "MULTI_GPU", "npu": "MULTI_NPU", "cpu": "MULTI_CPU"}


def accelerate(job: Job) -> Export:
    """An accelerate_config.yaml."""
    draft = Draft(job)
    strategy = job.strategy
    draft.express("precision")
    settings: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", **_processes(job, draft)}
    settings["mixed_precision"] = "no" if strategy.precision == "fp32" else strategy.precision
    if settings["distributed_type"] == "FSDP":
        settings |= {"fsdp_config": _fsdp(job, draft), **_parallelism(job, draft)}
    else:
        _without_fsdp(job, draft)
    _script(job, draft)
    draft.note_environment()
    draft.note_compile("dynamo_config with use_regional_compilation compiles each block")
    notes = draft.notes(SYSTEM)
    lead = ["Use: accelerate launch --config_file FILE SCRIPT; num_machines and machine_rank are yours to set."]
    return Export("accelerate", "accelerate_config.yaml", comments(job.title, lead, notes) + as_yaml(settings), notes)


def uses_fsdp(job: Job) -> bool:
    """Sharding, and tensor parallelism, which Accelerate takes with FSDP2 only."""
    mesh = job.strategy.mesh
    return mesh.shard > 1 or mesh.tensor > 1


def _processes(job: Job, draft: Draft) -> dict[str, Any]:
    mesh = job.strategy.mesh
    draft.note_if(
        mesh.pipeline > 1,
        f"mesh.pipeline {mesh.pipeline}: {SYSTEM} trains without pipeline stages, so num_processes is "
        f"{mesh.size // mesh.pipeline} and each holds all stages: it may not fit",
        "mesh.pipeline",
    )
    several = "FSDP" if uses_fsdp(job) else _SEVERAL[job.kind]
    count = mesh.size // mesh.pipeline
    return {
        "distributed_type": several if count > 1 else "NO",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": count,
        "use_cpu": job.kind == "cpu",
    }


def _fsdp(job: Job, draft: Draft) -> dict[str, Any]:
    strategy = job.strategy
    draft.express("zero.stage", "mesh")
    fsdp_notes(job, draft)
    draft.note_if(
        job.micro_batches_reduce,
        "zero.gradient_sync micro_batch: GradientAccumulationPlugin(sync_each_batch=True) in the script; without it, "
        "whole gradients are kept until the last micro batch",
    )
    on_host = strategy.optimizer.place == "host"
    draft.note_if(
        on_host,
        "optimizer.place host: fsdp_offload_params moves weights and gradients there too; for states alone use "
        "--export deepspeed with deepspeed_config_file",
        "optimizer.place",
    )
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": strategy.zero.stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": on_host,
        "fsdp_activation_checkpointing": recompute_all(job, draft),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def fsdp_notes(job: Job, draft: Draft) -> None:
    """What FSDP2 as Accelerate wraps it does differently from the plan."""
    strategy = job.strategy
    reduce_dtype = strategy.zero.reduce_dtype
    if strategy.mesh.shard > 1:
        draft.express("zero.gradient_sync")
    draft.note_if(
        strategy.precision not in ("fp32", reduce_dtype),
        f"zero.reduce_dtype {reduce_dtype}: mixed_precision {strategy.precision} also reduces gradients in it; in "
        "code, MixedPrecisionPolicy takes another reduce_dtype",
    )
    if strategy.precision != "fp32":
        draft.express("zero.reduce_dtype")
    draft.note_if(strategy.cast == "block", "cast block: FSDP2 does so in any case, where it gathers a block", "cast")


def _parallelism(job: Job, draft: Draft) -> dict[str, Any]:
    mesh = job.strategy.mesh
    replicate, shard = mesh.replicate, mesh.shard
    if mesh.tensor > 1 and replicate > 1 and shard == 1:
        draft.note(
            f"mesh.replicate {replicate} with tensor {mesh.tensor}: {SYSTEM} refuses replicas beside tensor "
            "parallelism, so they share their states instead (ZeRO), which takes less memory"
        )
        replicate, shard = 1, replicate
    if replicate == 1 and mesh.tensor == 1:
        return {}
    return {
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": replicate,
            "parallelism_config_dp_shard_size": shard,
            "parallelism_config_tp_size": mesh.tensor,
        }
    }


def recompute_all(job: Job, draft: Draft) -> bool:
    """One switch for all blocks."""
    tiers = job.tiers
    draft.express("tiers")
    draft.note_if(
        not (tiers.keeps_all or tiers.all_are("full")),
        f"tiers {tiers.text}: FSDP's activation checkpointing is for all blocks or none; all {len(tiers.names)} are "
        "recomputed in full, the nearest in no more memory",
    )
    return not tiers.keeps_all


def _without_fsdp(job: Job, draft: Draft) -> None:
    """One process or replicas: DistributedDataParallel, of which the file has no settings."""
    draft.express("mesh.replicate")
    tiers = job.tiers
    nearly = "" if tiers.all_are("full") else ", all blocks in full: the nearest that needs no more memory"
    draft.note_if(
        not tiers.keeps_all,
        f"tiers {tiers.text}: call model.gradient_checkpointing_enable() in the script{nearly}",
        "tiers",
    )
    draft.note_if(
        job.strategy.optimizer.place == "host",
        "optimizer.place host: use --export deepspeed with deepspeed_config_file",
        "optimizer.place",
    )


def _script(job: Job, draft: Draft) -> None:
    """What Accelerate leaves to the training script."""
    strategy = job.strategy
    variant = strategy.optimizer
    draft.note(
        f"in the script: DataLoader(batch_size={strategy.micro_batch_size}) of sequences of {job.seq_len} tokens, "
        f"Accelerator(gradient_accumulation_steps={strategy.accumulation_steps}), "
        + (f"accelerator.clip_grad_norm_(parameters, {job.max_grad_norm:g})" if job.max_grad_norm else "no clipping"),
        "micro_batch_size",
        "accumulation_steps",
    )
    if variant.kind == "adafactor":
        draft.note("optimizer.kind adafactor: torch.optim.Adafactor in the script", "optimizer.kind")
    elif variant.states != "fp32":
        eight = " such as bitsandbytes.optim.AdamW8bit" if variant.states in ("int8", "fp8") else ""
        draft.note(f"optimizer.states {variant.states}: an AdamW{eight} in the script", "optimizer.states")
    draft.note_if(
        variant.kernel != "fused", "optimizer.kernel foreach: AdamW(foreach=True) in the script", "optimizer.kernel"
    )
    draft.note_if(
        variant.weights != "fp32",
        f"optimizer.weights {variant.weights}: mixed_precision keeps fp32 weights and casts them",
        "optimizer.weights",
    )
    grad_scaler(draft)
    draft.note_if(
        strategy.loss_chunks > 1,
        f"loss_chunks {strategy.loss_chunks}: the model's own code; with full logits the plan's memory does not hold",
        "loss_chunks",
    )


def grad_scaler(draft: Draft) -> None:
    """The four numbers of torch.amp.GradScaler, where they are not its defaults."""
    known = {"init_scale", "growth_factor", "backoff_factor", "growth_interval"}
    left = {name.removeprefix("loss_scale."): value for name, value in draft.left_out() if "loss_scale." in name}
    if numbers := {name: value for name, value in left.items() if name in known}:
        arguments = ", ".join(f"{name}={value:g}" for name, value in numbers.items())
        draft.note(
            f"loss_scale: GradScalerKwargs({arguments}) in the script", *(f"loss_scale.{name}" for name in numbers)
        )
