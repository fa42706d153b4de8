"""torchtitan's TOML: JobConfig of torchtitan 0.2.2, the last release that reads one (main has Python configs)."""

from __future__ import annotations

import math
from typing import Any

from trainfit.export.base import Draft, Export, Job
from trainfit.export.text import comments, toml

SYSTEM = "torchtitan"
_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe"}


def torchtitan(job: Job) -> Export:
    """A train_config.toml without model, data, learning rate and steps."""
    draft = Draft(job)
    sections = {
        "training": _training(job, draft),
        "optimizer": _optimizer(job, draft),
        "parallelism": {**_data_parallel(job, draft), **_model_parallel(job, draft)},
        "activation_checkpoint": _activation(job, draft),
    }
    draft.note_environment()
    draft.note_compile("compile.enable compiles each block")
    notes = draft.notes(SYSTEM)
    lead = [
        "For torchtitan 0.2.2. Use: --job.config_file FILE, with sections model, lr_scheduler and checkpoint added."
    ]
    return Export("torchtitan", "train_config.toml", comments(job.title, lead, notes) + toml(sections), notes)


def _training(job: Job, draft: Draft) -> dict[str, Any]:
    """With pipeline stages a local batch is a whole window, cut into micro batches by the schedule."""
    strategy = job.strategy
    window = strategy.accumulation_steps if strategy.mesh.pipeline > 1 else 1
    draft.express("micro_batch_size", "accumulation_steps")
    draft.note_if(
        strategy.loss_chunks > 1,
        f"loss_chunks {strategy.loss_chunks}: 0.2.2 has full logits only, with which the plan's memory does not hold "
        "(main has ChunkedLossWrapper)",
        "loss_chunks",
    )
    on_host = strategy.optimizer.place == "host"
    draft.note_if(
        on_host, "optimizer.place host: enable_cpu_offload moves weights and gradients too", "optimizer.place"
    )
    return {
        "local_batch_size": strategy.micro_batch_size * window,
        "global_batch_size": strategy.sequences_per_step,
        "seq_len": job.seq_len,
        "max_norm": job.max_grad_norm or math.inf,
        "enable_cpu_offload": on_host,
        **_precision(job, draft),
    }


def _precision(job: Job, draft: Draft) -> dict[str, Any]:
    strategy = job.strategy
    mesh, precision, weights = strategy.mesh, strategy.precision, strategy.optimizer.weights
    draft.note_if(
        precision == "fp16",
        f"precision fp16: {SYSTEM} has no loss scaling and no fp16; bfloat16, as wide, is set instead",
    )
    draft.express("precision")
    draft.note_if(
        weights != "fp32",
        f"optimizer.weights {weights}: fp32 weights cast to bfloat16 are nearest; training.dtype = bfloat16 would also "
        "round weights and moments to the nearest bfloat16",
        "optimizer.weights",
    )
    without_fsdp = mesh.shard == 1 and (mesh.tensor > 1 or mesh.pipeline > 1)
    if without_fsdp and precision != "fp32":
        draft.note(f"precision {precision}: {SYSTEM} leaves tensor and pipeline parallelism without FSDP in fp32")
    draft.note_if(
        strategy.zero.reduce_dtype != "fp32",
        f"zero.reduce_dtype {strategy.zero.reduce_dtype}: mixed_precision_reduce takes float32 only",
        "zero.reduce_dtype",
    )
    if mesh.shard > 1 and strategy.cast == "block":
        draft.note("cast block: FSDP2 does so in any case, where it gathers a block", "cast")
    return {
        "dtype": "float32",
        "mixed_precision_param": "float32" if precision == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32",
    }


def _optimizer(job: Job, draft: Draft) -> dict[str, Any]:
    variant = job.strategy.optimizer
    draft.express("optimizer.kernel", "optimizer.update")
    draft.note_if(
        variant.kind != "adamw", f"optimizer.kind {variant.kind}: {SYSTEM} has Adam and AdamW only", "optimizer.kind"
    )
    draft.note_if(
        variant.states != "fp32",
        f"optimizer.states {variant.states}: moments have the dtype of the weights, which takes more memory",
        "optimizer.states",
    )
    return {
        "name": "AdamW",
        "implementation": variant.kernel,
        "early_step_in_backward": variant.update == "backward",
    }


