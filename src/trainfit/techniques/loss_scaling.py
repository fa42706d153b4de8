"""Loss scaling: fp16 gradients that neither vanish nor overflow unseen.

NOTE [ One scale a window ]
The scale goes into the factor that the loss function gets, with the division by the window's tokens, so that no product
on the way is out of range, and stays what it is for all micro batches of the window. After the last backward, once:
gradients are unscaled and looked at on all ranks (one that sees an inf makes all skip), clipped by their true norm, the
optimizer steps or not, and the scale moves.
The scaler lives on the host. One number is read from the device in a step, and the step is decided by it; a rehearsal
has no numbers to read, so there a step is always finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from trainfit.errors import ModelError, RecipeError
from trainfit.hardware import Accelerator, Ranks
from trainfit.hardware.ranks import local_part
from trainfit.profile import LossScale
from trainfit.techniques.base import Asked, Build, Draft, Stage
from trainfit.techniques.block_scales import BlockScaling, local_gradients


class LossScaling:
    """One dynamic scale for the loss, or one for each block."""

    stage: ClassVar[Stage] = Stage.STEP
    setting: ClassVar[str] = "loss_scale"

    def choices(self, so_far: Draft, asked: Asked) -> Iterable[LossScale | None]:
        yield asked.settings["loss_scale"]

    def apply(self, build: Build, setting: LossScale) -> None:
        """Raises ModelError for fp16 gradients and for blocks that cannot have scales, RecipeError for an optimizer
        that would not skip."""
        _refuse_half_gradients(build)
        _refuse_deaf_optimizer(build)
        build.scaling = (BlockScaling if setting.per_block else DynamicScaling)(setting, build)


class DynamicScaling:
    """torch.amp.GradScaler over all ranks. See NOTE [ One scale a window ]."""

    kind: ClassVar[str] = "dynamic"

    def __init__(self, setting: LossScale, build: Build) -> None:
        self.setting = setting
        self.scale = setting.init_scale
        self.skips_in_a_row = 0
        self._scaler = _RankScaler(setting, build.ranks, build.accelerator)

    @property
    def tensors(self) -> list[Tensor]:
        return self._scaler.tensors

    def begin(self) -> float:
        self._scaler.forget()
        return self.scale

    def unscale(self, optimizer: Optimizer) -> None:
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        skipped = self._scaler.found_inf
        self._scaler.step(optimizer)
        self._scaler.update()
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        if not self._scaler.is_fake:
            self.scale = self._scaler.get_scale()
        return skipped

    def state(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "scale": self.scale,
            "growth_tracker": self._scaler._get_growth_tracker(),
            "skips_in_a_row": self.skips_in_a_row,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.scale, self.skips_in_a_row = float(state["scale"]), int(state["skips_in_a_row"])
        self._scaler.put(self.scale, int(state["growth_tracker"]))


class _RankScaler(GradScaler):
    """GradScaler for shards, and for all ranks as one; see MP-07 in its tests.

    PyTorch's own mixes DTensors and plain tensors in one foreach, and reduces over one mesh alone.
    """

    def __init__(self, setting: LossScale, ranks: Ranks, accelerator: Accelerator) -> None:
        super().__init__(
            "cpu", setting.init_scale, setting.growth_factor, setting.backoff_factor, setting.growth_interval
        )
        self._ranks, self._accelerator_device = ranks, accelerator.device
        self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._check_scale_growth_tracker("tensors"))

    @property
    def is_fake(self) -> bool:
        return isinstance(self._scale, FakeTensor)

    @property
    def found_inf(self) -> bool:
        """Of the gradients that were unscaled last."""
        found = [
            each for state in self._per_optimizer_states.values() for each in state["found_inf_per_device"].values()
        ]
        return not self.is_fake and any(each.item() for each in found)

    def forget(self) -> None:
        """A window that failed, or whose gradients nobody stepped with, leaves nothing."""
        self._per_optimizer_states.clear()

    def put(self, scale: float, growth_tracker: int) -> None:
        of_scale, of_tracker = self._check_scale_growth_tracker("put")
        of_scale.fill_(scale)
        of_tracker.fill_(growth_tracker)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = torch.zeros((), dtype=torch.float32, device=self._accelerator_device)
        for device, _, gradients in local_gradients(parameters):
            on_device = found if device == found.device else torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, on_device, inv_scale.to(device))
            if on_device is not found:
                found = torch.maximum(found, on_device.to(found.device))
        return {found_inf.device: self._ranks.max(found).to(found_inf.device)}

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return None if self.found_inf else optimizer.step(*args, **kwargs)


def _refuse_half_gradients(build: Build) -> None:
    """MP-01: GradScaler says so only after a whole window, and does not say which."""
    trained = [(name, p) for name, p in build.model.named_parameters() if p.requires_grad]
    half = [
        name for name, p in trained if local_part(p.detach()).dtype == torch.float16 and p.grad_dtype != torch.float32
    ]
    if half:
        names = ", ".join(half[:3]) + (", ..." if len(half) > 3 else "")
        raise ModelError(
            f"{len(half)} of {len(trained)} parameters that train are fp16 themselves ({names}), and so would be their "
            "gradients, which cannot be unscaled; leave the model in fp32 (module.float()), it computes in fp16 anyway"
        )


def _refuse_deaf_optimizer(build: Build) -> None:
    assert build.optimizer is not None
    is_fused = any(group.get("fused") for group in build.optimizer.param_groups)
    if is_fused and build.accelerator.fused_adamw_ignores_grad_scaler:
        raise RecipeError(
            f"fused AdamW on {build.accelerator.stands_for} neither unscales nor skips under a gradient scaler, so "
            "fp16 would train on what has overflowed; set optimizer.kernel: foreach or may_change: [optimizer]"
        )
