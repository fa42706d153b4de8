"""MindSpeed's arguments on Ascend: features_manager/ of MindSpeed at 028de58, over Megatron Core 0.12.1."""

from __future__ import annotations

from trainfit.export.base import Draft, Export, Job
from trainfit.export.megatron import (
    Arguments,
    adam,
    batch,
    block_recompute,
    distributed_optimizer,
    loss,
    model_parallel,
    precision,
    residual_weights,
    shared_stage,
    shell,
)

SYSTEM = "MindSpeed"


def mindspeed(job: Job) -> Export:
    """A mindspeed_args.sh to source."""
    draft = Draft(job)
    arguments = [
        *batch(job, draft),
        *precision(job, draft, SYSTEM),
        *_optimizer(job, draft),
        *_data_parallel(job, draft),
        *model_parallel(job, draft, SYSTEM),
        *_activation(job, draft),
        *loss(job, draft),
    ]
    return shell("mindspeed", SYSTEM, job, draft, arguments)


def _optimizer(job: Job, draft: Draft) -> Arguments:
    """--reuse-fp32-param is bf16_residual: 16 bits more make bf16 weights fp32 again."""
    variant = job.strategy.optimizer
    host, small = variant.place == "host", variant.states in ("int8", "fp8")
    arguments = residual_weights(job, draft, "--reuse-fp32-param")
    if small and not host:
        arguments += ["--quant-states fp8"]
        draft.note_if(variant.states == "int8", "optimizer.states int8: fp8 is as small")
        draft.express("optimizer.states")
    elif variant.states != "fp32":
        why = "with states on the host" if small else f"of {SYSTEM}"
        draft.note(f"optimizer.states {variant.states}: moments {why} are fp32", "optimizer.states")
    if variant.gradients == "half" and job.strategy.zero.reduce_dtype == "bf16":
        draft.express("optimizer.gradients")
    return [*adam(job, draft, SYSTEM), *arguments, *(_on_host(job, draft) if host else [])]


def _on_host(job: Job, draft: Draft) -> Arguments:
    """States come to the device for the update, where trainfit updates on the host."""
    draft.note(
        "optimizer.place host: --swap-optimizer keeps states on the host and updates on the device, a sixteenth at a "
        "time (--swap-optimizer-times 16)",
        "optimizer.place",
    )
    if job.strategy.mesh.shard == 1 and job.strategy.mesh.data > 1:
        draft.note("zero.stage 0: --swap-optimizer needs the distributed optimizer, which shares states")
    return ["--swap-optimizer", "--swap-optimizer-times 16", "--use-distributed-optimizer"]


def _data_parallel(job: Job, draft: Draft) -> Arguments:
    stage = shared_stage(job, draft, SYSTEM)
    if stage < 2:
        return distributed_optimizer(job, draft) if stage else []
    kept = "optim_grads" if stage == 2 else "optim_grads_params"
    draft.note(
        f"zero.stage {stage}: unset CUDA_DEVICE_MAX_CONNECTIONS; {SYSTEM} advises against other features beside "
        "--use-custom-fsdp"
    )
    fsdp = ["--use-custom-fsdp", f"--data-parallel-sharding-strategy {kept}", "--no-gradient-accumulation-fusion"]
    return [*fsdp, *distributed_optimizer(job, draft)]


def _activation(job: Job, draft: Draft) -> Arguments:
    """Norms and activation functions have switches of their own, beside whole blocks."""
    tiers = job.tiers
    if tiers.keeps_all:
        return []
    if tiers.all_are("recompute_core"):
        draft.express("tiers")
        return ["--recompute-granularity selective", "--recompute-modules core_attn"]
    if tiers.all_are("recompute_mlp"):
        draft.express("tiers")
        return ["--recompute-granularity selective", "--recompute-modules mlp"]
    if tiers.all_are("discard", "pointwise", "selective"):
        draft.note(
            f"tiers {tiers.text}: norms and the mlp's activation function are recomputed; rotations and sums are kept, "
            "which takes somewhat more memory",
            "tiers",
        )
        return ["--recompute-norm", "--recompute-activation-function"]
    return block_recompute(job, draft)
