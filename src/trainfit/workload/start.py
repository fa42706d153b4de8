"""Start weights: what a run begins with, from safetensors files. Nothing is ever unpickled."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainfit.errors import ModelError
from trainfit.workload.huggingface import backbone_name
from trainfit.workload.names import base_name, is_adapter_name

if TYPE_CHECKING:
    from trainfit.workload.workload import Workload

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class StartWeights:
    """A folder that `trainfit export` wrote, any Hugging Face folder of safetensors, or one such file."""

    path: str

    def check(self, model: nn.Module) -> None:
        """Raises ModelError, with what is missing or different, unless the files hold all of this model's weights.

        Reads headers alone, so a model on meta will do.
        """
        self._sources(model)

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a model, one tensor at a time, in the dtypes and on the devices that it has.

        Everything is checked before the first one is copied; see check. An adapter keeps what it was drawn with.
        """
        from safetensors import safe_open

        by_file: dict[Path, list[tuple[str, Tensor]]] = {}
        for file, name, target in self._sources(model):
            by_file.setdefault(file, []).append((name, target))
        for file, tensors in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for name, target in tensors:
                    target.copy_(opened.get_tensor(name))

    def _sources(self, model: nn.Module) -> list[tuple[Path, str, Tensor]]:
        """The file of each of the model's tensors, its name there, and the tensor itself."""
        files = _read_headers(Path(self.path))
        wanted = _wanted(model)
        there = _as_named_here(files, model, wanted)
        sources, missing, known = [], [], set()
        for names, tensor in wanted:
            known.update(names)
            name = next((name for name in names if name in there), None)
            if name is None:
                missing.append(names[0])
                continue
            original, (file, shape, dtype) = there[name]
            if shape != tuple(tensor.shape):
                raise self._differs(f"{name} has shape {shape} there and {tuple(tensor.shape)} in the model")
            if not dtype.startswith(("F", "BF")) and tensor.is_floating_point():
                raise self._differs(f"{name} is {dtype} there, which is no floating point dtype")
            sources.append((file, original, tensor))
        if missing:
            raise self._differs(f"{len(missing)} of its {len(wanted)} tensors are missing, such as {missing[0]}")
        ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        surplus = [name for name in there if name not in known and not any(each.search(name) for each in ignored)]
        if surplus:
            raise self._differs(f"{len(surplus)} tensors there are not the model's, such as {min(surplus)}")
        return sources

    def _differs(self, what: str) -> ModelError:
        return ModelError(f"weights {self.path} are not this model's: {what}; name the weights that go with its config")


def with_weights(workload: Workload, path: str | Path) -> Workload:
    """The workload with weights to start from; see StartWeights. They are read when a step is built."""
    return workload.copy(start=StartWeights(str(path)))


# name in the file -> its file, shape and safetensors dtype
_Headers = dict[str, tuple[Path, tuple[int, ...], str]]


def _read_headers(path: Path) -> _Headers:
    headers: _Headers = {}
    for file in _files(path):
        headers |= {name: (file, *facts) for name, facts in _read_header(file).items()}
    return headers


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise _pickled(path)
        return [path]
    if not path.is_dir():
        raise ModelError(f"no weights at {path}; give a folder that trainfit export wrote, or one of safetensors")
    if (path / _ONE).is_file():
        return [path / _ONE]
    if (path / _INDEX).is_file():
        return _of_index(path)
    if (path / "checkpoints").is_dir() or (path / "checkpoint.json").is_file():
        raise ModelError(f"{path} is a run, not a model; write one with trainfit export {path} OUT, and give OUT")
    if pickles := sorted(file for pattern in _PICKLES for file in path.glob(pattern)):
        raise _pickled(pickles[0])
    raise ModelError(f"{path} has no {_ONE} and no {_INDEX}; give a folder that trainfit export wrote")


def _of_index(folder: Path) -> list[Path]:
    try:
        names = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / Path(name).name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / _INDEX} cannot be read ({error}); get the folder anew") from None
    if missing := [file for file in files if not file.is_file()]:
        raise ModelError(f"{folder} lacks {len(missing)} of its {len(files)} files, such as {missing[0].name}")
    return files


def _pickled(path: Path) -> ModelError:
    return ModelError(
        f"{path} is not safetensors: trainfit unpickles nothing, since that runs what is in the file; convert it with "
        "transformers' save_pretrained"
    )


def _read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and safetensors dtype of each tensor in a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
            return {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is no safetensors file ({' '.join(str(error).split())}); get it anew") from None


def _wanted(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Each tensor that a saved model has, once, with all of its names as they are without an adapter."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and not is_adapter_name(name):
            found.setdefault(id(tensor), ([], tensor))[0].append(base_name(name))
    return list(found.values())


def _as_named_here(
    files: _Headers, model: nn.Module, wanted: list[tuple[list[str], Tensor]]
) -> dict[str, tuple[str, tuple[Path, tuple[int, ...], str]]]:
    """The files' tensors by the model's names. Some folders hold a backbone alone, without its name in front."""
    known = {name for names, _ in wanted for name in names}
    prefix = backbone_name(model)
    if prefix is None or any(name.startswith(f"{prefix}.") for name in files):
        return {name: (name, facts) for name, facts in files.items()}
    return {name if name in known else f"{prefix}.{name}": (name, facts) for name, facts in files.items()}
