"""How a model's modules are split over tensor-parallel ranks: from its plan in transformers, or from the workload's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from trainfit.errors import ModelError, RecipeError
from trainfit.workload.anatomy import Anatomy
from trainfit.workload.huggingface import is_transformers_model
from trainfit.workload.workload import Workload

SplitKind = Literal["columns", "columns_gathered", "rows", "rows_cut", "experts", "shared", "sequence"]

_OF_TRANSFORMERS: Mapping[str, SplitKind] = {
    "colwise": "columns",
    "colwise_gather_output": "columns_gathered",
    "colwise_rep": "columns_gathered",
    "rowwise": "rows",
    "rowwise_split_input": "rows_cut",
    "rowwise_rep": "rows_cut",
    "moe_tp_experts": "experts",
    "replicated_with_grad_allreduce": "shared",
}
_OF_A_USER: Mapping[str, SplitKind] = {"colwise": "columns", "rowwise": "rows", "sequence": "sequence"}
# Blocks in which everything between attention and mlp treats tokens one by one; tests train each of them.
SEQUENCE_MODELS = ("gemma2", "llama", "mistral", "qwen2", "qwen3")


@dataclass
class TensorPlan:
    """splits: kind by module name. notes: what stays whole on every rank though the plan would split it.

    columns: a Linear by output features, each rank's own go on to the next module; columns_gathered: all of them do.
    rows: a Linear by input features, whose input is split already; rows_cut: whose input is whole.
    experts: by number. shared: whole, but used on each rank's part of the heads. sequence: whole, on a part of the
    tokens.
    """

    splits: dict[str, SplitKind] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def tensor_plan(model: nn.Module, workload: Workload, anatomy: Anatomy, size: int) -> TensorPlan:
    """Which modules are split over `size` ranks, and how.

    Embedding and head stay whole. Raises ModelError for a model without a plan, RecipeError for a size that does not
    divide its heads.
    """
    if workload.tensor_plan is not None:
        return _users_plan(model, workload.tensor_plan)
    if not is_transformers_model(model):
        raise ModelError(
            f"{workload.name} has no tensor plan; name its linears in Workload.tensor_plan, such as "
            '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, or use mesh.shard instead of mesh.tensor'
        )
    styles = dict(_matches(model, _plan_of(model)))
    groups = _groups(styles, anatomy)
    if not groups:
        raise ModelError(
            f"transformers has no tensor plan for {_type_of(model)}; use mesh.shard {size} with zero.stage 3 "
            f"instead of mesh.tensor {size}"
        )
    plan = TensorPlan()
    modules = dict(model.named_modules())
    for group in groups.values():
        _add_group(plan, modules, group, size)
    _check_heads(model, plan, size)
    return plan


def _plan_of(model: Any) -> dict[str, str]:
    return model.tp_plan or {}


def _type_of(model: Any) -> str:
    return str(model.config.model_type)


def _users_plan(model: nn.Module, styles: Mapping[str, str]) -> TensorPlan:
    plan = TensorPlan()
    for pattern, style in styles.items():
        if style not in _OF_A_USER:
            raise RecipeError(f"tensor_plan has {style!r} for {pattern!r}; it is one of {', '.join(_OF_A_USER)}")
        names = [name for name, _ in _matches(model, {pattern: style})]
        if not names:
            raise RecipeError(f"tensor_plan names {pattern!r}, but no module; * stands for one part of a name")
        for name in names:
            if style != "sequence" and not isinstance(module := model.get_submodule(name), nn.Linear):
                raise RecipeError(
                    f"tensor_plan has {style!r} for {name}; it is for nn.Linear, not {type(module).__name__}"
                )
            plan.splits[name] = _OF_A_USER[style]
    for outer in (name for name, kind in plan.splits.items() if kind == "sequence"):
        if inner := next((name for name in plan.splits if name.startswith(f"{outer}.")), None):
            raise RecipeError(f"tensor_plan splits {inner} inside of {outer}, which has sequence; take one of them out")
    return plan


def _matches(model: nn.Module, styles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names of modules and parameters that a plan names; * is one part of a dotted name."""
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"[^.]+")), style) for key, style in styles.items()]
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for name in names:
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                yield name, style
                break


