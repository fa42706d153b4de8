"""Offload: what a block saves leaves the device in forward and comes back in backward.

NOTE [ One block late, one block ahead ]
forward    Each storage that autograd saves is copied out as soon as it is saved, on a stream of its own. It stays on
           the device while it is copied: at the end of the next block computation waits for the copies, and only then
           is the memory given up. So what is live never depends on how fast a copy is, and memory is used again only
           after computation has waited. The last block's copies are waited for at its own end: loss comes next.
backward   When the gradient of a block's output is there, the block before it begins to come back, into memory that is
           taken then. The first tensor that backward asks for waits for its own storage alone.
A storage is a Parcel, owned by the autograd nodes that saved it: the last of them to go gives memory and slot back.
One storage is copied once, however many views of it are saved, also by the next block.

NOTE [ What stays ]
Parameters, buffers, and inputs without a gradient that all blocks share (rotary tables, masks) live anyway. A cast of
a parameter, as autocast saves it for each matmul, is dropped and cast again; cast "block" empties and fills its casts
itself. What is smaller than SMALLEST stays, since a copy's latency is worth more than that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from trainfit.errors import RecipeError
from trainfit.hardware import Accelerator
from trainfit.profile import Offload, Tier
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.techniques.offload_pool import Place, is_in_memory, place_of
from trainfit.techniques.offload_saved import Packed, Parcel, Recast, Stays, recast, unpack, weight_behind
from trainfit.techniques.surroundings import is_emptied

SMALLEST = 16 * 2**10  # bytes
# What of these tiers is elsewhere is what the other one keeps.
OFFLOADED: Mapping[Tier, Tier] = {"offload": "keep", "offload_pointwise": "pointwise", "offload_full": "full"}


class Offloading:
    """Where blocks under an offload tier put what they save; which blocks, the tiers say."""

    stage: ClassVar[Stage] = Stage.BLOCK
    setting: ClassVar[str] = "offload"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[Offload]:
        yield asked.settings.get("offload", Offload())

    def apply(self, build: Build, setting: Offload) -> None:
        build.offload = setting


def new_stash(setting: Offload, device: Accelerator) -> Stash:
    """Raises RecipeError for host memory that is the device's own."""
    check_place(setting, shares_host_memory=device.shares_host_memory)
    return Stash(place_of(setting, device), device.device)


def check_place(setting: Offload, *, shares_host_memory: bool) -> None:
    """Raises RecipeError for host memory that is the device's own."""
    if setting.place == "host" and shares_host_memory:
        raise RecipeError(
            "offload.place host would save nothing: this device's memory is the host's; set offload.place: disk, or "
            "use another activation tier"
        )


def notes_on(setting: Offload, device: Accelerator) -> list[str]:
    """What a user should know who offloads."""
    notes = []
    if setting.place == "host" and device.is_beside_host and not device.pins_memory:
        notes.append("host memory cannot be pinned here: copies of offloaded tensors do not overlap")
    if setting.place == "disk" and not device.is_rehearsed and is_in_memory(setting.directory):
        notes.append("offload.directory is in memory itself (tmpfs): give a folder on a disk")
    return notes


