"""A value that recompute has not made, and makes when something asks for it.

NOTE [ Operators that nobody asks for ]
Where the output of an operator is kept, what led to it may be asked for by nobody else: of a norm whose statistics are
kept the square and the mean. A chosen tier names the first operators of such chains. Recompute puts them off: instead
of a tensor the model gets a Deferred of the same shape, strides, dtype and device, which holds no memory. Views of it
and operators on it are put off too, up to an operator whose output is kept. Nothing depends on the names being right:
what is saved for backward, written in place, read as a number or drawn at random is computed then, with all that leads
to it. So a model that takes another branch than the one that was looked at loses time, not its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from trainfit.errors import RecomputeError


class Chain:
    """All that is put off in one recompute. is_running: some of it is being computed, which no mode should see."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        before, self.is_running = self.is_running, True
        try:
            # Hooks of saved tensors come without grad mode, which tells a recompute from the rest of backward.
            with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
                yield
        finally:
            self.is_running = before

    def put_off(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's outputs without running it; run where it cannot be put off."""
        like = _outputs_on_meta(func, args, kwargs) if may_put_off(func, kwargs) else None
        if like is None:
            return self.run(func, args, kwargs)
        device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        call = _Call(self, func, args, kwargs)
        if isinstance(like, Tensor):
            return Deferred(call, None, like, device)
        return type(like)(Deferred(call, at, each, device) for at, each in enumerate(like))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.running():
            return func(*tree_map_only(Deferred, _value, args), **tree_map_only(Deferred, _value, kwargs))


class _Call:
    """One operator that was put off; runs at most once."""

    def __init__(self, chain: Chain, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.chain, self.func, self.args, self.kwargs = chain, func, args, kwargs
        self.versions = _versions(args, kwargs)
        self.outputs: Any = None

    def output(self, at: int | None) -> Tensor:
        if self.outputs is None:
            # A view shows what was written since, as it would have in forward.
            if not self.func.is_view and _versions(self.args, self.kwargs) != self.versions:
                raise RecomputeError(
                    f"{self.chain.name}: an input of {self.func} was changed in place after recompute had put it off; "
                    "set this block's activation tier to pointwise"
                )
            self.outputs = self.chain.run(self.func, self.args, self.kwargs)
            self.args, self.kwargs = (), {}
        output: Tensor = self.outputs if at is None else self.outputs[at]
        return output


class Deferred(Tensor):
    """See NOTE [ Operators that nobody asks for ]."""

    call: _Call
    at: int | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, call: _Call, at: int | None, like: Tensor, device: torch.device) -> Deferred:
        made: Deferred = Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            layout=like.layout,
            device=device,
        )
        made.call, made.at = call, at
        return made

    def __init__(self, *_: Any) -> None: ...

    def value(self) -> Tensor:
        """The tensor itself."""
        return self.call.output(self.at)

    # Modes leave classes that have these two to their own handler, as they do DTensors.
    def __tensor_flatten__(self) -> Any:
        raise AssertionError("a value that was put off is not traced")

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Any:
        raise AssertionError("a value that was put off is not traced")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Deferred))
        return first.call.chain.put_off(func, args, kwargs)


def may_put_off(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it gives nothing but tensors, writes nothing and draws nothing."""
    schema = func._schema
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags or kwargs.get("device") is not None:
        return False
    return bool(schema.returns) and all(str(each.type) in ("Tensor", "Tensor[]") for each in schema.returns)


def _outputs_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shapes, strides and dtypes; None where the operator has no way to say them."""
    try:
        with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
            return func(*tree_map_only(Tensor, _on_meta, args), **tree_map_only(Tensor, _on_meta, kwargs))
    except (NotImplementedError, RuntimeError):
        return None


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _value(tensor: Deferred) -> Tensor:
    return tensor.value()


def _versions(args: Any, kwargs: Any) -> tuple[int, ...]:
    """Autograd counts what is written in place of a Deferred too."""
    return tuple(leaf._version for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
