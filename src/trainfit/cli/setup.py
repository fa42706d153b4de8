"""From options to what the library takes: a Workload, a Strategy and a device. Imports torch; verbs import it late."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from trainfit.cli.options import StepOptions
from trainfit.errors import DeviceError, DoesNotFitError, RecipeError
from trainfit.hardware import Accelerator, Hardware, Launch, accelerator, find_device, this_machine
from trainfit.plan import Plan, Target, choose
from trainfit.plan.held import choose_held
from trainfit.plan.per_batch import choose_per_batch
from trainfit.plan.policies import Situation, parse_policy
from trainfit.profile import (
    PRECISIONS,
    AllocatorSettings,
    Offload,
    OptimizerVariant,
    Precision,
    Tier,
)
from trainfit.second_process import SecondProcess
from trainfit.step import Strategy
from trainfit.step.build import prepare as prepare_build
from trainfit.step.strategy_text import (
    parse_compile,
    parse_offload,
    parse_variant,
)
from trainfit.techniques.chunked_loss import auto_chunks
from trainfit.techniques.pipeline_cut import divide
from trainfit.train import Recipe, load_recipe, recipe_workload
from trainfit.units import format_bytes
from trainfit.workload import Workload, resolve_workload

_UNCLIPPED = "nothing is clipped: an update in backward knows no norm of all gradients"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """One step to rehearse, measure or verify. notes: what was taken where the user left a choice."""

    workload: Workload
    strategy: Strategy
    max_grad_norm: float | None = 1.0
    notes: tuple[str, ...] = ()

    def about(self, hardware: Hardware) -> About:
        """What every answer names."""
        return {
            "model": self.workload.name,
            "device": hardware.spec.name,
            "seq_len": self.workload.seq_len,
            "notes": self.notes,
        }


class About(TypedDict):
    """What a step is about."""

    model: str
    device: str
    seq_len: int
    notes: tuple[str, ...]


def open_recipe(model: str) -> Recipe | None:
    """The recipe when MODEL is the path of one, by its ending."""
    return load_recipe(model) if Path(model).suffix.lower() in (".yaml", ".yml") else None


def find_hardware(name: str | None, recipe: Recipe | None = None, count: int = 1) -> Hardware:
    """The device that is named; unsaid, the recipe's or this machine's."""
    return find_device(name or (recipe.device if recipe else "this"), count)


def local_device(
    name: str | None, recipe: Recipe | None = None, launch: Launch | None = None
) -> tuple[Accelerator, Hardware]:
    """A device that is here, for this process of a launch.

    Raises DeviceError for one of the catalogue that is not this machine's.
    """
    wanted, launch = find_hardware(name, recipe).spec, launch or Launch()
    try:
        device = accelerator(wanted.kind, index=launch.local_rank if launch.size > 1 else None)
        here = this_machine(wanted.kind).shared_by(launch.local_size)
    except DeviceError as error:
        raise DeviceError(f"{wanted.name} is not in this machine: {error}") from None
    if here.spec.name != wanted.name:
        raise DeviceError(f"the {wanted.kind} device here is {here.spec.name}, not {wanted.name}; name that one")
    return device, here


def prepare(options: StepOptions, recipe: Recipe | None, hardware: Hardware, say: Say) -> Setup:
    """The step that the options name; a recipe without --micro-batch runs what its plan chooses.

    Raises RecipeError, ModelError, DeviceError or DoesNotFitError for what cannot be used.
    """
    if recipe is None:
        return _prepare_step(options, open_workload(options.model, None, options.seq_len), hardware)
    workload = open_workload(options.model, recipe, options.seq_len)
    if options.micro_batch is not None:
        precision = options.precision or recipe.precision
        step = _prepare_step(replace(options, precision=precision), workload, hardware, recipe)
        return replace(step, max_grad_norm=recipe.max_grad_norm if step.max_grad_norm else None)
    if options.said:
        devices = f" --devices {options.devices}" if options.devices > 1 else ""
        raise RecipeError(
            f"a recipe with {' '.join(options.said)} lacks --micro-batch; give one, such as --micro-batch 1 "
            f"(`trainfit plan {options.model}{devices}` finds the fastest), or leave them out to run the plan's step"
        )
    plan = plan_recipe(recipe, workload, hardware, say)
    notes = (f"the step is the one that the plan {plan.hash} of {options.model} chose", *plan.notes)
    return Setup(workload, plan.strategy, recipe.max_grad_norm, notes)


def open_workload(model: str, recipe: Recipe | None, seq_len: int | None) -> Workload:
    """The model that is named or that the recipe describes. Raises RecipeError where seq_len is nowhere given."""
    if recipe is not None:
        workload = recipe_workload(recipe)
        return workload if seq_len is None else workload.with_seq_len(seq_len)
    if seq_len is None:
        raise RecipeError("--seq-len is missing; give the tokens in a sequence, such as --seq-len 256")
    return resolve_workload(model, seq_len)


def _prepare_step(options: StepOptions, workload: Workload, hardware: Hardware, recipe: Recipe | None = None) -> Setup:
    """recipe: says what the options leave open of optimizer, casts and loss scale."""
    precision, notes = choose_precision(options.precision or "fp32", hardware)
    micro_batch = options.micro_batch or 1
    tiers = _tiers(options, workload)
    chunks, chunk_notes = _loss_chunks(options.loss_chunks, workload, micro_batch * workload.seq_len)
    mesh, zero = options.mesh_and_zero()
    own = recipe.optimizer.variant() if recipe is not None else OptimizerVariant()
    variant = own if options.optimizer is None else parse_variant(options.optimizer)
    cast: Any = options.cast or (recipe.cast if recipe is not None else "operator")  # Strategy looks at it
    scale = None
    if recipe is not None and recipe.loss_scale is not None and precision == "fp16":
        scale = recipe.loss_scale.loss_scale()
    strategy = Strategy(
        micro_batch,
        options.accumulation,
        precision,
        tiers,
        chunks,
        variant,
        cast if precision != "fp32" or options.cast else "operator",
        scale,
        "fp32" if recipe is None else recipe.frozen_weights,
        mesh=mesh,
        zero=zero,
        allocator=AllocatorSettings() if recipe is None or recipe.allocator is None else recipe.allocator.settings(),
        recompute_ahead=_recompute_ahead(options, recipe),
        compile=parse_compile(options.compile or (recipe.compile if recipe is not None else "none")),
        offload=_offload(options, recipe),
        attention=_attention(options, recipe),
    )
    if variant.update == "backward":
        return Setup(workload, strategy, None, (*notes, *chunk_notes, _UNCLIPPED))
    return Setup(workload, strategy, notes=(*notes, *chunk_notes))


def _recompute_ahead(options: StepOptions, recipe: Recipe | None) -> int:
    said = options.recompute_ahead
    if said is None and recipe is not None:
        said = recipe.recompute_ahead
    return said or 0


def _offload(options: StepOptions, recipe: Recipe | None) -> Offload:
    """Where the options, else the recipe, let blocks put what they save."""
    if options.offload is not None:
        return parse_offload(options.offload)
    return Offload() if recipe is None or recipe.offload is None else recipe.offload.settings()


def _attention(options: StepOptions, recipe: Recipe | None) -> Any:  # Strategy looks at it
    asked = options.attention or (recipe.attention if recipe is not None else "model")
    return "model" if asked == "auto" and not options.attention else asked


def _tiers(options: StepOptions, workload: Workload) -> tuple[Tier, ...]:
    """Of a policy that needs no plan. Raises RecipeError for one that does."""
    blocks = len(workload.anatomy().blocks)
    stages = tuple(len(part.blocks) for part in divide(blocks, options.pipeline)) if options.pipeline > 1 else None
    return parse_policy(options.activation).tiers(Situation(blocks, stages))


def recipe_target(recipe: Recipe, workload: Workload, hardware: Hardware) -> tuple[Target, tuple[str, ...]]:
    """What the recipe asks of a plan, and what was capped."""
    budget_bytes, notes = choose_budget(recipe.memory, hardware)
    target = Target(
        budget_bytes,
        recipe.tokens_per_step,
        workload.seq_len,
        recipe.precision,
        frozenset(recipe.may_change),
        recipe.layouts(hardware.count),
        recipe.optimizer.variant(),
        recipe.cast,
        None if recipe.loss_scale is None else recipe.loss_scale.loss_scale(),
        recipe.frozen_weights,
        None if recipe.allocator is None else recipe.allocator.settings(),
        recompute_ahead=recipe.recompute_ahead,
        compile=parse_compile(recipe.compile),
        offload=None if recipe.offload is None else recipe.offload.settings(),
        attention=recipe.attention,
    )
    return target, notes


def plan_recipe(
    recipe: Recipe, workload: Workload, hardware: Hardware, say: Say, *, optimizer: OptimizerVariant | None = None
) -> Plan:
    """The plan of a recipe. Raises DoesNotFitError when no strategy fits its memory.

    optimizer: the variant of a run that goes on, whose saved states no other can take.
    """
    target, notes = recipe_target(recipe, workload, hardware)
    if optimizer is not None and "optimizer" in target.may_change:
        target = replace(target, optimizer=optimizer, may_change=target.may_change - {"optimizer"})
    plan = choose_for(recipe, workload, hardware, target, say, max_grad_norm=recipe.max_grad_norm)
    if not plan.fits:
        raise DoesNotFitError(plan.reason)
    return replace(plan, notes=(*notes, *plan.notes))


def choose_for(
    recipe: Recipe | None,
    workload: Workload,
    hardware: Hardware,
    target: Target,
    say: Say,
    *,
    max_grad_norm: float | None,
    beside: SecondProcess | None = None,
) -> Plan:
    """The best plan for a target, with the tiers of the recipe's policy where it names one."""
    if recipe is not None and recipe.per_batch is not None:
        return choose_per_batch(
            workload,
            hardware,
            target,
            threshold=recipe.per_batch.threshold,
            max_grad_norm=max_grad_norm,
            on_progress=say,
        )
    if recipe is None or recipe.activation is None:
        return choose(workload, hardware, target, max_grad_norm=max_grad_norm, on_progress=say, beside=beside)
    policy = parse_policy(recipe.activation)
    return choose_held(workload, hardware, target, policy, max_grad_norm=max_grad_norm, on_progress=say)


