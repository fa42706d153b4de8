"""DeepSpeed's JSON: what DeepSpeed 0.19.6 reads in runtime/config.py and runtime/zero/config.py.

JSON has no comments. DeepSpeed looks its top-level keys up by name and passes over others, so notes go under
"trainfit"; within "zero_optimization" and the like an unknown key would be an error.
"""

from __future__ import annotations

import json
import math
from typing import Any

from trainfit.export.base import Draft, Export, Job
from trainfit.profile import LossScale

SYSTEM = "DeepSpeed"


def deepspeed(job: Job) -> Export:
    """A ds_config.json."""
    draft = Draft(job)
    settings = {
        **_batch(job, draft),
        **_precision(job, draft),
        "zero_optimization": _zero(job, draft),
        **_communication(job, draft),
        **_optimizer(job, draft),
        **_mesh(job, draft),
        **_activation(job, draft),
    }
    _code(job, draft)
    draft.note_environment()
    notes = draft.notes(SYSTEM)
    text = json.dumps({**settings, "trainfit": {"plan": job.title, "notes": list(notes)}}, indent=2) + "\n"
    return Export("deepspeed", "ds_config.json", text, notes)


def _batch(job: Job, draft: Draft) -> dict[str, Any]:
    return {
        "train_batch_size": job.strategy.sequences_per_step,
        **draft.batch("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        "gradient_clipping": job.max_grad_norm or 0.0,
    }


def _precision(job: Job, draft: Draft) -> dict[str, Any]:
    """fp32 weights are autocast; DeepSpeed's bf16 and fp16 modes keep half weights and fp32 masters."""
    strategy = job.strategy
    draft.express("precision")
    if strategy.precision == "fp32":
        return {}
    if strategy.optimizer.weights == "fp32":
        _loss_scale(draft, strategy.loss_scale, "the GradScaler of torch_autocast keeps its defaults", set())
        draft.note_if(strategy.cast == "block", "cast block: torch_autocast casts each weight where it is used", "cast")
        dtype = "bfloat16" if strategy.precision == "bf16" else "float16"
        return {"torch_autocast": {"enabled": True, "dtype": dtype}}
    _half_weights(job, draft)
    if strategy.precision == "bf16":
        return {"bf16": {"enabled": True}, **_accumulation(job, draft)}
    scale = strategy.loss_scale or LossScale()
    power = round(math.log2(scale.init_scale))
    _loss_scale(draft, scale, "fp16 doubles and halves", {"growth_interval"})
    draft.note_if(2.0**power != scale.init_scale, f"loss_scale.init_scale {scale.init_scale:g}: 2**{power} is set")
    draft.express("loss_scale.init_scale")
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": power, "loss_scale_window": scale.growth_interval}
    return {"fp16": {**fp16, "hysteresis": 1, "min_loss_scale": 1}, **_accumulation(job, draft)}


def _loss_scale(draft: Draft, scale: LossScale | None, why: str, known: set[str]) -> None:
    for name, value in () if scale is None else vars(scale).items():
        if name in known:
            draft.express(f"loss_scale.{name}")
        elif value != getattr(LossScale(), name):
            draft.note(f"loss_scale.{name} {value}: {why}", f"loss_scale.{name}")


def _half_weights(job: Job, draft: Draft) -> None:
    weights = job.strategy.optimizer.weights
    draft.note_if(
        not weights.endswith("_master"),
        f"optimizer.weights {weights}: {SYSTEM} keeps fp32 masters beside half weights, which takes more memory",
    )
    draft.express("optimizer.weights")


def _accumulation(job: Job, draft: Draft) -> dict[str, Any]:
    draft.express("optimizer.gradients")
    half = job.strategy.optimizer.gradients == "half"
    return {"data_types": {"grad_accum_dtype": "bf16" if half else "fp32"}}


def _stage(job: Job, draft: Draft) -> int:
    strategy = job.strategy
    zero, mesh, variant = strategy.zero, strategy.mesh, strategy.optimizer
    wanted = zero.stage if mesh.shard > 1 else 0
    draft.note_if(wanted != zero.stage, f"zero.stage {zero.stage}: mesh.shard is 1, nothing is shared")
    draft.express("zero.stage")
    if wanted == 0 and (variant.weights != "fp32" or variant.place == "host"):
        what = "fp32 masters" if variant.weights != "fp32" else "states on the host"
        shares = ", which shares states where the plan has copies" if mesh.data > 1 else ""
        draft.note(f"zero.stage 0: {SYSTEM} keeps {what} from stage 1 on, so stage 1 is set{shares}")
        return 1
    return wanted


def _zero(job: Job, draft: Draft) -> dict[str, Any]:
    strategy = job.strategy
    zero, mesh, stage = strategy.zero, strategy.mesh, _stage(job, draft)
    settings: dict[str, Any] = {"stage": stage}
    own_time = {0: False, 1: False, 2: True, 3: True}[stage]
    draft.note_if(
        zero.gradient_sync is not None and zero.reduces_each_micro_batch != own_time,
        f"zero.gradient_sync {zero.gradient_sync}: stage {stage} reduces "
        + ("after each micro batch" if own_time else "once a step"),
    )
    if mesh.shard > 1:
        draft.express("zero.gradient_sync")
    if mesh.replicate > 1 and mesh.shard > 1:
        if stage == 3:
            settings["mics_shard_size"] = mesh.shard
            draft.note(
                f"mesh.replicate {mesh.replicate}: mics_shard_size needs the model made in deepspeed.zero.MiCS_Init",
                "mesh.replicate",
            )
        else:
            draft.note(
                f"mesh.replicate {mesh.replicate} x shard {mesh.shard}: stage {stage} shares over all "
                f"{mesh.data} ranks, which takes less memory and more traffic between nodes",
                "mesh.replicate",
            )
    draft.express("mesh.replicate", "mesh.shard")
    if zero.reshard_size and stage == 3:
        settings["zero_hpz_partition_size"] = zero.reshard_size
        draft.express("zero.reshard_size")
    draft.note_if(
        zero.prefetch != 1,
        f"zero.prefetch {zero.prefetch}: set stage3_prefetch_bucket_size to the elements of {zero.prefetch} blocks",
        "zero.prefetch",
    )
    if strategy.optimizer.place == "host":
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        draft.note("optimizer.place host: pass deepspeed.ops.adam.DeepSpeedCPUAdam as optimizer", "optimizer.place")
    return settings


def _communication(job: Job, draft: Draft) -> dict[str, Any]:
    draft.express("zero.reduce_dtype")
    return {"communication_data_type": job.strategy.zero.reduce_dtype} if job.strategy.mesh.data > 1 else {}


def _optimizer(job: Job, draft: Draft) -> dict[str, Any]:
    """Notes only, but for what lets a foreign optimizer in: the plan has no learning rate to write down."""
    variant = job.strategy.optimizer
    if variant.kind == "adafactor":
        draft.note("optimizer.kind adafactor: pass torch.optim.Adafactor as optimizer", "optimizer.kind")
        return {"zero_allow_untested_optimizer": True}
    draft.note_if(
        variant.kernel == "foreach" and variant.place == "device",
        "optimizer.kernel foreach: pass torch.optim.AdamW(foreach=True) as optimizer",
        "optimizer.kernel",
    )
    if variant.states == "int8":
        draft.note(
            "optimizer.states int8: pass an 8-bit AdamW, such as bitsandbytes.optim.AdamW8bit, as optimizer",
            "optimizer.states",
        )
        return {"zero_allow_untested_optimizer": True}
    draft.note_if(
        variant.states != "fp32",
        f"optimizer.states {variant.states}: {SYSTEM} keeps fp32 moments beside fp32 masters, which take more memory",
        "optimizer.states",
    )
    return {}


def _mesh(job: Job, draft: Draft) -> dict[str, Any]:
    mesh, pipeline = job.strategy.mesh, job.strategy.pipeline
    settings: dict[str, Any] = {}
    draft.express("mesh.tensor")
    if mesh.tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": mesh.tensor}
    draft.note_if(
        job.strategy.tensor.sequence,
        "tensor.sequence: AutoTP keeps whole sequences between attention and mlp, which takes more memory",
        "tensor.sequence",
    )
    if mesh.pipeline > 1:
        settings["pipeline"] = {"stages": mesh.pipeline}
        draft.note(
            f"mesh.pipeline {mesh.pipeline}: the model itself must be a deepspeed.pipe.PipelineModule with num_stages="
            f"{mesh.pipeline}; its engine takes ZeRO up to stage 1",
            "mesh.pipeline",
        )
        draft.note_if(
            pipeline.schedule != "1f1b",
            f"pipeline.schedule {pipeline.schedule}: {SYSTEM} runs 1f1b",
            "pipeline.schedule",
            "pipeline.stages_per_rank",
        )
    return settings


def _activation(job: Job, draft: Draft) -> dict[str, Any]:
    tiers = job.tiers
    if tiers.keeps_all:
        return {}
    nearly = "" if tiers.all_are("full") else f", the nearest in no more memory to the plan's {tiers.text}"
    draft.note(
        f"tiers {tiers.text}: recomputation is the model's own code, not this file's: call "
        f"model.gradient_checkpointing_enable(), which recomputes all {len(tiers.names)} blocks in full{nearly}",
        "tiers",
    )
    return {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": len(tiers.names)}}


def _code(job: Job, draft: Draft) -> None:
    draft.note(f"seq_len {job.seq_len}: the data loader's matter")
    chunks = job.strategy.loss_chunks
    draft.note_if(
        chunks > 1,
        f"loss_chunks {chunks}: the model's own code; with full logits the plan's memory does not hold",
        "loss_chunks",
    )
