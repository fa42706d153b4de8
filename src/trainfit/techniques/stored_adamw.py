"""StoredAdamW: AdamW over weights and moments that are stored in fewer bytes than fp32.

NOTE [ Piece by piece ]
A parameter is updated in pieces of some rows: what is stored is read as fp32, torch's own AdamW runs on it, and it is
written back. The arithmetic is that of fp32 AdamW, whatever the storage; what the reading takes is no more than a few
fp32 copies of one piece. Pieces are a part of the whole model, so that their number, and the number of kernels that a
device is given, does not grow with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from trainfit.hardware.ranks import local_part
from trainfit.profile import OptimizerVariant
from trainfit.techniques.stored_moments import Moment, moments
from trainfit.techniques.stored_weights import WEIGHTS, Weights

MIN_PIECE = 2**18  # elements: below it, kernels take longer to start than to run
_PIECES = 256  # of a whole model, about


class StoredAdamW(Optimizer):
    """AdamW with weights, moments and gradients kept as a variant says.

    State names: step, exp_avg, exp_avg_sq, each with _scale where it has 8 bits, and master, residual or compensation.
    Those of a sharded parameter are sharded like it. Make it after the weights are in their stored form.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], variant: OptimizerVariant, **defaults: Any) -> None:
        """groups, defaults: lr, betas, eps, weight_decay, as torch.optim.AdamW takes them."""
        super().__init__(groups, defaults)
        self.variant = variant
        self._weights: Weights = WEIGHTS[variant.weights]
        self._moments = moments(variant.states)
        self._vector_moments = moments("fp32")
        self._seed = torch.initial_seed()
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._number = {p: number for number, p in enumerate(parameters)}
        self._piece = max(MIN_PIECE, sum(local_part(p).numel() for p in parameters) // _PIECES)

    @torch.no_grad()
    def begin(self, beside: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        """States before the first step. beside: what Weights.split() put beside each weight, this rank's part."""
        for parameter in self._number:
            local = local_part(parameter)
            state = {"step": first_step()}
            for moment in self._moments_of(parameter):
                state |= moment.first(local)
            state |= {name: value.contiguous() for name, value in beside.get(parameter, {}).items()}
            self.state[parameter] = named_states(state, parameter)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch has it, but states keep their dtypes: torch gives them that of their parameter."""
        here = [p for group in self.param_groups for p in group["params"]]
        there = [number for group in state_dict["param_groups"] for number in group["params"]]
        states = dict(self.state)
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(states)
        for parameter, number in zip(here, there):
            for name, value in state_dict["state"][number].items():
                self.state[parameter][name].copy_(value)

    @property
    def tables(self) -> list[Tensor]:
        """What its moments are read by, beside their states."""
        return [table for moment in self._moments for table in moment.tables]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    @torch.no_grad()
    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """One parameter by its gradient."""
        state = self.state[parameter]
        step = state["step"]
        assert parameter.grad is not None
        whole, gradient = local_part(parameter), local_part(parameter.grad).contiguous()
        weight = whole.contiguous()  # itself, but for weights that are transposed or channels-last
        columns = weight.shape[-1] if weight.dim() > 1 else weight.numel()
        flat = flat_states(state)
        for number, rows in enumerate(self._pieces(weight.numel(), columns)):
            states = {name: value[rows] for name, value in flat.items()}
            self._update_piece(parameter, rows_of(weight)[rows], rows_of(gradient)[rows], states, step, group, number)
        if weight is not whole:
            whole.copy_(weight)
        step += 1

    def _update_piece(
        self,
        parameter: nn.Parameter,
        weight: Tensor,
        gradient: Tensor,
        states: dict[str, Tensor],
        step: Tensor,
        group: dict[str, Any],
        number: int,
    ) -> None:
        value = self._weights.read(weight, states)
        self._adamw(parameter, value, gradient, states, step, group)
        self._weights.write(value, weight, states, lambda: self._chance(parameter, step, number))

    def _adamw(
        self,
        parameter: nn.Parameter,
        value: Tensor,
        gradient: Tensor,
        states: dict[str, Tensor],
        step: Tensor,
        group: dict[str, Any],
    ) -> None:
        """torch's AdamW on the fp32 value of a piece, in place."""
        first, second = self._moments_of(parameter)
        exp_avg, exp_avg_sq = first.read(states), second.read(states)
        beta1, beta2 = group["betas"]
        fused = self.variant.kernel == "fused"
        adamw(
            [value],
            [gradient.to(value)],
            [exp_avg],
            [exp_avg_sq],
            [],
            # The fused kernel wants it beside the weights; foreach reads it, which would make the host wait.
            [step.to(value.device, copy=True) if fused else step.clone()],
            fused=fused,
            foreach=not fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        first.write(exp_avg, states)
        second.write(exp_avg_sq, states)

    def _moments_of(self, parameter: nn.Parameter) -> tuple[Moment, Moment]:
        return self._moments if parameter.dim() > 1 else self._vector_moments

    def _pieces(self, numel: int, columns: int) -> Iterator[slice]:
        if numel == 0:  # a shard of fewer rows than ranks
            return
        rows = numel // max(1, columns)
        each = max(1, self._piece // columns)
        for start in range(0, rows, each):
            yield slice(start, min(rows, start + each))

    def _chance(self, parameter: nn.Parameter, step: Tensor, piece: int) -> torch.Generator:
        """Its own for each piece of each step: copies of the model round alike, and a resumed run as it would have."""
        weight = local_part(parameter)
        seed = hash((self._seed, int(step.item()), self._number[parameter], piece, _shard_of(parameter)))
        return torch.Generator(weight.device).manual_seed(seed % 2**63)


def first_step(device: torch.device | None = None) -> Tensor:
    """The count of steps. On the host it has a number in a rehearsal too, where optimizers that read it need one."""
    return torch.tensor(0.0) if device is None or device.type == "cpu" else torch.zeros((), device=device)


def rows_of(tensor: Tensor) -> Tensor:
    """(rows, columns) of what has rows; a vector is one row."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(1, -1)


def _shard_of(parameter: Tensor) -> tuple[int, ...]:
    """This rank's place along the mesh dimensions that split it."""
    if not isinstance(parameter, DTensor):
        return ()
    places = parameter.device_mesh.get_coordinate() or ()
    return tuple(place for place, how in zip(places, parameter.placements) if not how.is_replicate())


def named_states(state: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """A rank's states as tensors of all ranks, by the names under which they are saved.

    Where ranks split the columns of a matrix, blocks begin anew at each rank's first one. Their scales are of as many
    parts, which is put into their name: ranks that split it otherwise must not take them for theirs.
    """
    parts = _column_parts(parameter)
    return {
        f"{name}@{parts}" if parts > 1 and name.endswith("_scale") else name: like_parameter(value, parameter)
        for name, value in state.items()
    }


def flat_states(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of each state that has elements, as rows, by its plain name."""
    return {name.partition("@")[0]: rows_of(local_part(value)) for name, value in state.items() if name != "step"}


def _column_parts(parameter: Tensor) -> int:
    """Over how many ranks the last dimension of a matrix is split."""
    if not isinstance(parameter, DTensor) or parameter.dim() < 2:
        return 1
    last, parts = parameter.dim() - 1, 1
    for dim, how in enumerate(parameter.placements):
        if isinstance(how, Shard) and how.dim == last:
            parts *= parameter.device_mesh.size(dim)
    return parts


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """A rank's part of a state as the tensor of all ranks, split as its parameter is."""
    if not isinstance(parameter, DTensor) or local.dim() == 0:
        return local
    mine = local_part(parameter)
    shape = list(parameter.shape)
    if local.shape[-1] != mine.shape[-1]:  # scales: blocks of a row instead of its elements
        shape[-1] = local.shape[-1] * _column_parts(parameter)
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=TensorMeta(size, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)
