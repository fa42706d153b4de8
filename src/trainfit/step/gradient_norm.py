"""The norm of all gradients over all ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from trainfit.hardware import Ranks
from trainfit.hardware.ranks import local_part


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    ranks: Ranks,
    *,
    counted: Sequence[nn.Parameter] | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most max_norm. Returns the norm before, ().

    counted: those of parameters that no other pipeline stage counts; None for all.
    An inf or nan anywhere makes the norm of every rank one.
    """
    is_half = any(p.grad is not None and p.grad.dtype != torch.float32 for p in parameters)
    if ranks.mesh.size == 1 and not is_half:  # torch's norm of half gradients is half itself
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = [p.grad for p in (parameters if counted is None else counted) if p.grad is not None]
    norm = global_norm(own, ranks, device=parameters[0].device)
    # As nn.utils.clip_grad_norm_ has it, on local shards: one foreach takes no tensors of several meshes.
    torch._foreach_mul_([local_part(gradient) for gradient in gradients], (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def global_norm(gradients: Sequence[Tensor], ranks: Ranks, *, device: torch.device) -> Tensor:
    """Every element counts once, on whichever rank it is; pipeline stages have different ones, and may have none."""
    # By how a gradient is split: [whole, over shard, over tensor, over both].
    squares = torch.zeros(4, dtype=torch.float32, device=device)
    locals_: list[list[Tensor]] = [[], [], [], []]
    for gradient in gradients:
        locals_[_how_split(gradient)].append(local_part(gradient))
    for index, group in enumerate(locals_):
        if group:
            squares[index] = torch.stack(torch._foreach_norm(group, 2.0, torch.float32)).square().sum()
    squares[1::2] = ranks.sum(squares[1::2].contiguous(), "shard")
    squares[2:] = ranks.sum(squares[2:].contiguous(), "tensor")
    return ranks.sum(squares.sum(), "pipeline").sqrt()


def _how_split(gradient: Tensor) -> int:
    if not isinstance(gradient, DTensor):
        return 0
    names = gradient.device_mesh.mesh_dim_names or ()
    split = {name for name, placement in zip(names, gradient.placements) if _splits(placement)}
    return ("shard" in split) + 2 * ("tensor" in split)


def _splits(placement: object) -> bool:
    # FSDP's shards of a tensor-parallel parameter are of a class of their own, beside Shard.
    return isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard"
