"""What categories, places and tiers are called in sentences."""

from __future__ import annotations

from collections.abc import Mapping

from trainfit.profile import CHOSEN_TIERS, Category

NAMES: Mapping[Category, str] = {
    "parameters": "parameters",
    "optimizer": "optimizer states",
    "gradients": "gradients",
    "activations": "saved activations",
    "temporary": "temporaries",
    "loss": "logits and loss",
    "communication": "communication buffers",
}
# Tier: what a block keeps for backward, what it computes again.
TIER_WORDS: Mapping[str, tuple[str, str]] = {
    "keep": ("what autograd saves", "nothing"),
    "keep_bf16": ("what autograd saves, fp32 as bf16", "nothing"),
    "keep_int8": ("what autograd saves, in int8", "nothing"),
    "keep_fp8": ("what autograd saves, in fp8", "nothing"),
    "discard": ("all but outputs of norms and activations", "these"),
    "pointwise": ("input, outputs of matmuls and attention", "norms, rotations, activation functions, sums"),
    "attention": ("input, output of attention", "all but attention"),
    "full": ("input", "everything"),
    "selective": ("input, attention, every second matmul", "the rest"),
    "recompute_core": ("all but what attention saves inside", "scaled dot product attention"),
    "recompute_attention": ("all but what the attention module saves", "the attention module"),
    "recompute_mlp": ("all but what the mlp module saves", "the mlp module"),
    "offload": ("nothing: all that autograd saves is elsewhere", "nothing"),
    "offload_pointwise": ("nothing: what pointwise keeps is elsewhere", "as pointwise"),
    "offload_full": ("nothing: the input is elsewhere", "everything"),
    **dict.fromkeys(CHOSEN_TIERS, ("input, outputs of single operators", "what leads to the other saved tensors")),
}
# Of those that mean something else in a compiled block.
COMPILED_TIER_WORDS: Mapping[str, tuple[str, str]] = {
    "keep": ("what its graph saves", "what a kernel makes again from that"),
    "pointwise": (
        "input, what matmuls, attention and reductions make",
        "norms, rotations, activation functions, casts",
    ),
}
