"""The optimizer, in the variant that a strategy names, with its states built up front.

The first step then needs no more memory than the second.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, AdamW, Optimizer

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import Accelerator, Hardware
from trainfit.hardware.ranks import local_part
from trainfit.hardware.runtime import PRECISION_OF, fused_adamw_ignores_grad_scaler
from trainfit.profile import Accuracy, Mesh, OptimizerVariant, Precision, WeightStorage
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.techniques.host_adamw import HostAdamW
from trainfit.techniques.stored_adamw import StoredAdamW, first_step
from trainfit.techniques.stored_moments import BLOCK, moments
from trainfit.techniques.stored_weights import WEIGHTS, Weights
from trainfit.workload import AdamWSettings

_HANDLES = "_trainfit_update_handles"

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class OptimizerStates:
    """Weights in the form in which they are kept, and the optimizer that updates them."""

    stage: ClassVar[Stage] = Stage.OPTIMIZER
    setting: ClassVar[str] = "optimizer"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[OptimizerVariant]:
        """What was asked for; where it may change, what saves memory against that."""
        mesh, precision = so_far["mesh"], so_far["precision"]
        wanted: OptimizerVariant = asked.settings["optimizer"]
        may_change = "optimizer" in asked.may_change
        found = [wanted, *(smaller_variants(wanted, precision, asked.hardware.is_host) if may_change else [])]
        if may_change:
            found = [skipping(each, precision, asked.hardware) for each in found]
        for variant in dict.fromkeys(found):
            clips = asked.clips and variant.update == "backward" and variant != wanted
            if not clips and _reason_against(variant, mesh) is None:
                yield variant

    def apply(self, build: Build, setting: OptimizerVariant) -> None:
        forget_updates(build.model)
        mesh = build.ranks.mesh
        if build.workload.make_optimizer is not None:
            build.optimizer = _own_optimizer(build, setting)
            return
        if (reason := _reason_against(setting, mesh)) is not None:
            raise RecipeError(reason)
        if setting.kind == "adafactor":
            build.notes.append(
                "adafactor takes no optimizer.betas and eps, and scales optimizer.learning_rate by the size of each "
                "matrix's weights"
            )
        if setting.place == "host" and not build.accelerator.pins_memory and build.accelerator.is_beside_host:
            build.notes.append("host memory cannot be pinned here: copies of optimizer.place host do not overlap")
        if setting.place == "host" and build.accelerator.shares_host_memory:
            build.notes.append("optimizer.place host has no effect: this device's memory is the host's")
            setting = replace(setting, place="device")
        _refuse_other_weights(build)
        if setting.weights != "fp32":
            _refuse_mixed_norms(build)
        if setting.weights != "fp32" and setting.gradients == "fp32":
            build.gradient_dtype = torch.float32
        beside = store_weights(build.root or build.model, build.model, setting)
        build.optimizer = make_optimizer(
            build.model.named_parameters(), build.workload.optimizer, setting, beside=beside, device=build.accelerator
        )
        if setting.update == "backward":
            build.updates_in_backward = True
            update_in_backward(build.model, build.optimizer)


def skipping(variant: OptimizerVariant, precision: Precision, hardware: Hardware) -> OptimizerVariant:
    """The variant with a kernel that leaves out a step that overflowed: in fp16 some devices' fused AdamW does not."""
    deaf = precision == "fp16" and fused_adamw_ignores_grad_scaler(hardware.spec.kind)
    return replace(variant, kernel="foreach") if deaf else variant


def _reason_against(variant: OptimizerVariant, mesh: Mesh) -> str | None:
    """Why a variant does not work with a mesh."""
    if variant.update == "backward" and mesh.replicate > 1:
        return (
            f"optimizer.update backward updates before the {mesh.replicate} copies of mesh.replicate have summed "
            "their gradients; use mesh.shard with zero.stage 2 or 3, or optimizer.update: step"
        )
    if variant.kind == "adafactor" and max(mesh.shard, mesh.tensor) > 1:
        return (
            f"optimizer.kind adafactor needs whole matrices, this mesh splits them (shard {mesh.shard} x tensor "
            f"{mesh.tensor}); use optimizer.kind: adamw with states: int8"
        )
    return None


