"""What a saved tensor is until its block's backward begins: elsewhere, cast again when asked for, or where it was."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from trainfit.errors import OffloadError
from trainfit.techniques.offload_pool import Place

if TYPE_CHECKING:
    from trainfit.techniques.offload import Shipment

_VIEWS = frozenset(
    {"TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0", "PermuteBackward0", "AliasBackward0"}
)


class Parcel:
    """One storage that is elsewhere; on the device while it leaves, and again from when backward nears it."""

    def __init__(self, place: Place, tensor: Tensor) -> None:
        self._place, self._comes = place, False
        self.value: Tensor | None = None
        self.dtype = tensor.dtype
        self.num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.source: Tensor | None = None
        self.slot = place.pool.take(tensor.untyped_storage().nbytes())  # the last that may fail: __del__ gives it back
        source = tensor.detach().as_strided((self.num_elements,), (1,), 0)
        self._version = source._version
        self._mark: Any = place.out(self.slot, source)
        self.source = source

    @property
    def is_unchanged(self) -> bool:
        return self.source is not None and self.source._version == self._version

    def leave(self) -> None:
        """Give up the device's memory, once it has been copied."""
        if self.source is None:
            return
        self._refuse_changes()
        mark, self._mark = self._mark, None
        self._place.wait(mark)
        self.source = None

    def _refuse_changes(self) -> None:
        if not self.is_unchanged:
            raise OffloadError(
                "a tensor that backward needs was changed in place after it was saved, while it was copied; set this "
                "block's activation tier to keep"
            )

    def come(self, device: torch.device) -> None:
        """Begin to copy it back."""
        if self.source is None and self.value is None:
            self.value = torch.empty(self.num_elements, dtype=self.dtype, device=device)
            self._mark, self._comes = self._place.back(self.slot, self.value), True

    def here(self, device: torch.device) -> Tensor:
        """The storage's elements, on the device."""
        if self.source is not None:
            self._refuse_changes()
            return self.source
        self.come(device)
        if self._comes:
            # Before it may fail: an error that this held would hold the graph, and so this, for ever.
            mark, self._mark, self._comes = self._mark, None, False
            value, self.value = self.value, None
            self._place.wait(mark)
            self.value = value
        assert self.value is not None
        return self.value

    def __del__(self) -> None:
        if not hasattr(self, "slot"):
            return
        if self.source is not None or self._comes:  # a graph that died early: its memory must not be used before
            with suppress(OffloadError):
                self._place.wait(self._mark)
        self._place.pool.give(self.slot)


@dataclass(frozen=True, slots=True)
class Packed:
    """A saved tensor: a view of a parcel."""

    parcel: Parcel
    shipment: Shipment
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool

    def tensor(self) -> Tensor:
        self.shipment.come()
        flat = self.parcel.here(self.shipment.device)
        flat = flat if flat.dtype == self.dtype else flat.view(self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Recast:
    """A saved tensor that is a view of a cast of a parameter."""

    parameter: nn.Parameter
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.parameter.detach().to(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Stays:
    """A saved tensor that is where it was. Autograd does not look for changes behind a hook."""

    kept: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Stays:
        # Detached: an output would hold the node that made it, and the node holds what it saved.
        return cls(tensor.detach(), tensor._version)

    def tensor(self) -> Tensor:
        if self.kept._version != self.version:
            raise OffloadError(
                f"a saved tensor of {tuple(self.kept.shape)} was changed in place before backward; plain training "
                "would fail too: change a copy"
            )
        return self.kept


def weight_behind(tensor: Tensor) -> nn.Parameter | None:
    """The parameter of which a tensor is a view, or a view of one cast."""
    node, is_cast = tensor.grad_fn, False
    while node is not None:
        name = type(node).__name__
        if name == "AccumulateGrad":
            variable = node.variable  # type: ignore[attr-defined]
            return variable if isinstance(variable, nn.Parameter) else None
        if name == "ToCopyBackward0" and not is_cast:  # of two casts the first one has rounded
            is_cast = True
        elif name not in _VIEWS:
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def recast(weight: nn.Parameter, tensor: Tensor) -> Recast | None:
    same = weight.is_contiguous() and tensor.untyped_storage().nbytes() == weight.numel() * tensor.element_size()
    if not same or type(weight.data) not in (Tensor, FakeTensor):
        return None
    return Recast(weight, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def unpack(packed: Any) -> Tensor:
    return packed.tensor() if isinstance(packed, Packed | Recast | Stays) else packed


def unpack_all(tree: Any) -> Any:
    """Detached, and asking for gradients as what was packed did."""

    def one(packed: Packed | Recast) -> Tensor:
        tensor = packed.tensor().detach()
        return tensor.requires_grad_(packed.requires_grad) if isinstance(packed, Packed) else tensor

    return tree_map_only((Packed, Recast), one, tree)
