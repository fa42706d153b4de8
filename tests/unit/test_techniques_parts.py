"""Tiers that people know from elsewhere: what each keeps and runs again, held against PyTorch's own checkpointing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainfit.errors import RecipeError
from trainfit.hardware import accelerator
from trainfit.rehearsal.tracker import StorageTracker
from trainfit.techniques.activation import forget_recompute, recompute_block
from trainfit.techniques.parts import parts_of

CPU = accelerator("cpu")
DIM, ROWS, LENGTH, HEADS = 32, 2, 24, 4
HIDDEN = 4 * ROWS * LENGTH * DIM  # bytes of hidden states
SAVED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor, p: float = 0.0) -> tuple[Tensor, None]:
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.out(mixed.transpose(1, 2).flatten(2)), None


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.self_attn = nn.LayerNorm(DIM), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(DIM), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.attention_norm(x))[0]
        return x + self.mlp(self.mlp_norm(x))


class Counts(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func] += 1
        return func(*args, **(kwargs or {}))


def block_under(tier: str) -> nn.Module:
    torch.manual_seed(0)
    block = Block()
    if tier != "keep":
        recompute_block(block, tier, CPU, name="layers.0")
    return block


def hidden() -> Tensor:
    return torch.randn(ROWS, LENGTH, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()


def run(block: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> tuple[int, Counter[Any]]:
    """Bytes that forward leaves behind beside input and output, and the operators of forward and backward."""
    x, call = hidden(), call or block
    tracker, counts = StorageTracker(), Counts()
    tracker.register([x, *block.parameters()], "parameters")
    before = tracker.live_bytes()
    with tracker:
        output = call(x)
    held = tracker.live_bytes() - before - output.untyped_storage().nbytes()
    with counts:
        call(hidden()).sum().backward()
    return held, counts.of


def torchtitan(block: nn.Module) -> Callable[[Tensor], Tensor]:
    """Its policy, written down again for this block: every second aten.mm is recomputed, attention is saved."""
    runs = {False: 0, True: 0}

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is torch.ops.aten.mm.default:
            runs[ctx.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if runs[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func is SAVED_ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE

    def call(x: Tensor) -> Tensor:
        runs[False] = runs[True] = 0
        context = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, x, use_reentrant=False, context_fn=context)

    return call


def test_selective_runs_and_keeps_what_torchtitan_does():
    """The last matmul's output is stored there, but recompute stops before it is asked for: here it is not."""
    held, counts = run(block_under("selective"))
    theirs = block_under("keep")
    their_held, their_counts = run(theirs, torchtitan(theirs))
    _, plain = run(block_under("keep"))
    assert plain[torch.ops.aten.mm.default] == 3 * 7
    assert counts[torch.ops.aten.mm.default] == their_counts[torch.ops.aten.mm.default] == 3 * 7 + 3
    assert counts[SAVED_ATTENTION] == plain[SAVED_ATTENTION]
    assert their_held - held == HIDDEN
    # q, v, the mixed values and what attention needs to go back, gate.
    assert held == HIDDEN * (1 + 1 + 1 + 2) + 4 * ROWS * LENGTH * HEADS


def test_one_part_is_run_again_and_the_other_kept():
    keep, plain = run(block_under("keep"))
    attention, again = run(block_under("recompute_attention"))
    mlp, mlp_again = run(block_under("recompute_mlp"))
    mm = torch.ops.aten.mm.default
    # out's own output is behind the last saved tensor; so is down's.
    assert (plain[mm], again[mm], mlp_again[mm]) == (21, 21 + 3, 21 + 2)
    assert again[SAVED_ATTENTION] == 2 * plain[SAVED_ATTENTION] == 2 * mlp_again[SAVED_ATTENTION]
    # q, k, v, mixed values and log-sum-exp.
    assert keep - attention == 4 * HIDDEN + 4 * ROWS * LENGTH * HEADS
    # gate, silu(gate), up and their product, each twice as wide.
    assert keep - mlp == 4 * 2 * HIDDEN


def test_core_keeps_queries_keys_and_values_but_not_what_attention_saves():
    keep, plain = run(block_under("keep"))
    core, again = run(block_under("recompute_core"))
    assert again[SAVED_ATTENTION] == 2 * plain[SAVED_ATTENTION]
    assert again[torch.ops.aten.mm.default] == plain[torch.ops.aten.mm.default]
    assert keep - core == 4 * ROWS * LENGTH * HEADS  # the log-sum-exp: the rest is another operator's input


def test_core_of_unfused_attention_saves_its_scores():
    """Megatron's case: softmax and dropout of all scores."""

    class Dropping(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.self_attn(self.attention_norm(x), p=0.5)[0]

    def held(tier: str) -> int:
        torch.manual_seed(0)
        block = Dropping()
        if tier != "keep":
            recompute_block(block, tier, CPU)
        return run(block)[0]

    scores = 4 * ROWS * HEADS * LENGTH * LENGTH
    assert held("keep") - held("recompute_core") > 2 * scores


@pytest.mark.parametrize("tier", ["recompute_attention", "recompute_mlp"])
def test_a_block_without_the_part_says_what_it_has(tier: str):
    block = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM))
    with pytest.raises(RecipeError, match=rf"{tier}: layers\.3 has no part .* its parts are 0, 1; use pointwise"):
        recompute_block(block, tier, CPU, name="layers.3")


def test_parts_are_the_outermost_and_no_norms():
    block = Block()
    assert [name for name, _ in parts_of(block, "recompute_attention", "b")] == ["self_attn"]
    assert [name for name, _ in parts_of(block, "recompute_mlp", "b")] == ["mlp"]
    renamed = nn.ModuleDict({"first": Attention(), "second": nn.ModuleDict({"inner": Attention()})})
    assert [name for name, _ in parts_of(renamed, "recompute_attention", "b")] == ["first", "second.inner"]


@pytest.mark.parametrize("tier", ["recompute_attention", "recompute_core", "recompute_mlp"])
def test_forgetting_takes_it_off_every_part(tier: str):
    block = block_under(tier)
    forget_recompute(block)
    assert not any("forward" in vars(module) for module in block.modules())
    assert run(block) == run(block_under("keep"))


def test_core_without_attention_is_refused_where_it_runs():
    block = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())
    recompute_block(block, "recompute_core", CPU, name="layers.0")
    with torch.no_grad():
        block(hidden())
    with pytest.raises(RecipeError, match=r"layers\.0 never calls F\.scaled_dot_product_attention"):
        block(hidden())
