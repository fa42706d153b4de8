"""What a graph of forward and backward has to save is marked in its forward alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from trainfit.techniques.graph_partition import partition_for

aten = torch.ops.aten


def joint() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """Scores, mixed values and dropout of an attention without a kernel; a matmul of backward."""
    graph, nodes = fx.Graph(), dict[str, fx.Node]()

    def add(name: str, target: Any, *args: fx.Node, like: Tensor) -> fx.Node:
        node = graph.placeholder(name) if target is None else graph.call_function(target, args)
        node.meta["val"] = like
        nodes[name] = node
        return node

    heads = torch.zeros(2, 16, 4)
    queries = add("primals_1", None, like=heads)
    keys = add("primals_2", None, like=heads.mT)
    tangents = add("tangents_1", None, like=heads)
    scores = add("scores", aten.bmm.default, queries, keys, like=torch.zeros(2, 16, 16))
    drawn = add("drawn", aten.bernoulli.default, scores, like=torch.zeros(2, 16, 16))
    mixed = add("mixed", aten.bmm.default, drawn, queries, like=heads)
    add("chosen", aten.argmax.default, mixed, like=heads)
    gradient = add("gradient", aten.bmm.default, drawn, tangents, like=heads)
    graph.output((mixed, gradient))
    return fx.GraphModule(torch.nn.Module(), graph), nodes


@pytest.mark.parametrize(
    ("tier", "budget", "expected"),
    [
        ("attention", 1.0, {"drawn", "chosen", "mixed"}),
        ("pointwise", 1.0, {"drawn", "chosen"}),
        ("keep", 0.5, {"drawn", "chosen"}),
    ],
)
def test_attention_and_what_is_drawn_or_chosen_are_marked(tier, budget, expected):
    module, nodes = joint()
    settings = partition_for(tier, budget)
    assert settings["joint_custom_pass"](module, []) is module
    marked = {name for name, node in nodes.items() if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE}
    assert marked == expected


def test_only_keep_heeds_a_budget():
    assert partition_for("keep", 0.5)["activation_memory_budget"] == 0.5
    assert partition_for("keep", 0.0)["activation_memory_budget"] > 0  # of none PyTorch heeds no marks
    assert partition_for("attention", 0.5)["activation_memory_budget"] < 1e-3
    assert "activation_memory_budget" not in partition_for("pointwise", 0.5)
