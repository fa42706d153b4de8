"""What an operator takes around its kernel: Python, modules, dispatch, autograd, memory taken and given back.

NOTE [ What is left beside the kernels ]
Blocks are run as a step runs them, forward and backward. What they take beyond what the tables say of their kernels is
shared among their operators, views included. A clock around each kernel would not do: kernels displace what Python, the
dispatcher and malloc had in the caches, so a call within a step begins slowly, and the clock would hold that for the
kernel's, while a table was timed with one call after the other. So a CPU runs blocks of one token, after which
everything is still there, and of more and more; how many bytes an operator touched in the mean is the size.
The blocks are transformers' own: with its look-ups, decorators and nested modules an operator has more Python around it
than in a block that is written for the purpose: 12.5 microseconds in forward with four blocks, 7.9 with two of those.

NOTE [ Overheads by part ]
forward, backward    of plain training
no_grad              without autograd, as optimizers run
forward.TIER         of a block that does not save all: what autograd saves goes through hooks, and what the tier keeps
                     is looked for. Of one that does not run again, what its hooks do in backward is in it: which
                     operators of a backward are its own is not known
recompute.TIER       of a block when it runs again; what hooks do in backward is in it
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfit.hardware.calibration import Table
from trainfit.hardware.runtime import Accelerator

# Of these sizes the tables of a CPU's matmuls and attention have points: nothing between two is taken for overhead.
_HEADS, _HEAD_DIM, _SEQ_LEN = 4, 64, 64
_DIM = _HEADS * _HEAD_DIM
BLOCKS = 4  # with two, more of what is around an operator stays in the caches
_ROUNDS = 16
# Of _SEQ_LEN tokens; 0 is a single token. With more, a few per cent of the kernels are more than all around them, and a
# block of 256 tokens has displaced what a megabyte of cache holds.
SEQUENCES = (0, 1, 4)

Clock = Callable[[], float]  # seconds, after all that was launched has ended
Price = Callable[[Any, Any, Any, Any], float]  # (operator, args, kwargs, output): seconds of a kernel in tables
Recompute = Callable[[nn.Module], None]  # puts a block under a tier


def part_of_step() -> str:
    """What an operator that is dispatched now belongs to: forward, no_grad, backward, or a recompute within it."""
    in_engine = torch._C._current_graph_task_id() != -1
    if torch.is_grad_enabled():
        return "recompute" if in_engine else "forward"
    return "backward" if in_engine else "no_grad"


def touched_bytes(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Of all that an operator is given and makes; a view touches nothing."""
    if func.is_view:
        return 0
    return sum(leaf.nbytes for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor))


class _Kernels(TorchDispatchMode):
    """By part of the step, operators and their seconds in tables; bytes touched by all."""

    def __init__(self, price: Price) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.price = price
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.touched = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        part = part_of_step()
        self.counts[part] += 1
        self.seconds[part] += self.price(func, args, kwargs, output)
        self.touched += touched_bytes(func, args, kwargs, output)
        return output


def _new_blocks() -> nn.ModuleList:
    from transformers import LlamaConfig  # a second of imports that a step does without
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=_DIM,
        intermediate_size=_DIM,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        num_hidden_layers=BLOCKS,
        attn_implementation="sdpa",
    )
    return nn.ModuleList(LlamaDecoderLayer(config, number) for number in range(BLOCKS))


class _Probe:
    """Some blocks, and how they are run."""

    def __init__(self, device: Accelerator, clock: Clock, recompute: Recompute | None = None) -> None:
        self.device, self.clock = device, clock
        with torch.device(device.device):
            self.blocks = _new_blocks()
        if recompute is not None:
            for block in self.blocks:
                recompute(block)

    def step(
        self, sequences: int, *, learns: bool, mode: AbstractContextManager[Any] | None = None
    ) -> tuple[float, float]:
        """Seconds of a forward and of its backward, which run under the mode."""
        shape = (sequences, _SEQ_LEN) if sequences else (1, 1)
        output = hidden = torch.full((*shape, _DIM), 0.5, device=self.device.device)
        table = torch.full((1, shape[1], _HEAD_DIM), 0.5, device=self.device.device)
        gradient, parameters = torch.ones_like(hidden), list(self.blocks.parameters())
        with mode or nullcontext(), torch.set_grad_enabled(learns):
            begin = self.clock()
            for block in self.blocks:
                output = block(output, position_embeddings=(table, table))
            middle = self.clock()
            if learns:
                torch.autograd.grad(output, parameters, gradient)
            return middle - begin, self.clock() - middle

    def kernels(self, sequences: int, price: Price, *, learns: bool) -> _Kernels:
        """Of such a step."""
        found = _Kernels(price)
        self.step(sequences, learns=learns, mode=found)
        return found


