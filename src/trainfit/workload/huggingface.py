"""All that trainfit knows about transformers. Imported by functions only: it takes two seconds.

NOTE [ Packed positions ]
Without a mask, transformers looks for several sequences packed in one row: it compares position ids and asks
`.all()`, which makes every forward wait for the device. Under FakeTensorMode the answer cannot be known, so it
builds the packed mask, and attention runs with an explicit mask and repeated keys and values: rehearsed peaks came
out 4 to 11 % too high. trainfit never passes positions, so every row is one sequence; `training_call` says so, in
training and in rehearsal alike, and fake and real peaks agree to the byte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainfit.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def is_transformers_model(model: nn.Module) -> bool:
    """Whether this is a transformers model; does not import transformers to find out."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def make_config(settings: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """The config of a causal language model from what config.json holds. Nothing is downloaded or executed.

    Raises ModelError for a missing or unknown model_type, for bad values and for models that are no causal LM.
    """
    _quiet()
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    model_type = settings.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f'{name} has no model_type; add one, such as "model_type": "llama"')
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"{name}: unknown model_type {model_type!r}{_nearest(model_type, CONFIG_MAPPING)}")
    architectures = settings.get("architectures") or ()
    if model_type not in CAUSAL or (architectures and not any("CausalLM" in a or "LMHead" in a for a in architectures)):
        what = architectures[0] if architectures else model_type
        raise ModelError(f"{name} is {what}, not a causal language model; hand it over with workload_from_module")
    try:
        # auto_map names code to download; this config is read by the class that transformers ships.
        config = CONFIG_MAPPING[model_type].from_dict({k: v for k, v in settings.items() if k != "auto_map"})
    except Exception as error:
        raise ModelError(f"{name} has bad values: {' '.join(str(error).split())}; correct them") from error
    if model_type in MASKED and not getattr(config, "is_decoder", True):
        raise ModelError(f'{name} is an encoder ({model_type} with is_decoder false); set "is_decoder": true')
    _check_sizes(config, name)
    return config


def _check_sizes(config: PreTrainedConfig, name: str) -> None:
    """transformers builds an empty model from sizes of zero or less and does not complain."""
    text = config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ModelError(f"{name} has no vocab_size; a language model needs one")
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        size = getattr(text, key, None)
        if isinstance(size, int) and size < 1:
            raise ModelError(f"{key} of {name} is {size}; it must be at least 1")


def build_model(config: PreTrainedConfig) -> nn.Module:
    """A new causal LM in training mode, fp32, on the default device.

    attn_implementation is not set: the default takes sdpa where the model supports it (gemma2 does not).
    """
    _quiet()
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.train()


def backbone_name(model: nn.Module) -> str | None:
    """The attribute that holds the model without its head, such as "model" or "transformer"."""
    if not is_transformers_model(model):
        return None
    prefix = model.base_model_prefix
    return prefix if isinstance(prefix, str) and isinstance(getattr(model, prefix, None), nn.Module) else None


def named_embeddings(model: nn.Module) -> tuple[str | None, str | None]:
    """Qualified names of the token embedding and of the head of a transformers model."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[str | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(names.get(id(getattr(model, getter)())))
        except NotImplementedError:
            found.append(None)
    return found[0], found[1]


@contextmanager
def training_call() -> Iterator[None]:
    """Around every forward of a model that has transformers parts: see NOTE [ Packed positions ]."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    original = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = _not_packed  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original  # type: ignore[attr-defined]


@contextmanager
def without_cache(configs: tuple[Any, ...]) -> Iterator[None]:
    """Turns the key-value cache of these configs off, and back to what it was afterwards."""
    before = [config.use_cache for config in configs]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config, use_cache in zip(configs, before):
            config.use_cache = use_cache


@contextmanager
def batched_experts(configs: tuple[Any, ...]) -> Iterator[None]:
    """Experts by plain batched matmuls: the fake kernel of grouped_mm takes nothing but bf16, the real one does."""
    key = "_experts_implementation_internal"
    before = [vars(config).get(key) for config in configs]
    try:
        for config, kind in zip(configs, before):
            if kind == "grouped_mm":
                vars(config)[key] = "batched_mm"
        yield
    finally:
        for config, kind in zip(configs, before):
            if kind == "grouped_mm":
                vars(config)[key] = kind


def inner_configs(model: nn.Module) -> tuple[Any, ...]:
    """Configs with a use_cache flag of the transformers models inside a module."""
    configs = {id(part.config): part.config for part in model.modules() if is_transformers_model(part)}
    return tuple(config for config in configs.values() if hasattr(config, "use_cache"))


def _not_packed(position_ids: Tensor) -> None:
    return None


def _quiet() -> None:
    """transformers reports defaults and tips on every build; what matters we raise ourselves."""
    from transformers.utils import logging

    logging.set_verbosity_error()


def _nearest(word: str, known: Any) -> str:
    from difflib import get_close_matches

    near = get_close_matches(word, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else f"; transformers knows {len(list(known))} others"
