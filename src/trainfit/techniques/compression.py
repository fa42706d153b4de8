"""What autograd saves of a block in fewer bytes: int8 or fp8 codes with scales, or bf16 for fp32.

NOTE [ Codes of a storage ]
Autograd saves tensors, memory is held by storages: queries, keys and values may be views of one, and a norm's output is
saved by each matmul that takes it. So it is storages that get codes, once for each version of what they hold, however
many tensors of however many blocks are saved of them; a saved tensor is a view of what its storage's codes stand for.
  forward    The pack hook makes the codes at once, so that the original dies as soon as forward lets go of it. Outputs
             of operators are what they were: forward is not changed.
  backward   The first tensor that is asked for makes the storage's numbers again and drops the codes; they live as long
             as a node that saved one of them has not run, as in plain training.
What was changed in place after it was saved has the numbers of then.

NOTE [ What is left as it is ]
- Integers, booleans, and floats that codes would not make smaller.
- What needs no gradient: masks, rotary tables, frozen weights. It is held elsewhere, or a constant that is no
  activation. Parameters and views of them, which live anyway.
- Small tensors, below _SMALLEST numbers or a sixteenth of the block's input: what is saved of each row or head, such as
  a norm's scale or attention's log-sum-exp, whose error all numbers of the row would have.
- What someone else still holds when forward has ended, such as a list of hidden states: its codes would come on top,
  so they are dropped and the original taken. Changed in place after that it is refused, as in plain training.
- A weight that autocast has cast is cast again: no bytes at all, and the same bits. Those of cast "block" are emptied
  and filled again there.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from trainfit.errors import RecomputeError
from trainfit.hardware import Accelerator
from trainfit.profile import Tier
from trainfit.techniques.made_again import Eps, MadeAgain, Source, eps_of, numbers_of, storage_of
from trainfit.techniques.quantised import dequantise, quantise
from trainfit.techniques.recompute import asks_for_gradients
from trainfit.techniques.surroundings import is_emptied

Coded = Literal["bf16", "int8", "fp8"]
Storage = Literal[Coded, "made_again"]
COMPRESSED: Mapping[Tier, Storage] = {
    "keep_bf16": "bf16",
    "keep_int8": "int8",
    "keep_fp8": "fp8",
    "discard": "made_again",  # no codes, but what its operator makes again: see made_again.py
}

BLOCK_SIZE = 128  # numbers that share a scale: 1 + 4/128 bytes each
_SMALLEST = 4096
# Numbers that are made codes of at once: on a CPU so few that what is in between stays in its cache, elsewhere so many
# that launches cost nothing beside them.
_HOST_PIECE, _DEVICE_PIECE = 2**18, 2**24


@dataclass(eq=False)
class CompressionPlan:
    """Stands in the place of a block's forward; shared by all its calls.

    block: held weakly, since the block holds the plan. forward: the block's own, unbound: takes the block first.
    tier: one of COMPRESSED. piece: see _HOST_PIECE.
    frees_input: whether the last forward kept nothing of the hidden states that it was given but codes.
    """

    name: str
    block: weakref.ref[nn.Module]
    forward: Callable[..., Any]
    tier: Tier
    piece: int
    frees_input: bool = False

    @classmethod
    def of(
        cls, block: nn.Module, forward: Callable[..., Any], tier: Tier, accelerator: Accelerator, name: str
    ) -> CompressionPlan:
        piece = _HOST_PIECE if accelerator.stands_for == "cpu" else _DEVICE_PIECE
        return cls(name, weakref.ref(block), forward, tier, piece)

    @property
    def kind(self) -> Storage:
        return COMPRESSED[self.tier]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block()
        assert block is not None
        if not torch.is_grad_enabled() or not asks_for_gradients(block, (args, kwargs)):
            return self.forward(block, *args, **kwargs)  # nothing is saved
        call = _Call(self, _tensors((args, kwargs)), eps_of(block) if self.kind == "made_again" else {})
        with saved_tensors_hooks(call.pack, _unpack):
            output = self.forward(block, *args, **kwargs)
        call.finish(output)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressionPlan:
        # A copied block comes here while it is copied, so memo has it already.
        block = self.block()
        assert block is not None
        return replace(self, block=weakref.ref(deepcopy(block, memo)), forward=deepcopy(self.forward, memo))


class _Call:
    """One forward of one block: packs what autograd saves."""

    costs_like: Tier = "discard"  # beside the operators that make codes

    def __init__(self, plan: CompressionPlan, inputs: list[Tensor], eps: Eps) -> None:
        self.plan, self.kind, self.eps = plan, plan.kind, eps
        self.inputs = [storage_of(tensor) for tensor in inputs]
        floats = [tensor for tensor in inputs if tensor.is_floating_point()]
        self.hidden = storage_of(floats[0]) if floats else None
        self.smallest = max([_SMALLEST, *(tensor.numel() // 16 for tensor in floats)])
        self.made: list[weakref.ref[_Codes]] = []
        self.coded: set[StorageWeakRef] = set()

    def pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if is_emptied(tensor):
            return _AsItIs(tensor, tensor._version, self.plan.name)
        source = None
        if self._is_activation(tensor):
            source = self._made_again(tensor) if self.kind == "made_again" else self._codes_of(tensor, self.kind)
        if source is None:
            return _AsItIs(tensor.detach(), tensor._version, self.plan.name)
        return _Saved(source, tensor.shape, tensor.stride(), int(tensor.storage_offset()), self.plan.name)

    @torch.no_grad()
    def _codes_of(self, tensor: Tensor, kind: Coded) -> Source | None:
        """None for what is left as it is."""
        if (cast := _CastWeight.of(tensor)) is not None:
            return cast
        if not self._pays(tensor):
            return None
        storage = storage_of(tensor)
        self.coded.add(storage)
        key = storage.cdata, tensor._version, tensor.dtype, kind
        codes = _MADE.get(key)
        if codes is None:
            codes = _MADE[key] = _Codes(tensor, storage, kind, self.plan.piece)
            self.made.append(weakref.ref(codes))
        return codes

    def _made_again(self, tensor: Tensor) -> Source | None:
        if numbers_of(tensor) < self.smallest:
            return None
        key = storage_of(tensor).cdata, tensor._version, tensor.dtype, self.kind
        found = _MADE.get(key)
        if found is None and (found := MadeAgain.of(tensor, self.eps)) is not None:
            _MADE[key] = found
        return found

    def _is_activation(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) is Tensor or type(tensor) is FakeTensor
        return is_plain and tensor.requires_grad and not isinstance(tensor._base, nn.Parameter)

    def _pays(self, tensor: Tensor) -> bool:
        larger = (torch.float32, torch.float64)
        if tensor.dtype not in (larger if self.kind == "bf16" else (*larger, torch.bfloat16, torch.float16)):
            return False
        # All of the storage must have been written by what made the tensor, or the tensor that it is a view of.
        whole = numbers_of(tensor)
        base = tensor._base
        return whole >= self.smallest and (tensor.numel() == whole or (base is not None and base.numel() == whole))

    def finish(self, output: Any) -> None:
        """Forward has ended. See NOTE [ What is left as it is ]: what someone else holds."""
        moves_on = {*self.inputs, *map(storage_of, _tensors(output))}
        for codes in filter(None, (made() for made in self.made)):
            if codes.original not in moves_on and not codes.original.expired():
                codes.take_original()
        self.plan.frees_input = self.hidden in self.coded


class _Codes(Source):
    """A storage's numbers as codes, until they are asked for. See NOTE [ Codes of a storage ].

    original: keeps the storage's address from being given to another one, so that it names this one in _MADE.
    version: of the tensor that was saved. counter: goes with that tensor's, without its memory.
    """

    def __init__(self, tensor: Tensor, original: StorageWeakRef, kind: Coded, piece: int) -> None:
        self.original, self.dtype, self.piece = original, tensor.dtype, piece
        self.version, self.counter = tensor._version, _counter_of(tensor)
        self._is_original = False
        flat = tensor.detach().as_strided((numbers_of(tensor),), (1,), 0)
        self._value: Tensor | None = None
        self._scales: Tensor | None = None
        self._rest: Tensor | None = None  # the last numbers, too few for a block of codes
        if kind == "bf16":
            self._codes: Tensor | None = flat.to(torch.bfloat16)
        else:
            coded = flat.numel() - flat.numel() % BLOCK_SIZE
            self._codes, self._scales = quantise(flat[:coded], kind, block_size=BLOCK_SIZE, piece=piece)
            self._rest = flat[coded:].clone() if coded < flat.numel() else None
        for watch in _WATCHES:
            watch.look(flat, self.nbytes, self._decoded())

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self._codes, self._scales, self._rest) if each is not None)

    def value(self, name: str) -> Tensor:
        if self._is_original and self.counter is not None and self.counter._version != self.version:
            assert self._value is not None
            raise _changed(self._value, name)
        if self._value is None:
            self._value = self._decoded()
            self._codes = self._scales = self._rest = None
        return self._value

    def take_original(self) -> None:
        """Hold what is held anyway, instead of codes."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.original.cdata)
        assert storage is not None
        like = self._codes
        assert like is not None
        self._value, self._is_original = torch.empty(0, dtype=self.dtype, device=like.device).set_(storage), True
        self._codes = self._scales = self._rest = None

    def _decoded(self) -> Tensor:
        codes = self._codes
        assert codes is not None
        if self._scales is None:
            return codes.to(self.dtype)
        coded = dequantise(codes, self._scales, (codes.numel(),), self.dtype, block_size=BLOCK_SIZE, piece=self.piece)
        return coded if self._rest is None else torch.cat([coded, self._rest])


