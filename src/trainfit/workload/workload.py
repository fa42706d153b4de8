"""Workload: what is trained, and how its model is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainfit.errors import ModelError, RecipeError
from trainfit.workload.anatomy import Anatomy, dissect
from trainfit.workload.start import StartWeights


@dataclass(frozen=True)
class AdamWSettings:
    """The optimizer's constants; the schedule scales learning_rate."""

    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Workload:
    """A model factory with its data shape, loss and optimizer. A factory, because sharding replaces parameters.

    make_model: a new model with fp32 parameters on the current default device; works under FakeTensorMode and
        torch.device("meta"). It draws from the global random generator, so seed first.
    max_seq_len: positions the model has, None if it does not say.
    make_optimizer: (named parameters that train) -> an optimizer of your own, in the place of AdamW and its settings.
    loss: None for token cross entropy, else loss(output, labels) -> SUM over the valid labels.
    tensor_plan: how a tensor dimension of the mesh splits modules, by name: colwise and rowwise for nn.Linear, sequence
        for a module that treats tokens one by one. "*" stands for one part of a dotted name. None takes the plan that
        transformers has for its own models.
    start: the weights that a run begins with; None for those that make_model draws. A rehearsal does not read them.
    notes: sentences for the user about how the model was changed.
    memo: what has been found out about the model, by whoever did; a copy begins with it.
    Raises RecipeError if seq_len is below 1 or above max_seq_len, ModelError if vocab_size is below 1.
    """

    name: str
    make_model: Callable[[], nn.Module]
    vocab_size: int
    max_seq_len: int | None
    seq_len: int
    optimizer: AdamWSettings = AdamWSettings()
    make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    tensor_plan: Mapping[str, str] | None = None
    start: StartWeights | None = None
    notes: tuple[str, ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _cache: dict[str, Anatomy] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ModelError(f"vocab_size of {self.name} is {self.vocab_size}; it must be at least 1")
        if self.seq_len < 1:
            raise RecipeError(f"seq_len is {self.seq_len}; it must be at least 1")
        if self.max_seq_len is not None and self.seq_len > self.max_seq_len:
            raise RecipeError(
                f"seq_len is {self.seq_len}, but {self.name} has {self.max_seq_len} positions;"
                f" use seq_len={self.max_seq_len} or less"
            )

    def __getstate__(self) -> dict[str, Any]:
        """For another process, where what was found out here may mean nothing."""
        return {**vars(self), "memo": {}}

    def anatomy(self) -> Anatomy:
        """Where blocks, embedding, head and ties are. Built on meta at the first call, then kept.

        Raises ModelError if the model cannot be built.
        """
        if "anatomy" not in self._cache:
            self._cache["anatomy"] = dissect(self.meta_model(), vocab_size=self.vocab_size)
        return self._cache["anatomy"]

    def with_seq_len(self, seq_len: int) -> Workload:
        return self.copy(seq_len=seq_len)

    def copy(self, **changes: Any) -> Workload:
        """The same model with another name, seq_len or optimizer; what is known of its anatomy stays known."""
        assert "make_model" not in changes, "another model has another anatomy"
        other = replace(self, **changes)
        other._cache.update(self._cache)
        other.memo.update(self.memo)
        return other

    def changed(self, change: Callable[[nn.Module], None], words: str, notes: Sequence[str] = ()) -> Workload:
        """A workload whose models go through `change`, in place, when they are made; words: for its name."""
        make_model = partial(_made_and_changed, self.make_model, change)
        return replace(self, make_model=make_model, name=f"{self.name}+{words}", notes=(*self.notes, *notes))

    def meta_model(self) -> nn.Module:
        """A new model without memory. Raises ModelError if it cannot be built."""
        try:
            with torch.device("meta"):
                return self.make_model()
        except ModelError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"{self.name} cannot be built: {reason}; check its sizes in the config") from error


def _made_and_changed(make_model: Callable[[], nn.Module], change: Callable[[nn.Module], None]) -> nn.Module:
    model = make_model()
    change(model)
    return model
