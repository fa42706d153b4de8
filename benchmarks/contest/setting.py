"""What is the same for all: models, weights, batch, precision and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_model import ReferenceConfig, ReferenceModel

LEARNING_RATE, BETAS = 1e-3, (0.9, 0.95)  # without weight decay
MODELS = {
    "reference": ReferenceConfig(),
    "wide": ReferenceConfig(num_blocks=12, dim=512, num_heads=8, ffn_dim=1408),
    # For GPUs, which the two above do not keep busy.
    "large": ReferenceConfig(8, 2048, 16, 5632, vocab_size=32768, seq_len=1024),
}
Step = Callable[[], Tensor]  # one optimizer step -> its mean loss


@dataclass(frozen=True)
class Case:
    """model: a name of MODELS. precision: "fp32", or "bf16" by autocast. device: a torch device type."""

    model: str
    precision: str
    device: str

    @property
    def config(self) -> ReferenceConfig:
        return MODELS[self.model]

    @property
    def key(self) -> str:
        return f"{self.model}-{self.precision}" + ("" if self.device == "cpu" else f"-{self.device}")

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")

    def new_model(self) -> ReferenceModel:
        """The same weights each time."""
        return make_model(self.config).to(self.device)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Ids and labels, each (batch, seq)."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.config.batch_size, self.config.seq_len + 1)
        ids = torch.randint(self.config.vocab_size, shape, generator=generator).to(self.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def make_model(config: ReferenceConfig) -> ReferenceModel:
    torch.manual_seed(0)
    return ReferenceModel(config)


class WithLoss(nn.Module):
    """Model and mean token loss as one module, for who compiles or wraps both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())


def loop(
    case: Case,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    parameters: Iterable[nn.Parameter],
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    fused: bool = True,
    micro_batches: int = 1,
) -> Step:
    """A training loop as one writes it by hand, without clipping. around: entered for each forward."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=fused or None)
    batches = list(zip(*(tensor.chunk(micro_batches) for tensor in case.tokens())))

    def step() -> Tensor:
        total = torch.zeros((), device=case.device)
        for ids, labels in batches:
            with around(), case.autocast():
                loss = loss_of(ids, labels) / micro_batches
            loss.backward()
            total += loss.detach()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def wrap_blocks(model: ReferenceModel, run: Callable[..., Any], *, every: int = 1) -> None:
    """Have run(forward, *inputs) run the forward of the first of every so many blocks."""
    for index, block in enumerate(model.blocks):
        if index % every == 0:
            block.forward = partial(run, block.forward)  # type: ignore[method-assign]
