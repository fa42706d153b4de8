"""From the options of a question to its Setting. Imports torch; `ask` imports it late."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainfit.cli.options import QuestionOptions
from trainfit.cli.setup import Say, choose_budget, choose_precision, find_hardware, open_recipe, open_workload
from trainfit.plan import Target
from trainfit.plan.layout import default_layouts
from trainfit.plan.questions import Setting, head_dim
from trainfit.profile import Layout, Mesh, OptimizerVariant, Zero
from trainfit.step.strategy_text import parse_variant
from trainfit.units import parse_bytes, parse_count


@dataclass(frozen=True)
class Asked:
    """A question's setting, and what was taken where the user left a choice."""

    setting: Setting
    notes: tuple[str, ...]
    layouts: tuple[Layout, ...]

    def every_layout(self) -> Target:
        """The target of a plan that may arrange its devices as it likes."""
        return replace(self.setting.target, layouts=self.layouts)


def sharded_over(devices: int) -> Layout:
    """One copy's parameters, gradients and states over all devices: the arrangement that needs the least of each."""
    return Layout() if devices == 1 else Layout(Mesh(shard=devices), Zero(3))


def open_question(options: QuestionOptions, say: Say, *, finds_length: bool = False) -> Asked:
    """finds_length: the sequence length is what is asked for."""
    recipe = open_recipe(options.model)
    hardware = find_hardware(options.device, recipe, options.devices)
    say(f"Building {options.model}")
    wanted = parse_bytes(options.memory) if options.memory else recipe.memory if recipe else None
    budget, budget_notes = choose_budget(wanted, hardware)
    precision = options.precision or (recipe.precision if recipe else "auto")
    taken, precision_notes = choose_precision(precision, hardware)
    seq_len = 1 if finds_length and recipe is None else options.seq_len
    workload = open_workload(options.model, recipe, seq_len)
    variant = recipe.optimizer.variant() if recipe else OptimizerVariant()
    variant = parse_variant(options.optimizer) if options.optimizer else variant
    layouts = recipe.layouts(options.devices) if recipe else default_layouts(options.devices)
    tokens = recipe.tokens_per_step if recipe else None
    tokens = parse_count(options.tokens_per_step) if options.tokens_per_step else tokens
    target = Target(
        budget,
        tokens or workload.seq_len * layouts[-1].mesh.data,
        workload.seq_len,
        taken,
        layouts=layouts[-1:],
        optimizer=variant,
        cast=recipe.cast if recipe and taken != "fp32" else "operator",
        frozen_weights=recipe.frozen_weights if recipe else "fp32",
        attention=recipe.attention if recipe else "auto",
    )
    norm = recipe.max_grad_norm if recipe else 1.0
    dim = head_dim(workload)
    setting = Setting(workload, hardware, target, layouts[-1], dim, norm, tokens is not None, say)
    return Asked(setting, (*budget_notes, *precision_notes), layouts)