def _data_parallel(job: Job, draft: Draft) -> dict[str, Any]:
    """Stages 1 and 2 keep parameters after forward, as FSDP2 does without resharding."""
    strategy = job.strategy
    mesh, zero = strategy.mesh, strategy.zero
    draft.express("mesh.replicate", "mesh.shard")
    if mesh.shard > 1:
        draft.express("zero.stage", "zero.gradient_sync")
    draft.note_if(
        mesh.shard > 1 and strategy.accumulation_steps > 1 and not zero.reduces_each_micro_batch,
        f"zero.stage {zero.stage}, gradients reduced once a step: {SYSTEM} reduces after each micro batch, which takes "
        "less memory and more traffic",
    )
    stage_3 = "always" if mesh.pipeline > 1 else "default"
    return {
        "data_parallel_replicate_degree": mesh.replicate,
        "data_parallel_shard_degree": mesh.shard,
        "fsdp_reshard_after_forward": stage_3 if zero.stage == 3 else "never",
    }


def _model_parallel(job: Job, draft: Draft) -> dict[str, Any]:
    strategy = job.strategy
    mesh = strategy.mesh
    draft.express("mesh.tensor", "mesh.pipeline")
    draft.note_if(
        mesh.tensor > 1 and not strategy.tensor.sequence,
        f"tensor.sequence false: {SYSTEM} always splits sequences between attention and mlp, which takes less memory",
    )
    draft.express("tensor.sequence")
    settings: dict[str, Any] = {"tensor_parallel_degree": mesh.tensor, "pipeline_parallel_degree": mesh.pipeline}
    return settings | (_pipeline(job, draft) if mesh.pipeline > 1 else {})


def _pipeline(job: Job, draft: Draft) -> dict[str, Any]:
    pipeline, ranks, blocks = job.strategy.pipeline, job.strategy.mesh.pipeline, len(job.tiers.names)
    stages = ranks * pipeline.stages_per_rank
    draft.express("pipeline.schedule")
    settings: dict[str, Any] = {
        "pipeline_parallel_schedule": _SCHEDULES[pipeline.schedule],
        "pipeline_parallel_microbatch_size": job.strategy.micro_batch_size,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    if pipeline.schedule == "interleaved":
        layers = math.ceil(blocks / stages)
        draft.note_if(
            math.ceil(blocks / max(1, layers)) != stages,
            f"pipeline.stages_per_rank {pipeline.stages_per_rank}: {blocks} blocks cannot be cut into {stages} stages "
            "by layers_per_stage; two stages a rank are left",
        )
        draft.express("pipeline.stages_per_rank")
        if math.ceil(blocks / max(1, layers)) == stages:
            settings["pipeline_parallel_layers_per_stage"] = layers
    return settings


def _activation(job: Job, draft: Draft) -> dict[str, Any]:
    """early_stop, as trainfit recomputes no further than backward needs."""
    tiers = job.tiers
    if tiers.keeps_all:
        return {"mode": "none"}
    option = None if tiers.all_are("full") else str(tiers.step)
    if not tiers.all_are("full", "keep") and tiers.all_are("discard", "pointwise", "selective", "keep"):
        option = "op"
    if tiers.all_are("selective") or option is None:
        draft.express("tiers")
    elif option == "op":
        draft.note(
            f"tiers {tiers.text}: 'op' in all blocks, which recomputes every second matmul too and holds less", "tiers"
        )
    else:
        exact = tiers.every == int(option)
        where = (
            f"blocks {option}, {2 * int(option)}, ... counted from 1, where the plan begins with the first"
            if exact
            else f"{'all blocks' if option == '1' else f'every {option} blocks'} in full are nearest in no more memory"
        )
        draft.note(f"tiers {tiers.text}: {where}", "tiers")
    selective = {"mode": "selective", "selective_ac_option": option}
    full = {"mode": "full"} if option in (None, "1") else selective
    return {**full, "early_stop": True}
