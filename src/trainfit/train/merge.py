"""What a run with an adapter or with quantised weights saved, as plain weights or as an adapter of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.errors import InputError, ModelError
from trainfit.techniques.quantised import dequantise
from trainfit.train.index import Index, SavedTensor, read_tensor
from trainfit.train.model import recipe_workload
from trainfit.train.recipe import Recipe
from trainfit.train.storage import DTYPES_BY_NAME, Entry, write_safetensors
from trainfit.workload.adapter import ADAPTER, lora_config, lora_layers
from trainfit.workload.names import base_name, is_adapter_name

ADAPTER_FILE = "adapter_model.safetensors"
_OF_PEFT = "base_model.model."  # what PeftModel has in front of every name


def entry_of(checkpoint: Path, saved: SavedTensor) -> Entry:
    """A tensor as it was saved."""
    return Entry(DTYPES_BY_NAME[saved.kind.dtype], saved.kind.shape, lambda: read_tensor(checkpoint, saved))


def merged_entries(checkpoint: Path, tensors: Index, model: nn.Module | None) -> dict[str, Entry]:
    """Weights under their names without an adapter, each merged and dequantised when it is read.

    model: the run's, on meta, with its adapter. W + scaling * B A is computed in fp32 and rounded to W's dtype; codes
    become fp32. Raises ModelError where there is something to merge or to dequantise, but no model.
    """
    if not any(is_adapter_name(name) or name.endswith(".codes") for name in tensors):
        return {name: entry_of(checkpoint, saved) for name, saved in tensors.items()}
    if model is None:
        raise ModelError(
            f"{checkpoint} has an adapter or quantised weights, but its run folder has no config.json and the recipe's "
            "model is not found; put the model's config.json into the run folder"
        )
    kept = model.state_dict()
    layers = dict(lora_layers(model))
    entries: dict[str, Entry] = {}
    for name, saved in tensors.items():
        module, _, leaf = name.rpartition(".")
        is_codes = leaf == "codes" and name not in kept
        if is_adapter_name(name) or (leaf == "scales" and name not in kept):
            continue
        entry = entry_of(checkpoint, saved)
        if is_codes:
            name = f"{module}.weight"
            entry = _dequantised(checkpoint, saved, tensors[f"{module}.scales"], tuple(kept[name].shape))
        layer = layers.get(module.removesuffix(".base_layer"))
        if layer is not None and name.endswith(".base_layer.weight"):
            entry = _merged(checkpoint, tensors, module.removesuffix(".base_layer"), layer, entry)
        entries[base_name(name)] = entry
    return entries


def _dequantised(checkpoint: Path, codes: SavedTensor, scales: SavedTensor, shape: tuple[int, ...]) -> Entry:
    def read() -> Tensor:
        return dequantise(read_tensor(checkpoint, codes), read_tensor(checkpoint, scales), shape, torch.float32)

    return Entry(torch.float32, shape, read)


def _merged(checkpoint: Path, tensors: Index, module: str, layer: Any, base: Entry) -> Entry:
    first, second = (tensors[f"{module}.lora_{which}.{ADAPTER}.weight"] for which in "AB")
    scaling, transposed = layer.scaling[ADAPTER], layer.fan_in_fan_out

    def read() -> Tensor:
        change = read_tensor(checkpoint, second).float() @ read_tensor(checkpoint, first).float()
        weight = base.read().float()
        return weight.add_(change.t() if transposed else change, alpha=scaling).to(base.dtype)

    return Entry(base.dtype, base.shape, read)


def write_adapter(checkpoint: Path, tensors: Index, recipe: Recipe, folder: Path) -> dict[str, Entry]:
    """adapter_model.safetensors and adapter_config.json, which peft.PeftModel.from_pretrained loads on the base.

    Raises InputError for a run without an adapter.
    """
    adapter = {name: saved for name, saved in tensors.items() if is_adapter_name(name)}
    if recipe.adapter is None or not adapter:
        raise InputError(f"{checkpoint} has no adapter; leave --adapter-only out")
    entries = {
        _OF_PEFT + name.replace(f".{ADAPTER}.", "."): entry_of(checkpoint, saved) for name, saved in adapter.items()
    }
    write_safetensors(folder / ADAPTER_FILE, entries, {"format": "pt"})
    bare = recipe_workload(recipe.model_copy(update={"adapter": None, "freeze": None, "weights": None}))
    config = lora_config(bare.meta_model(), bare.anatomy(), recipe.adapter.lora())
    config.inference_mode = True
    # Absolute, so that peft finds it from anywhere on this machine.
    config.base_model_name_or_path = recipe.weights and str(Path(recipe.weights).absolute())
    config.save_pretrained(str(folder))
    return entries
