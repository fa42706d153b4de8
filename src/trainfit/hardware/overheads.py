"""What an operator takes around its kernel: Python, modules, dispatch, autograd, memory taken and given back.

NOTE [ What is left beside the kernels ]
Blocks are run as a step runs them, forward and backward. What they take beyond what the tables say of their kernels is
shared among their operators, views included. A clock around each kernel would not do: kernels displace what Python, the
dispatcher and malloc had in the caches, so a call within a step begins slowly, and the clock would hold that for the
kernel's, while a table was timed with one call after the other. So a CPU runs blocks of one token, after which
everything is still there, and of more and more; how many bytes an operator touched in the mean is the size.
The blocks are transformers' own: with its look-ups, decorators and nested modules an operator has more Python around it
than in a block that is written for the purpose, by half in forward.

NOTE [ Overheads by part ]
forward, backward    of plain training
no_grad              without autograd, as optimizers run
forward.TIER         of a block that does not save all: what autograd saves goes through hooks, and what the tier keeps
                     is looked for
recompute.TIER       of that block when it runs again, or of what is made again; what hooks do in backward is in it
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainfit.hardware.calibration import Table
from trainfit.hardware.runtime import Accelerator

# Of these sizes the tables have points: nothing that lies between two of them is taken for overhead.
_HEADS, _HEAD_DIM, _SEQ_LEN = 4, 64, 64
_DIM = _HEADS * _HEAD_DIM
BLOCKS = 4  # with two, what is around an operator took half as long in backward: all of it was in a cache
_ROUNDS = 6
SEQUENCES = (0, 1, 4, 16)  # of _SEQ_LEN tokens; 0 is a single token

Clock = Callable[[], float]  # seconds, after all that was launched has ended
Price = Callable[[Any, Any, Any, Any], float]  # (operator, args, kwargs, output): seconds of a kernel in tables
Recompute = Callable[[nn.Module], None]  # puts a block under a tier


def part_of_step() -> str:
    """What an operator that is dispatched now belongs to: forward, no_grad, backward, or a recompute within it."""
    in_engine = torch._C._current_graph_task_id() != -1
    if torch.is_grad_enabled():
        return "recompute" if in_engine else "forward"
    if in_engine:
        return "recompute" if makes_again() else "backward"
    return "no_grad"


class MakingAgain:
    """Around an operator that backward runs once more, without gradients, for a tensor that was not saved."""

    def __enter__(self) -> None:
        _AGAIN.depth = getattr(_AGAIN, "depth", 0) + 1

    def __exit__(self, *details: object) -> None:
        _AGAIN.depth -= 1


def makes_again() -> bool:
    return getattr(_AGAIN, "depth", 0) > 0


_AGAIN = threading.local()  # the engine has a thread for each device


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


@dataclass
class _Run:
    """Seconds of the two halves of a step beyond their kernels, and how many operators each part has."""

    first: float
    second: float
    counts: Mapping[str, int]
    touched: float  # bytes an operator


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


@dataclass
class _Probe:
    """Some blocks, and how they are run."""

    device: Accelerator
    clock: Clock
    price: Price
    recompute: Recompute | None = None
    blocks: nn.ModuleList = field(init=False)

    def __post_init__(self) -> None:
        with torch.device(self.device.device):
            self.blocks = _new_blocks()
        if self.recompute is not None:
            for block in self.blocks:
                self.recompute(block)

    def runs(self, *, learns: bool = True) -> list[_Run]:
        """One for each number of sequences."""
        numbers = SEQUENCES if self.device.kind == "cpu" else SEQUENCES[:1]
        with torch.set_grad_enabled(learns):
            return [self._run(number, learns) for number in numbers]

    def _run(self, sequences: int, learns: bool) -> _Run:
        shape = (sequences, _SEQ_LEN) if sequences else (1, 1)
        hidden = torch.full((*shape, _DIM), 0.5, device=self.device.device)
        table = torch.full((1, shape[1], _HEAD_DIM), 0.5, device=self.device.device)
        gradient, parameters = torch.ones_like(hidden), list(self.blocks.parameters())

        def step() -> tuple[float, float]:
            begin, output = self.clock(), hidden
            for block in self.blocks:
                output = block(output, position_embeddings=(table, table))
            middle = self.clock()
            if learns:
                torch.autograd.grad(output, parameters, gradient)
            return middle - begin, self.clock() - middle

        step()  # the first call of a recomputed block is not like the others
        first, second = map(min, zip(*(step() for _ in range(_ROUNDS)), strict=True))
        kernels = _Kernels(self.price)
        with kernels:
            step()
        seconds, counts = kernels.seconds, kernels.counts
        first -= seconds["forward"] + seconds["no_grad"]
        second -= seconds["backward"] + seconds["recompute"]
        return _Run(first, second, counts, kernels.touched / counts.total())


def operator_overheads(
    clock: Clock, device: Accelerator, price: Price, tiers: Mapping[str, Recompute] | None = None
) -> dict[str, Table]:
    """Seconds for each operator by bytes touched. See NOTE [ What is left beside the kernels ].

    price: of kernels, without what is around them. tiers: how a block is put under each tier that makes anything again.
    """
    plain = _Probe(device, clock, price).runs()
    axis = tuple(max(1.0, run.touched) for run in plain)

    def table(seconds: Iterable[float]) -> Table:
        return Table.grown((axis,), {(at,): max(_NOTHING, each) for at, each in enumerate(seconds)})

    found = {
        "forward": table(run.first / run.counts["forward"] for run in plain),
        "backward": (backward := table(run.second / run.counts["backward"] for run in plain)),
    }
    alone = _Probe(device, clock, price).runs(learns=False)
    found["no_grad"] = no_grad = table(run.first / run.counts["no_grad"] for run in alone)
    for name, recompute in (tiers or {}).items():
        runs = _Probe(device, clock, price, recompute).runs()
        found[f"forward.{name}"] = table(
            # Hooks run without gradients.
            (run.first - run.counts["no_grad"] * each) / run.counts["forward"]
            for run, each in zip(runs, no_grad.seconds)
        )
        found[f"recompute.{name}"] = table(
            (run.second - run.counts["backward"] * each) / run.counts["recompute"]
            if run.counts["recompute"]  # of a single token some tiers save all
            else _NOTHING
            for run, each in zip(runs, backward.seconds)
        )
    return found


_NOTHING = 1e-9
