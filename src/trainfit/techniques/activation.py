"""Activation tiers: what each block keeps for backward, and what it computes again.

keep       what plain autograd saves
discard    all of that but outputs of norms and activation functions, which their operator makes again from what it has
           saved itself; see made_again.py
pointwise  the block's input and the outputs of matmuls and attention; norms, rotations, activations are recomputed
attention  the block's input and the output of attention
full       the block's input

Those above are what a search takes. These are what people know from elsewhere:

selective            the block's input, the outputs of attention and of matmuls, but not of every second plain one; as
                     torchtitan's selective activation checkpointing (its SelectiveAC)
recompute_attention  all but what the block's attention module saves inside; its input
recompute_core       all but what F.scaled_dot_product_attention saves; queries, keys and values. Megatron's core_attn
recompute_mlp        all but what the block's mlp module saves inside; its input. Megatron's mlp

chosen_1, chosen_2, ...  outputs of single operators, which a plan chose by their costs (Strategy.kept_operators)

These keep what plain autograd saves in fewer bytes, so gradients differ a little; see compression.py:

keep_bf16  fp32 as bf16
keep_int8  8 bits a number, and a scale for each 128
keep_fp8   the same with floating point codes

These send what is saved away, to pinned host memory or a disk, and fetch it in time for backward; see offload.py:

offload            what plain autograd saves
offload_pointwise  what pointwise keeps
offload_full       the block's input

What recomputes also keeps what a router chose and what a private generator drew, since neither comes back by running
the block again. Embedding and head are never recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainfit.errors import RecipeError
from trainfit.hardware import Accelerator, Hardware
from trainfit.operators import KeptOperators
from trainfit.profile import GRAPH_TIERS, SEARCH_TIERS, Offload, Tier
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.techniques.blockwise_attention import FORWARD as BLOCKWISE_ATTENTION
from trainfit.techniques.compression import COMPRESSED, CompressionPlan
from trainfit.techniques.kept_outputs import LATER, KeepRules, Rule, Verdict
from trainfit.techniques.offload import OFFLOADED, BlockOffload, Stash, new_stash, notes_on
from trainfit.techniques.parts import CoreForward, parts_of, run_attention
from trainfit.techniques.recompute import RecomputePlan
from trainfit.techniques.switched import SwitchedForward

_FORWARDS = RecomputePlan | CoreForward | SwitchedForward | CompressionPlan | BlockOffload
SEARCHED: tuple[Tier, ...] = ("pointwise", "attention", "full")  # those of the first list that recompute
CALIBRATED: tuple[Tier, ...] = (*SEARCHED, "discard")  # what hooks and modes take is measured

_MATMULS = ("aten.mm", "aten.addmm", "aten._grouped_mm", "aten._scaled_mm")
_BATCHED_MATMULS = ("aten.bmm", "aten.baddbmm")
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "npu.npu_fusion_attention",
)
_ROUTING = ("aten.topk", "aten.argmax", "aten.max.dim", "aten.multinomial", "aten.sort", "aten.sort.stable")


# What torchtitan saves: pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py, _get_default_save_ops at
# commit b5bcd76c: PyTorch's compute-intensive operators and some more, but of aten.mm the first, third, fifth, ... one
# alone. Kernels of the CPU and of NPUs, which it does not know, are taken as their CUDA counterparts.
_SELECTIVE = (
    "aten.addmm",
    "aten.bmm",
    "aten.convolution",
    "aten._scaled_mm",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "aten.max",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
)


def _always(args: tuple[Any, ...], output: Any, runs: int) -> bool:
    return True


def _every_second(args: tuple[Any, ...], output: Any, runs: int) -> bool:
    """The first, the third, ... of a region."""
    return runs % 2 == 1


def _wide_enough(args: tuple[Any, ...], output: Any, runs: int) -> bool:
    """False for a matmul of few products an element, such as an adapter's second: as cheap as what is recomputed."""
    matrices = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() >= 2]
    return bool(16 * matrices[0].shape[-1] > output.shape[-1])


def _no_larger_than_inputs(args: tuple[Any, ...], output: Any, runs: int) -> bool:
    """True for scores @ values, False for the scores themselves, which grow with the square of the sequence."""
    return bool(output.numel() <= sum(arg.numel() for arg in args if isinstance(arg, Tensor)))


