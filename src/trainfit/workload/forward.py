"""How a model is called in training, whole or in two halves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from trainfit.errors import ModelError
from trainfit.workload.huggingface import inner_configs, training_call, without_cache


class HeadSplit(ABC):
    """logits(hidden(inputs)) is the model's output, to the bit, gradients included.

    dim is the width of the hidden states. linear is set when logits(h) is exactly h @ linear.weight.T + linear.bias
    and nothing else.
    """

    dim: int
    linear: nn.Linear | None

    @abstractmethod
    def hidden(self, inputs: Tensor) -> Tensor:
        """inputs (batch, seq) -> hidden states before the head (batch, seq, dim)."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (batch, seq, dim), any part of the tokens -> logits (batch, seq, vocab), token by token."""

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Those that logits() uses."""


def run_model(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's output for training: (batch, seq, vocab) logits, or whatever tensor a user's module returns.

    The key-value cache is off during the call. Raises ModelError if the output is no tensor and holds no logits.
    """
    with training_call(), without_cache(configs_of(model)):
        output = model(inputs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ModelError(f"the model returns {type(output).__name__}; return one tensor, or an object with .logits")
    return logits


_CONFIGS: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()


def configs_of(model: nn.Module) -> tuple[Any, ...]:
    """inner_configs, looked up once for each model: walking its modules takes as long as a small step."""
    if model not in _CONFIGS:
        _CONFIGS[model] = inner_configs(model)
    return _CONFIGS[model]


def forget_configs() -> None:
    """To be called where models got other configs."""
    _CONFIGS.clear()
