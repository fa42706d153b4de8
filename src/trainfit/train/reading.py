"""load_recipe: YAML and key=value overrides to a Recipe; each thing wrong becomes part of one clear line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainfit.errors import RecipeError
from trainfit.train.recipe import Recipe

# Keys by which others call what has another name here.
_MEANT: Mapping[str, str] = {
    "mesh.data": "set mesh.replicate (a copy each) or mesh.shard (one copy's states split); data is their product"
}
_MAX_SHOWN = 3  # problems in one line; the rest is a number


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, which YAML would silently resolve to the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is written twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return dict(super().construct_mapping(node, deep))


# YAML 1.1 takes 1e-5 for a string, since it wants a dot; people who write learning rates mean the number.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe at path with "dotted.key=value" overrides laid over it.

    Raises RecipeError, always one line, when the file is missing or broken or a key or value is wrong.
    """
    path = Path(path)
    settings = _read_yaml(path)
    for override in overrides:
        _apply_override(settings, override)
    try:
        return Recipe.model_validate(settings).located(path.parent)
    except ValidationError as error:
        raise RecipeError(f"{path}: {_describe(error.errors())}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        raise RecipeError(f"no recipe at {path}{_neighbours(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe {path}: {error}; give the path of a YAML text file") from None
    except yaml.YAMLError as error:
        raise RecipeError(_broken_yaml(path, error)) from None
    if not isinstance(settings, dict):
        found = "empty" if settings is None else f"a {type(settings).__name__}"
        raise RecipeError(f"{path} is {found}; a recipe is a mapping of keys such as model:, data: and seq_len:")
    return settings


def _neighbours(path: Path) -> str:
    names = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1)
    if close:
        return f"; did you mean {path.parent / close[0]}?"
    return f"; {path.parent} has {', '.join(names[:5])}" if names else "; check the path"


def _broken_yaml(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    opened = getattr(error, "context_mark", None)
    since = f" in what began at line {opened.line + 1}" if opened else ""
    return f"{path}{where}: {problem}{since}; correct it there"


def _apply_override(settings: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise RecipeError(f"override {override!r} is not key=value; write it like optimizer.learning_rate=1e-3")
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError:
        raise RecipeError(f"override {override!r}: {text!r} is not a YAML value; quote it") from None
    target = settings
    for depth, key in enumerate(keys[:-1]):
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            whole = ".".join(keys[: depth + 1])
            raise RecipeError(f"override {override!r}: {whole} is {target!r} and has no keys; set {whole} itself")
    target[keys[-1]] = value


def _describe(errors: list[ErrorDetails]) -> str:
    # A union reports one error for each of its members: the first one of a key says enough.
    by_key: dict[str, str] = {}
    for error in errors:
        key = ".".join(str(part) for part in error["loc"])
        by_key.setdefault(key, _describe_one(key, error))
    shown = list(by_key.values())[:_MAX_SHOWN]
    more = [f"and {len(by_key) - len(shown)} more"] if len(by_key) > len(shown) else []
    return "; ".join(shown + more)


def _describe_one(key: str, error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown key {key}" + (f"; {_MEANT[key]}" if key in _MEANT else _nearest(key))
    if error["type"] == "missing":
        return f"{key} is missing; add it to the recipe"
    cause = error.get("ctx", {}).get("error")
    message = str(cause) if cause is not None else _reworded(error["msg"])
    return f"{key} is {_short(error['input'])}; {message}" if key else message


def _reworded(message: str) -> str:
    """pydantic's words for Python values, as words for YAML."""
    if "valid dictionary" in message:
        return "it must be a mapping of keys"
    return (
        message.replace("Input should", "it must")
        .replace("a valid tuple", "a list")
        .replace("a valid integer", "a whole number")
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(key: str) -> str:
    known = list(known_keys(Recipe))
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(known)}
    # First the same name in another section (a flat learning_rate), then the nearest spelling.
    leaf = key.rpartition(".")[2]
    if leaf in by_leaf:
        return f"; did you mean {by_leaf[leaf]}?"
    if close := get_close_matches(key, known, n=1, cutoff=0.7):
        return f"; did you mean {close[0]}?"
    if close := get_close_matches(leaf, by_leaf, n=1, cutoff=0.6):
        return f"; did you mean {by_leaf[close[0]]}?"
    section = key.rpartition(".")[0]
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    return f"; known keys are {', '.join(siblings)}"


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key that a recipe may have, sections included."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for kind in (info.annotation, *get_args(info.annotation)):  # of a section that may be left out too
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from known_keys(kind, f"{prefix}{name}.")


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two recipes given as plain values."""
    changed: list[str] = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed += changed_keys(old, new, f"{prefix}{key}.")
        elif old != new:
            changed.append(prefix + key)
    return changed