def read_plan(path: Path) -> Plan:
    """A plan that `trainfit plan --json` or a run wrote. Raises RecipeError when it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"no plan at {path}; write one with `trainfit plan RECIPE --json > {path}`") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read plan {path}: {error}; give what `trainfit plan --json` wrote") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path} holds a JSON {type(data).__name__}; give what `trainfit plan --json` wrote")
    return Plan.from_json(data)


def choose_precision(text: str, hardware: Hardware) -> tuple[Precision, tuple[str, ...]]:
    """The precision asked for; auto is bf16 on a device that has it, fp32 on a CPU and elsewhere.

    Raises RecipeError for an unknown name and DeviceError for one that the device lacks.
    """
    if text == "auto":
        fast = not hardware.is_host and hardware.supports("bf16")
        taken: Precision = "bf16" if fast else "fp32"
        return taken, (f"precision auto took {taken} on {hardware.spec.name}{_faster_in_fp16(hardware)}",)
    if text not in PRECISIONS:
        raise RecipeError(f"unknown --precision {text!r}; use one of {', '.join(PRECISIONS)} or auto")
    precision: Precision = text
    hardware.require(precision)
    return precision, ()


def _faster_in_fp16(hardware: Hardware) -> str:
    """A device without bf16 is slow in what auto takes; fp16 changes more than auto may decide."""
    rates = hardware.spec.tflops
    if hardware.is_host or "bf16" in rates or "fp16" not in rates:
        return ""
    times = rates["fp16"].value / rates["fp32"].value
    return f", which has no bf16 and computes {times:.0f} times as fast with --precision fp16"


def choose_budget(memory: int | None, hardware: Hardware) -> tuple[int, tuple[str, ...]]:
    """Bytes that tensors may take: what was asked for, no more than the device leaves, or all of that.

    Raises DeviceError for more memory than the device has.
    """
    usable, name = hardware.usable_bytes, hardware.spec.name
    if memory is None or memory <= usable:
        return memory or usable, ()
    if memory > hardware.total_bytes:
        raise DeviceError(
            f"memory {format_bytes(memory)} is more than the {format_bytes(hardware.total_bytes)} of {name}; "
            f"lower it to {format_bytes(usable)} or less"
        )
    return usable, (f"{name} leaves {format_bytes(usable)} to tensors: planned for that, not {format_bytes(memory)}",)


def require_free(needed_bytes: int, device: Accelerator, what: str) -> None:
    """Raises DoesNotFitError before a real step would run this machine out of memory."""
    free = device.memory.free_bytes()
    if needed_bytes > free:
        raise DoesNotFitError(
            f"{what} needs {format_bytes(needed_bytes)}, this {device.kind} has {format_bytes(free)} free; "
            "try a smaller micro batch, --activation full or a shorter sequence, or only rehearse"
        )


def _loss_chunks(text: str, workload: Workload, tokens: int) -> tuple[int, tuple[str, ...]]:
    """The number of chunks, one where the head cannot be cut off."""
    if text != "auto":
        if not text.isdecimal() or not 1 <= int(text) <= tokens:
            raise RecipeError(f"--loss-chunks is {text!r}; give auto or a number from 1 to the {tokens} tokens at once")
        if int(text) == 1:
            return 1, ()
    with torch.device("meta"):
        model = workload.make_model()
    split = prepare_build(workload, accelerator("cpu"), model).split
    if isinstance(split, str):
        return 1, (f"the loss stays in one chunk: {split}",)
    if text != "auto":
        return int(text), ()
    chunks = auto_chunks(tokens, workload.vocab_size, split.dim)
    return chunks, (f"loss chunks auto took {chunks}",)


def time_notes(hardware: Hardware) -> tuple[str, ...]:
    """Where predicted times come from, when it is this machine's calibration; a link's figure that is unsure."""
    calibration, link = hardware.spec.calibration, hardware.spec.link_bandwidth
    notes = [] if calibration is None else [f"times are from a calibration, {calibration.source}"]
    if hardware.count > 1 and link.confidence == "low":
        notes.append(f"times of links are from {link.value / 1e9:.0f} GB/s, {link.source}")
    return tuple(notes)
