"""Tensor parallelism: ranks that split each block's matrices, as the model's own plan in transformers says.

NOTE [ DTensor parameters, local matmuls ]
A parameter that is split is a DTensor over the mesh's tensor dimension, so that FSDP2, saving, and the gradient norm
know its parts. While a split module runs, its parameters are the plain local parts, and what flows between modules are
plain tensors. Only where something must go between ranks does DTensor's redistribute do it, forward and backward: see
`moved`. So inside a block there is no operator on a DTensor, and activation tiers and rehearsals see what they know.
A module that is whole on all ranks gets the same inputs and the same gradients on each, to the bit, so its parameters
stay plain and need no sync. That asks for equal random states on tensor ranks.

Collectives of a micro batch, one block: an all-reduce after attention and mlp in forward, and before each in backward;
a recompute repeats those of its forward that lie before the last tensor that backward needs. All tensor ranks run the
same modules on the same shapes, so all issue them in the same order.
With `sequence`, each all-reduce is a reduce-scatter and an all-gather around what lies between attention and mlp.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from trainfit.errors import ModelError, RecipeError
from trainfit.profile import TensorParallel
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.workload.tensor_plan import SplitKind, check_sequence, tensor_plan

SEQUENCE_DIM = 1
# The dimension of a Linear's weight that is split, and of its bias: None stays whole.
_LINEAR_DIMS: Mapping[SplitKind, tuple[int, int | None]] = {
    "columns": (0, 0),
    "columns_gathered": (0, 0),
    "rows": (1, None),
    "rows_cut": (1, None),
}
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class TensorSplit:
    """Splits blocks over the mesh's tensor dimension."""

    stage: ClassVar[Stage] = Stage.MODULE
    setting: ClassVar[str] = "tensor"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[TensorParallel]:
        """Within a node only, and with split sequences where the model can."""
        size = so_far["mesh"].tensor
        if size == 1:
            yield TensorParallel()
            return
        workload = asked.workload
        try:
            fits = asked.hardware.node_size % size == 0
            if not fits or not tensor_plan(asked.model, workload, workload.anatomy(), size).splits:
                return
        except (ModelError, RecipeError):
            return  # no plan, or heads that it does not divide
        try:
            check_sequence(asked.model, workload, size)
        except RecipeError:
            yield TensorParallel()
        else:
            yield TensorParallel(sequence=True)

    def apply(self, build: Build, setting: TensorParallel) -> None:
        """Raises ModelError for a model without a plan, RecipeError for a number of ranks that does not divide it."""
        size = build.ranks.mesh.tensor
        if size == 1:
            return
        if setting.sequence:
            check_sequence(build.model, build.workload, size)
        plan = tensor_plan(build.model, build.workload, build.anatomy, size)
        build.notes += plan.notes
        if not plan.splits:
            raise RecipeError(
                f"mesh.tensor {size} would split nothing of {build.workload.name} ({'; '.join(plan.notes)}); use "
                f"mesh.shard {size} with zero.stage 3 instead"
            )
        splitter = _Splitter(build.model, build.ranks.sub_mesh("tensor"), setting.sequence)
        for name, kind in plan.splits.items():
            splitter.split(name, kind)
        if setting.sequence:
            splitter.split_sequences(build, plan.splits)


