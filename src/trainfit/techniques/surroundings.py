"""What a block's forward finds around it besides its inputs: autocast, random generators, buffers.

A recompute must find them as forward did, and leave them as it found them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

_EMPTIED = "_trainfit_emptied"


def mark_emptied(tensor: Tensor) -> None:
    """Its memory is given up when forward ends and filled again in backward, by who knows this very tensor."""
    setattr(tensor, _EMPTIED, True)


def is_emptied(tensor: Tensor) -> bool:
    """Whether it is one of these or a view of one. What shares its memory does not hold it: save it as it is."""
    return hasattr(tensor if tensor._base is None else tensor._base, _EMPTIED)


class RandomState(Protocol):
    """Random number generators of host and device, as hardware's facade offers them."""

    def get_state(self) -> tuple[Tensor, ...]: ...
    def set_state(self, state: tuple[Tensor, ...]) -> None: ...


def same_state(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second))


class random_state:  # noqa: N801
    """The generators as they stood in forward, for the length of a recompute."""

    def __init__(self, random: RandomState, state: tuple[Tensor, ...]) -> None:
        self.random, self.state = random, state

    def __enter__(self) -> None:
        self.outer = self.random.get_state()
        self.random.set_state(self.state)

    def __exit__(self, *_: object) -> None:
        self.random.set_state(self.outer)


@dataclass(frozen=True)
class Autocast:
    """Autocast as it stood in forward; backward may run outside of it, or on another thread."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @classmethod
    def now(cls, device_type: str) -> Autocast:
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def restored(self) -> torch.autocast:
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled
        )


@dataclass(frozen=True)
class WrittenBuffer:
    """A buffer that a forward may have written.

    value: what it was before; None where that is what it still is, or where no operator said that it would write.
    """

    module: nn.Module
    name: str
    value: Tensor | None


class BufferWatch:
    """Buffers of a block during its forward (token counters, running statistics): which does it write?"""

    def __init__(self, block: nn.Module) -> None:
        self._found = [
            (module, name, buffer, buffer._version)
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._before: dict[int, Tensor] = {}

    @property
    def any(self) -> bool:
        """Whether the block has buffers at all."""
        return bool(self._found)

    def before_write(self, target: object) -> bool:
        """An operator is about to write to target: keep what its buffer was. Whether target is a buffer."""
        if not self._found or not isinstance(target, Tensor):
            return False
        storage = target.untyped_storage()._cdata
        hit = [buffer for _, _, buffer, _ in self._found if buffer.untyped_storage()._cdata == storage]
        for buffer in hit:
            if id(buffer) not in self._before:
                self._before[id(buffer)] = buffer.clone()
        return bool(hit)

    def written(self) -> list[WrittenBuffer]:
        """All buffers if any was written, else none: batch norm moves its statistics without a word to anyone."""
        if all(module._buffers.get(name) is buffer and buffer._version == v for module, name, buffer, v in self._found):
            return []
        return [
            WrittenBuffer(
                module, name, self._before.get(id(buffer), None if module._buffers.get(name) is buffer else buffer)
            )
            for module, name, buffer, _ in self._found
        ]


class buffers_as_in_forward:  # noqa: N801
    """A recompute reads what forward read and writes to copies: nothing may move twice for one batch."""

    def __init__(self, written: list[WrittenBuffer]) -> None:
        self.written = written

    def __enter__(self) -> None:
        self.outer = [each.module._buffers[each.name] for each in self.written]
        copies: dict[int, Tensor] = {}  # one buffer under two names stays one
        for each, now in zip(self.written, self.outer):
            source = now if each.value is None else each.value
            if source is not None and id(now) not in copies:
                copies[id(now)] = source.clone()
            each.module._buffers[each.name] = copies.get(id(now))

    def __exit__(self, *_: object) -> None:
        for each, buffer in zip(self.written, self.outer):
            each.module._buffers[each.name] = buffer