_MADE: weakref.WeakValueDictionary[tuple[Any, ...], _Codes | MadeAgain] = weakref.WeakValueDictionary()


class _CastWeight(Source):
    """A weight in the dtype of autocast: cast again where it is asked for."""

    def __init__(self, weight: nn.Parameter, dtype: torch.dtype) -> None:
        self.weight, self.dtype, self.version = weight, dtype, weight._version

    @classmethod
    def of(cls, tensor: Tensor) -> _CastWeight | None:
        """None where it is no cast of a whole parameter, by the graph that made it."""
        node = tensor.grad_fn
        while node is not None and node.name() in ("TBackward0", "TransposeBackward0", "ViewBackward0"):
            node = node.next_functions[0][0]
        if node is None or node.name() != "ToCopyBackward0":
            return None
        weight = getattr(node.next_functions[0][0], "variable", None)
        if not isinstance(weight, nn.Parameter) or not weight.is_contiguous() or weight.numel() != numbers_of(tensor):
            return None
        return cls(weight, tensor.dtype)

    def value(self, name: str) -> Tensor:
        if self.weight._version != self.version:
            raise RecomputeError(f"{name}: a weight was changed in place between forward and backward")
        return self.weight.detach().to(self.dtype).view(-1)


@dataclass(eq=False, slots=True)
class _Saved:
    """In place of a saved tensor: a view of what its storage's codes stand for."""

    source: Source
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    name: str