def _decides(args: tuple[Any, ...], output: Any, runs: int) -> bool:
    """Indices picked from floating point scores; picking from integers comes out the same every time."""
    return bool(args[0].is_floating_point())


def _overloads(names: Sequence[str], rule: Rule) -> dict[Any, Rule]:
    """Operators by name, as far as this build of PyTorch and its backends has them."""
    rules: dict[Any, Rule] = {}
    for name in names:
        namespace, packet_name, *overload = name.split(".")
        packet = getattr(getattr(torch.ops, namespace, None), packet_name, None)
        if packet is not None:
            rules |= {getattr(packet, each): rule for each in (overload or ["default"]) if hasattr(packet, each)}
    return rules


@cache
def keep_rules(tier: Tier) -> KeepRules:
    """Which operators' outputs a tier stores."""
    fused = _overloads(_ATTENTION, _always) | {BLOCKWISE_ATTENTION: _always}
    attention = fused | _overloads(_BATCHED_MATMULS, _no_larger_than_inputs)
    if tier == "pointwise":
        return _overloads(_MATMULS, _wide_enough) | attention
    if tier == "selective":
        return fused | _overloads(_SELECTIVE, _always) | _overloads(("aten.mm",), _every_second)
    return attention if tier == "attention" else {}


ATTENTION = "attention"  # what a fused kernel is called, whichever of them the device has


def operator_name(func: Any) -> str:
    """What KeptOperators call an operator by, without its number."""
    name = str(func)
    return ATTENTION if name.removesuffix(".default") in _ATTENTION else name


@cache
def chosen_rules(chosen: KeptOperators) -> KeepRules:
    """Raises RecipeError for an operator that is not one of this PyTorch's, or that may not be kept."""
    kept, skipped = _runs_of(chosen.kept), _runs_of(chosen.skipped)
    return {func: _of_runs(kept.get(func, frozenset()), skipped.get(func, frozenset())) for func in {*kept, *skipped}}


def _of_runs(kept: frozenset[int], skipped: frozenset[int]) -> Rule:
    def rule(args: tuple[Any, ...], output: Any, runs: int) -> Verdict:
        return LATER if runs in skipped else runs in kept

    return rule


def _runs_of(keys: Sequence[str]) -> dict[Any, frozenset[int]]:
    """By operator, which of its runs are named."""
    found: dict[Any, frozenset[int]] = {}
    for key in keys:
        name, _, run = key.rpartition("#")
        names = _ATTENTION if name == ATTENTION else (name,)
        funcs = list(_overloads(names, _always)) if name == ATTENTION or name.count(".") == 2 else []
        if not funcs or not run.isdigit() or not all(map(makes_its_own, funcs)):
            raise RecipeError(
                f"kept_operators names {key!r}, which is no operator of this PyTorch ({torch.__version__}) that may be "
                "kept; make the plan again on this machine"
            )
        for func in funcs:
            found[func] = found.get(func, frozenset()) | {int(run)}
    return found


def makes_its_own(func: Any) -> bool:
    """Whether its output may be kept or skipped by name: tensors of its own, no views, writes or choices of routing."""
    schema = func._schema
    is_pure = not schema.is_mutable and all(each.alias_info is None for each in schema.returns)
    return is_pure and any("Tensor" in str(each.type) for each in schema.returns) and func not in routing_rules()


@cache
def routing_rules() -> KeepRules:
    """Operators whose choice must be the same in recompute."""
    return _overloads(_ROUTING, _decides)


def searched_tiers(hardware: Hardware, may_change: frozenset[str], offload: Offload | None = None) -> tuple[Tier, ...]:
    """What a search may give a block on such hardware; may_change, offload: see Target.

    What blocks send away takes memory of the host or a disk, of which a plan knows nothing: only where it was asked
    for, and the host's only beside a device.
    """
    # fp8 takes as many bytes as int8, is less exact and slower: it wins nowhere.
    fewer_bits: tuple[Tier, ...] = ("keep_bf16", "keep_int8") if "activations" in may_change else ()
    leaves = offload is not None and not (hardware.is_host and offload.place == "host")
    return (*SEARCH_TIERS, *fewer_bits, *(OFFLOADED if leaves else ()))