def smaller_variants(asked: OptimizerVariant, precision: Precision, on_host: bool) -> list[OptimizerVariant]:
    """Variants that save memory against the one that was asked for; Strategy knows which of them go together.

    on_host: whether the device computes in host memory, so that nothing is gained by moving states there.
    """
    if asked.kind != "adamw":  # nothing of these is known of other methods
        return []
    kept = [asked]
    may_be_half = precision == "bf16" and asked.weights == "fp32"
    if may_be_half:
        halves: tuple[WeightStorage, ...] = ("bf16_residual", "bf16_stochastic")
        kept += [replace(asked, weights=weights, gradients=sums) for weights in halves for sums in ("fp32", "half")]
    if asked.states == "fp32":
        kept += [replace(variant, states="int8") for variant in list(kept)]
    if asked.update == "step":
        kept += [replace(variant, update="backward") for variant in list(kept)]
    if not on_host and asked.place == "device":
        kept += [replace(asked, place="host")]
        if may_be_half:
            kept += [replace(asked, weights="bf16_master", gradients="half", place="host")]
        if precision == "fp16" and asked.weights == "fp32":
            kept += [replace(asked, weights="fp16_master", place="host")]
    return kept[1:]


def _refuse_other_weights(build: Build) -> None:
    """Report MP-08: a model that is half already would get half moments, and lose what is below rounding."""
    trained = [(name, local_part(p.detach()).dtype) for name, p in build.model.named_parameters() if p.requires_grad]
    if other := [(name, dtype) for name, dtype in trained if dtype != torch.float32]:
        names = ", ".join(name for name, _ in other[:3]) + (", ..." if len(other) > 3 else "")
        kind = PRECISION_OF.get(other[0][1], str(other[0][1]).removeprefix("torch."))
        raise ModelError(
            f"{len(other)} of {len(trained)} parameters that train are {kind} themselves ({names}): AdamW would keep "
            "moments in that too, and small updates would be lost; make the model in fp32 (module.float()) and set "
            "optimizer.weights for half weights"
        )


def _refuse_mixed_norms(build: Build) -> None:
    """Kernels of LayerNorm and GroupNorm take half weights with half inputs and a bias of the same dtype only."""
    named = [(n, m) for n, m in build.model.named_modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm)]
    halves = {name: {p.requires_grad for p in norm.parameters()} for name, norm in named}
    if mixed := [name for name, trains in halves.items() if len(trains) > 1]:
        raise RecipeError(
            f"half weights need norms that train whole or not at all, {mixed[0]} does in part; freeze its weight and "
            "bias, or neither, or set optimizer.weights: fp32"
        )
    frozen = [n for n, p in build.model.named_parameters() if not p.requires_grad and p.dtype == torch.float32]
    if frozen and any(True in trains for trains in halves.values()):
        raise RecipeError(
            f"half weights of norms need half inputs, and {frozen[0]} is frozen in fp32; set frozen_weights: half, or "
            "optimizer.weights: fp32"
        )