def _groups(styles: Mapping[str, str], anatomy: Anatomy) -> dict[str, dict[str, str]]:
    """The plan's entries by the part of a block that they lie in. A part is split as a whole or not at all, since its
    modules hand each other what is split."""
    groups: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        block = next((block for block in anatomy.blocks if name.startswith(f"{block}.")), None)
        if block is not None and style != "replicate":
            part = name[len(block) + 1 :].split(".")[0]
            groups.setdefault(f"{block}.{part}", {})[name] = style
    return groups


def _add_group(plan: TensorPlan, modules: Mapping[str, nn.Module], group: dict[str, str], size: int) -> None:
    experts = [name for name, style in group.items() if style == "moe_tp_experts"]
    for name in experts:
        # Experts take and give what all ranks have, so they can stay whole alone.
        group = {key: style for key, style in group.items() if key != name and not _is_own(key, name)}
        if (reason := _reason_against_experts(modules[name], size)) is None:
            plan.splits[name] = "experts"
        else:
            _note(plan, f"{_generic(name)} stays whole on every tensor rank: {reason}")
    unknown = [(name, style) for name, style in group.items() if not _is_known(modules.get(name), style)]
    if unknown:
        name, style = unknown[0]
        part = _generic(min(group, key=len).rpartition(".")[0])
        _note(plan, f"{part} stays whole on every tensor rank: {style} of {_generic(name)} is not supported")
        return
    plan.splits |= {name: _OF_TRANSFORMERS[style] for name, style in group.items()}


def _is_own(name: str, module_name: str) -> bool:
    return name.rpartition(".")[0] == module_name


def _is_known(module: nn.Module | None, style: str) -> bool:
    kind = _OF_TRANSFORMERS.get(style)
    return kind == "shared" if not isinstance(module, nn.Linear) else kind not in (None, "experts")


def _reason_against_experts(experts: Any, size: int) -> str | None:
    number = getattr(experts, "num_experts", None)
    if not isinstance(number, int) or not hasattr(experts, "_is_expert_parallel"):
        return f"a {type(experts).__name__} cannot skip experts"
    if any(parameter.shape[0] != number for parameter in experts.parameters()):
        return "not all of its parameters are stacked by expert"
    return f"mesh.tensor {size} does not divide {number} experts" if number % size else None


def _check_heads(model: Any, plan: TensorPlan, size: int) -> None:
    if not any(kind == "columns" and "att" in name.split(".")[-2] for name, kind in plan.splits.items()):
        return  # no attention, or one that sees all heads
    config = model.config.get_text_config()
    queries = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or queries
    numbers = [number for each in (queries, keys) for number in (each if isinstance(each, list) else [each])]
    common = math.gcd(*numbers)
    if common % size:
        allowed = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
        raise RecipeError(
            f"mesh.tensor {size} does not divide the {queries} attention heads and {keys} key-value heads of "
            f"{config.model_type}; it can be {allowed}"
        )


def check_sequence(model: nn.Module, workload: Workload, size: int) -> None:
    """Raises RecipeError if sequences cannot be split between the parts of the model's blocks."""
    model_type = _type_of(model) if is_transformers_model(model) else workload.name
    if not is_transformers_model(model) or model_type not in SEQUENCE_MODELS or workload.tensor_plan is not None:
        raise RecipeError(
            f"tensor.sequence is there for {', '.join(SEQUENCE_MODELS)} with their own plans, not for {model_type}; "
            "set it to false"
        )
    if workload.seq_len % size:
        raise RecipeError(f"tensor.sequence splits seq_len {workload.seq_len} over {size} ranks; make it a multiple")


def _generic(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _note(plan: TensorPlan, note: str) -> None:
    if note not in plan.notes:
        plan.notes.append(note)
