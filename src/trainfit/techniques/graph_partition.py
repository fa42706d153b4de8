"""What a compiled block saves: settings of PyTorch's partitioner, which cuts a graph into forward and backward.

NOTE [ Tiers of a graph ]
The partitioner finds the smallest cut between what forward makes and what backward needs, among what it may compute
again. By itself it is shy: it saves what would be made again far from where it was made, at the end of long chains, or
where backward writes it to memory anyway. In bf16 these are the weights' copies and a quarter of the activations.
    keep       as it is, or with the budget of Compile
    pointwise  without that shyness: what matmuls, attention and reductions make is saved, the rest is made again
    attention  of that only what the eager tier of this name keeps, within a budget of next to nothing; of none the
               partitioner would save inputs alone
Within a budget whatever is not marked may be made again. So these are marked: under attention what it keeps; always
what is drawn, or backward would see another dropout than forward, and what a router chose, which might come out
otherwise.
Source: torch/_functorch/partitioners.py, choose_saved_values_set and should_ban_recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from trainfit.profile import Tier
from trainfit.techniques.activation import keep_rules, routing_rules
from trainfit.techniques.kept_outputs import KeepRules

_NEXT_TO_NOTHING = 1e-6  # a share of what a graph saves beside its inputs
_WITHOUT_SHYNESS = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}


def partition_for(tier: Tier, budget: float) -> Mapping[str, Any]:
    """Settings of torch._functorch.config for a tier of a graph. budget: of keep."""
    marked = {**routing_rules(), **(keep_rules("attention") if tier == "attention" else {})}
    settings: dict[str, Any] = {"joint_custom_pass": partial(_mark_saved, rules=marked)}
    if tier == "keep":
        return {**settings, "activation_memory_budget": max(budget, _NEXT_TO_NOTHING)}
    if tier == "attention":
        settings["activation_memory_budget"] = _NEXT_TO_NOTHING
    return {**settings, **_WITHOUT_SHYNESS}


def _mark_saved(joint: GraphModule, inputs: Sequence[Any], *, rules: KeepRules) -> GraphModule:
    """Mark what a graph of forward and backward has to save whatever the budget: what rules keep, and what is drawn."""
    backward: set[Node] = set()
    for node in joint.graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(each in backward for each in node.all_input_nodes):
            backward.add(node)
        elif isinstance(node.target, torch._ops.OpOverload) and (_is_drawn(node) or _is_kept(node, rules)):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return joint


def _is_drawn(node: Node) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    return torch.Tag.nondeterministic_seeded in node.target.tags


def _is_kept(node: Node, rules: KeepRules) -> bool:
    if (rule := rules.get(node.target)) is None:
        return False
    args: Any = map_arg(node.args, lambda each: each.meta["val"])
    return rule(args, node.meta["val"], 1) is True  # none of these rules counts an operator's runs