def _own_optimizer(build: Build, setting: OptimizerVariant) -> Optimizer:
    """The workload's own. Raises RecipeError for a variant beside it, ModelError for others' parameters."""
    if setting != OptimizerVariant():
        raise RecipeError(
            f"{build.workload.name} brings an optimizer of its own, which decides how states are kept; leave the "
            "strategy's optimizer out, or the workload's make_optimizer"
        )
    assert build.workload.make_optimizer is not None
    trained = [(name, p) for name, p in build.model.named_parameters() if p.requires_grad]
    optimizer = build.workload.make_optimizer(trained)
    known = {id(p) for p in build.model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if strangers := [p for p in held if id(p) not in known]:
        raise ModelError(
            f"the optimizer holds {len(strangers)} of {len(held)} parameters that the model does not have, such as one "
            f"of shape {tuple(strangers[0].shape)}: sharding, casts and adapters replace some; make it from those "
            "that make_optimizer is given"
        )
    if missing := [name for name, p in trained if all(p is not other for other in held)]:
        raise ModelError(
            f"the optimizer leaves out {len(missing)} of {len(trained)} parameters that train, such as {missing[0]}; "
            "give it all, or freeze them"
        )
    return optimizer


def make_optimizer(
    named_parameters: NamedParameters,
    settings: AdamWSettings,
    variant: OptimizerVariant | None = None,
    *,
    beside: dict[nn.Parameter, dict[str, Tensor]] | None = None,
    device: Accelerator | None = None,
) -> Optimizer:
    """The optimizer over the parameters that train, which are in their stored form already.

    Matrices decay, vectors (norms, biases) do not. beside: what store_weights() returned. device: where the parameters
    are, for states on the host.
    """
    variant = variant or OptimizerVariant()
    groups = decay_groups(named_parameters, settings.weight_decay)
    if variant.kind == "adafactor":
        return _adafactor(groups, settings, variant)
    constants: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    if not is_stored(variant):
        fused = variant.kernel == "fused"
        optimizer = AdamW(groups, fused=fused, foreach=not fused, **constants)
        for parameter in (p for group in groups for p in group["params"]):
            optimizer.state[parameter] = _adamw_state(parameter, fused=fused)
        return optimizer
    if variant.place == "host":
        assert device is not None
        stored: StoredAdamW = HostAdamW(groups, variant, device, **constants)
    else:
        stored = StoredAdamW(groups, variant, **constants)
    stored.begin(beside or {})
    return stored


def states_on_device(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer keeps where its parameters are."""
    if isinstance(optimizer, HostAdamW):
        return []
    states = (value for state in optimizer.state.values() for value in state.values())
    tables = optimizer.tables if isinstance(optimizer, StoredAdamW) else []
    return [*(value for value in states if isinstance(value, Tensor)), *tables]


def is_stored(variant: OptimizerVariant) -> bool:
    """Whether it takes StoredAdamW; torch's own AdamW is one kernel for all parameters."""
    plain = OptimizerVariant(kernel=variant.kernel)
    return variant.kind == "adamw" and variant != plain


def decay_groups(named_parameters: NamedParameters, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: those that decay, and tensors of one mesh, or plain ones, as one fused update takes them."""
    groups: dict[Any, dict[str, Any]] = {}
    for _, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        decays = parameter.dim() >= 2
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        group = groups.setdefault((not decays, mesh), {"params": [], "weight_decay": weight_decay if decays else 0.0})
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def _adamw_state(parameter: nn.Parameter, *, fused: bool) -> dict[str, Any]:
    """What AdamW itself would set up in its first step."""
    return {
        # Without fused, steps are counted on the host.
        "step": first_step(parameter.device if fused else torch.device("cpu")),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def _adafactor(groups: list[dict[str, Any]], settings: AdamWSettings, variant: OptimizerVariant) -> Adafactor:
    # It scales the rate by the size of each matrix, and has no use for betas and eps.
    optimizer = Adafactor(groups, lr=settings.learning_rate, foreach=variant.kernel == "foreach")
    for parameter in (p for group in groups for p in group["params"]):
        state: dict[str, Any] = {"step": first_step()}
        if parameter.dim() > 1:
            state["row_var"] = parameter.new_zeros((*parameter.shape[:-1], 1))
            state["col_var"] = parameter.new_zeros((*parameter.shape[:-2], 1, parameter.shape[-1]))
        else:
            state["variance"] = torch.zeros_like(parameter)
        optimizer.state[parameter] = state
    return optimizer


@torch.no_grad()
def store_weights(
    root: nn.Module, model: nn.Module, variant: OptimizerVariant
) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Turns the parameters that train into their stored form, in place. Returns what lies beside each.

    root: what is sharded as one, or the model.
    """
    weights = WEIGHTS[variant.weights]
    if weights.half is None:
        return {}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if any(isinstance(parameter, DTensor) for parameter in trained.values()):
        beside = _split_sharded(root, model, trained, weights)
    else:
        beside = {}
        for parameter in trained.values():
            parameter.data, beside[parameter] = _split(parameter, weights)
    for parameter in beside:
        if variant.gradients == "fp32":
            parameter.grad_dtype = torch.float32
    for module in root.modules():
        if isinstance(module, FSDPModule) and variant.gradients == "fp32":
            _reduce_into_fp32(module)
    return beside


def _split_sharded(
    root: nn.Module, model: nn.Module, trained: Mapping[str, nn.Parameter], weights: Weights
) -> dict[nn.Parameter, dict[str, Tensor]]:
    """By _apply, after which FSDP looks at its parameters again."""
    parts: dict[int, dict[str, Tensor]] = {}
    before = {name: id(parameter) for name, parameter in trained.items()}

    def halved(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        # A tied parameter comes by once for each of its names. What stays is given back as another tensor: modules may
        # swap the two, which one that something has a weak reference to does not allow.
        if not tensor.requires_grad or id(tensor) in parts:
            return tensor.detach()
        half, parts[id(tensor)] = _split(tensor, weights)
        return half

    root._apply(halved)
    return {model.get_parameter(name): parts[number] for name, number in before.items()}


def _split(parameter: nn.Parameter, weights: Weights) -> tuple[Tensor, dict[str, Tensor]]:
    half, beside = weights.split(local_part(parameter.detach()))
    if isinstance(parameter, DTensor):
        whole = DTensor.from_local(
            half,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return whole, beside
    return half, beside


def _reduce_into_fp32(module: FSDPModule) -> None:
    """FSDP turns reduced gradients into the dtype of the parameter, and would add up micro batches in it.

    There is no setting for it (torch 2.13): its groups take the dtype from their parameters at the first forward.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        assert hasattr(group, "_orig_dtype") or callable(group._init_mp_dtypes), "this torch's FSDP is another"
        original = group._init_mp_dtypes

        def init(group: Any = group, original: Any = original) -> None:
            original()
            group._orig_dtype = torch.float32

        group._init_mp_dtypes = init  # type: ignore[method-assign]


def update_in_backward(model: nn.Module, optimizer: Optimizer) -> None:
    """Each parameter is updated as soon as its gradient is whole, which then goes."""
    assert isinstance(optimizer, StoredAdamW)
    handles = vars(model).setdefault(_HANDLES, [])
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            hook = partial(_update, weakref.ref(optimizer), index)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))


def forget_updates(model: nn.Module) -> None:
    """Undo update_in_backward: a model may be built again under another strategy, while the first step is alive."""
    for handle in vars(model).pop(_HANDLES, ()):
        handle.remove()


def _update(optimizer: weakref.ref[StoredAdamW], index: int, parameter: Any) -> None:
    """Holds no optimizer: the collector does not see hooks, so parameters that lead to themselves would stay."""
    alive = optimizer()
    if alive is not None and parameter.grad is not None:
        alive.update(parameter, alive.param_groups[index])
        parameter.grad = None


ACCURACY_WORDS: Mapping[Accuracy, str] = {
    "exact": "exact: the same updates as plain fp32 AdamW",
    "rounding": "rounding only: single results have 16 bits, sums over steps have 32",
    "lossy": "lossy: weights or moments have fewer bits than fp32 from step to step",
}


def accuracy_of(variant: OptimizerVariant, precision: Precision) -> Accuracy:
    """What a variant does to what is learnt.

    "exact": fp32 AdamW on fp32 weights, wherever and whenever it runs. "rounding": results are rounded to 16 bits, but
    what adds up over steps is not. "lossy": weights or moments have less than fp32 from step to step, or the method is
    another.
    """
    if variant.kind != "adamw" or variant.states != "fp32" or variant.weights in ("bf16_kahan", "bf16_stochastic"):
        return "lossy"
    if precision != "fp32" or variant.gradients == "half":
        return "rounding"
    return "exact"


@dataclass(frozen=True)
class BytesPerParameter:
    """Of a weight matrix on the device, scales of wide rows included.

    weights: in the model. beside: masters, residuals or compensations. moments: both. gradients: what the whole model's
    take before the update; 0.0 where each goes at once.
    """

    weights: float
    beside: float
    moments: float
    gradients: float

    @property
    def total(self) -> float:
        return self.weights + self.beside + self.moments + self.gradients


def bytes_per_parameter(variant: OptimizerVariant) -> BytesPerParameter:
    """The table from which plans are made: sizes of what one block of a matrix is stored as."""
    value = torch.zeros(1, BLOCK)
    weight, beside = WEIGHTS[variant.weights].split(value)
    if variant.kind == "adafactor":
        kept: list[Tensor] = []  # a row and a column, which are nothing beside a matrix
    else:
        kept = [part for moment in moments(variant.states) for part in moment.first(value).values()]
    gradient = weight.element_size() if variant.gradients == "half" else 4
    on_device = variant.place == "device"
    return BytesPerParameter(
        weights=weight.element_size(),
        beside=sum(part.nbytes for part in beside.values()) / BLOCK * on_device,
        moments=sum(part.nbytes for part in kept) / BLOCK * on_device,
        gradients=0.0 if variant.update == "backward" else float(gradient),
    )
