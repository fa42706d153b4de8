"""recipe_workload: the Workload that a recipe names, with the recipe's optimizer."""

from __future__ import annotations

import hashlib
import json
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from trainfit.errors import ModelError, RecipeError
from trainfit.train.recipe import Recipe
from trainfit.units import format_count
from trainfit.workload import (
    AdamWSettings,
    Workload,
    builtin_names,
    resolve_workload,
    with_adapter,
    with_frozen,
    with_trained_only,
    with_weights,
    workload_from_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def recipe_workload(recipe: Recipe) -> Workload:
    """A built-in name, a path relative to the recipe's folder, or the config written in the recipe.

    A config in the recipe that leaves out vocab_size gets that of the tokenizer to be trained. The recipe's adapter is
    put in and what it freezes is frozen; its weights are not looked at.
    Raises ModelError when there is no such model, RecipeError for a key that its config does not have and for targets
    and patterns that name nothing.
    """
    if isinstance(recipe.model, str):
        builtin = recipe.model.lower() in builtin_names()
        workload = resolve_workload(recipe.model if builtin else _located(recipe, recipe.model), recipe.seq_len)
    else:
        workload = _of_config(recipe.model, recipe)
    workload = workload.copy(optimizer=AdamWSettings(**recipe.optimizer.constants()))
    if recipe.adapter is not None:
        workload = with_adapter(workload, recipe.adapter.lora())
    if recipe.train_only is not None:
        workload = with_trained_only(workload, recipe.train_only)
    if recipe.freeze is not None:
        workload = with_frozen(workload, recipe.freeze)
    return workload if recipe.weights is None else with_weights(workload, recipe.resolve(recipe.weights))


def _of_config(config: dict[str, Any], recipe: Recipe) -> Workload:
    known = _defaults(config["model_type"])
    _check_keys(config, known, "model")
    settings = _with_vocab_size(config, known, recipe.data.tokenizer.vocab_size)
    workload = workload_from_config(settings, seq_len=recipe.seq_len, name=f"the recipe's {config['model_type']}")
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
    size = format_count(workload.anatomy().num_parameters)
    return workload.copy(name=f"{config['model_type']}-{size}-{digest}")


def _located(recipe: Recipe, model: str) -> str:
    path = recipe.resolve(model)
    # What is no path stays as written, so that the error names it so and offers the nearest built-in.
    return str(path) if path.exists() or path.suffix == ".json" else model


def _defaults(model_type: str) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"unknown model_type {model_type!r} in the recipe's model; transformers knows "
            f"{', '.join(get_close_matches(model_type, list(CONFIG_MAPPING), n=3) or sorted(CONFIG_MAPPING)[:5])}"
        )
    known: PreTrainedConfig = CONFIG_MAPPING[model_type]()
    return known


def _check_keys(config: dict[str, Any], known: PreTrainedConfig, where: str) -> None:
    """transformers takes any key and ignores those it does not know, so hiden_size would train another model."""
    names = [*known.to_dict(), *known.attribute_map]
    for key, value in config.items():
        if not hasattr(known, key):
            near = get_close_matches(key, names, n=1)
            hint = f"did you mean {where}.{near[0]}?" if near else f"{known.model_type} has no such setting: remove it"
            raise RecipeError(f"unknown key {where}.{key}; {hint}")
        if key in known.sub_configs and isinstance(value, dict):
            _check_keys(value, getattr(known, key), f"{where}.{key}")


def _with_vocab_size(config: dict[str, Any], known: PreTrainedConfig, trained: int | None) -> dict[str, Any]:
    """trained: tokens of the tokenizer to be trained, None for one that is there."""
    if "text_config" in known.sub_configs:  # a model of texts and images keeps its vocabulary there
        text = config.get("text_config") or {}
        return {**config, "text_config": _with_vocab_size(text, known.text_config, trained)}
    if "vocab_size" in config or trained is None:
        return config
    return {**config, "vocab_size": trained}
