"""Which attention function the transformers models inside a module look up, and how another is put there."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from trainfit.workload.forward import forget_configs
from trainfit.workload.huggingface import is_transformers_model

_BEFORE = "_trainfit_configs"  # of a model: the modules whose configs are copies, with the configs they had


def looks_up_attention(model: nn.Module) -> bool:
    """Whether the attention in it is transformers' and looked up by name."""
    models = [part for part in model.modules() if is_transformers_model(part)]
    return bool(models) and all(part._can_set_attn_implementation() for part in models)  # type: ignore[operator]


def set_attention(model: nn.Module, name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Have every transformers model in it look up `attend` and `mask` under that name, in a config of its own."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    memo: dict[int, Any] = {}  # one for all: configs hold each other
    before = []
    for part in model.modules():
        config = vars(part).get("config")
        if isinstance(config, PreTrainedConfig):
            before.append((part, config))
            own = copy.deepcopy(config, memo)
            own._attn_implementation_internal = name
            part.config = own
    vars(model)[_BEFORE] = before
    forget_configs()


def keep_attention(model: nn.Module) -> None:
    """Undo set_attention."""
    for part, config in vars(model).pop(_BEFORE, ()):
        part.config = config
        forget_configs()


def window_of(mask_function: Any) -> int | None:
    """Of a mask function of transformers: 0 for causal, the window of a sliding one, None for any other."""
    masking = sys.modules["transformers.masking_utils"]
    if mask_function is masking.causal_mask_function:
        return 0
    both = _closed_over(mask_function, "and_masks.<locals>.and_mask", "mask_functions")
    if both is None or len(both) != 2 or both[1] is not masking.causal_mask_function:
        return None
    window = _closed_over(both[0], "sliding_window_overlay.<locals>.inner_mask", "sliding_window")
    return window if type(window) is int and window > 0 else None


def _closed_over(function: Any, qualified_name: str, variable: str) -> Any:
    """A variable of the function around this one; None where it is another."""
    if getattr(function, "__qualname__", None) != qualified_name or variable not in function.__code__.co_freevars:
        return None
    return function.__closure__[function.__code__.co_freevars.index(variable)].cell_contents