@dataclass(eq=False, slots=True)
class _AsItIs:
    """In place of a saved tensor that is not worth codes. Autograd does not look for changes behind a hook."""

    tensor: Tensor
    version: int
    name: str


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if torch.is_grad_enabled():
        raise RecomputeError(
            f"{packed.name}: second derivatives (create_graph=True) do not go through compressed activations; set this "
            "block's activation tier to keep"
        )
    if isinstance(packed, _Saved):
        return packed.source.value(packed.name).as_strided(packed.shape, packed.stride, packed.offset)
    if packed.tensor._version != packed.version:
        raise _changed(packed.tensor, packed.name)
    tensor: Tensor = packed.tensor
    return tensor


def _changed(tensor: Tensor, name: str) -> RecomputeError:
    return RecomputeError(
        f"{name}: a saved tensor of {tuple(tensor.shape)} was changed in place before backward; plain training would "
        "fail too: change a copy"
    )


def _counter_of(tensor: Tensor) -> Tensor | None:
    """A tensor of no elements that shares its version counter; a rehearsal needs none."""
    if isinstance(tensor, FakeTensor):
        return None
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # a detached tensor's counter stays
    return counter


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# ---- what it does to numbers ---------------------------------------------------------------------------------------


class CompressionWatch:
    """Bytes and error of all storages that got codes while it watched.

    original_bytes, compressed_bytes: scales included. relative_error: root of the mean square, over that of the
    numbers themselves.
    """

    def __init__(self) -> None:
        self.original_bytes = self.compressed_bytes = 0
        self._error = self._size = 0.0

    def look(self, original: Tensor, compressed_bytes: int, decoded: Tensor) -> None:
        self.original_bytes += original.nbytes
        self.compressed_bytes += compressed_bytes
        self._error += float((decoded.double() - original.double()).square().sum())
        self._size += float(original.double().square().sum())

    @property
    def relative_error(self) -> float:
        return math.sqrt(self._error / self._size) if self._size else 0.0


_WATCHES: list[CompressionWatch] = []


@contextmanager
def watch_compression(watch: CompressionWatch | None = None) -> Iterator[CompressionWatch]:
    """Looks at every storage that gets codes meanwhile, which takes time. watch: one that goes on."""
    watch = watch or CompressionWatch()
    _WATCHES.append(watch)
    try:
        yield watch
    finally:
        _WATCHES.remove(watch)
