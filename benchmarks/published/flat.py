"""FSDP1 on fake tensors: each unit's parameters are one flat tensor, gathered before use and dropped after it.

NOTE [ What FSDP1 holds ]
full shard: a unit's whole flat parameter from before its forward to after it, and again in backward, where the next
unit is gathered when a unit's gradient arrives (BACKWARD_PRE): two units at once. Parameters are views that autograd
sees, so a unit's gradients are made one by one and then joined in a flat one before they are reduced. The root unit has
what no block has, embedding, last norm and head, and stays whole from forward to the end of backward.
A frozen unit is dropped by a hook on the gradient of its inputs. That hook lives until the end of backward and holds
the inputs; with reentrant checkpointing these are leaves, which hold the recomputed block's input and its gradient: two
hidden states a block that stay until the end.
Source: torch/distributed/fsdp/_runtime_utils.py, _register_post_backward_reshard_only_hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from published.model import Linear

Streams = tuple[torch.cpu.Stream, torch.cpu.Stream]  # of gathering, of reducing


class FlatUnit:
    """Parameters that are gathered together.

    kept: not dropped between forward and backward. Packed weights are gathered with frozen ones, their scales are not
    sharded.
    """

    def __init__(
        self, modules: Iterable[nn.Module], ranks: int, gathered: torch.dtype | None, streams: Streams, *, kept: bool
    ) -> None:
        self.modules = list(modules)
        self.kept = kept
        self.slots = [(m, n, p) for m in self.modules for n, p in m._parameters.items() if p is not None]
        self.trains = any(p.requires_grad for _, _, p in self.slots)
        dtype = self.slots[0][2].dtype if self.slots else torch.bfloat16
        own = list({id(p): p for _, _, p in self.slots}.values())  # tied ones once
        self.places = [next(i for i, p in enumerate(own) if p is parameter) for _, _, parameter in self.slots]
        self.numels = [p.numel() for p in own]
        self.total = sum(self.numels)
        self.shard_size = -(-self.total // ranks)
        self.local = nn.Parameter(torch.empty(self.shard_size, dtype=dtype), requires_grad=self.trains)
        self.gathered = gathered or dtype
        self.full = torch.empty(self.shard_size * ranks, dtype=self.gathered, requires_grad=self.trains)
        self.packed = [m for m in self.modules if isinstance(m, Linear) and m.quant]
        self.packed_full = [m.packed for m in self.packed]
        self.packed_local = [torch.empty(-(-p.numel() // ranks), dtype=torch.uint8) for p in self.packed_full]
        self.hooks: list[Any] = []
        self.streams = streams
        if self.trains:
            self.full.register_post_accumulate_grad_hook(self._reduce)
        self.drop()

    @property
    def tensors(self) -> list[Tensor]:
        return [self.local, *self.packed_local, *(m.scales for m in self.packed)]

    def gather(self) -> None:
        with torch.cpu.stream(self.streams[0]):
            self._gather()

    def _gather(self) -> None:
        for tensor in (self.full, *self.packed_full):
            size = tensor.numel() * tensor.element_size()
            if tensor.untyped_storage().size() != size:
                casted = self.local.to(self.gathered) if tensor is self.full else None
                tensor.untyped_storage().resize_(size)
                del casted

    def drop(self) -> None:
        for tensor in (self.full, *self.packed_full):
            tensor.untyped_storage().resize_(0)

    def set_views(self) -> None:
        views = torch.split(self.full[: self.total] if self.full.numel() > self.total else self.full, self.numels)
        for (module, name, parameter), place in zip(self.slots, self.places):
            module._parameters[name] = views[place].view(parameter.shape)  # type: ignore[assignment]

    def _reduce(self, full: Tensor) -> None:
        gradient = full.grad
        assert gradient is not None
        with torch.cpu.stream(self.streams[1]):
            shard = torch.empty(self.shard_size, dtype=gradient.dtype)
        full.grad = None
        self.drop()
        del gradient
        shard = shard.to(self.local.dtype)
        self.local.grad = shard if self.local.grad is None else self.local.grad.add_(shard)


class FlatShards:
    """All units of a model, and the hooks that gather and drop them."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        root: Iterable[nn.Module],
        ranks: int,
        gathered: torch.dtype | None,
        ignored: Iterable[nn.Module],
        *,
        reshard: bool,
    ) -> None:
        streams = torch.cpu.Stream(), torch.cpu.Stream()
        skipped = {id(m) for module in ignored for m in module.modules()}
        self.units = [
            FlatUnit([m for m in block.modules() if id(m) not in skipped], ranks, gathered, streams, kept=not reshard)
            for block in blocks
        ]
        self.root = FlatUnit([m for part in root for m in part.modules()], ranks, gathered, streams, kept=True)
        for index, block in enumerate(blocks):
            block.forward = _Around(self, index, block.forward)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for unit in (*self.units, self.root) for tensor in unit.tensors]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [unit.local for unit in (*self.units, self.root) if unit.trains]

    def begin(self) -> None:
        self.root.gather()
        self.root.set_views()

    def finish(self) -> None:
        for unit in (*self.units, self.root):
            for hook in unit.hooks:
                hook.remove()
            unit.hooks.clear()
            unit.drop()
            for module, name, parameter in unit.slots:
                module._parameters[name] = parameter


class _Around:
    """In the place of a block's forward."""

    def __init__(self, shards: FlatShards, index: int, forward: Any) -> None:
        self.shards, self.index, self.forward = shards, index, forward

    def __call__(self, *args: Any) -> Any:
        unit = self.shards.units[self.index]
        unit.gather()
        unit.set_views()
        in_backward = torch._C._current_graph_task_id() != -1
        output = self.forward(*args)
        if not in_backward and not unit.kept:
            unit.drop()
        if torch.is_grad_enabled():
            self._watch(unit, args, output)
        return output

    def _watch(self, unit: FlatUnit, args: Any, output: Tensor) -> None:
        if not unit.trains:
            inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if inputs:
                # It holds the inputs; see the NOTE.
                unit.hooks.append(register_multi_grad_hook(inputs, lambda _: unit.drop()))
        if output.requires_grad:
            output.register_hook(self._gather_ahead)

    def _gather_ahead(self, _: Tensor) -> None:
        """A frozen block's adapters are units of their own, which come before the next block in the order."""
        ahead = self.shards.units[self.index].trains
        for index in (self.index, self.index - 1)[: 1 + ahead]:
            if index >= 0:
                self.shards.units[index].gather()