class Shipment:
    """What one call of one block sends away.

    number: of the block. previous: that of the block before in the same forward, which comes back next.
    """

    def __init__(self, stash: Stash, number: int, previous: Shipment | None, stays: set[int]) -> None:
        self.device, self.number = stash.device, number
        self._stash, self._stays = stash, stays
        self._previous = None if previous is None else weakref.ref(previous)
        self.parcels: list[weakref.ref[Parcel]] = []
        self._came = False

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Any:
        """See NOTE [ What stays ]."""
        if isinstance(tensor, nn.Parameter) or is_emptied(tensor):
            return tensor
        if not self._may_leave(tensor):
            return Stays.of(tensor)
        if (weight := weight_behind(tensor)) is not None:
            return recast(weight, tensor) or Stays.of(tensor)
        parcel = self._stash.parcel_of(tensor)
        self.parcels.append(weakref.ref(parcel))
        offset = int(tensor.storage_offset())
        return Packed(parcel, self, tensor.dtype, tensor.size(), tensor.stride(), offset, tensor.requires_grad)

    def _may_leave(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor and not isinstance(tensor, FakeTensor):
            return False
        if tensor.layout is not torch.strided or tensor.device != self.device or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        return size >= SMALLEST and size % tensor.element_size() == 0 and storage._cdata not in self._stays

    def pack_all(self, tree: Any) -> Any:
        """With everything that leaves packed; what stays is what it was."""

        def one(tensor: Tensor) -> Any:
            packed = self.pack(tensor)
            return packed if isinstance(packed, Packed | Recast) else tensor

        return tree_map_only(Tensor, one, tree)

    def come(self) -> None:
        """Begin to copy everything back."""
        if not self._came:
            self._came = True
            for reference in self.parcels:
                if (parcel := reference()) is not None:
                    parcel.come(self.device)

    def gradient_is_there(self) -> None:
        """Backward of the block begins. See NOTE [ One block late, one block ahead ]."""
        self.come()
        if self._previous is not None and (previous := self._previous()) is not None:
            previous.come()


class Stash:
    """Everything of one step that is elsewhere. current: of the block whose forward runs; None in backward."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.place, self.device = place, device
        self.current: Shipment | None = None
        self._latest: weakref.ref[Shipment] | None = None
        self._leaving: list[weakref.ref[Parcel]] = []
        self._by_storage: dict[int, weakref.ref[Parcel]] = {}

    def parcel_of(self, tensor: Tensor) -> Parcel:
        """That of its storage, if that is on its way already and has not been written since."""
        key = tensor.untyped_storage()._cdata
        known = self._by_storage.get(key)
        parcel = known() if known is not None else None
        # One that still has its source holds the storage, so the key is the storage's and nobody else's.
        if parcel is None or not parcel.is_unchanged:
            parcel = Parcel(self.place, tensor)
            self._by_storage[key] = weakref.ref(parcel)
        return parcel

    def begins(self, number: int, block: nn.Module, inputs: Any) -> Shipment:
        latest = self._latest and self._latest()
        shipment = Shipment(
            self, number, latest if latest and latest.number < number else None, _that_stay(block, inputs)
        )
        self.current = shipment
        return shipment

    def ends(self, shipment: Shipment, *, is_last: bool) -> None:
        self.leave()
        self._leaving, self._latest = shipment.parcels, weakref.ref(shipment)
        self.current = None
        if is_last:
            self.leave()

    def leave(self) -> None:
        """What the block before sent has been copied: its memory is free."""
        leaving, self._leaving = self._leaving, []
        self._by_storage = {key: ref for key, ref in self._by_storage.items() if ref() is not None} if leaving else {}
        for reference in leaving:
            if (parcel := reference()) is not None:
                parcel.leave()


def _that_stay(block: nn.Module, inputs: Any) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    shared = (tensor for tensor in tensors[1:] if not tensor.requires_grad)  # the first are hidden states
    held = (*block.parameters(), *block.buffers(), *shared)
    return {_storage_key(tensor) for tensor in held}


def _storage_key(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    key: int = local.untyped_storage()._cdata
    return key


class BlockOffload:
    """In the place of a block's forward, of every block once one of them offloads.

    forward: the block's own, or what recomputes it; takes the block first. packs: whether what autograd saves is sent
    away here; a region that recomputes sends away its own. is_last: of this rank.
    """

    def __init__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        stash: Stash,
        *,
        number: int = 0,
        packs: bool = False,
        is_last: bool = False,
    ) -> None:
        self._block = weakref.ref(block)
        self.forward, self.stash = forward, stash
        self.number, self.packs, self.is_last = number, packs, is_last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block()
        assert block is not None
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return self.forward(block, *args, **kwargs)
        shipment = self.stash.begins(self.number, block, (args, kwargs))
        if self.packs:
            with saved_tensors_hooks(shipment.pack, unpack):
                output = self.forward(block, *args, **kwargs)
        else:
            output = self.forward(block, *args, **kwargs)
        self.stash.ends(shipment, is_last=self.is_last)
        _call_in_backward(output, shipment)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockOffload:
        block = self._block()
        assert block is not None
        twin = deepcopy(block, memo)  # copied already: memo has it
        settings = {"number": self.number, "packs": self.packs, "is_last": self.is_last}
        return BlockOffload(twin, deepcopy(self.forward, memo), self.stash, **settings)  # type: ignore[arg-type]


def _call_in_backward(output: Any, shipment: Shipment) -> None:
    """When the gradient of the block's output is there."""
    first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None), None)
    if first is not None:
        first.register_hook(lambda _: shipment.gradient_is_there())
