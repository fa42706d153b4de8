"""Freezing: which parameters train, by patterns on their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from trainfit.errors import RecipeError
from trainfit.workload.names import base_name
from trainfit.workload.workload import Workload


def with_frozen(workload: Workload, patterns: Sequence[str]) -> Workload:
    """The workload with the parameters frozen that a pattern names: "model.embed_tokens*", "*.layers.[0-3].*".

    A frozen parameter has no gradient and no optimizer state. A pattern is for whole names, as in a shell; a tied
    parameter is one tensor under several names, and one of them is enough. Raises RecipeError for a pattern that names
    nothing and where nothing would be left to train.
    """
    return _checked(workload, patterns, "freeze", trains=False)


def with_trained_only(workload: Workload, patterns: Sequence[str]) -> Workload:
    """The workload with everything frozen but the parameters that a pattern names; see with_frozen."""
    return _checked(workload, patterns, "train_only", trains=True)


def _checked(workload: Workload, patterns: Sequence[str], key: str, *, trains: bool) -> Workload:
    patterns = tuple(patterns)
    model = workload.meta_model()
    names = _names(model)
    for pattern in patterns:
        if not any(_matches(each, (pattern,)) for each in names.values()):
            raise RecipeError(f"{key} has {pattern!r}, which names no parameter; {_near(pattern, names.values())}")
    _set_trained(model, patterns, trains)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(f"{key} {list(patterns)} leaves nothing to train; name fewer parameters")
    ties = [each for each in names.values() if len(each) > 1 and _matches(each, patterns)]
    notes = [f"{' and '.join(each)} are one tensor, which {key} takes under each of its names" for each in ties]
    change = partial(_set_trained, patterns=patterns, trains=trains)
    return workload.changed(change, f"{key}-{'-'.join(patterns)}", notes)


def _set_trained(model: nn.Module, patterns: tuple[str, ...], trains: bool) -> None:
    names = _names(model)
    for parameter in model.parameters():
        if _matches(names[id(parameter)], patterns) != trains:
            parameter.requires_grad_(False)


def _names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, as they are without an adapter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(base_name(name))
    return names


def _matches(names: Iterable[str], patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _near(pattern: str, names: Iterable[list[str]]) -> str:
    known = [name for each in names for name in each]
    inside = [name for name in known if pattern.strip("*.") and pattern.strip("*.") in name]
    near = inside[:2] or get_close_matches(pattern, known, n=2, cutoff=0.4) or known[:2]
    return f"near names are {' and '.join(near)}"
