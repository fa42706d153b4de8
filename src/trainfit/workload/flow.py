"""Flow: how hidden states run from block to block, and which parameters act before and after the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainfit.errors import ModelError
from trainfit.workload.anatomy import Anatomy
from trainfit.workload.forward import configs_of
from trainfit.workload.huggingface import batched_experts, training_call, without_cache
from trainfit.workload.probe import quiet_fake_tensors


@dataclass(frozen=True)
class BlockFlow:
    """What is known of a model whose blocks hand on hidden states and nothing else.

    token_shape: of one token's hidden states, (dim,) nearly always.
    low: whether each block's input is in low precision under autocast; without it, it has the parameters' dtype.
    items: how many items the tuple has that each block returns; 0 for a bare tensor.
    before, after: names of parameters outside of the blocks that act before the first block and after the last one; all
        of their names if they have several.
    """

    token_shape: tuple[int, ...]
    low: tuple[bool, ...]
    items: tuple[int, ...]
    before: frozenset[str]
    after: frozenset[str]


def hidden_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a block is given to work on: its first argument."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def replace_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with other hidden states in them."""
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def trace_flow(
    model: nn.Module,
    anatomy: Anatomy,
    *,
    seq_len: int,
    device: torch.device,
    autocast: AbstractContextManager[Any],
) -> BlockFlow:
    """Watch one row of seq_len tokens run through the model in low precision, on fake tensors of the device.

    The model itself may still be on the host. Raises ModelError, with the reason, for a model that cannot be cut
    between blocks: more than hidden states runs from one to the next, or past them.
    """
    watch = _watch(model, anatomy, seq_len, device, autocast)
    before, after = watch.sides()
    shape = watch.inputs[0].shape
    if shape[:2] != (1, seq_len):
        raise _uncuttable(f"its blocks work on {tuple(shape)} for 1 row of {seq_len} tokens")
    return BlockFlow(
        token_shape=tuple(shape[2:]),
        low=tuple(hidden.dtype.itemsize < 4 for hidden in watch.inputs),
        items=tuple(len(output) if isinstance(output, tuple) else 0 for output in watch.outputs),
        before=before,
        after=after,
    )


def _uncuttable(reason: str) -> ModelError:
    return ModelError(f"the model cannot be cut into pipeline stages: {reason}; use mesh.pipeline 1")


@dataclass
class _Watch:
    """What went into the blocks and came out of them in one forward."""

    names: dict[int, set[str]]  # of each fake parameter, by its id
    parameters: list[Tensor]  # kept, so that ids stay what they are
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    logits: Tensor | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, number: int) -> None:
        if number != len(self.inputs):
            raise _uncuttable(f"block {number} is not called once and in its turn")
        hidden = hidden_input(args, kwargs)
        if number and hidden is not _hidden_output(self.outputs[-1]):
            raise _uncuttable(f"block {number} is not given what block {number - 1} returns")
        for tensor in _tensors((args, kwargs)):
            if tensor is not hidden and tensor.requires_grad:
                raise _uncuttable(f"block {number} is given a trained tensor beside its hidden states")
        self.inputs.append(hidden)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.outputs.append(output)

    def sides(self) -> tuple[frozenset[str], frozenset[str]]:
        """Parameters that act before the blocks and after them."""
        assert self.logits is not None
        first, last = self.inputs[0].grad_fn, _hidden_output(self.outputs[-1]).grad_fn
        before = self._leaves(first, stop=None)
        after = self._leaves(self.logits.grad_fn, stop=last)
        inside = [hidden.grad_fn for hidden in self.inputs]
        if any(node is not None and node in after[1] for node in inside):
            raise _uncuttable("its output depends on more than what the last block returns")
        return before[0], after[0]

    def _leaves(self, node: Any, stop: Any) -> tuple[frozenset[str], set[Any]]:
        """Names of parameters that a node was computed from, not looking behind stop; the nodes on the way."""
        seen: set[Any] = set()
        found: set[str] = set()
        todo = [node]
        while todo:
            node = todo.pop()
            if node is None or node in seen or node is stop:
                continue
            seen.add(node)
            found |= self.names.get(id(getattr(node, "variable", None)), set())
            todo += [parent for parent, _ in node.next_functions]
        return frozenset(found), seen


def _hidden_output(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


@quiet_fake_tensors()
def _watch(
    model: nn.Module, anatomy: Anatomy, seq_len: int, device: torch.device, autocast: AbstractContextManager[Any]
) -> _Watch:
    some = next(model.parameters())
    mode = some.fake_mode if isinstance(some, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.enable_grad():
        fakes, watch = _fake_tensors(model, mode, device)
        with ExitStack() as hooks:
            for number, name in enumerate(anatomy.blocks):
                block = model.get_submodule(name)
                enter = _numbered(watch, number)
                hooks.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(watch.leave).remove)
            inputs = torch.zeros(1, seq_len, dtype=torch.long, device=device)
            configs = configs_of(model)
            with training_call(), without_cache(configs), batched_experts(configs), autocast:
                try:
                    output = torch.func.functional_call(model, fakes, (inputs,), tie_weights=False)
                except ModelError:
                    raise
                except Exception as error:
                    raise _uncuttable(f"it cannot be tried out on fake tensors ({type(error).__name__})") from error
    watch.logits = output if isinstance(output, Tensor) else output.logits
    if len(watch.outputs) != len(anatomy.blocks):
        raise _uncuttable(f"{len(watch.outputs)} of its {len(anatomy.blocks)} blocks were called")
    return watch


def _numbered(watch: _Watch, number: int) -> Callable[..., None]:
    return lambda module, args, kwargs: watch.enter(module, args, kwargs, number=number)


def _fake_tensors(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> tuple[dict[str, Tensor], _Watch]:
    """A fake of each tensor under each of its names. All parameters train, frozen ones too, so that the graph shows
    where they act."""
    fakes: dict[int, Tensor] = {}
    by_name: dict[str, Tensor] = {}
    names: dict[int, set[str]] = {}
    for prefix, module in model.named_modules():
        for leaf, tensor in (module._parameters | module._buffers).items():
            if tensor is None:
                continue
            name = f"{prefix}.{leaf}".removeprefix(".")
            if id(tensor) not in fakes:
                fake: Tensor = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)
                trains = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
                fakes[id(tensor)] = fake.detach().to(device).requires_grad_(trains)
            by_name[name] = fakes[id(tensor)]
            if isinstance(tensor, nn.Parameter):
                names.setdefault(id(by_name[name]), set()).add(name)
    return by_name, _Watch(names, list(fakes.values()))
