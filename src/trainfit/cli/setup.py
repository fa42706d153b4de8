"""From options to what the library takes: a Workload, a Strategy and a device. Imports torch; verbs import it late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainfit.cli.options import StepOptions
from trainfit.errors import DeviceError, DoesNotFitError, RecipeError
from trainfit.hardware import Accelerator, Hardware, accelerator, find_device, this_machine
from trainfit.profile import PRECISIONS, Precision
from trainfit.step import Strategy, parse_tiers
from trainfit.techniques.chunked_loss import auto_chunks
from trainfit.units import format_bytes
from trainfit.workload import Workload, resolve_workload, split_head

if TYPE_CHECKING:
    from trainfit.plan import Plan, Target
    from trainfit.train import Recipe

Say = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """One step to rehearse, measure or verify. notes: what was taken where the user left a choice."""

    workload: Workload
    strategy: Strategy
    max_grad_norm: float | None = 1.0
    notes: tuple[str, ...] = ()


def is_recipe(model: str) -> bool:
    return Path(model).suffix.lower() in (".yaml", ".yml")


def find_hardware(name: str, count: int = 1) -> Hardware:
    """A device of the catalogue, or of this machine by `this` or its kind."""
    if name in ("cuda", "npu"):
        return Hardware(this_machine(name).spec, count)  # type: ignore[arg-type]
    return find_device(name, count)


def local_device(name: str) -> tuple[Accelerator, Hardware]:
    """A device that is here. Raises DeviceError for one of the catalogue that is not this machine's."""
    hardware = find_hardware(name)
    device = accelerator(hardware.spec.kind)
    here = this_machine(hardware.spec.kind)
    if here.spec.name != hardware.spec.name:
        raise DeviceError(
            f"this machine's {device.kind} device is {here.spec.name}, not {hardware.spec.name}; leave out --device"
        )
    return device, here


def prepare(options: StepOptions, hardware: Hardware, say: Say) -> Setup:
    """The step that the options name; a recipe without --micro-batch runs what its plan chooses.

    Raises RecipeError, ModelError, DeviceError or DoesNotFitError for what cannot be used.
    """
    if is_recipe(options.model):
        return _prepare_recipe(options, hardware, say)
    if options.seq_len is None:
        raise RecipeError("--seq-len is missing; give the tokens in a sequence, such as --seq-len 256")
    return _prepare_step(options, resolve_workload(options.model, options.seq_len), hardware)


def _prepare_step(options: StepOptions, workload: Workload, hardware: Hardware) -> Setup:
    precision, notes = choose_precision(options.precision or "fp32", hardware)
    micro_batch = options.micro_batch or 1
    tiers = parse_tiers(options.activation, len(workload.anatomy().blocks))
    chunks, chunk_notes = _loss_chunks(options.loss_chunks, workload, micro_batch * workload.seq_len)
    strategy = Strategy(micro_batch, options.accumulation, precision, tiers, chunks)
    return Setup(workload, strategy, notes=(*notes, *chunk_notes))


def _prepare_recipe(options: StepOptions, hardware: Hardware, say: Say) -> Setup:
    from dataclasses import replace

    from trainfit.train import load_recipe, recipe_workload

    recipe = load_recipe(options.model)
    workload = recipe_workload(recipe)
    if options.seq_len is not None:
        workload = workload.with_seq_len(options.seq_len)
    if options.micro_batch is not None:
        step = _prepare_step(replace(options, precision=options.precision or recipe.precision), workload, hardware)
        return replace(step, max_grad_norm=recipe.max_grad_norm)
    plan = plan_recipe(recipe, workload, hardware, say)
    notes = (f"the step is the one that the plan {plan.hash} of {options.model} chose", *plan.notes)
    return Setup(workload, plan.strategy, recipe.max_grad_norm, notes)


def plan_recipe(recipe: Recipe, workload: Workload, hardware: Hardware, say: Say) -> Plan:
    """The plan of a recipe. Raises DoesNotFitError when no strategy fits its memory."""
    from trainfit.plan import choose

    target, notes = recipe_target(recipe, workload, hardware)
    plan = choose(workload, hardware, target, max_grad_norm=recipe.max_grad_norm, on_progress=say)
    if not plan.fits:
        raise DoesNotFitError(plan.reason)
    return _with_notes(plan, notes)


def recipe_target(recipe: Recipe, workload: Workload, hardware: Hardware) -> tuple[Target, tuple[str, ...]]:
    """What the recipe asks of a plan, and what was rounded or capped."""
    from trainfit.plan import Target

    budget_bytes, notes = choose_budget(recipe.memory, hardware)
    tokens = recipe.sequences_per_step * workload.seq_len
    may_change = frozenset(recipe.may_change)
    return Target(budget_bytes, tokens, workload.seq_len, recipe.precision, may_change), notes


def _with_notes(plan: Plan, notes: tuple[str, ...]) -> Plan:
    from dataclasses import replace

    return replace(plan, notes=(*notes, *plan.notes))


def choose_precision(text: str, hardware: Hardware) -> tuple[Precision, tuple[str, ...]]:
    """The precision asked for; auto is bf16 on a device that has it, fp32 on a CPU and elsewhere.

    Raises RecipeError for an unknown name and DeviceError for one that the device lacks.
    """
    if text == "auto":
        fast = hardware.spec.kind != "cpu" and hardware.supports("bf16")
        taken: Precision = "bf16" if fast else "fp32"
        return taken, (f"precision auto took {taken} on {hardware.spec.name}",)
    if text not in PRECISIONS:
        raise RecipeError(f"unknown --precision {text!r}; use one of {', '.join(PRECISIONS)} or auto")
    precision: Precision = text  # type: ignore[assignment]
    hardware.require(precision)
    return precision, ()


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


def whole_sequences(tokens: int, seq_len: int) -> tuple[int, tuple[str, ...]]:
    """The number of sequences nearest to tokens, at least one, and a note where that rounds."""
    sequences = max(1, round(tokens / seq_len))
    rounded = sequences * seq_len
    if rounded == tokens:
        return sequences, ()
    return sequences, (f"{tokens} tokens a step are {rounded} in whole sequences: {sequences} of {seq_len}",)


def require_free(needed_bytes: int, device: Accelerator, what: str) -> None:
    """Raises DoesNotFitError before a real step would run this machine out of memory."""
    free = device.memory.free_bytes()
    if needed_bytes > free:
        raise DoesNotFitError(
            f"{what} needs {format_bytes(needed_bytes)}, this {device.kind} has {format_bytes(free)} free; "
            "try a smaller --micro-batch or --activation full, or rehearse instead of measure"
        )


def _loss_chunks(text: str, workload: Workload, tokens: int) -> tuple[int, tuple[str, ...]]:
    """The number of pieces, one where the head cannot be cut off."""
    if text != "auto":
        if not text.isdecimal() or not 1 <= int(text) <= tokens:
            raise RecipeError(f"--loss-chunks is {text!r}; give auto or a number from 1 to the {tokens} tokens at once")
        if int(text) == 1:
            return 1, ()
    with torch.device("meta"):
        model = workload.make_model()
    anatomy = workload.anatomy()
    split = "the model has a loss of its own" if workload.loss is not None else split_head(model, anatomy)
    if isinstance(split, str):
        return 1, (f"the loss stays in one piece: {split}",)
    if text != "auto":
        return int(text), ()
    assert anatomy.head is not None, "a split has a head"
    dim = int(model.get_submodule(anatomy.head).weight.shape[-1])  # type: ignore[index]
    chunks = auto_chunks(tokens, workload.vocab_size, dim)
    return chunks, (f"loss chunks auto took {chunks}",)
