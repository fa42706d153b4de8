"""What a run saves for backward: autocast's casts, what is computed again, what goes to host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from published.records import Run

_ATEN = torch.ops.aten
_SAVED = {_ATEN.mm.default, _ATEN._scaled_dot_product_flash_attention_for_cpu.default}


@contextmanager
def autocast(run: Run) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16) if run.autocast else nullcontext():
        yield


@contextmanager
def offloaded(run: Run) -> Iterator[None]:
    """Saved tensors go to host memory, and come back when they are asked for."""
    if not run.offload:
        yield
        return

    def to_host(tensor: Tensor) -> Any:
        # As torchtune: no parameters, nothing small.
        if isinstance(tensor, nn.Parameter) or tensor.numel() * tensor.element_size() < 1024:
            return tensor
        return tensor.shape, tensor.dtype

    def back(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else torch.empty(packed[0], dtype=packed[1])

    with torch.autograd.graph.saved_tensors_hooks(to_host, back):
        yield


def recomputed(forward: Callable[..., Tensor], run: Run) -> Callable[..., Tensor]:
    if run.recompute == "none":
        return forward
    keywords: dict[str, Any] = {"use_reentrant": run.recompute == "reentrant", "preserve_rng_state": False}
    if run.recompute == "selective":
        keywords["context_fn"] = _selective
    return lambda *args: checkpoint(forward, *args, **keywords)


def _selective() -> Any:
    """torchtitan's rule: every second matmul is computed again, the others and attention are saved."""
    counts = {False: 0, True: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is _ATEN.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
