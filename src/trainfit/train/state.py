"""The tensors of a model and its optimizer by name, and how a file of them is compared and copied back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from trainfit.errors import ModelError, ResumeError


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by name, each object once, and the other names of those that are tied.

    Raises ModelError for state that is not a tensor.
    """
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():  # keep_vars: the objects themselves, not new views
        if not isinstance(value, Tensor):
            raise ModelError(f"{name} is a {type(value).__name__} and cannot be saved; make it a buffer")
        if id(value) in first_name:
            ties[name] = first_name[id(value)]
        else:
            first_name[id(value)] = name
            tensors[name] = value
    return tensors, ties


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """States as "parameter/key": by name, so that neither the order nor the grouping of parameters matters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the host. Raises ResumeError when it is not one."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ResumeError(
            f"{path} is damaged ({error}); remove its folder to go on from the checkpoint before"
        ) from None
    return tensors


def check_same(path: Path, wanted: Mapping[str, Tensor]) -> None:
    """Raises ResumeError, with names and shapes, unless the file at path holds exactly the tensors wanted."""
    try:
        with safe_open(path, framework="pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ResumeError(
            f"{path} is damaged ({error}); remove its folder to go on from the checkpoint before"
        ) from None
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    if saved == shapes:
        return
    differing = sorted(name for name in saved.keys() & shapes.keys() if saved[name] != shapes[name])
    parts = [f"{name} is {saved[name]} there and {shapes[name]} here" for name in differing[:1]]
    for place, names in (("only there", saved.keys() - shapes.keys()), ("only here", shapes.keys() - saved.keys())):
        parts += [f"{len(names)} {place} such as {min(names)}"] if names else []
    raise ResumeError(
        f"{path} is of another model: {len(differing)} of {len(shapes)} tensors differ in shape, {', '.join(parts)}; "
        "resume with the recipe that saved it, or use another run_folder"
    )


def copy_into(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Copies the file's tensors into targets one at a time, so that no second model is ever in memory."""
    with torch.no_grad(), safe_open(path, framework="pt") as file:
        for name, target in targets.items():
            target.copy_(file.get_tensor(name))
