"""Colours for people who tell few apart: Okabe and Ito's for categories, one hue by lightness for tiers.

Source: Okabe and Ito, Color Universal Design, 2008 (jfly.uni-koeln.de/color). No picture is told by colour alone: each
has a legend in the order of its layers, text labels and a table.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainfit.profile import Category, Tier

# Bottom to top: what stays through the step lies below what comes and goes.
LAYERS: dict[Category, str] = {
    "parameters": "#0072b2",
    "optimizer": "#56b4e9",
    "gradients": "#009e73",
    "activations": "#e69f00",
    "loss": "#cc79a7",
    "temporary": "#d55e00",
    "communication": "#f0e442",
}
_TIERS: Mapping[str, str] = {
    "keep": "#cfe3f2",
    "keep_bf16": "#d5e8d0",
    "keep_int8": "#b5d6ab",
    "keep_fp8": "#98c58b",
    "discard": "#c0d9ec",
    "pointwise": "#8fbddc",
    "selective": "#7aaed3",
    "recompute_core": "#b3d2e8",
    "recompute_attention": "#6ba2cb",
    "recompute_mlp": "#568fbb",
    "attention": "#3f7fb0",
    "full": "#0b3d66",
    "offload": "#f3d9a8",
    "offload_pointwise": "#d9a441",
    "offload_full": "#8a5f12",
    "chosen_1": "#5f9ec9",
    "chosen_2": "#9cc5e2",
    "chosen_3": "#4f8fc0",
    "chosen_4": "#a9cde6",
    "chosen_5": "#4485b8",
    "chosen_6": "#bcd8ec",
}
_OTHER = "#888888"


def tier_colour(tier: Tier) -> str:
    """Darker is more recomputed; another hue is what leaves the device."""
    return _TIERS.get(tier, _OTHER)