class ActivationTiers:
    """Sets the tier of each block, first to last."""

    stage: ClassVar[Stage] = Stage.BLOCK
    setting: ClassVar[str] = "tiers"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[tuple[Tier, ...]]:
        """None to choose from: each block's tier is the solver's."""
        yield ()

    def apply(self, build: Build, setting: tuple[Tier, ...]) -> None:
        """Raises RecipeError if there are not as many tiers as blocks, those of other pipeline stages included."""
        names = (build.whole or build.anatomy).blocks
        if setting and len(setting) != len(names):
            raise RecipeError(f"{len(setting)} activation tiers for a model of {len(names)} blocks; give one for each")
        tiers = dict(zip(names, setting))
        chosen = {each.tier: each for each in build.kept_operators}
        for block in build.blocks:
            forget_recompute(block)
        own = [tiers.get(name, "keep") for name in build.anatomy.blocks]
        both = [split_tier(tier, compiles=build.compiles) for tier in own]
        build.graph_tiers = {name: graph for name, (_, graph) in zip(build.anatomy.blocks, both)}
        own = [around for around, _ in both]
        stash = None
        if any(tier in OFFLOADED for tier in own):
            stash = new_stash(build.offload, build.accelerator)
            build.notes += notes_on(build.offload, build.accelerator)
        for number, (name, block, tier) in enumerate(zip(build.anatomy.blocks, build.blocks, own)):
            if tier != "keep":
                recompute_block(block, tier, build.accelerator, name=name, stash=stash, chosen=chosen.get(tier))
            if stash is not None:
                offload_block(block, tier, stash, number=number, is_last=number == len(own) - 1)


def split_tier(tier: Tier, *, compiles: bool) -> tuple[Tier, Tier]:
    """A tier as what is done around a block, and what its graph is told; "keep" is nothing in particular."""
    return ("keep", tier) if compiles and tier in GRAPH_TIERS else (tier, "keep")


def offload_block(block: nn.Module, tier: Tier, stash: Stash, *, number: int = 0, is_last: bool = False) -> None:
    """Put a block that has a tier beside others that offload, in place."""
    forward = unbound_forward(block)
    block.forward = BlockOffload(block, forward, stash, number=number, packs=tier == "offload", is_last=is_last)


def recompute_block(
    block: nn.Module,
    tier: Tier,
    accelerator: Accelerator,
    *,
    name: str = "block",
    stash: Stash | None = None,
    chosen: KeptOperators | None = None,
) -> None:
    """Put a block under a tier, in place. The module, its name, hooks and parameters stay what they are.

    chosen: what a chosen tier keeps. stash: where a tier that offloads sends what it keeps; offload_block() has to
    follow. Raises RecipeError for a tier that names a part which the block does not have.
    """
    if tier == "offload":
        return  # nothing is recomputed
    if tier in OFFLOADED:
        block.forward = replace(_plan_for(block, OFFLOADED[tier], accelerator, name), stash=stash)
        return
    if tier in ("recompute_attention", "recompute_mlp"):
        for part_name, part in parts_of(block, tier, name):
            part.forward = _plan_for(part, "full", accelerator, f"{name}.{part_name}")
        return
    if tier in COMPRESSED:
        block.forward = CompressionPlan.of(block, unbound_forward(block), tier, accelerator, name)
        return
    plan = _plan_for(block, tier, accelerator, name, None if chosen is None else chosen_rules(chosen))
    if tier == "recompute_core":
        block.forward = CoreForward(replace(plan, forward=run_attention), plan.forward)
        return
    block.forward = plan


def _plan_for(
    module: nn.Module, tier: Tier, accelerator: Accelerator, name: str, keep: KeepRules | None = None
) -> RecomputePlan:
    return RecomputePlan(
        name=name,
        block=weakref.ref(module),
        forward=unbound_forward(module),
        device_type=accelerator.device.type,
        random=accelerator.rng,
        keep=keep_rules(tier) if keep is None else keep,
        watched=routing_rules(),
        tier=tier,
    )


def forget_recompute(block: nn.Module) -> None:
    """Undo recompute_block: a model may be built again under another strategy."""
    for module in block.modules():
        while isinstance(plan := vars(module).get("forward"), _FORWARDS):
            del module.forward
            if isinstance(plan.forward, Patched):
                module.forward = plan.forward.forward


class Patched:
    """A forward that someone set on the block itself, with the block as an argument that it does not take."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def unbound_forward(block: nn.Module) -> Callable[..., Any]:
    """What a block runs now, called with the block first."""
    patched = vars(block).get("forward")
    return type(block).forward if patched is None else Patched(patched)
