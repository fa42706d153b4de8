"""From a name, a config.json or a folder to a Workload."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainfit.errors import ModelError
from trainfit.workload.builtin import BUILTIN
from trainfit.workload.huggingface import build_model, make_config
from trainfit.workload.workload import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def resolve_workload(model: str, seq_len: int) -> Workload:
    """model: a built-in name, the path of a Hugging Face config.json, or a folder that holds one.

    Raises ModelError if there is no such model or it is not a causal LM, RecipeError if seq_len does not fit it.
    """
    name, settings = _read(model)
    return workload_from_config(settings, seq_len=seq_len, name=name)


def workload_from_config(settings: Mapping[str, Any], *, seq_len: int, name: str) -> Workload:
    """settings: what a config.json holds, model_type included. name: how errors and reports call the model.

    Raises ModelError if it is not the config of a causal LM, RecipeError if seq_len does not fit it.
    """
    config = make_config(settings, name)
    text = config.get_text_config()
    return Workload(
        name=name,
        make_model=partial(_make, config),
        vocab_size=text.vocab_size,
        max_seq_len=getattr(text, "max_position_embeddings", None),
        seq_len=seq_len,
    )


def _make(config: PreTrainedConfig) -> nn.Module:
    # A model writes into the config that it is built from, so each gets its own.
    return build_model(deepcopy(config))


def _read(model: str) -> tuple[str, Mapping[str, Any]]:
    if (settings := BUILTIN.get(model.lower())) is not None:
        return model.lower(), settings
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return str(path), _read_json(path)
    if path.suffix == ".json":
        raise ModelError(f"no file {path}; give a config.json, a folder that holds one, or a built-in name")
    near = get_close_matches(Path(model).name.lower(), BUILTIN, n=3, cutoff=0.5)
    hint = f"nearest names: {', '.join(near)}" if near else f"built-in names: {', '.join(BUILTIN)}"
    raise ModelError(f"unknown model {model!r}, and no such file or folder; {hint}")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text (byte {error.start}); give a config.json") from error
    except RecursionError as error:
        raise ModelError(f"{path} is nested too deep to be a config; give a config.json") from error
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; correct it there"
        ) from error
    if not isinstance(settings, dict):
        raise ModelError(f"{path} holds a JSON {type(settings).__name__}, not an object; give a config.json")
    return settings
