"""A model whose gradients are of sizes that no single fp16 scale holds, and what training it comes to.

    OMP_NUM_THREADS=1 python benchmarks/deep_gradients.py

Each block fills one channel from a hidden layer, through values that are `gain` times what goes on: their gradients are
one over gain times what comes in. A block of gain 2**13 and 512 values a token has gradients of 1e-9, one of 2**-12 has
gradients of 1e2 and more; both matter alike for the loss. The channel of the latter has noise, so its stay large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainfit.hardware import accelerator
from trainfit.profile import LossScale, Precision
from trainfit.step import Strategy, TrainStep, Underflow, build_step, count_underflow
from trainfit.workload import AdamWSettings, MicroBatch, workload_from_module

TOKENS, DIM, HIDDEN = 32, 16, 24
ROWS, SEQ_LEN = 16, 64
PARTS: Sequence[tuple[float, int]] = ((1.0, 1), (2.0**13, 512), (1.0, 1), (2.0**-12, 1), (1.0, 1))  # gain, values
SMALL, LARGE = 1, 3
NOISE = 0.3  # in the channel of LARGE
SETTINGS: dict[str, tuple[Precision, LossScale | None]] = {
    "fp32": ("fp32", None),
    "fp16 unscaled": ("fp16", LossScale(init_scale=1.0, growth_interval=10**9)),
    "fp16 one scale": ("fp16", LossScale()),
    "fp16 by block": ("fp16", LossScale(per_block=True)),
}


class Part(nn.Module):
    def __init__(self, gain: float, values: int, channel: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, values, bias=False)
        self.gain, self.channel = gain, channel

    def forward(self, x: Tensor) -> Tensor:
        values = nn.functional.linear(torch.tanh(self.down(x)), self.up.weight * self.gain)
        out = values.float().mean(-1, keepdim=True) / self.gain
        return torch.cat([x[..., : self.channel], out, x[..., self.channel + 1 :]], -1)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, DIM)
        self.blocks = nn.ModuleList(Part(*part, channel) for channel, part in enumerate(PARTS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x[..., : len(PARTS)]


def squared_error(output: Tensor, labels: Tensor) -> Tensor:
    return (output.float() - labels).square().sum()


def batches(steps: int) -> Iterator[MicroBatch]:
    """A value for each token and channel, to be learnt by heart."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(TOKENS, len(PARTS), generator=generator) / 2
    for _ in range(steps):
        ids = torch.randint(TOKENS, (ROWS, SEQ_LEN), generator=generator)
        labels = table[ids]
        labels[..., LARGE] += NOISE * torch.randn(ids.shape, generator=generator)
        yield MicroBatch(ids, labels, ids.numel())


def build(precision: Precision, scale: LossScale | None) -> TrainStep:
    workload = workload_from_module(Deep, seq_len=SEQ_LEN, vocab_size=TOKENS, loss=squared_error)
    workload = workload.copy(optimizer=AdamWSettings(learning_rate=5e-3, weight_decay=0.0))
    strategy = Strategy(ROWS, precision=precision, loss_scale=scale)
    return build_step(workload, strategy, accelerator("cpu"), max_grad_norm=None)


@dataclass(frozen=True)
class Outcome:
    """loss: the mean of the last 20 steps. skips: steps that overflowed."""

    loss: float
    skips: int
    underflow: Underflow | None


def train(setting: str, steps: int = 300) -> Outcome:
    step = build(*SETTINGS[setting])
    results = []
    for batch in batches(steps):
        results.append(step([batch]))
    loss = sum(float(result.loss) for result in results[-20:]) / 20
    return Outcome(loss, sum(result.skipped for result in results), count_underflow(step, [batch]))


def main() -> None:
    print(f"{'setting':15} {'loss':>8} {'skipped':>8}  zeros in the blocks' matrices")
    for setting in SETTINGS:
        outcome = train(setting)
        zeros = ""
        if outcome.underflow is not None:
            zeros = f"{outcome.underflow.with_blocks:.1%}, with one scale {outcome.underflow.with_one:.1%}"
        print(f"{setting:15} {outcome.loss:8.4f} {outcome.skips:8}  {zeros}")


if __name__ == "__main__":
    main()
