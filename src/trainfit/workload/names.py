"""Names of parameters with and without an adapter beside their module."""

from __future__ import annotations


def base_name(name: str) -> str:
    """What a parameter was called before there was an adapter."""
    return name.replace(".base_layer.", ".")


def is_adapter_name(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
