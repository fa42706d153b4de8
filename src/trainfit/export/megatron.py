"""Megatron-LM's arguments, as a bash array: megatron/training/arguments.py of main at d98e8a6 (Core 0.20).

MindSpeed runs Megatron Core 0.12.1 with arguments of its own, so most of this serves both (mindspeed.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.export.base import Draft, Export, Job
from trainfit.export.text import comments
from trainfit.profile import LossScale

SYSTEM = "Megatron-LM"
Arguments = list[str]


def megatron(job: Job) -> Export:
    """A megatron_args.sh to source."""
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
    return shell("megatron", SYSTEM, job, draft, arguments)


def shell(name: str, system: str, job: Job, draft: Draft, arguments: Sequence[str]) -> Export:
    """A bash array, one argument a line, without repetitions."""
    if job.environment:
        draft.express("allocator")
    notes = draft.notes(system)
    array = f"{name.upper()}_ARGS"
    lead = [f'Use: source FILE; torchrun --nproc-per-node N pretrain_gpt.py "${{{array}[@]}}" MODEL DATA ...']
    body = "".join(f"    {argument}\n" for argument in dict.fromkeys(arguments))
    exported = "".join(f"export {variable}={value}\n" for variable, value in job.environment.items())
    text = comments(job.title, lead, notes) + exported + f"{array}=(\n{body})\n"
    return Export(name, f"{name}_args.sh", text, notes)


def batch(job: Job, draft: Draft) -> Arguments:
    strategy = job.strategy
    draft.express("micro_batch_size", "accumulation_steps")
    return [
        f"--micro-batch-size {strategy.micro_batch_size}",
        f"--global-batch-size {strategy.sequences_per_step}",
        f"--seq-length {job.seq_len}",
        f"--clip-grad {job.max_grad_norm or 0.0:g}",
    ]


def precision(job: Job, draft: Draft, system: str) -> Arguments:
    """Half precision is half weights with fp32 masters here."""
    strategy = job.strategy
    weights, reduce_dtype = strategy.optimizer.weights, strategy.zero.reduce_dtype
    draft.express("precision", "zero.reduce_dtype")
    if strategy.precision == "fp32":
        draft.note_if(reduce_dtype != "fp32", f"zero.reduce_dtype {reduce_dtype}: fp32 gradients are reduced in fp32")
        return []
    draft.note_if(
        weights == "fp32",
        f"optimizer.weights fp32: {system} computes with {strategy.precision} weights and keeps fp32 masters beside, "
        "2 bytes a parameter more than the plan",
    )
    if strategy.cast == "block":
        draft.note("cast block: weights are in half precision all the time", "cast")
    if weights.endswith("_master"):
        draft.express("optimizer.weights")
    return [f"--{strategy.precision}", *_reduction(job, draft), *_loss_scale(job, draft)]


def _reduction(job: Job, draft: Draft) -> Arguments:
    """Gradients add up and are reduced in one dtype."""
    strategy = job.strategy
    reduce_dtype, half = strategy.zero.reduce_dtype, strategy.optimizer.gradients == "half"
    draft.note_if(
        half and reduce_dtype == "fp32",
        "zero.reduce_dtype fp32: gradients kept in bf16 are reduced in bf16, so they are kept in fp32 instead, which "
        "takes 2 bytes a parameter more (--grad-reduce-in-bf16 does the other)",
        "optimizer.gradients",
    )
    if reduce_dtype == "fp32":
        return ["--accumulate-allreduce-grads-in-fp32"]
    if not half:
        draft.note(f"zero.reduce_dtype {reduce_dtype}: gradients also add up in it")
    return ["--grad-reduce-in-bf16"] if reduce_dtype == "bf16" else []


def _loss_scale(job: Job, draft: Draft) -> Arguments:
    scale = job.strategy.loss_scale
    if scale is None:
        return []
    draft.express("loss_scale.init_scale", "loss_scale.growth_interval")
    for name in ("growth_factor", "backoff_factor"):
        value, default = getattr(scale, name), getattr(LossScale(), name)
        draft.note_if(value != default, f"loss_scale.{name} {value:g}: {default:g} is built in", f"loss_scale.{name}")
    return [
        f"--initial-loss-scale {scale.init_scale:.17g}",
        f"--loss-scale-window {scale.growth_interval}",
        "--hysteresis 1",
        "--min-loss-scale 1",
    ]


def adam(job: Job, draft: Draft, system: str) -> Arguments:
    """Always fused AdamW."""
    variant = job.strategy.optimizer
    draft.note_if(
        variant.kind != "adamw", f"optimizer.kind {variant.kind}: {system} has adam, which takes more", "optimizer.kind"
    )
    if variant.kernel == "foreach":
        draft.note("optimizer.kernel foreach: its Adam is fused", "optimizer.kernel")
    return ["--optimizer adam"]


def residual_weights(job: Job, draft: Draft, argument: str) -> Arguments:
    """The argument that keeps bf16 weights and the 16 bits that make them fp32, where those of the plan are near it."""
    weights = job.strategy.optimizer.weights
    if weights not in ("bf16_residual", "bf16_kahan", "bf16_stochastic"):
        return []
    draft.note_if(
        weights != "bf16_residual",
        f"optimizer.weights {weights}: bf16 weights and the other 16 bits of fp32 ones are nearest",
    )
    draft.express("optimizer.weights")
    return [argument]


def _optimizer(job: Job, draft: Draft) -> Arguments:
    """The precision-aware optimizer keeps bf16 weights and the 16 bits that make them fp32, as bf16_residual does."""
    variant = job.strategy.optimizer
    arguments = residual_weights(job, draft, "--main-params-dtype fp32")
    if variant.gradients == "half" and job.strategy.zero.reduce_dtype == "bf16":
        arguments += ["--main-grads-dtype bf16"]
        draft.express("optimizer.gradients")
    if variant.states != "fp32":
        kept = "bf16" if variant.states == "bf16" else "fp8"
        arguments += [f"--exp-avg-dtype {kept}", f"--exp-avg-sq-dtype {kept}"]
        draft.note_if(variant.states != kept, f"optimizer.states {variant.states}: fp8 is as small")
        draft.express("optimizer.states")
    if variant.place == "host":
        arguments += ["--optimizer-cpu-offload"]
        draft.express("optimizer.place")
    if arguments:
        stage_0 = job.strategy.zero.stage == 0 or job.strategy.mesh.shard == 1
        draft.note_if(
            stage_0 and job.strategy.mesh.data > 1,
            "zero.stage 0: the precision-aware optimizer needs the distributed one, which shares states over replicas",
        )
        arguments = ["--use-precision-aware-optimizer", *arguments, "--use-distributed-optimizer"]
    return [*adam(job, draft, SYSTEM), *arguments]


def _data_parallel(job: Job, draft: Draft) -> Arguments:
    stage = shared_stage(job, draft, SYSTEM)
    if stage < 2:
        return distributed_optimizer(job, draft) if stage else []
    kept = "optim_grads" if stage == 2 else "optim_grads_params"
    fsdp = ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {kept}", "--ckpt-format fsdp_dtensor"]
    if stage == 3:
        fsdp += ["--init-model-with-meta-device"]
    draft.note(f"zero.stage {stage}: unset CUDA_DEVICE_MAX_CONNECTIONS, Megatron-FSDP refuses 1")
    return [*fsdp, *distributed_optimizer(job, draft)]


def shared_stage(job: Job, draft: Draft, system: str) -> int:
    """ZeRO's stage where there is something to share."""
    zero, mesh, steps = job.strategy.zero, job.strategy.mesh, job.strategy.accumulation_steps
    stage = zero.stage if mesh.shard > 1 else 0
    draft.note_if(stage != zero.stage, f"zero.stage {zero.stage}: mesh.shard is 1, nothing is shared")
    draft.express("mesh.shard", "mesh.replicate", "zero.stage")
    if mesh.shard > 1:
        draft.express("zero.gradient_sync")
    draft.note_if(
        zero.gradient_sync is not None and steps > 1 and zero.reduces_each_micro_batch != (stage >= 2),
        f"zero.gradient_sync {zero.gradient_sync}: {system} reduces "
        + ("after each micro batch" if stage >= 2 else "once a step"),
    )
    return stage