def moved(tensor: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    """tensor, which lies as source says, as target says; gradients go the other way.

    Partial -> Replicate is an all-reduce, Partial -> Shard a reduce-scatter, Shard -> Replicate an all-gather,
    Replicate -> Shard a cut. target Partial means: the same on all ranks, of whose gradient each will have a part.
    """
    if isinstance(target, Shard):
        target = Shard(target.dim % tensor.dim())
    spread = DTensor.from_local(tensor, mesh, [source], run_check=False)
    if isinstance(target, Partial):
        if not isinstance(source, Replicate):
            spread = spread.redistribute(placements=[Replicate()])
        return spread.to_local(grad_placements=[target])
    return spread.redistribute(placements=[target]).to_local(grad_placements=[target])


class _Unviewed(torch.autograd.Function):
    """The same tensor, no longer a view: a view holds its base, and a base that keeps its view would never die."""

    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass(eq=False)
class LocalForward:
    """A module's forward on this rank's parts of its parameters; put in the place of its forward.

    A parameter that is whole is used on a part of the heads or tokens only, so its gradients are summed over ranks.
    module: held weakly, since the module holds this: a model must die with its last reference.
    patched: a forward that someone had set on the module itself.
    before, after: change the arguments and the output. late_bias: the bias is added behind `after`, once for all ranks.
    deep: parameters of the module's parts are meant too.
    """

    module: weakref.ref[nn.Module]
    mesh: DeviceMesh
    patched: Callable[..., Any] | None
    before: Callable[..., Arguments] | None
    after: Callable[[Any], Any] | None
    late_bias: Literal["no", "whole", "partial"]
    deep: bool

    @classmethod
    def put(
        cls,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        before: Callable[..., Arguments] | None = None,
        after: Callable[[Any], Any] | None = None,
        late_bias: Literal["no", "whole", "partial"] = "no",
        deep: bool = False,
    ) -> None:
        module.forward = cls(weakref.ref(module), mesh, vars(module).get("forward"), before, after, late_bias, deep)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        if self.before is not None:
            args, kwargs = self.before(*args, **kwargs)
        bias = module._parameters.get("bias") if self.late_bias != "no" else None
        # FSDP puts other parameters in place between calls, so they are looked up in each.
        originals = [(part, dict(part._parameters)) for part in self._parts(module) if part._parameters]
        try:
            for part, parameters in originals:
                part._parameters.update({name: self._local(each, each is bias) for name, each in parameters.items()})
            run = self.patched or partial(type(module).forward, module)
            output = run(*args, **kwargs)
        finally:
            for part, parameters in originals:
                part._parameters.update(parameters)
        if self.after is not None:
            output = self.after(output)
        if bias is None:
            return output
        return output + (bias if self.late_bias == "whole" else self._local(bias)).to(output.dtype)

    def _parts(self, module: nn.Module) -> Iterable[nn.Module]:
        return module.modules() if self.deep else (module,)

    def _local(self, parameter: Tensor | None, is_late: bool = False) -> Any:
        if parameter is None or is_late:
            return None
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        return moved(parameter, self.mesh, Replicate(), Partial())

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalForward:
        # A copied module comes here while it is copied, so memo has it already.
        module = self.module()
        assert module is not None
        return replace(self, module=weakref.ref(deepcopy(module, memo)), patched=deepcopy(self.patched, memo))


def _first(change: Callable[[Tensor], Tensor]) -> Callable[..., Arguments]:
    """A change of the first argument."""
    return lambda tensor, *args, **kwargs: ((change(tensor), *args), kwargs)


class _Splitter:
    """Changes modules in place. sequence: what lies between attention and mlp is split along the sequence."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
        self.model, self.mesh, self.sequence = model, mesh, sequence
        self._owners: dict[int, int] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                self._owners[id(parameter)] = self._owners.get(id(parameter), 0) + 1

    def split(self, name: str, kind: SplitKind) -> None:
        module = self.model.get_submodule(name)
        if kind in _LINEAR_DIMS:
            weight_dim, bias_dim = _LINEAR_DIMS[kind]
            self._split_parameter(module, name, "weight", weight_dim)
            if bias_dim is not None and module.bias is not None:
                self._split_parameter(module, name, "bias", bias_dim)
        if kind in ("columns", "columns_gathered"):
            self._split_columns(module, gathered=kind == "columns_gathered")
        elif kind in ("rows", "rows_cut"):
            self._split_rows(module, cut=kind == "rows_cut")
        elif kind == "experts":
            self._split_experts(module, name)
        elif kind == "shared":
            LocalForward.put(module, self.mesh)
        else:
            before = _first(self._cut_sequence)
            LocalForward.put(module, self.mesh, before=before, after=self._gather_sequence, deep=True)

    def _split_columns(self, module: nn.Module, *, gathered: bool) -> None:
        # With split sequences the part of the block that the module lies in has gathered its input.
        before = None if self.sequence else _first(self._enter)
        after = (lambda output: moved(output, self.mesh, Shard(-1), Replicate())) if gathered else None
        LocalForward.put(module, self.mesh, before=before, after=after)

    def _split_rows(self, module: nn.Module, *, cut: bool) -> None:
        whole = Shard(SEQUENCE_DIM) if self.sequence else Replicate()
        before = _first(lambda part: moved(part, self.mesh, Replicate(), Shard(-1))) if cut else None
        LocalForward.put(
            module,
            self.mesh,
            before=before,
            after=lambda part: moved(part, self.mesh, Partial(), whole),
            late_bias="partial" if self.sequence else "whole",
        )

    def _split_experts(self, module: Any, name: str) -> None:
        """Each rank has some of the experts; the tokens of the others' are left out of its sum."""
        for each in dict(module.named_parameters(recurse=False)):
            self._split_parameter(module, name, each, 0)
        module.num_experts //= self.mesh.size()
        module._is_expert_parallel = True
        here, number = self.mesh.get_local_rank(), module.num_experts

        def before(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Arguments:
            elsewhere = chosen // number != here
            # The number after the last stands for no expert.
            local = torch.where(elsewhere, number, chosen - here * number)
            return (self._enter(hidden), local, self._enter(weights).masked_fill(elsewhere, 0.0)), {}

        LocalForward.put(
            module, self.mesh, before=before, after=lambda part: moved(part, self.mesh, Partial(), Replicate())
        )

    def split_sequences(self, build: Build, splits: Mapping[str, SplitKind]) -> None:
        """Between attention and mlp: tokens are cut before the first block and gathered after the last."""
        for block_name, block in zip(build.anatomy.blocks, build.blocks):
            for child_name, child in block.named_children():
                if any(name.startswith(f"{block_name}.{child_name}.") for name in splits):
                    LocalForward.put(child, self.mesh, before=self._gather_hidden)
                else:
                    LocalForward.put(child, self.mesh, deep=True)
        first, last = build.blocks[0], build.blocks[-1]
        first.register_forward_pre_hook(lambda _, args: (self._cut_sequence(args[0]), *args[1:]))
        # A copy: FSDP hooks onto a block's output, and a view's hook would be lost by a change in place.
        last.register_forward_hook(lambda _, args, output: self._gather_sequence(output).clone())

    def _enter(self, whole: Tensor) -> Any:
        """What several split modules take goes in once, so that its gradient is summed over ranks once."""
        if whole.is_leaf:  # a leaf would hold itself through what is kept on it
            return moved(whole, self.mesh, Replicate(), Partial())
        entered: Tensor | None = getattr(whole, "_entered", None)
        if entered is None:
            entered = _Unviewed.apply(moved(whole, self.mesh, Replicate(), Partial()))  # type: ignore[no-untyped-call]
            whole._entered = entered  # type: ignore[attr-defined]
        return entered

    def _gather_hidden(self, *args: Any, **kwargs: Any) -> Arguments:
        def gathered(part: Tensor) -> Tensor:
            return moved(part, self.mesh, Shard(SEQUENCE_DIM), Partial())

        if args:
            return (gathered(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": gathered(kwargs["hidden_states"])}

    def _cut_sequence(self, whole: Tensor) -> Tensor:
        if (tokens := whole.shape[SEQUENCE_DIM]) % self.mesh.size():
            raise RecipeError(f"{tokens} tokens do not split over {self.mesh.size()} tensor ranks; pad to a multiple")
        return moved(whole, self.mesh, Replicate(), Shard(SEQUENCE_DIM))

    def _gather_sequence(self, part: Tensor) -> Tensor:
        return moved(part, self.mesh, Shard(SEQUENCE_DIM), Replicate())

    def _split_parameter(self, module: nn.Module, name: str, own_name: str, dim: int) -> None:
        """A DTensor in its place, of which this rank has one part."""
        whole = module._parameters[own_name]
        assert whole is not None
        if isinstance(whole, DTensor):
            raise RecipeError(f"{name} is split already; build a step on a new model")
        size = self.mesh.size()
        if self._owners[id(whole)] > 1:
            raise RecipeError(f"{name} is tied to another module, so it cannot be split; leave it out of the plan")
        if whole.shape[dim] % size:
            fits = math.gcd(size, whole.shape[dim])  # which divides the heads too
            lower = f"lower it to {fits}" if fits > 1 else "leave it out"
            raise RecipeError(
                f"mesh.tensor {size} does not divide the {whole.shape[dim]} features of {name}; {lower}, or use "
                f"mesh.shard {size} with zero.stage 3 instead"
            )
        # A copy: a view would keep the whole.
        local = whole.detach().chunk(size, dim)[self.mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
        split = DTensor.from_local(
            local, self.mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        module._parameters[own_name] = nn.Parameter(split, requires_grad=whole.requires_grad)
