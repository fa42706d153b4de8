"""Whether a model runs fewer of its blocks as it runs all: what a block's structure does not show.

A model may treat its blocks by their number: a norm of its own for each beside the list, every third one's output
changed, the first half without gradients, all outputs stacked at the end, or `range(num_layers)` over the list. So the
forward of the whole model and of the short one run once, without a step around, and what each block does and what the
model does after it are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfit.rehearsal.operators import FakeKernels
from trainfit.rehearsal.splice import Cut
from trainfit.workload import Workload
from trainfit.workload.forward import run_model

_Forward = dict[int, int]  # by block: a hash of what ran in it and after it; -1 for what ran before all


def runs_alike(workload: Workload, cut: Cut, own: Iterable[int]) -> bool:
    """Whether the blocks of the short model do what those do that they stand for. own: the deep model's that matter.

    False too where one of them cannot run on token ids: the rehearsal of all blocks says why.
    """
    whole = _forward(workload, tuple(range(len(workload.anatomy().blocks))))
    short = _forward(workload, cut.kept)
    if whole is None or short is None:
        return False
    stands = [(-1, -1)]
    for at, block in enumerate(cut.kept):
        repeat = cut.of(at)
        copies = repeat.copies if repeat is not None and repeat.has(at) else 0
        stands += [(at, block + copy * (repeat.size if repeat else 0)) for copy in range(copies + 1)]
    mine = {-1, *own}
    return all(short.get(at) == whole.get(block) for at, block in stands if block in mine)


def _forward(workload: Workload, kept: tuple[int, ...]) -> _Forward | None:
    """Of the model with these blocks, once for each; None where it does not run."""
    key = "forward", kept, workload.seq_len
    if key not in workload.memo:
        workload.memo[key] = _run(workload, kept)
    found: _Forward | None = workload.memo[key]
    return found


def _run(workload: Workload, kept: tuple[int, ...]) -> _Forward | None:
    name = workload.anatomy().block_list
    assert name is not None
    holder, _, leaf = name.rpartition(".")
    try:
        mode, model = _model(workload)
        every, parent = model.get_submodule(name), model.get_submodule(holder)
        assert isinstance(every, nn.ModuleList)
        blocks = nn.ModuleList(every[number] for number in kept)
        setattr(parent, leaf, blocks)
        try:
            listening = _Listening(model, every)
            with mode, torch.device("cpu"), FakeKernels(), listening, listening.following(blocks):
                run_model(model, torch.zeros(1, workload.seq_len, dtype=torch.long))
        finally:
            setattr(parent, leaf, every)
    except Exception:  # whatever a user's model raises
        return None
    return {block: hash(tuple(calls)) for block, calls in listening.calls.items()}


def _model(workload: Workload) -> tuple[FakeTensorMode, nn.Module]:
    """One without memory, made once: that takes longer than a forward."""
    if "fake model" not in workload.memo:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.device("cpu"):
            workload.memo["fake model"] = mode, workload.make_model().train()
    mode, model = workload.memo["fake model"]
    return mode, model


class _Listening(TorchDispatchMode):
    """Operators by the block that runs or has run last, with their tensors' shapes and the names of the model's own."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        inside = {id(tensor) for tensor in (*blocks.parameters(), *blocks.buffers())}
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(tensor): name for name, tensor in named if id(tensor) not in inside}
        self._block = -1
        self.calls: dict[int, list[Any]] = {-1: []}

    @contextmanager
    def following(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        handles = []
        for number, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(self._at(number, "begins"), prepend=True))
            handles.append(block.register_forward_hook(self._at(number, "ends")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _at(self, number: int, what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._block = number
            self.calls.setdefault(number, []).append(what)

        return hook

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)]
        seen = tuple((each.shape, each.dtype, each.requires_grad, self._names.get(id(each))) for each in tensors)
        self.calls[self._block].append((func, torch.is_grad_enabled(), seen))
        return output