def distributed_optimizer(job: Job, draft: Draft) -> Arguments:
    replicate = job.strategy.mesh.replicate
    copies = [f"--num-distributed-optimizer-instances {replicate}"] if replicate > 1 else []
    return ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", *copies]


def model_parallel(job: Job, draft: Draft, system: str) -> Arguments:
    """Embedding and head are split too, over the tensor ranks."""
    strategy = job.strategy
    mesh, pipeline = strategy.mesh, strategy.pipeline
    draft.express("mesh.tensor", "mesh.pipeline", "tensor.sequence")
    arguments = [
        f"--tensor-model-parallel-size {mesh.tensor}",
        f"--pipeline-model-parallel-size {mesh.pipeline}",
    ]
    arguments += ["--sequence-parallel"] if strategy.tensor.sequence else []
    if mesh.pipeline > 1 and pipeline.stages_per_rank > 1:
        arguments += [f"--num-virtual-stages-per-pipeline-rank {pipeline.stages_per_rank}"]
        draft.express("pipeline.schedule", "pipeline.stages_per_rank")
    draft.note_if(
        pipeline.schedule == "gpipe",
        f"pipeline.schedule gpipe: {system} runs 1f1b, which holds less",
        "pipeline.schedule",
    )
    return arguments


def block_recompute(job: Job, draft: Draft) -> Arguments:
    """Whole blocks in full: all of them, or the first of each stage."""
    tiers, strategy = job.tiers, job.strategy
    stages = strategy.mesh.pipeline * strategy.pipeline.stages_per_rank
    count = tiers.most_in_a_stage(stages)
    everything = tiers.recomputed == len(tiers.names)
    nearest = "all blocks" if everything else f"the first {count} blocks{'' if stages == 1 else ' of each stage'}"
    draft.express("tiers")
    draft.note_if(
        not tiers.full_first(stages),
        f"tiers {tiers.text}: {nearest} in full are nearest in no more memory",
    )
    if everything:
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return ["--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {count}"]


