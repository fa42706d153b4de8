"""LoRA: small matrices beside frozen ones, put there by PEFT.

PEFT's inject_adapter_in_model changes a model in place, so its class, its blocks and its head stay where they were. A
target becomes a module with base_layer (what it was), lora_A and lora_B; see names.py.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.errors import ModelError, RecipeError
from trainfit.workload.anatomy import Anatomy, dissect
from trainfit.workload.workload import Workload

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"  # PEFT's own name for the only adapter of a model


@dataclass(frozen=True)
class LoRASettings:
    """W x becomes W x + alpha / rank * B A x, and only A (rank, in) and B (out, rank) train.  Source: arXiv:2106.09685.

    dropout: of what A is given. targets: last parts of module names, or "all-linear" for every linear but the head.
    Raises RecipeError for values that make no adapter.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = ("q_proj", "v_proj")

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise RecipeError(f"adapter.rank is {self.rank!r}; it must be a whole number, at least 1")
        if not 0.0 < self.alpha < math.inf:
            raise RecipeError(f"adapter.alpha is {self.alpha!r}; it must be above 0, often 2 x rank")
        if not 0.0 <= self.dropout < 1.0:
            raise RecipeError(f"adapter.dropout is {self.dropout!r}; it must be at least 0 and below 1")
        if isinstance(self.targets, str) and self.targets != "all-linear":
            raise RecipeError(f"adapter.targets is {self.targets!r}; give a list of module names, or all-linear")
        if not self.targets:
            raise RecipeError("adapter.targets names no module; give a list such as [q_proj, v_proj], or all-linear")

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    @property
    def words(self) -> str:
        """A short name: "lora-r8-q_proj-v_proj"."""
        targets = (self.targets,) if isinstance(self.targets, str) else self.targets
        return "-".join([f"lora-r{self.rank}-a{self.alpha:g}", *targets])


def with_adapter(workload: Workload, settings: LoRASettings) -> Workload:
    """The workload with LoRA beside the targets and everything else frozen.

    Raises RecipeError for targets that the model does not have, ModelError where peft is not installed.
    """
    require_peft()
    model = workload.meta_model()
    target_names(model, workload.anatomy(), settings)
    return workload.changed(partial(inject, settings=settings, vocab_size=workload.vocab_size), settings.words)


def inject(model: nn.Module, settings: LoRASettings, vocab_size: int) -> None:
    """Put the adapter into a model, in place, and freeze the rest of it. A and B are drawn from torch's generator."""
    require_peft()
    from peft import inject_adapter_in_model

    training = model.training
    config = lora_config(model, dissect(model, vocab_size=vocab_size), settings)
    with warnings.catch_warnings(), _left_where_it_is_made(model):
        warnings.simplefilter("ignore")  # of tied heads: target_names() refuses what is tied
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for _, layer in lora_layers(model):
        # Autocast casts what a matmul is given; PEFT would make an fp32 copy of it before.
        layer.cast_input_dtype_enabled = False
    model.train(training)


@contextmanager
def _left_where_it_is_made(model: nn.Module) -> Iterator[None]:
    """Module.to() fails on fake tensors, and what is made under a rehearsal's default device need not be moved."""
    if not any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        yield
        return
    original = nn.Module.to
    nn.Module.to = _stays  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.to = original  # type: ignore[method-assign]


def _stays(module: nn.Module, *arguments: object, **keywords: object) -> nn.Module:
    return module


def lora_config(model: nn.Module, anatomy: Anatomy, settings: LoRASettings) -> LoraConfig:
    """PEFT's config of an adapter for this model, which has none yet."""
    from peft import LoraConfig

    names = target_names(model, anatomy, settings)
    leaves = sorted({name.rpartition(".")[2] for name in names})
    by_leaf = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in leaves]
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=leaves if by_leaf == names else names,
        fan_in_fan_out=any(is_conv1d(model.get_submodule(name)) for name in names),
        bias="none",
        task_type="CAUSAL_LM",
    )


def target_names(model: nn.Module, anatomy: Anatomy, settings: LoRASettings) -> list[str]:
    """Qualified names of the modules that get an adapter. Raises RecipeError for targets that are not there."""
    linears = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) or is_conv1d(part)]
    if isinstance(settings.targets, str):
        found = [name for name in linears if name != anatomy.head]
        if not found:
            raise RecipeError("adapter.targets all-linear finds no linear but the head; name modules instead")
        return found
    for target in settings.targets:
        if not any(_is_named(name, target) for name in linears):
            raise RecipeError(f"adapter.targets names {target!r}, {_unknown_target(model, linears, target)}")
    found = [name for name in linears if any(_is_named(name, target) for target in settings.targets)]
    tied = {name.rpartition(".")[0] for group in anatomy.ties for name in group}
    if wrong := sorted(tied.intersection(found)):
        raise RecipeError(
            f"adapter.targets names {wrong[0]}, whose weight is another module's too: what is learnt could not be "
            "merged into it; leave it out"
        )
    return found


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _unknown_target(model: nn.Module, linears: list[str], target: str) -> str:
    if other := next((part for name, part in model.named_modules() if _is_named(name, target)), None):
        return f"a {type(other).__name__}; LoRA here is for nn.Linear and Conv1D"
    leaves = sorted({name.rpartition(".")[2] for name in linears})
    near = get_close_matches(target, leaves, n=2, cutoff=0.5)
    return f"which the model does not have; {'did you mean ' + ' or '.join(near) if near else 'it has'}" + (
        "?" if near else f" {', '.join(leaves[:8])}"
    )


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is GPT-2's linear, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Qualified names and modules that have an adapter beside them. Imports no peft to find out."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and hasattr(module, "base_layer"):
            yield name, module


def require_peft() -> None:
    """Raises ModelError, with the command, where peft is not installed."""
    if find_spec("peft") is None:
        raise ModelError(
            "an adapter is made by peft, which is not installed here; run pip install 'trainfit[adapters]', or "
            "pip install 'peft>=0.17'"
        )
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # peft looks for other libraries, which tell what they could not find
    try:
        import peft  # noqa: F401
    finally:
        logging.disable(level)
