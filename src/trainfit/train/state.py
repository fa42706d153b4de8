"""The tensors of a model and its optimizer by name, and how they are compared with saved ones.

Names are those of the whole model whatever the mesh: "model/<name>" and "optimizer/<state>.<name of its parameter>",
so that neither the ranks, nor the stage, nor the order or grouping of parameters matters to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from trainfit.errors import ModelError, ResumeError
from trainfit.train.storage import DTYPE_NAMES

MODEL, OPTIMIZER, RNG = "model/", "optimizer/", "rng/"


@dataclass(frozen=True)
class Kind:
    """Global shape and safetensors dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> Kind:
        return cls(tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))


def run_tensors(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """This rank's tensors by name, each object once, and the other names of parameters that are tied.

    Raises ModelError for state that is not a tensor.
    """
    # The model first: asked for its state, FSDP puts shards in the place of parameters that are still gathered.
    tensors, ties = _model_tensors(model)
    return {**tensors, **_optimizer_tensors(model, optimizer)}, ties


def _model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
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
            tensors[MODEL + name] = value
    return tensors, ties


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor) or id(parameter) not in names:
                where = names.get(id(parameter), "a parameter that is not the model's")
                raise ModelError(f"optimizer state {key} of {where} is a {type(value).__name__} and cannot be saved")
            tensors[f"{OPTIMIZER}{key}.{names[id(parameter)]}"] = value
    return tensors


def other_names(saved: Iterable[str], ties: Mapping[str, str]) -> dict[str, str]:
    """Names that tied parameters and their states could be asked for by, and the saved name of each."""
    aliases: dict[str, list[str]] = {}
    for alias, name in ties.items():
        aliases.setdefault(name, []).append(alias)
    others: dict[str, str] = {}
    for full_name in saved:
        prefix, name = split_name(full_name)
        others |= {prefix + alias: full_name for alias in aliases.get(name, ())}
    return others


def split_name(full_name: str) -> tuple[str, str]:
    """("model/" or "optimizer/<state>.", name of the parameter or buffer)."""
    if not full_name.startswith(OPTIMIZER):
        kind, slash, name = full_name.partition("/")
        return kind + slash, name
    state, dot, name = full_name.partition(".")  # a state's name has no dot
    return state + dot, name


def check_same(checkpoint: Path, saved: Mapping[str, Kind], wanted: Mapping[str, Kind]) -> None:
    """Raises ResumeError, with names and shapes, unless exactly the tensors wanted on some rank were saved."""
    for prefix in (MODEL, OPTIMIZER):
        there = {name.removeprefix(prefix): kind for name, kind in saved.items() if name.startswith(prefix)}
        here = {name.removeprefix(prefix): kind for name, kind in wanted.items() if name.startswith(prefix)}
        if there != here:
            raise ResumeError(
                f"{checkpoint} is of another {prefix[:-1]}: {_differences(there, here)}; "
                "resume with the recipe that saved it, or use another run_folder"
            )


def _differences(there: Mapping[str, Kind], here: Mapping[str, Kind]) -> str:
    differing = sorted(name for name in there.keys() & here.keys() if there[name] != here[name])
    reshaped = [name for name in differing if there[name].shape != here[name].shape]
    what = "shape" if reshaped or not differing else "dtype"
    parts = [f"{len(differing)} of {len(here)} tensors differ in {what}"]
    for name in (reshaped or differing)[:1]:
        parts.append(f"{name} is {getattr(there[name], what)} there and {getattr(here[name], what)} here")
    for place, names in (("only there", there.keys() - here.keys()), ("only here", here.keys() - there.keys())):
        parts += [f"{len(names)} {place} such as {min(names)}"] if names else []
    return ", ".join(parts)


def check_ties(checkpoint: Path, saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raises ResumeError where parameters that were one are now two, or the other way round."""
    if saved != here:
        raise ResumeError(
            f"{checkpoint} has {len(saved)} tied parameters {_some(saved)}, this model has {len(here)} {_some(here)}; "
            "resume with the recipe that saved it, or use another run_folder"
        )


def _some(ties: Mapping[str, str]) -> str:
    return f"({', '.join(sorted(ties)[:2])})" if ties else ""