def _activation(job: Job, draft: Draft) -> Arguments:
    tiers = job.tiers
    if tiers.keeps_all:
        return []
    for alike, modules in _SELECTIVE.items():
        if tiers.all_are(*alike):
            draft.express("tiers")
            draft.note_if(
                modules == _NORMS_AND_MLP,
                f"tiers {tiers.text}: norms, and each mlp with its matmuls, are recomputed: nearest in no more memory",
            )
            return ["--recompute-granularity selective", f"--recompute-modules {modules}"]
    return block_recompute(job, draft)


_NORMS_AND_MLP = "layernorm mlp"
# By tiers, where all blocks have one of them: --recompute-modules of TransformerConfig.
_SELECTIVE = {
    ("discard", "pointwise", "selective"): _NORMS_AND_MLP,
    ("recompute_core",): "core_attn",
    ("recompute_mlp",): "mlp",
}


def loss(job: Job, draft: Draft) -> Arguments:
    chunks = job.strategy.loss_chunks
    if chunks == 1:
        return []
    draft.note(
        f"loss_chunks {chunks}: logits are computed whole (split over tensor ranks), so the plan's memory does not "
        "hold; the fused cross entropy saves copies of them",
        "loss_chunks",
    )
    return ["--cross-entropy-loss-fusion"]