@dataclass(frozen=True)
class _Beyond:
    """Seconds of a forward and of its backward beyond their kernels, and how many operators each part has."""

    forward_seconds: float
    backward_seconds: float
    counts: Mapping[str, int]
    touched: float  # bytes an operator

    def seconds_each(self, part: str, seconds: float) -> float:
        """So many seconds, shared among a part's operators."""
        return max(_NOTHING, seconds / self.counts[part])


def _beyond(probes: Mapping[str, _Probe], sequences: int, price: Price) -> dict[str, _Beyond]:
    """By probe. All take turns, and what one takes more than plain is the median of rounds: it is small beside both."""
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in probes}
    for number in range(_ROUNDS + 1):
        for name, probe in probes.items():
            found = probe.step(sequences, learns=name != "no_grad")
            if number:  # the first call of a recomputed block is not like the others
                rounds[name].append(found)
    least = [min(each) for each in zip(*rounds["plain"], strict=True)]
    made: dict[str, _Beyond] = {}
    for name, probe in probes.items():
        forward, backward = (
            low + statistics.median(mine - plain for mine, plain in zip(own, beside, strict=True))
            for low, own, beside in zip(least, zip(*rounds[name]), zip(*rounds["plain"]), strict=True)
        )
        kernels = probe.kernels(sequences, price, learns=name != "no_grad")
        forward -= kernels.seconds["forward"] + kernels.seconds["no_grad"]
        backward -= kernels.seconds["backward"] + kernels.seconds["recompute"]
        made[name] = _Beyond(forward, backward, kernels.counts, kernels.touched / kernels.counts.total())
    return made


def operator_overheads(
    clock: Clock, device: Accelerator, price: Price, tiers: Mapping[str, Recompute] | None = None
) -> dict[str, Table]:
    """Seconds for each operator by bytes touched. See NOTE [ What is left beside the kernels ].

    price: of kernels, without what is around them. tiers: how a block is put under each tier that makes anything again.
    """
    tiers = tiers or {}
    if device.kind != "cpu":  # the host runs ahead: a single token's kernels are not in its seconds
        price = _no_seconds
    probes = {name: _Probe(device, clock) for name in ("plain", "no_grad")}
    probes |= {name: _Probe(device, clock, recompute) for name, recompute in tiers.items()}
    sizes = SEQUENCES if device.kind == "cpu" else SEQUENCES[:1]
    runs = [_beyond(probes, sequences, price) for sequences in sizes]
    axis = tuple(max(1.0, run["plain"].touched) for run in runs)

    found: dict[str, Table] = {}

    def add(part: str, seconds: Iterable[float]) -> Sequence[float]:
        found[part] = Table.grown((axis,), {(at,): each for at, each in enumerate(seconds)})
        return found[part].seconds

    forward = add("forward", (run["plain"].seconds_each("forward", run["plain"].forward_seconds) for run in runs))
    backward = add("backward", (run["plain"].seconds_each("backward", run["plain"].backward_seconds) for run in runs))
    no_grad = add("no_grad", (run["no_grad"].seconds_each("no_grad", run["no_grad"].forward_seconds) for run in runs))
    for name in tiers:
        own = [run[name] for run in runs]
        # Hooks run without gradients.
        first = [run.forward_seconds - run.counts["no_grad"] * each for run, each in zip(own, no_grad)]
        rest = [run.backward_seconds - run.counts["backward"] * each for run, each in zip(own, backward)]
        if all(run.counts["recompute"] for run in own):
            add(f"recompute.{name}", (run.seconds_each("recompute", seconds) for run, seconds in zip(own, rest)))
            add(f"forward.{name}", (run.seconds_each("forward", seconds) for run, seconds in zip(own, first)))
        else:
            hooked = [run.seconds_each("forward", sum(seconds)) for run, *seconds in zip(own, first, rest)]
            add(f"forward.{name}", _hooks_at_work(hooked, forward))
    return found


def _hooks_at_work(hooked: Sequence[float], plain: Sequence[float]) -> list[float]:
    """By size. A single token's tensors are too small to be made again: hooks take as much more as at the next size."""
    if len(hooked) == 1:
        return list(hooked)
    return [max(hooked[0], plain[0] + hooked[1] - plain[1]), *hooked[1:]]


def _no_seconds(*_: Any) -> float:
    return 0.0


_NOTHING = 1e-9
