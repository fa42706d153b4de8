"""Frozen weights in fewer bytes: they get no update that a low precision could lose.

fp32  as they are
half  in the compute dtype: 2 bytes a parameter; LayerNorm's vectors stay fp32
int8  weights of frozen nn.Linear as codes with a scale for each 64, about 1.06 bytes; the rest as in half
nf4   the same with 4-bit codes, about 0.56 bytes

The head is never quantised, nor embeddings and norms. Where the compute dtype is fp32, "the rest" stays fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from trainfit.errors import RecipeError
from trainfit.hardware import DTYPES
from trainfit.profile import FrozenStorage
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.techniques.quantised import BLOCK_SIZE, Quantisation, QuantisedLinear, pair_table

# Their CPU kernels take weights of the input's dtype or fp32 ones, and hidden states are fp32 behind what trains.
_KEEP_FP32 = (nn.LayerNorm, nn.GroupNorm)


class FrozenWeights:
    """Stores what does not train as the strategy says, before the model is sharded."""

    stage: ClassVar[Stage] = Stage.MODULE
    setting: ClassVar[str] = "frozen_weights"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[FrozenStorage]:
        yield asked.settings["frozen_weights"]

    def apply(self, build: Build, setting: FrozenStorage) -> None:
        """Raises RecipeError where nothing is frozen, and where a mesh would have to split codes."""
        if setting == "fp32":
            return
        frozen = [p for p in build.model.parameters() if not p.requires_grad and p.is_floating_point()]
        if not frozen:
            raise RecipeError(
                f"frozen_weights {setting}, but every parameter of {build.workload.name} trains; set adapter, freeze "
                "or train_only, or leave frozen_weights out"
            )
        if setting in ("int8", "nf4"):
            _quantise(build, setting)
        _store_in(build.model, DTYPES[build.precision])


def _store_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Frozen floating point parameters in another dtype, ties kept. Codes have scales, which stay fp32.

    New Parameters take their places: fake ones cannot change their dtype.
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or not parameter.is_floating_point():
                continue
            if isinstance(module, _KEEP_FP32) or (isinstance(module, QuantisedLinear) and parameter is module.scales):
                continue
            if id(parameter) not in replaced:
                replaced[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            module._parameters[name] = replaced[id(parameter)]


def _quantise(build: Build, kind: Quantisation) -> None:
    mesh = build.ranks.mesh
    for dim in ("shard", "tensor", "pipeline"):
        if (size := getattr(mesh, dim)) > 1:
            raise RecipeError(
                f"frozen_weights {kind} keeps codes, which mesh.{dim} {size} cannot split; use frozen_weights half, or "
                "mesh.replicate"
            )
    apart = {build.anatomy.head, *(name.rpartition(".")[0] for group in build.anatomy.ties for name in group)}
    linears = [
        (name, module)
        for name, module in build.model.named_modules()
        if type(module) is nn.Linear and not module.weight.requires_grad
        if name.removesuffix(".base_layer") not in apart
    ]
    fitting = [(name, module) for name, module in linears if module.weight.numel() % BLOCK_SIZE == 0]
    if not fitting:
        raise RecipeError(
            f"frozen_weights {kind} is for frozen nn.Linear weights, of which {build.workload.name} has none that "
            f"{BLOCK_SIZE} divides; use frozen_weights half"
        )
    if left := len(linears) - len(fitting):
        build.notes.append(f"{left} frozen weights stay unquantised: {BLOCK_SIZE} does not divide their sizes")
    table = pair_table(fitting[0][1].weight.device)
    for name, module in fitting:
        parent, _, leaf = name.rpartition(".")
        setattr(build.model.get_submodule(parent), leaf, QuantisedLinear(module, kind, table))
        module.weight = None  # type: ignore[assignment]  # one at a time: the model must not hold both
