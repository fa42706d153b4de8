"""Anatomy: where a model's blocks, embedding, head and tied weights are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch import nn

from trainfit.workload.huggingface import backbone_name, is_transformers_model, named_embeddings

# A block's own position says nothing about its structure: layer_idx, block_id, layer_number, depth.
_POSITION = re.compile(r"(idx|index|id|number|depth)$")


@dataclass(frozen=True)
class Anatomy:
    """Qualified module names; parameter names in ties.

    blocks: the repeated transformer blocks, first to last.
    structures: one int per block; the same int means the same class, parameter shapes and layer type (sliding or full
        attention, dense or mixture of experts), so that one trace serves all of them.
    backbone: the module whose output is the hidden states before the head; None if the model has no such module.
    ties: groups of parameter names that are one object.
    block_list: the list of modules that holds the blocks and nothing else; None if there is no such list.
    """

    blocks: tuple[str, ...]
    structures: tuple[int, ...]
    embedding: str | None
    head: str | None
    backbone: str | None
    ties: tuple[tuple[str, ...], ...]
    num_parameters: int
    block_list: str | None = None


def dissect(model: nn.Module, vocab_size: int | None = None) -> Anatomy:
    """Takes a model apart by looking, without running it.

    vocab_size tells the token embedding from other embeddings, and the head from other linears, in a module that is not
    a transformers model.
    """
    blocks = _find_blocks(model)
    embedding, head = _find_embedding_and_head(model, blocks, vocab_size)
    return Anatomy(
        blocks=tuple(blocks),
        structures=_number(_signature(block) for block in blocks.values()),
        embedding=embedding,
        head=head,
        backbone=backbone_name(model),
        ties=_find_ties(model),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        block_list=_list_of(model, blocks),
    )


def _find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Elements of the list of modules with the most repeated parameters; {} if no list repeats anything."""
    best: dict[str, nn.Module] = {}
    best_score = 0
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        elements = _candidates(container)
        score = sum(parameter.numel() for element in elements.values() for parameter in element.parameters())
        if score > best_score:
            best = {f"{name}.{key}" if name else key: element for key, element in elements.items()}
            best_score = score
    return best


def _list_of(model: nn.Module, blocks: dict[str, nn.Module]) -> str | None:
    for name in {block.rpartition(".")[0] for block in blocks}:
        container = model.get_submodule(name)
        if isinstance(container, nn.ModuleList) and list(container) == list(blocks.values()):
            return name
    return None


def _candidates(container: nn.ModuleList | nn.Sequential) -> dict[str, nn.Module]:
    """Composite elements of a list; of a Sequential, which may also hold embedding and head, only the repeated ones.

    An element is a block only if it has parts: recomputing a lone Linear saves nothing.
    """
    # named_children leaves out repeats of one object, so a shared block is one block.
    elements = {key: child for key, child in container.named_children() if any(True for _ in child.children())}
    if isinstance(container, nn.ModuleList):
        return elements
    shapes = {key: _shapes(element) for key, element in elements.items()}
    counts = Counter(shapes.values())
    return {key: element for key, element in elements.items() if counts[shapes[key]] > 1}


def _shapes(module: nn.Module) -> Hashable:
    parameters = module.named_parameters()
    return type(module), tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in parameters)


def _signature(block: nn.Module) -> Hashable:
    parts = block.named_modules()
    return _shapes(block), tuple((name, type(part), tuple(_traits(part))) for name, part in parts)


def _traits(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """Plain settings that may change what a module does: layer_type, is_causal, sliding_window, dropout on or off."""
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, float):
            yield name, value != 0.0
        elif value is None or isinstance(value, bool | str) or (isinstance(value, int) and not _POSITION.search(name)):
            yield name, value


def _number(signatures: Iterator[Hashable]) -> tuple[int, ...]:
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(signature, len(numbers)) for signature in signatures)


def _find_embedding_and_head(
    model: nn.Module, blocks: dict[str, nn.Module], vocab_size: int | None
) -> tuple[str | None, str | None]:
    if is_transformers_model(model):
        return named_embeddings(model)
    inside = {id(part) for block in blocks.values() for part in block.modules()}
    outside = {name: module for name, module in model.named_modules() if id(module) not in inside}
    tables = {name: module for name, module in outside.items() if isinstance(module, nn.Embedding)}
    of_vocab = [name for name, table in tables.items() if table.num_embeddings == vocab_size]
    embedding = next(iter(of_vocab or tables), None)
    # A vocabulary padded to a round size shows in the embedding, not in vocab_size.
    sizes = {vocab_size} | ({tables[embedding].num_embeddings} if embedding is not None else set())
    heads = [name for name, part in outside.items() if isinstance(part, nn.Linear) and part.out_features in sizes]
    return embedding, heads[-1] if heads else None


def _find_ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)
