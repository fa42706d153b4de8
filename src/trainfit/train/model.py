"""recipe_workload: the Workload that a recipe names, with the recipe's optimizer."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from torch import nn

from trainfit.errors import ModelError, RecipeError
from trainfit.train.recipe import Recipe
from trainfit.workload import AdamWSettings, Workload, builtin_names, resolve_workload
from trainfit.workload.huggingface import build_model, make_config


def recipe_workload(recipe: Recipe) -> Workload:
    """A built-in name, a path relative to the recipe's folder, or the config written in the recipe.

    A config in the recipe that leaves out vocab_size gets that of the tokenizer to be trained.
    Raises ModelError when there is no such model, RecipeError for a key that its config does not have.
    """
    if isinstance(recipe.model, str):
        builtin = recipe.model.lower() in builtin_names()
        workload = resolve_workload(recipe.model if builtin else _located(recipe, recipe.model), recipe.seq_len)
    else:
        settings = _with_vocab_size(recipe, recipe.model)
        _check_keys(settings)
        workload = _of_config(settings, recipe.seq_len)
    return replace(workload, optimizer=AdamWSettings(**recipe.optimizer.model_dump()))


def _of_config(settings: dict[str, Any], seq_len: int) -> Workload:
    name = f"the recipe's {settings['model_type']}"
    config = make_config(settings, name)

    def make_model() -> nn.Module:
        return build_model(deepcopy(config))  # a model writes into the config that it is built from

    positions = getattr(config, "max_position_embeddings", None)
    return Workload(name, make_model, config.vocab_size, max_seq_len=positions, seq_len=seq_len)


def _located(recipe: Recipe, model: str) -> str:
    path = recipe.resolve(model)
    # What is no path stays as written, so that the error names it so and offers the nearest built-in.
    return str(path) if path.exists() or path.suffix == ".json" else model


def _with_vocab_size(recipe: Recipe, config: dict[str, Any]) -> dict[str, Any]:
    trained = recipe.data.tokenizer.vocab_size
    if "vocab_size" in config or trained is None:
        return config
    return {**config, "vocab_size": trained}


def _check_keys(config: dict[str, Any]) -> None:
    """transformers takes any key and ignores those it does not know, so hiden_size would train another model."""
    from transformers import CONFIG_MAPPING

    model_type = config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"unknown model_type {model_type!r} in the recipe's model; transformers knows "
            f"{', '.join(get_close_matches(model_type, list(CONFIG_MAPPING), n=3) or sorted(CONFIG_MAPPING)[:5])}"
        )
    known = CONFIG_MAPPING[model_type]()
    names = [*known.to_dict(), *known.attribute_map]
    for key in config:
        if not hasattr(known, key):
            near = get_close_matches(key, names, n=1)
            hint = f"did you mean model.{near[0]}?" if near else f"{model_type} has no such setting: remove it"
            raise RecipeError(f"unknown key model.{key}; {hint}")
