"""The operators of one block as a recompute runs them: what each takes, makes and costs, and what autograd saves.

The block runs once on fake tensors, within autograd's engine as a recompute does, so that a calibration prices it as
one. Tensors are known by their storages: a view is what it is a view of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfit.operators import BlockGraph, Operator
from trainfit.profile import Tier
from trainfit.rehearsal.operator_cost import OperatorCost
from trainfit.rehearsal.operators import leaves_to_its_handler
from trainfit.techniques.activation import makes_its_own, operator_name, routing_rules

_DEVICE = torch.ops.prim.device.default


@dataclass
class _Seen:
    """One operator while the block runs. storages: those it made."""

    operator: Operator
    storages: frozenset[int]
    is_routing: bool


class _Listening(TorchDispatchMode):
    """Follows storages from the operators that make them to those that read them."""

    costs_like: ClassVar[Tier] = "pointwise"  # as the tiers that are chosen by this

    def __init__(self, block: nn.Module, cost: OperatorCost, rounding: int, given_up: Collection[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost, self.rounding = cost, rounding
        self._given_up = {_storage(tensor) for tensor in given_up}
        self.seen: list[_Seen] = []
        self.stop = 0  # operators before the last saved tensor
        self._runs: Counter[Any] = Counter()
        self._maker: dict[int, int] = {}  # by storage: the operator that made it
        self._saved: set[int] = set()
        self._written: set[int] = set()
        self._alive: list[Tensor] = []  # so that no storage takes another's place
        self._places = [""]
        self._names = {module: name for name, module in block.named_modules()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(leaves_to_its_handler, types)):
            return NotImplemented
        output = func(*args, **kwargs)
        if func is not _DEVICE:
            self._note(func, args, kwargs, output)
        return output

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        time = self.cost.time(func, args, kwargs, output)
        self._runs[func] += 1
        given, made = _tensors((args, kwargs)), _tensors(output)
        self._alive += made
        taken = {_storage(tensor) for tensor in given}
        fresh = {_storage(tensor): tensor for tensor in made if _storage(tensor) not in taken | self._maker.keys()}
        written = _written_to(func, args, kwargs)
        reads_number = bool(taken) and any(not isinstance(leaf, Tensor) for leaf in tree_leaves(output))
        if not fresh and not written and not reads_number:
            return  # a view
        number = len(self.seen)
        inputs = sorted({self._maker[storage] for storage in taken if storage in self._maker})
        runs_anyway = not makes_its_own(func) or reads_number or torch.Tag.nondeterministic_seeded in func.tags
        operator = Operator(
            name=operator_name(func),
            run=self._runs[func],
            place=self._places[-1],
            seconds=time.seconds,
            num_bytes=sum(self._rounded(tensor) for tensor in fresh.values()),
            inputs=tuple(inputs),
            is_saved=False,
            may_store=bool(fresh) and not taken & self._given_up and not reads_number and makes_its_own(func),
            may_skip=not runs_anyway,
        )
        self._maker |= dict.fromkeys(fresh, number)
        self._written |= written
        rule = routing_rules().get(func)
        is_routing = (rule is not None and bool(rule(args, output, 1))) or kwargs.get("generator") is not None
        self.seen.append(_Seen(operator, frozenset(fresh), is_routing))

    def _rounded(self, tensor: Tensor) -> int:
        return -(-tensor.untyped_storage().nbytes() // self.rounding) * self.rounding

    def pack(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            self._saved.add(_storage(tensor))
            self.stop = len(self.seen)
        return tensor

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Knows the module that runs."""
        handles = []
        for module, name in self._names.items():
            if name:
                handles.append(module.register_forward_pre_hook(lambda *_, at=name: self._places.append(at)))
                handles.append(module.register_forward_hook(lambda *_: self._places.pop() and None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def graph(self) -> BlockGraph:
        """What every tier stores is taken out; what is written later may neither be stored nor skipped."""
        seen = self.seen[: self.stop]
        stays = [number for number, each in enumerate(seen) if not each.is_routing]
        new = {old: at for at, old in enumerate(stays)}
        operators = []
        for number in stays:
            operator, storages = seen[number].operator, seen[number].storages
            is_written = bool(storages & self._written)
            operators.append(
                replace(
                    operator,
                    inputs=tuple(new[each] for each in operator.inputs if each in new),
                    is_saved=bool(storages & self._saved),
                    may_store=operator.may_store and not is_written,
                    may_skip=operator.may_skip and not is_written,
                )
            )
        return BlockGraph(tuple(operators), sum(each.operator.num_bytes for each in seen if each.is_routing))


class _Again(torch.autograd.Function):
    """Runs something in backward."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, run: Callable[[], Any]) -> Tensor:
        ctx.run = run
        return start.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            ctx.run()
        return gradient, None


def listen(
    block: nn.Module,
    run: Callable[[], Any],
    cost: OperatorCost,
    rounding: int,
    given_up: Collection[Tensor] = (),
) -> BlockGraph:
    """The graph of what run() does, which calls the block. Enter fake tensors and their kernels before.

    given_up: weights whose casts have no memory once forward has ended: to keep them keeps nothing.
    """
    listening = _Listening(block, cost, rounding, given_up)

    def again() -> None:
        with saved_tensors_hooks(listening.pack, lambda tensor: tensor), listening.placed(), listening:
            run()

    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        _Again.apply(start, again).backward()  # type: ignore[no-untyped-call]
    return listening.graph()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    if not func._schema.is_mutable:
        return set()
    written: set[int] = set()
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written |= {_storage(tensor) for tensor in _tensors(value)}
    return written
